"""counts.c in Python: counts.py PAGES"""
import mmap, os, struct, sys, ctypes

pages = int(sys.argv[1])
fd = os.memfd_create("counted", os.MFD_CLOEXEC)
os.ftruncate(fd, pages * 4096)
memory = mmap.mmap(fd, pages * 4096)
for page in range(pages):
    if page % 4:
        memory[page * 4096] = 1
first = ctypes.addressof(ctypes.c_char.from_buffer(memory)) // 4096
counts = {"present": 0, "swap": 0, "none": 0}
with open("/proc/self/pagemap", "rb") as pagemap:
    for page in range(pages):
        pagemap.seek((first + page) * 8)
        (entry,) = struct.unpack("Q", pagemap.read(8))
        counts["present" if entry >> 63 else "swap" if entry >> 62 & 1 else "none"] += 1
print(*(f"{name} {count}" for name, count in counts.items()))
