/* Preloaded into a program: large anonymous mappings are parts of one shared mapping of a memfd. Contains no fdmap code. For
   programs that do not fork, and whose allocator expects no zeros in memory that it has freed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HEAP_BYTES (1L << 30)

static void *(*next_mmap)(void *, size_t, int, int, int, off_t);
static int (*next_munmap)(void *, size_t);
static char *heap;
static atomic_long end;

/* Not by syscall(), which another preloaded library may define in terms of mmap. */
static long kernel_call(long number, void *at, size_t len, long protection, long flags, long fd, off_t offset) {
    long result;
    register long r10 __asm__("r10") = flags, r8 __asm__("r8") = fd, r9 __asm__("r9") = offset;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(at), "S"(len), "d"(protection), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return (unsigned long)result > -4096UL ? -1 : result;
}

/* The allocator holds a lock when it calls mmap, so all is mapped before. */
__attribute__((constructor)) static void create_heap(void) {
    next_munmap = (int (*)(void *, size_t))dlsym(RTLD_NEXT, "munmap");
    next_mmap = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    int fd = memfd_create("heap", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, HEAP_BYTES)) return;
    void *at = next_mmap(NULL, HEAP_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) heap = at;
}

void *mmap(void *at, size_t len, int protection, int flags, int fd, off_t offset) {
    /* The allocator may call this before the constructor runs. */
    if (!next_mmap) return (void *)kernel_call(SYS_mmap, at, len, protection, flags, fd, offset);
    int anonymous = (flags & MAP_ANONYMOUS) && (flags & MAP_PRIVATE) && !(flags & (MAP_FIXED | MAP_STACK | MAP_GROWSDOWN));
    if (heap && anonymous && protection == (PROT_READ | PROT_WRITE) && len >= 1 << 20) {
        long bytes = (len + 4095) & ~4095L, first = atomic_fetch_add(&end, bytes);
        if (first + bytes <= HEAP_BYTES) return heap + first;
    }
    return next_mmap(at, len, protection, flags, fd, offset);
}

void *mmap64(void *at, size_t len, int protection, int flags, int fd, off_t offset) {
    return mmap(at, len, protection, flags, fd, offset);
}

int munmap(void *at, size_t len) {
    if (heap && (char *)at >= heap && (char *)at < heap + HEAP_BYTES) return 0;
    return next_munmap ? next_munmap(at, len) : (int)kernel_call(SYS_munmap, at, len, 0, 0, 0, 0);
}
