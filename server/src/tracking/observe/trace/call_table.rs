//! The system calls that the programs examine, by number on x86-64.

use bytemuck::Zeroable as _;

use crate::bpf::records::{CALLS, Call, CallNumber};

/// 64-bit system calls: `asm/unistd_64.h`.
const NATIVE: [(usize, Call); 25] = [
    (1, Call::FDMAP_CALL_WRITE),
    (2, Call::FDMAP_CALL_OPEN),
    (8, Call::FDMAP_CALL_LSEEK),
    (9, Call::FDMAP_CALL_MMAP),
    (16, Call::FDMAP_CALL_IOCTL),
    (18, Call::FDMAP_CALL_PWRITE),
    (20, Call::FDMAP_CALL_WRITEV),
    (25, Call::FDMAP_CALL_MREMAP),
    (28, Call::FDMAP_CALL_MADVISE),
    (30, Call::FDMAP_CALL_SHMAT),
    (40, Call::FDMAP_CALL_SENDFILE),
    (76, Call::FDMAP_CALL_TRUNCATE),
    (77, Call::FDMAP_CALL_FTRUNCATE),
    (85, Call::FDMAP_CALL_OPENAT2), // creat, which always truncates
    (209, Call::FDMAP_CALL_IO_SUBMIT),
    (216, Call::FDMAP_CALL_REMAP_FILE_PAGES),
    (257, Call::FDMAP_CALL_OPENAT),
    (275, Call::FDMAP_CALL_SPLICE),
    (285, Call::FDMAP_CALL_FALLOCATE),
    (296, Call::FDMAP_CALL_PWRITEV),
    (304, Call::FDMAP_CALL_OPENAT), // open_by_handle_at, which has its flags in the same argument
    (326, Call::FDMAP_CALL_SPLICE), // copy_file_range, which has the same arguments
    (328, Call::FDMAP_CALL_PWRITEV2),
    (437, Call::FDMAP_CALL_OPENAT2),
    (440, Call::FDMAP_CALL_PROCESS_MADVISE),
];

/// x32 system calls with numbers of their own: `asm/unistd_x32.h`. The others have those of 64-bit calls. Their arguments are in the
/// same registers, also offsets, which have 64 bits.
const X32: [(usize, Call); 5] = [
    (514, Call::FDMAP_CALL_IOCTL),
    (516, Call::FDMAP_CALL_WRITEV),
    (535, Call::FDMAP_CALL_PWRITEV),
    (544, Call::FDMAP_CALL_IO_SUBMIT),
    (547, Call::FDMAP_CALL_PWRITEV2),
];

/// 32-bit system calls: `asm/unistd_32.h`. Their ranges are not determined, so the class of a writing call only selects
/// the argument that holds the descriptor.
const COMPAT: [(usize, Call); 31] = [
    (4, Call::FDMAP_CALL_WRITE),
    (5, Call::FDMAP_CALL_OPEN),
    (8, Call::FDMAP_CALL_OPENAT2), // creat
    (19, Call::FDMAP_CALL_LSEEK),
    (54, Call::FDMAP_CALL_IOCTL),
    (90, Call::FDMAP_CALL_OLD_MMAP),
    (92, Call::FDMAP_CALL_TRUNCATE),
    (93, Call::FDMAP_CALL_FTRUNCATE),
    (117, Call::FDMAP_CALL_IPC),
    (140, Call::FDMAP_CALL_LSEEK), // _llseek
    (146, Call::FDMAP_CALL_WRITEV),
    (163, Call::FDMAP_CALL_MREMAP),
    (181, Call::FDMAP_CALL_PWRITE),
    (187, Call::FDMAP_CALL_SENDFILE),
    (192, Call::FDMAP_CALL_MMAP),     // mmap2
    (193, Call::FDMAP_CALL_TRUNCATE), // truncate64
    (194, Call::FDMAP_CALL_FTRUNCATE),
    (219, Call::FDMAP_CALL_MADVISE),
    (239, Call::FDMAP_CALL_SENDFILE), // sendfile64
    (248, Call::FDMAP_CALL_IO_SUBMIT),
    (257, Call::FDMAP_CALL_REMAP_FILE_PAGES),
    (295, Call::FDMAP_CALL_OPENAT),
    (313, Call::FDMAP_CALL_SPLICE),
    (324, Call::FDMAP_CALL_FALLOCATE),
    (334, Call::FDMAP_CALL_PWRITEV),
    (342, Call::FDMAP_CALL_OPENAT), // open_by_handle_at
    (377, Call::FDMAP_CALL_SPLICE), // copy_file_range
    (379, Call::FDMAP_CALL_PWRITEV2),
    (397, Call::FDMAP_CALL_SHMAT),
    (437, Call::FDMAP_CALL_OPENAT2),
    (440, Call::FDMAP_CALL_PROCESS_MADVISE),
];

/// The system call table of the programs.
#[must_use]
pub(super) fn call_table() -> [CallNumber; CALLS] {
    let mut table = [CallNumber::zeroed(); CALLS];
    for (number, call) in NATIVE.into_iter().chain(X32) {
        table[number].native = call;
    }
    for (number, call) in COMPAT {
        table[number].compat = call;
    }
    table
}
