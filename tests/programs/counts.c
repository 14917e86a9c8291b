/* Maps a memfd, writes all pages except every fourth, and counts the pagemap entries of all pages, read by the given method:
   counts PAGES pread|read|fopen|freopen|scan|each|late. "late" writes each page, and has it paged out, just before it
   reads its entry. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef PAGEMAP_SCAN
struct page_region { uint64_t start, end, categories; };
struct pm_scan_arg {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#define PAGE_IS_PRESENT (1 << 3)
#define PAGE_IS_SWAPPED (1 << 4)
#endif

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    unsigned long pages = strtoul(argv[1], 0, 10), present = 0, swap = 0;
    int fd = memfd_create("counted", MFD_CLOEXEC), map;
    if (fd < 0 || ftruncate(fd, pages * 4096)) return perror("memfd"), 1;
    char *memory = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return perror("mmap"), 1;
    for (unsigned long page = 0; page < pages; page++)
        if (page % 4 && strcmp(argv[2], "late")) memory[page * 4096] = 1;
    uint64_t *entries = calloc(pages, 8), first = (uintptr_t)memory / 4096;
    if (!strcmp(argv[2], "scan")) {
        static struct page_region regions[100];
        struct pm_scan_arg scan = {.size = sizeof scan, .start = first * 4096, .end = (first + pages) * 4096,
            .vec = (uintptr_t)regions, .vec_len = 100, .category_anyof_mask = PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            .return_mask = PAGE_IS_PRESENT | PAGE_IS_SWAPPED};
        for (map = open("/proc/self/pagemap", O_RDONLY); scan.start < scan.end; scan.start = scan.walk_end) {
            int count = ioctl(map, PAGEMAP_SCAN, &scan);
            if (count < 0) return perror("PAGEMAP_SCAN"), 1;
            for (int i = 0; i < count; i++) {
                unsigned long len = (regions[i].end - regions[i].start) / 4096;
                if (regions[i].categories & PAGE_IS_PRESENT) present += len; else swap += len;
            }
        }
    } else {
        if (strstr(argv[2], "open")) {
            FILE *file = argv[2][0] == 'r' ? freopen("/proc/self/pagemap", "r", stdin) : fopen("/proc/self/pagemap", "r");
            if (!file || fseeko(file, first * 8, SEEK_SET) || fread(entries, 8, pages, file) != pages)
                return perror("fread"), 1;
        } else if (!strcmp(argv[2], "read")) {
            map = open("/proc/self/pagemap", O_RDONLY);
            lseek(map, first * 8, SEEK_SET);
            if (read(map, entries, pages * 8) != (ssize_t)(pages * 8)) return perror("read"), 1;
        } else if (!strcmp(argv[2], "each") || !strcmp(argv[2], "late")) {
            map = open("/proc/self/pagemap", O_RDONLY);
            for (unsigned long page = 0; page < pages; page++) {
                if (argv[2][0] == 'l' && page % 4) {
                    memory[page * 4096] = 1;
                    madvise(memory + page * 4096, 4096, MADV_PAGEOUT);
                }
                if (pread(map, entries + page, 8, (first + page) * 8) != 8) return perror("pread"), 1;
            }
        } else {
            map = open("/proc/self/pagemap", O_RDONLY);
            if (pread(map, entries, pages * 8, first * 8) != (ssize_t)(pages * 8)) return perror("pread"), 1;
        }
        for (unsigned long page = 0; page < pages; page++) {
            present += entries[page] >> 63;
            swap += entries[page] >> 62 & 1;
        }
    }
    printf("present %lu swap %lu none %lu\n", present, swap, pages - present - swap);
    return 0;
}
