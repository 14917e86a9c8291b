/*
 * mapper PATH HOW [NUMBER]: maps two pages of a file shared and writable, prints "ok PID", and keeps the mapping until its input
 * ends. Contains no fdmap code. HOW:
 *
 * map          in this process
 * leader       in a process whose first thread has ended
 * namespaces   in a process of another pid and mount namespace
 * overlay      PATH is a directory: mounts a tmpfs there, in another mount namespace, and maps the file u/f of it through an
 *              overlay file system whose upper layer is u. Prints "ok PID" too: /proc/PID/root/PATH/u/f is the file
 * many         in NUMBER processes; prints the pid of their parent, which does not map the file
 * churn        in NUMBER processes that map and unmap pages all the time; prints the pid of their parent
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL

static void check(int failed, const char *what) {
    if (failed) {
        perror(what);
        exit(1);
    }
}

static void *map_page(int fd, size_t bytes, unsigned long page) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, page * PAGE);
    check(at == MAP_FAILED, "mmap");
    return at;
}

static void answer(pid_t pid) {
    printf("ok %d\n", pid);
    fflush(stdout);
}

static void wait_for_end(void) {
    char byte;
    while (read(0, &byte, 1) > 0) {}
}

static void *second_thread(void *unused) {
    (void)unused;
    usleep(50000); /* the first thread ends */
    answer(getpid());
    wait_for_end();
    exit(0);
}

static void end_first_thread(void) {
    pthread_t thread;
    check(pthread_create(&thread, NULL, second_thread, NULL), "pthread_create");
    syscall(SYS_exit, 0);
}

/* A child that ends with this process. */
static pid_t child(void) {
    pid_t pid = fork();
    check(pid < 0, "fork");
    if (!pid) check(prctl(PR_SET_PDEATHSIG, SIGKILL), "prctl");
    return pid;
}

static void enter_namespaces(int fd) {
    check(unshare(CLONE_NEWPID | CLONE_NEWNS), "unshare");
    int ready[2];
    char byte;
    check(pipe(ready), "pipe");
    pid_t pid = child();
    if (!pid) {
        map_page(fd, 2 * PAGE, 0);
        check(write(ready[1], "x", 1) != 1, "write");
        for (;;) pause();
    }
    check(read(ready[0], &byte, 1) != 1, "read");
    answer(pid);
    wait_for_end();
}

/* Maps a file through an overlay file system. */
static void map_overlay(const char *directory) {
    const char *names[] = {"l", "u", "w", "m"};
    char options[512];
    check(unshare(CLONE_NEWNS), "unshare");
    check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "mount of private /");
    check(mount("none", directory, "tmpfs", 0, NULL), "mount of tmpfs");
    check(chdir(directory), "chdir");
    for (int i = 0; i < 4; i++) check(mkdir(names[i], 0700), "mkdir");
    int real = open("u/f", O_CREAT | O_RDWR, 0600);
    check(real < 0 || ftruncate(real, 16 * PAGE), "creation of u/f");
    snprintf(options, sizeof options, "lowerdir=%s/l,upperdir=%s/u,workdir=%s/w", directory, directory, directory);
    check(mount("overlay", "m", "overlay", 0, options), "mount of overlay");
    int over = open("m/f", O_RDWR);
    check(over < 0, "open of m/f");
    map_page(over, 2 * PAGE, 0);
    answer(getpid());
    wait_for_end();
}

/* Maps and unmaps pages at many offsets, so that the tree of the file's mappings is rotated all the time. */
static void churn(int fd, unsigned seed) {
    void *held[64] = {0};
    for (;;) {
        seed = seed * 1103515245 + 12345;
        unsigned i = seed >> 16 & 63;
        if (held[i]) munmap(held[i], PAGE);
        held[i] = held[i] ? NULL : map_page(fd, PAGE, seed >> 8 & 15);
    }
}

static void spawn(int fd, int count, int churns) {
    int ready[2];
    char byte;
    check(pipe(ready), "pipe");
    for (int i = 0; i < count; i++) {
        if (child()) continue;
        if (!churns) map_page(fd, 2 * PAGE, 0);
        check(write(ready[1], "x", 1) != 1, "write");
        if (churns) churn(fd, i * 77 + 1);
        for (;;) pause();
    }
    for (int i = 0; i < count; i++) check(read(ready[0], &byte, 1) != 1, "read");
    answer(getpid());
    wait_for_end();
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    const char *how = argv[2];
    if (!strcmp(how, "overlay")) {
        map_overlay(argv[1]);
        return 0;
    }
    int fd = open(argv[1], O_RDWR), count = argc > 3 ? atoi(argv[3]) : 1;
    check(fd < 0, argv[1]);
    if (!strcmp(how, "many") || !strcmp(how, "churn")) {
        spawn(fd, count, how[0] == 'c');
    } else if (!strcmp(how, "namespaces")) {
        enter_namespaces(fd);
    } else {
        map_page(fd, 2 * PAGE, 0);
        if (!strcmp(how, "leader")) end_first_thread();
        answer(getpid());
        wait_for_end();
    }
    return 0;
}
