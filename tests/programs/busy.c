/* Threads that use shared memory and system calls that a tracer could disturb, and check every result.
 *
 *   busy [alone|ticks|execs|many]
 *
 * Prints "ready"; a line on standard input ends it, and it prints "errors N rounds M".
 *   alone: one thread, which makes only calls that end with EINTR when a tracer stops them.
 *   ticks: one thread, which pauses and handles a timer signal every 100 microseconds.
 *   execs: executes itself every few milliseconds, and sometimes after 60.
 *   many: five files, one of them with 150 mappings; idle.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define PAGES 256
#define WORDS (PAGES * 4096 / sizeof(long))

static volatile unsigned long *memory;
static volatile int ended;
static int to[2], back[2], pair[2];

struct worker {
    const char *name;
    long (*round)(struct worker *);
    pthread_t thread;
    long rounds, errors;
    unsigned long seed;
    char error[96];
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static long wrong(struct worker *worker, long result, double took) {
    snprintf(worker->error, sizeof worker->error, "result %ld errno %d after %.2f ms", result, errno, took);
    return 1;
}

/* Writes numbers and checks their floating point sum. */
static long stores(struct worker *worker) {
    double sum = 0, wanted = 0;
    for (unsigned long i = 0; i < 512; i++) {
        worker->seed = worker->seed * 6364136223846793005UL + 1442695040888963407UL;
        unsigned long at = worker->seed % (WORDS / 2);
        memory[at] = i;
        sum += memory[at] * 0.5;
        wanted += i * 0.5;
    }
    return sum == wanted ? 0 : wrong(worker, (long)sum, 0);
}

/* Sends a number to a partner (pong) through a pipe and expects its successor. */
static long ping(struct worker *worker) {
    unsigned long sent = ++worker->seed, got = 0;
    long result = write(to[1], &sent, 8);
    if (result != 8 || (result = read(back[0], &got, 8)) != 8 || got != sent + 1)
        return wrong(worker, result, 0);
    return memory[WORDS - 1] == sent ? 0 : wrong(worker, (long)memory[WORDS - 1], 0);
}

static long pong(struct worker *worker) {
    unsigned long got;
    long result = read(to[0], &got, 8);
    if (result == 0)
        return -1;
    if (result != 8)
        return wrong(worker, result, 0);
    memory[WORDS - 1] = got++;
    result = write(back[1], &got, 8);
    return result == 8 ? 0 : wrong(worker, result, 0);
}

static long epolls(struct worker *worker) {
    struct epoll_event event;
    int poller = epoll_create1(EPOLL_CLOEXEC);
    double began = now();
    int result = epoll_wait(poller, &event, 1, 3);
    double took = now() - began;
    close(poller);
    return result == 0 && took >= 2.9 ? 0 : wrong(worker, result, took);
}

static long sleeps(struct worker *worker) {
    struct timespec time = {0, 2000000};
    double began = now();
    int result = nanosleep(&time, NULL);
    double took = now() - began;
    return result == 0 && took >= 1.9 ? 0 : wrong(worker, result, took);
}

static long futexes(struct worker *worker) {
    struct timespec time = {0, 2000000};
    static unsigned word;
    long result = syscall(SYS_futex, &word, FUTEX_WAIT, 0, &time, NULL, 0);
    return result == -1 && errno == ETIMEDOUT ? 0 : wrong(worker, result, 0);
}

static long signals(struct worker *worker) {
    struct timespec time = {0, 3000000};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    long result = sigtimedwait(&set, NULL, &time);
    return result == -1 && errno == EAGAIN ? 0 : wrong(worker, result, 0);
}

static long receives(struct worker *worker) {
    char byte;
    long result = recv(pair[0], &byte, 1, 0);
    return result == -1 && errno == EAGAIN ? 0 : wrong(worker, result, 0);
}

/* Makes these calls in turn. None may end before its timeout, nor much later. */
static long alone(struct worker *worker) {
    static long (*const calls[])(struct worker *) = {epolls, signals, receives};
    double began = now();
    long errors = calls[worker->seed++ % 3](worker), took = now() - began;
    memory[worker->seed % WORDS] = worker->seed;
    return errors || took < 500 ? errors : wrong(worker, took, took);
}

static volatile unsigned long tick_count;

static void tick(int signal) {
    (void)signal;
    tick_count++;
    memory[tick_count % WORDS] = tick_count;
}

/* Only a handler ends pause(). */
static long ticks(struct worker *worker) {
    unsigned long before = tick_count;
    int result = pause();
    return result == -1 && errno == EINTR && tick_count != before ? 0 : wrong(worker, result, 0);
}

static int end_requested(int milliseconds) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    return poll(&input, 1, milliseconds) > 0;
}

static void *work(void *given) {
    struct worker *worker = given;
    /* pong runs until ping has ended. */
    while (!ended || worker->round == pong) {
        long errors = worker->round(worker);
        if (errors < 0)
            break;
        worker->errors += errors;
        worker->rounds++;
    }
    return NULL;
}

/* Creates a file of 64 pages and maps its pages one by one, not adjacent to each other. */
static void map_apart(int pages) {
    int fd = memfd_create("busy", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 64 * 4096) < 0)
        exit(3);
    for (int i = 0; i < pages; i++) {
        char *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, i * 7 % 64 * 4096);
        if (at == MAP_FAILED || mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
            exit(3);
        *at = 1;
    }
}

static void exec_again(long rounds) {
    char number[32];
    map_apart(1);
    /* Some adoptions fit between two calls of execve. */
    usleep(rounds % 32 ? 1000 + rounds * 700 % 2900 : 60000);
    if (end_requested(0)) {
        printf("errors 0 rounds %ld\n", rounds);
        exit(0);
    }
    snprintf(number, sizeof number, "%ld", rounds + 1);
    execl("/proc/self/exe", "busy", "execs", number, NULL);
    exit(3);
}

int main(int count, char **words) {
    if (count > 2)
        exec_again(atol(words[2]));
    static struct worker workers[] = {
        {.name = "stores", .round = stores},   {.name = "ping", .round = ping},       {.name = "pong", .round = pong},
        {.name = "epolls", .round = epolls},   {.name = "sleeps", .round = sleeps},   {.name = "futexes", .round = futexes},
        {.name = "signals", .round = signals}, {.name = "receives", .round = receives},
    };
    size_t all = sizeof workers / sizeof *workers;
    struct worker only = {.name = "alone", .round = alone};
    struct timeval timeout = {0, 3000};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    int fd = memfd_create("busy", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, PAGES * 4096) < 0 || pipe(to) < 0 || pipe(back) < 0)
        return 3;
    memory = mmap(NULL, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) < 0)
        return 3;
    setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    printf("ready\n");
    fflush(stdout);
    if (count > 1 && !strcmp(words[1], "ticks")) {
        struct itimerval interval = {{0, 100}, {0, 100}};
        signal(SIGALRM, tick);
        setitimer(ITIMER_REAL, &interval, NULL);
        only = (struct worker){.name = "ticks", .round = ticks};
    }
    if (count > 1 && (only.round == ticks || !strcmp(words[1], "alone"))) {
        while (!end_requested(0)) {
            only.errors += only.round(&only);
            only.rounds++;
        }
        if (only.errors)
            printf("%s: %s\n", only.name, only.error);
        printf("errors %ld rounds %ld\n", only.errors, only.rounds);
        return 0;
    }
    if (count > 1 && !strcmp(words[1], "execs"))
        exec_again(0);
    if (count > 1 && !strcmp(words[1], "many")) {
        for (int i = 0; i < 4; i++)
            map_apart(i == 0 ? 150 : 3);
        while (!end_requested(10000))
            ;
        printf("errors 0 rounds 0\n");
        return 0;
    }
    for (size_t i = 0; i < all; i++)
        pthread_create(&workers[i].thread, NULL, work, &workers[i]);
    while (!end_requested(10000))
        ;
    ended = 1;
    long errors = 0, rounds = 0;
    for (size_t i = 0; i < all; i++) {
        if (workers[i].round == pong)
            close(to[1]);
        pthread_join(workers[i].thread, NULL);
        errors += workers[i].errors;
        rounds += workers[i].rounds;
        if (workers[i].errors)
            printf("%s: %ld of %ld: %s\n", workers[i].name, workers[i].errors, workers[i].rounds, workers[i].error);
    }
    printf("errors %ld rounds %ld\n", errors, rounds);
    return 0;
}
