/*
 * strangers_file KIND PATH UID: a process of user UID that has the file PATH of another user open for reading only. It prints "ok PID",
 * and ends with its standard input.
 *
 * descriptor: holds the descriptor
 * mapping: has the file mapped, shared, without a descriptor
 * swapped-descriptors, swapped-mappings: between the file and one of its own, that it may write to, all the time
 *
 * Contains no fdmap code.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define PAGE 4096UL
/* The descriptor that is swapped. */
#define SLOT 100

static int strangers, own, own_read_only;
static char *place;

static void check(int failed, const char *what) {
    if (failed) {
        printf("%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static void map(int file, int protection) {
    check(mmap(place, PAGE, protection, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED, "mmap");
}

static void *swap_descriptors(void *unused) {
    for (;;) {
        dup2(own_read_only, SLOT);
        dup2(strangers, SLOT);
    }
    return unused;
}

static void *swap_mappings(void *unused) {
    for (;;) {
        map(own, PROT_READ | PROT_WRITE);
        map(strangers, PROT_READ);
    }
    return unused;
}

int main(int argc, char **argv) {
    char link[64], byte;
    pthread_t thread;
    if (argc != 4) return 2;
    strangers = open(argv[2], O_RDONLY);
    check(strangers < 0, argv[2]);
    uid_t user = atoi(argv[3]);
    check(setresgid(user, user, user) || setresuid(user, user, user), "setresuid");
    /* setresuid() resets it. */
    prctl(PR_SET_DUMPABLE, 1);
    /* Not a memfd, which would be found by its descriptor. */
    own = open("/dev/shm", O_TMPFILE | O_RDWR, 0600);
    check(own < 0 || ftruncate(own, PAGE), "open of a file in /dev/shm");
    snprintf(link, sizeof link, "/proc/self/fd/%d", own);
    own_read_only = open(link, O_RDONLY);
    check(own_read_only < 0, link);
    place = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(place == MAP_FAILED, "mmap");
    if (!strcmp(argv[1], "mapping")) {
        map(strangers, PROT_READ);
        close(strangers);
    } else if (!strcmp(argv[1], "swapped-descriptors")) {
        check(dup2(strangers, SLOT) < 0, "dup2");
        close(own);
        check(pthread_create(&thread, NULL, swap_descriptors, NULL), "pthread_create");
    } else if (!strcmp(argv[1], "swapped-mappings")) {
        map(strangers, PROT_READ);
        check(pthread_create(&thread, NULL, swap_mappings, NULL), "pthread_create");
    } else if (strcmp(argv[1], "descriptor")) {
        return 2;
    }
    printf("ok %d\n", getpid());
    fflush(stdout);
    while (read(0, &byte, 1) > 0) continue;
    return 0;
}
