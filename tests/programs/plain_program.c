/* Maps and writes memfds by commands on standard input, one per line. Contains no fdmap code. Each command prints one line. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef UFFD_FEATURE_WP_ASYNC
#define UFFD_FEATURE_WP_ASYNC (1 << 15)
#endif

struct { char *at; size_t len; } maps[64];
int slots;

#ifndef PAGEMAP_SCAN
struct page_region { uint64_t start, end, categories; };
struct pm_scan_arg {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#endif

static int registered(int slot) {
    int fd = syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_WP_ASYNC};
    struct uffdio_register range = {.range = {(uintptr_t)maps[slot].at, maps[slot].len}, .mode = UFFDIO_REGISTER_MODE_WP};
    if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &range)) return errno;
    return 0;
}

/* Installs a guard region: by madvise, by process_madvise, or by the number of the system call. */
static int guard(char *at, size_t len, int way) {
    struct iovec part = {at, len};
    int self = syscall(SYS_pidfd_open, getpid(), 0);
    long done = way == 0 ? madvise(at, len, 102) : way == 1 ? process_madvise(self, &part, 1, 102, 0) : syscall(SYS_madvise, at, len, 102);
    int error = done < 0 ? errno : 0;
    close(self);
    return error;
}

int main(void) {
    char line[256], name[64];
    long a, b, c, d;
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "memfd %63s %ld", name, &a) == 2) {
            int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
            printf(fd < 0 || ftruncate(fd, a) ? "failed\n" : "ok %d\n", fd);
        } else if (sscanf(line, "raw %63s %ld", name, &a) == 2) {
            int fd = syscall(SYS_memfd_create, name, 0);
            printf(fd < 0 || ftruncate(fd, a) ? "failed\n" : "ok %d\n", fd);
        } else if (sscanf(line, "reserve %ld %ld", &a, &b) == 2) {
            maps[slots].len = b;
            maps[slots].at = mmap(0, b, PROT_NONE, MAP_SHARED, a, 0);
            if (maps[slots].at == MAP_FAILED) puts("failed"); else printf("ok %d\n", slots++);
        } else if (sscanf(line, "map %ld %ld %ld", &a, &b, &c) == 3) {
            maps[slots].len = c;
            maps[slots].at = mmap(0, c, PROT_READ | PROT_WRITE, MAP_SHARED, a, b);
            if (maps[slots].at == MAP_FAILED) puts("failed"); else printf("ok %d\n", slots++);
        } else if (sscanf(line, "write %ld %ld", &a, &b) == 2) {
            maps[a].at[b * 4096]++;
            puts("ok");
        } else if (sscanf(line, "unmap %ld %ld %ld", &a, &b, &c) == 3) {
            puts(munmap(maps[a].at + b, c) ? "failed" : "ok");
        } else if (sscanf(line, "mseal %ld", &a) == 1) {
            printf("ok %d\n", syscall(462, maps[a].at, maps[a].len, 0L) ? errno : 0);
        } else if (sscanf(line, "protect %ld", &a) == 1) {
            puts(mprotect(maps[a].at, maps[a].len, PROT_READ | PROT_WRITE) ? "failed" : "ok");
        } else if (sscanf(line, "cover %ld %ld %ld", &a, &b, &c) == 3) {
            void *at = mmap(maps[a].at + b, c, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
            puts(at == MAP_FAILED ? "failed" : "ok");
        } else if (sscanf(line, "move %ld %ld", &a, &b) == 2) {
            char *to = mmap(0, b, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            char *at = mremap(maps[a].at, maps[a].len, b, MREMAP_MAYMOVE | MREMAP_FIXED, to);
            if (at != MAP_FAILED) maps[a].at = at, maps[a].len = b;
            puts(at == MAP_FAILED ? "failed" : "ok");
        } else if (sscanf(line, "dup %ld %ld", &a, &b) == 2) {
            printf("ok %d\n", b < 0 ? dup(a) : dup2(a, b));
        } else if (sscanf(line, "close %ld", &a) == 1) {
            puts(close(a) ? "failed" : "ok");
        } else if (sscanf(line, "fork %ld %ld", &a, &b) == 2) {
            int status, pid = fork();
            if (!pid) {
                maps[a].at[b * 4096]++;
                _exit(7);
            }
            waitpid(pid, &status, 0);
            printf("ok %d\n", WEXITSTATUS(status));
        } else if (sscanf(line, "child %ld", &a) == 1) {
            /* The child maps a memfd of its own. */
            int status, pid = fork();
            if (!pid) {
                int fd = memfd_create("child", 0);
                ftruncate(fd, a) ? _exit(1) : 0;
                char *at = mmap(0, a, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
                at[0] = 1;
                _exit(munmap(at, a) ? 1 : 7);
            }
            waitpid(pid, &status, 0);
            printf("ok %d\n", WEXITSTATUS(status));
        } else if (sscanf(line, "guard %ld %ld %ld %ld", &a, &b, &c, &d) == 4) {
            printf("ok %d\n", guard(maps[a].at + b * 4096, c * 4096, d));
        } else if (sscanf(line, "unguard %ld %ld %ld", &a, &b, &c) == 3) {
            puts(madvise(maps[a].at + b * 4096, c * 4096, 103) ? "failed" : "ok");
        } else if (sscanf(line, "guardfork %ld %ld %ld", &a, &b, &c) == 3) {
            /* The child installs a guard region, removes it, and writes to its first page. */
            int status, pid = fork();
            char *at = maps[a].at + b * 4096;
            if (!pid) {
                if (guard(at, c * 4096, 0) || madvise(at, c * 4096, 103)) _exit(1);
                at[0]++;
                _exit(7);
            }
            waitpid(pid, &status, 0);
            printf("ok %d\n", WEXITSTATUS(status));
        } else if (sscanf(line, "access %ld %ld", &a, &b) == 2) {
            char byte;
            struct iovec from = {maps[a].at + b * 4096, 1}, to = {&byte, 1};
            printf("ok %d\n", process_vm_readv(getpid(), &to, 1, &from, 1, 0) == 1 ? 0 : errno);
        } else if (!strcmp(line, "filter\n")) {
            /* The filter allows everything. */
            struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
            struct sock_fprog filter = {.len = 1, .filter = &allow};
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            printf("ok %d\n", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter));
        } else if (sscanf(line, "byte %ld %ld", &a, &b) == 2) {
            printf("ok %d\n", maps[a].at[b]);
        } else if (!strcmp(line, "vfork\n")) {
            int status, pid = vfork();
            if (!pid) {
                execl("/bin/sh", "sh", "-c", "exit 7", (char *)0);
                _exit(1);
            }
            waitpid(pid, &status, 0);
            printf("ok %d\n", WEXITSTATUS(status));
        } else if (sscanf(line, "uffd %ld", &a) == 1) {
            printf("ok %d\n", registered(a));
        } else if (sscanf(line, "flags %ld", &a) == 1) {
            printf("ok %d %d\n", fcntl(a, F_GETFD), fcntl(a, F_GET_SEALS));
        } else if (sscanf(line, "entry %ld %ld", &a, &b) == 2) {
            uint64_t entry = 0;
            int fd = open("/proc/thread-self/pagemap", O_RDONLY | O_CLOEXEC), other = dup(fd);
            close(fd);
            ssize_t got = pread(other, &entry, 8, ((uintptr_t)maps[a].at / 4096 + b) * 8);
            close(other);
            printf(got == 8 ? "ok %lx\n" : "failed\n", entry);
        } else if (sscanf(line, "scan %ld %ld %ld", &a, &b, &c) == 3) {
            struct page_region first = {0};
            struct pm_scan_arg scan = {.size = sizeof scan, .flags = b, .start = (uintptr_t)maps[a].at,
                .end = (uintptr_t)maps[a].at + maps[a].len, .vec = (uintptr_t)&first, .vec_len = 1, .category_mask = c,
                .return_mask = 0x7f};
            int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), count = ioctl(fd, PAGEMAP_SCAN, &scan);
            if (count < 0) printf("ok errno %d\n", errno);
            else printf("ok %d %ld %lx\n", count, (long)(first.end - first.start) / 4096, (long)first.categories);
            close(fd);
        } else if (sscanf(line, "seal %ld", &a) == 1) {
            puts(fcntl(a, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK) ? "failed" : "ok");
        } else {
            puts("unknown command");
        }
        fflush(stdout);
    }
    return 0;
}
