/*
 * The only program of a guest. It reports the guest-physical addresses of its pages, writes some of them and reads disks into
 * others. It takes one command per line and answers each with one line that begins with "ok" or "no". See tests/src/guest/.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

enum { PAGE = 4096, BLOCK_PAGES = 16 };

/* Pages that are written on command, pages that disks are read into on command, and pages that a child reads into continuously. */
static unsigned char *pages, *read_pages, *busy_pages;
static uint64_t page_count, read_count;
static int line_fd = -1;

static void reply(const char *text) {
    size_t left = strlen(text);
    while (left) {
        ssize_t done = write(line_fd, text, left);
        if (done <= 0) _exit(1);
        text += done;
        left -= (size_t)done;
    }
}

static void failed(const char *what) {
    char text[256];
    snprintf(text, sizeof text, "no %s: %s\n", what, strerror(errno));
    reply(text);
}

/* As in tests/src/pattern.rs. */
static uint64_t mix(uint64_t word) {
    uint64_t z = word + 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* Memory that keeps its physical address: locked, not copied by a fork, without huge pages and compaction. */
static unsigned char *memory(uint64_t count) {
    void *got = mmap(0, count * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED || mlock(got, count * PAGE)) return NULL;
    memset(got, 0xff, count * PAGE);
    return got;
}

/* Prints the guest-physical page numbers of some pages, as FIRST+COUNT for each run. */
static void print_runs(const unsigned char *start, uint64_t count) {
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    uint64_t first = 0, run = 0;
    char text[64];
    for (uint64_t i = 0; i < count; i++) {
        uint64_t entry = 0;
        off_t place = (off_t)(((uintptr_t)start / PAGE + i) * sizeof entry);
        if (pread(pagemap, &entry, sizeof entry, place) != sizeof entry || !(entry >> 63)) entry = 0;
        uint64_t frame = entry & ((1ULL << 55) - 1);
        if (run && frame == first + run) {
            run++;
            continue;
        }
        if (run) {
            snprintf(text, sizeof text, " %llu+%llu", (unsigned long long)first, (unsigned long long)run);
            reply(text);
        }
        first = frame;
        run = 1;
    }
    snprintf(text, sizeof text, " %llu+%llu", (unsigned long long)first, (unsigned long long)run);
    reply(text);
    close(pagemap);
}

static void print_all(void) {
    reply("ok");
    print_runs(pages, page_count);
    reply(" |");
    print_runs(read_pages, read_count);
    reply(" |");
    print_runs(busy_pages, BLOCK_PAGES);
    reply("\n");
}

static void write_pages(uint64_t seed, uint64_t per_mille) {
    uint64_t written = 0;
    for (uint64_t i = 0; i < page_count; i++) {
        if (mix(seed ^ mix(i)) % 1000 >= per_mille) continue;
        uint64_t *words = (uint64_t *)(pages + i * PAGE);
        words[0] = mix(seed) | 1;
        words[1] = i;
        written++;
    }
    char text[64];
    snprintf(text, sizeof text, "ok %llu\n", (unsigned long long)written);
    reply(text);
}

/* Reads `count` pages of a disk, from page `first`, into as many pages of this program, from page `to`. */
static void read_disk(const char *disk, uint64_t first, uint64_t count, uint64_t to) {
    if (to + count > read_count) {
        errno = EINVAL;
        return failed("read");
    }
    int fd = open(disk, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd < 0) return failed(disk);
    ssize_t got = pread(fd, read_pages + to * PAGE, count * PAGE, (off_t)(first * PAGE));
    close(fd);
    if (got != (ssize_t)(count * PAGE)) return failed("pread");
    reply("ok\n");
}

static void read_continuously(const char *disk, uint64_t blocks) {
    int fd = open(disk, O_RDONLY | O_DIRECT | O_CLOEXEC);
    for (uint64_t word = 1; fd >= 0; word = mix(word))
        if (pread(fd, busy_pages, BLOCK_PAGES * PAGE, (off_t)(word % blocks * BLOCK_PAGES * PAGE)) < 0) break;
    _exit(1);
}

static void command(char *line) {
    static pid_t reader;
    char disk[32];
    unsigned long long a, b, c;
    if (!strcmp(line, "pages")) {
        print_all();
    } else if (sscanf(line, "write %llu %llu", &a, &b) == 2) {
        write_pages(a, b);
    } else if (sscanf(line, "read %31s %llu %llu %llu", disk, &a, &b, &c) == 4) {
        read_disk(disk, a, b, c);
    } else if (sscanf(line, "busy %31s %llu", disk, &a) == 2 && !reader) {
        reader = fork();
        if (reader == 0) read_continuously(disk, a);
        reply(reader > 0 ? "ok\n" : "no fork\n");
    } else if (!strcmp(line, "calm") && reader) {
        int status = 0;
        kill(reader, SIGKILL);
        waitpid(reader, &status, 0);
        reader = 0;
        /* A reader that was not killed by the signal has failed. */
        reply(WIFSIGNALED(status) ? "ok\n" : "no reading went wrong\n");
    } else {
        reply("no such command\n");
    }
}

static void load(const char *module) {
    int fd = open(module, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || syscall(SYS_finit_module, fd, "", 0)) failed(module);
    close(fd);
}

static void set_up(void) {
    char module[32];
    if (mount("proc", "/proc", "proc", 0, "")) failed("mount /proc");
    /* Modules are numbered in the order in which they need one another. */
    for (int i = 0; snprintf(module, sizeof module, "/modules/%d.ko", i), !access(module, R_OK); i++) load(module);
    int compact = open("/proc/sys/vm/compact_unevictable_allowed", O_WRONLY | O_CLOEXEC);
    if (compact >= 0 && write(compact, "0", 1) != 1) failed("compact_unevictable_allowed");
    close(compact);
}

int main(void) {
    struct termios raw;
    char line[256];
    size_t used = 0;
    /* The kernel's log has the first serial line, commands have the second. */
    if (mount("dev", "/dev", "devtmpfs", 0, "")) return 1;
    line_fd = open("/dev/ttyS1", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (line_fd < 0) return 1;
    tcgetattr(line_fd, &raw);
    cfmakeraw(&raw);
    tcsetattr(line_fd, TCSANOW, &raw);
    set_up();
    const char *wanted = getenv("pages"), *wanted_read = getenv("read_pages");
    page_count = wanted ? strtoull(wanted, NULL, 10) : 0;
    read_count = wanted_read ? strtoull(wanted_read, NULL, 10) : 0;
    pages = memory(page_count);
    read_pages = memory(read_count);
    busy_pages = memory(BLOCK_PAGES);
    if (!pages || !read_pages || !busy_pages) failed("memory");
    reply("ok ready\n");
    while (read(line_fd, line + used, 1) == 1) {
        if (line[used] != '\n') {
            used += used < sizeof line - 1;
            continue;
        }
        line[used] = 0;
        used = 0;
        command(line);
    }
    return 1;
}
