/* Blocks in one system call, or spins, and then reports whether anything disturbed it: the call's result, its duration, and
 * whether a register or the red zone changed that the kernel preserves over a call.
 *
 *   blocked_syscall memfd|closed|shm|sysv|anon [NAME [filtered]]
 *
 * Maps 64 pages ("closed": of a memfd whose descriptor it closes) and prints "ready ADDRESS". With "filtered" it installs a
 * seccomp filter that allows everything. Commands on standard input: "block CALL MILLISECONDS" (negative: no timeout),
 * "write PAGE", "thread" (starts a thread that waits in pause), "poller" (makes an io_uring whose submissions a thread of the
 * kernel polls), "state", "quit".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <poll.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>

#define PAGES 64
#define KEPT 27

/* Registers after a call: rdi rsi rdx r10 r8 r9 rbx rbp r12 r13 r14 r15, xmm0..xmm14. Then the red zone. */
struct after {
    unsigned long kept[KEPT];
    unsigned long red_zone[16];
};

/* Makes a system call with known values in all other registers. A negative number spins until `stop` is set. */
long with_known_registers(long number, const long *arguments, struct after *after);
volatile long stop;

asm(".text\n"
    ".globl with_known_registers\n"
    "with_known_registers:\n"
    "  push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15; push %rdx\n"
    /* Fill the red zone: 16 words below the stack pointer. */
    "  mov $16, %rcx\n"
    "1: mov %rcx, %r11; neg %r11; mov $0x5a5a5a5a, %eax; add %rcx, %rax; mov %rax, (%rsp,%r11,8); dec %rcx; jnz 1b\n"
    "  mov %rdi, %rax; mov %rsi, %rbx\n"
    "  mov $0x1000, %rcx; movq %rcx, %xmm0; inc %rcx; movq %rcx, %xmm1; inc %rcx; movq %rcx, %xmm2; inc %rcx\n"
    "  movq %rcx, %xmm3; inc %rcx; movq %rcx, %xmm4; inc %rcx; movq %rcx, %xmm5; inc %rcx; movq %rcx, %xmm6; inc %rcx\n"
    "  movq %rcx, %xmm7; inc %rcx; movq %rcx, %xmm8; inc %rcx; movq %rcx, %xmm9; inc %rcx; movq %rcx, %xmm10; inc %rcx\n"
    "  movq %rcx, %xmm11; inc %rcx; movq %rcx, %xmm12; inc %rcx; movq %rcx, %xmm13; inc %rcx; movq %rcx, %xmm14\n"
    "  mov (%rbx), %rdi; mov 8(%rbx), %rsi; mov 16(%rbx), %rdx; mov 24(%rbx), %r10; mov 32(%rbx), %r8; mov 40(%rbx), %r9\n"
    "  mov $0x2001, %rbx; mov $0x2002, %rbp; mov $0x2003, %r12; mov $0x2004, %r13; mov $0x2005, %r14; mov $0x2006, %r15\n"
    "  test %rax, %rax; js 2f\n"
    "  syscall\n"
    "  jmp 3f\n"
    "2: mov $0x3001, %rcx; mov $0x3002, %r11; mov $-5, %rax\n"
    "4: cmpq $0, stop(%rip); je 4b\n"
    "  cmp $0x3001, %rcx; jne 5f; cmp $0x3002, %r11; jne 5f; cmp $-5, %rax; je 3f\n"
    "5: mov $0, %rdi\n"
    "3: mov (%rsp), %rcx\n"
    "  mov %rdi, (%rcx); mov %rsi, 8(%rcx); mov %rdx, 16(%rcx); mov %r10, 24(%rcx); mov %r8, 32(%rcx); mov %r9, 40(%rcx)\n"
    "  mov %rbx, 48(%rcx); mov %rbp, 56(%rcx); mov %r12, 64(%rcx); mov %r13, 72(%rcx); mov %r14, 80(%rcx); mov %r15, 88(%rcx)\n"
    "  movq %xmm0, 96(%rcx); movq %xmm1, 104(%rcx); movq %xmm2, 112(%rcx); movq %xmm3, 120(%rcx); movq %xmm4, 128(%rcx)\n"
    "  movq %xmm5, 136(%rcx); movq %xmm6, 144(%rcx); movq %xmm7, 152(%rcx); movq %xmm8, 160(%rcx); movq %xmm9, 168(%rcx)\n"
    "  movq %xmm10, 176(%rcx); movq %xmm11, 184(%rcx); movq %xmm12, 192(%rcx); movq %xmm13, 200(%rcx); movq %xmm14, 208(%rcx)\n"
    "  mov $16, %rdx\n"
    "6: mov %rdx, %r11; neg %r11; mov (%rsp,%r11,8), %rdi; mov %rdi, 208(%rcx,%rdx,8); dec %rdx; jnz 6b\n"
    "  pop %rdx; pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx\n"
    "  ret\n");

static void on_signal(int number) {
    if (number == SIGALRM)
        stop = 1;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

/* Names the first register or red zone word that changed. The frame of a signal handler lies below the red zone. */
static const char *changed(const long *arguments, const struct after *after) {
    static char where[64];
    for (int i = 0; i < KEPT; i++) {
        unsigned long wanted = i < 6 ? (unsigned long)arguments[i] : i < 12 ? 0x2001UL + i - 6 : 0x1000UL + i - 12;
        if (after->kept[i] != wanted) {
            snprintf(where, sizeof where, "register-%d=%lx", i, after->kept[i]);
            return where;
        }
    }
    for (int i = 0; i < 16; i++)
        if (after->red_zone[i] != 0x5a5a5a5aUL + i + 1) {
            snprintf(where, sizeof where, "red-zone-%d=%lx", i, after->red_zone[i]);
            return where;
        }
    return "intact";
}

static void block(const char *call, long ms) {
    static unsigned word;
    static char byte;
    static struct epoll_event events[4];
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    struct timeval timeout = {ms / 1000, ms % 1000 * 1000};
    struct timespec *limit = ms < 0 ? NULL : &time;
    struct after after = {0};
    struct pollfd polled = {.fd = 0, .events = POLLIN};
    struct sembuf down = {0, -1, 0};
    sigset_t set;
    int pair[2] = {-1, -1}, poller = -1, semaphore = -1;
    long arguments[6] = {11, 12, 13, 14, 15, 16}, number = -1;
#define ARGUMENTS(...) do { long given[] = {__VA_ARGS__}; memcpy(arguments, given, sizeof given); } while (0)
    if (!strcmp(call, "read")) {
        number = SYS_read;
        ARGUMENTS(0, (long)&byte, 1);
    } else if (!strcmp(call, "futex")) {
        number = SYS_futex;
        ARGUMENTS((long)&word, FUTEX_WAIT, 0, (long)limit);
    } else if (!strcmp(call, "nanosleep")) {
        number = SYS_nanosleep;
        ARGUMENTS((long)&time, 0);
    } else if (!strcmp(call, "poll")) {
        number = SYS_poll;
        ARGUMENTS((long)&polled, 1, ms);
    } else if (!strcmp(call, "ppoll")) {
        static unsigned long mask;
        number = SYS_ppoll;
        ARGUMENTS((long)&polled, 1, (long)limit, (long)&mask, 8);
    } else if (!strncmp(call, "epoll", 5)) {
        struct epoll_event event = {.events = EPOLLIN};
        poller = epoll_create1(0);
        epoll_ctl(poller, EPOLL_CTL_ADD, 0, &event);
        if (!strcmp(call, "epoll_pwait2")) {
            number = SYS_epoll_pwait2;
            ARGUMENTS(poller, (long)events, 4, (long)limit, 0, 8);
        } else {
            number = SYS_epoll_wait;
            ARGUMENTS(poller, (long)events, 4, ms);
        }
    } else if (!strcmp(call, "sigtimedwait")) {
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        number = SYS_rt_sigtimedwait;
        ARGUMENTS((long)&set, 0, (long)limit, 8);
    } else if (!strcmp(call, "recv") || !strcmp(call, "accept")) {
        if (!strcmp(call, "recv")) {
            socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
        } else {
            pair[0] = socket(AF_INET, SOCK_STREAM, 0);
            listen(pair[0], 1);
        }
        if (ms >= 0)
            setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
        number = !strcmp(call, "recv") ? SYS_recvfrom : SYS_accept;
        if (number == SYS_recvfrom)
            ARGUMENTS(pair[0], (long)&byte, 1, 0, 0, 0);
        else
            ARGUMENTS(pair[0], 0, 0);
    } else if (!strcmp(call, "semtimedop")) {
        semaphore = semget(IPC_PRIVATE, 1, 0600);
        number = SYS_semtimedop;
        ARGUMENTS(semaphore, (long)&down, 1, (long)limit);
    } else if (!strcmp(call, "spin")) {
        struct itimerval timer = {.it_value = timeout};
        stop = 0;
        setitimer(ITIMER_REAL, &timer, NULL);
    }
    printf("blocks\n");
    fflush(stdout);
    double began = now();
    long result = with_known_registers(number, arguments, &after);
    double took = now() - began;
    socklen_t length = sizeof timeout;
    long kept = -1;
    if (pair[0] >= 0) {
        getsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, &length);
        kept = timeout.tv_sec * 1000 + timeout.tv_usec / 1000;
        close(pair[0]);
        close(pair[1]);
    }
    if (poller >= 0)
        close(poller);
    if (semaphore >= 0)
        semctl(semaphore, 0, IPC_RMID);
    printf("done %ld %.1f %s %ld\n", result, took, changed(arguments, &after), kept);
}

static void state(void) {
    sigset_t mask;
    struct sigaction trap;
    sigprocmask(SIG_BLOCK, NULL, &mask);
    sigaction(SIGTRAP, NULL, &trap);
    printf("state");
    for (int number = 1; number <= 64; number++)
        printf("%c", "-b"[sigismember(&mask, number) == 1]);
    printf(" %s", trap.sa_handler == SIG_IGN ? "ignored" : "changed");
    for (int fd = 0; fd < 64; fd++) {
        char path[32], target[256];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length > 0)
            printf(" %d:%.*s", fd, (int)length, target);
    }
    printf("\n");
}

static void *wait_in_pause(void *unused) {
    for (;;)
        pause();
    return unused;
}

static char *map(const char *kind, const char *name) {
    size_t bytes = PAGES * 4096;
    int fd = -1;
    if (!strcmp(kind, "sysv")) {
        int id = shmget(IPC_PRIVATE, bytes, 0600);
        char *at = shmat(id, NULL, 0);
        shmctl(id, IPC_RMID, NULL);
        return at;
    }
    if (!strcmp(kind, "anon"))
        return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!strcmp(kind, "shm"))
        fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    else
        fd = memfd_create(name, 0);
    if (fd < 0 || ftruncate(fd, bytes) < 0)
        exit(3);
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (strcmp(kind, "memfd"))
        close(fd);
    return at;
}

int main(int count, char **words) {
    char line[128];
    struct sigaction action = {.sa_handler = on_signal};
    sigset_t blocked;
    struct sock_filter allow = {.code = BPF_RET | BPF_K, .k = SECCOMP_RET_ALLOW};
    struct sock_fprog filter = {1, &allow};
    if (count > 3 && (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)))
        return 3;
    char *memory = map(count > 1 ? words[1] : "memfd", count > 2 ? words[2] : "blocked");
    if (memory == MAP_FAILED)
        return 3;
    memset(memory, 1, 3 * 4096);
    sigaction(SIGALRM, &action, NULL);
    sigaction(SIGUSR2, &action, NULL);
    signal(SIGTRAP, SIG_IGN);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    sigaddset(&blocked, 40);
    sigprocmask(SIG_BLOCK, &blocked, NULL);
    printf("ready %p\n", (void *)memory);
    for (;;) {
        fflush(stdout);
        size_t length = 0;
        while (length < sizeof line - 1 && read(0, line + length, 1) == 1 && line[length] != '\n')
            length++;
        if (length == 0)
            return 0;
        line[length] = 0;
        char call[32];
        long number;
        pthread_t thread;
        if (sscanf(line, "block %31s %ld", call, &number) == 2)
            block(call, number);
        else if (sscanf(line, "write %ld", &number) == 1) {
            memory[number * 4096] += 1;
            printf("written\n");
        } else if (!strcmp(line, "thread"))
            printf(pthread_create(&thread, NULL, wait_in_pause, NULL) ? "failed\n" : "started\n");
        else if (!strcmp(line, "poller")) {
            struct io_uring_params parameters = {.flags = IORING_SETUP_SQPOLL, .sq_thread_idle = 1};
            printf(syscall(SYS_io_uring_setup, 1, &parameters) < 0 ? "failed\n" : "started\n");
        } else if (!strcmp(line, "state"))
            state();
        else
            return 0;
    }
}
