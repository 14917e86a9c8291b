/*
 * read_only_file KIND PATH UID [PROGRAM]: a process of user UID that has the file PATH of another user open for reading only. It prints "ok PID",
 * and ends with its standard input.
 *
 * descriptor: holds the descriptor
 * mapping: has the file mapped, shared, without a descriptor
 * executed: executes PROGRAM with the descriptor; that has a set-user-ID bit
 * forged-segment: has the file mapped, and above it, writable, a System V segment of its own that has the file's inode number
 * swapped-descriptors, swapped-mappings: between the file and one of its own, that it may write to, all the time
 *
 * Contains no fdmap code.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096UL
/* The descriptor that is swapped. */
#define SLOT 100

static int foreign, own, own_read_only;
static char *address;

static void check(int failed, const char *what) {
    if (failed) {
        printf("%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static void map(int file, int protection) {
    check(mmap(address, PAGE, protection, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED, "mmap");
}

static void *swap_descriptors(void *unused) {
    for (;;) {
        dup2(own_read_only, SLOT);
        dup2(foreign, SLOT);
    }
    return unused;
}

static void *swap_mappings(void *unused) {
    for (;;) {
        map(own, PROT_READ | PROT_WRITE);
        map(foreign, PROT_READ);
    }
    return unused;
}

/* The id of a segment is its inode number. Creates one in an IPC namespace of its own, whose next id is that of the file. */
static int forge_segment(uid_t user) {
    struct stat file;
    struct shmid_ds segment;
    FILE *next;
    check(unshare(CLONE_NEWIPC) || fstat(foreign, &file), "unshare");
    next = fopen("/proc/sys/kernel/shm_next_id", "w");
    check(!next || fprintf(next, "%lu", file.st_ino) < 0 || fclose(next), "shm_next_id");
    int id = shmget(IPC_PRIVATE, PAGE, IPC_CREAT | 0600);
    check(id < 0 || (ino_t)id != file.st_ino || shmctl(id, IPC_STAT, &segment), "shmget");
    segment.shm_perm.uid = segment.shm_perm.gid = user;
    check(shmctl(id, IPC_SET, &segment), "shmctl");
    return id;
}

int main(int argc, char **argv) {
    char link[64], byte;
    pthread_t thread;
    int segment = -1;
    if (argc < 4) return 2;
    foreign = open(argv[2], O_RDONLY);
    check(foreign < 0, argv[2]);
    uid_t user = atoi(argv[3]);
    if (!strcmp(argv[1], "forged-segment")) segment = forge_segment(user);
    check(setresgid(user, user, user) || setresuid(user, user, user), "setresuid");
    /* setresuid() resets it. */
    prctl(PR_SET_DUMPABLE, 1);
    /* Not a memfd, which would be found by its descriptor. */
    own = open("/dev/shm", O_TMPFILE | O_RDWR, 0600);
    check(own < 0 || ftruncate(own, PAGE), "open of a file in /dev/shm");
    snprintf(link, sizeof link, "/proc/self/fd/%d", own);
    own_read_only = open(link, O_RDONLY);
    check(own_read_only < 0, link);
    address = mmap(NULL, 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(address == MAP_FAILED, "mmap");
    if (!strcmp(argv[1], "mapping")) {
        map(foreign, PROT_READ);
        close(foreign);
    } else if (!strcmp(argv[1], "swapped-descriptors")) {
        check(dup2(foreign, SLOT) < 0, "dup2");
        close(own);
        check(pthread_create(&thread, NULL, swap_descriptors, NULL), "pthread_create");
    } else if (!strcmp(argv[1], "swapped-mappings")) {
        map(foreign, PROT_READ);
        check(pthread_create(&thread, NULL, swap_mappings, NULL), "pthread_create");
    } else if (segment >= 0) {
        map(foreign, PROT_READ);
        close(foreign);
        check(shmat(segment, address + PAGE, SHM_REMAP) == (void *)-1, "shmat");
        shmctl(segment, IPC_RMID, NULL);
    } else if (!strcmp(argv[1], "executed")) {
        close(own);
        close(own_read_only);
        printf("ok %d\n", getpid());
        fflush(stdout);
        execl(argv[4], argv[4], "1000", NULL);
        return 2;
    } else if (strcmp(argv[1], "descriptor")) {
        return 2;
    }
    printf("ok %d\n", getpid());
    fflush(stdout);
    while (read(0, &byte, 1) > 0) continue;
    return 0;
}
