/* Threads that move, grow and shrink memory of their own while others hold the lock of the address space (mmap_lock), so that a tracer
 * cannot look at the mappings.
 *
 * Prints "ready" when it does; a line on standard input ends it.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define LARGE (8UL << 20)

static void *lock(void *unused) {
    (void)unused;
    for (;;) {
        char *memory = mmap(NULL, LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (memory == MAP_FAILED || munmap(memory, LARGE) < 0)
            exit(3);
    }
}

static void *remap(void *unused) {
    size_t small = 4096, large = 64 * 4096;
    char *memory = mmap(NULL, small, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    (void)unused;
    for (;;) {
        if (memory == MAP_FAILED || (memory = mremap(memory, small, large, MREMAP_MAYMOVE)) == MAP_FAILED)
            exit(3);
        memory = mremap(memory, large, small, MREMAP_MAYMOVE);
    }
}

int main(void) {
    pthread_t thread;
    for (int i = 0; i < 2; i++)
        if (pthread_create(&thread, NULL, lock, NULL) || pthread_create(&thread, NULL, remap, NULL))
            return 3;
    usleep(50000);
    printf("ready\n");
    fflush(stdout);
    return getchar() == EOF;
}
