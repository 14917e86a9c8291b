#!/usr/bin/env python3
"""Use a file as a template of private memory: fdmap open FILE -- clone.py [PAGES]

The file is descriptor 3, open for reading. Pages that this program does not write to are those of the file: all
processes that run this program share them. A page that it writes to becomes its own copy, and the file stays as it is.

Writes to the first PAGES pages, prints how much memory is shared, and exits when its standard input ends."""
import mmap
import os
import sys

DESCRIPTOR = 3
PAGE = 4096


def smaps(inode):
    """The sizes in /proc/self/smaps of the mapping of a file, in KiB."""
    sizes = {}
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0]:  # ADDRESSES RIGHTS OFFSET DEVICE INODE PATH
                is_wanted = words[4] == str(inode)
            elif is_wanted and words[-1] == "kB":
                sizes[words[0].rstrip(":")] = sizes.get(words[0].rstrip(":"), 0) + int(words[1])
    return sizes


def main():
    status = os.fstat(DESCRIPTOR)
    memory = mmap.mmap(DESCRIPTOR, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for start in range(0, status.st_size, PAGE):
        memory[start]  # a read maps the page of the file
    for page in range(int(sys.argv[1]) if len(sys.argv) > 1 else 0):
        memory[page * PAGE] = (memory[page * PAGE] + 1) % 256
    print("ready", flush=True)
    for _ in sys.stdin:
        sizes = smaps(status.st_ino)
        names = ("Rss", "Pss", "Shared_Clean", "Shared_Dirty", "Private_Clean", "Private_Dirty")
        print(*(f"{name}={sizes.get(name, 0)}" for name in names), f"first={memory[0]}", flush=True)


if __name__ == "__main__":
    main()
