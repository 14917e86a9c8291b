/* Measures the calls that the shim interposes, in nanoseconds each: costs ROUNDS */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define LEN (4 << 20)

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : 1;
    int memfd = memfd_create("costs", 0), null = open("/dev/zero", O_RDONLY), map = open("/proc/self/pagemap", O_RDONLY);
    if (memfd < 0 || null < 0 || map < 0 || ftruncate(memfd, LEN)) return 1;
    char byte;
    double began = now();
    for (long i = 0; i < rounds; i++) munmap(mmap(0, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0), LEN);
    printf("memfd %.0f\n", (now() - began) / rounds);
    began = now();
    for (long i = 0; i < 1000; i++)
        munmap(mmap(0, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), LEN);
    printf("anonymous %.0f\n", (now() - began) / 1000);
    began = now();
    for (long i = 0; i < 10000; i++)
        if (read(null, &byte, 1) != 1) return 1;
    printf("read %.0f\n", (now() - began) / 10000);
    static uint64_t entries[LEN / 4096];
    char *memory = mmap(0, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    began = now();
    for (long i = 0; i < rounds; i++)
        if (pread(map, entries, sizeof entries, (uintptr_t)memory / 4096 * 8) != sizeof entries) return 1;
    printf("pagemap %.0f\n", (now() - began) / rounds);
    return 0;
}
