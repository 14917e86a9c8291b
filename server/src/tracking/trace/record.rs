//! What `bpf/file_writes.bpf.c` shares with this module: `bpf/write_record.h`, field by field.

use bytemuck::{Pod, Zeroable};

/// A length that reaches to the end of all offsets: `FDMAP_TO_THE_END`.
pub const TO_THE_END: u64 = u64::MAX;

/// Numbers of system calls that the table has room for.
pub const CALLS: usize = 512;

/// Of the whole host: `struct fdmap_write_control`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Control {
    /// Files that are followed; written here.
    pub followed: u64,
    /// Entries made in `in_flight`.
    pub begun: u64,
    /// Entries removed from it.
    pub ended: u64,
    /// io_uring requests that may write to a file.
    pub io_uring: u64,
    /// Calls of `io_submit` that may write to a followed file.
    pub aio: u64,
    /// Calls of `truncate`.
    pub paths: u64,
    /// Calls of `madvise(MADV_REMOVE)`.
    pub removals: u64,
}

/// One followed file: `struct fdmap_followed_file`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct FollowedFile {
    /// Written here.
    pub id: u64,
    /// Entries made in `in_flight`.
    pub begun: u64,
    /// Entries removed from it, each after its record was made.
    pub ended: u64,
    /// Records made.
    pub records: u64,
    /// Times that something could not be recorded.
    pub lost: u64,
    /// Calls that may set the position of a descriptor back.
    pub moves_begun: u64,
    /// Of these, those that have ended.
    pub moves_ended: u64,
    /// Calls of `mmap`, counted when they begin and when they end.
    pub mapped: u64,
}

/// A call that has begun: `struct fdmap_write_in_flight`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct InFlight {
    /// The file's.
    pub id: u64,
    /// What it may write to, as far as that could be said when it began; bytes.
    pub offset: u64,
    /// Bytes, or [`TO_THE_END`].
    pub length: u64,
    /// For the program alone.
    pub start: u64,
    /// For the program alone.
    pub file: u64,
    /// For the program alone.
    pub pointer: u64,
    /// For the program alone.
    pub moves: u64,
    /// For the program alone.
    pub descriptor: u32,
    /// How its range is found; [`NOWHERE`] if it writes nothing.
    pub place: u16,
    /// For the program alone.
    pub moving: u16,
}

/// `FDMAP_PLACE_NOWHERE`
pub const NOWHERE: u16 = 4;

/// A write that has ended: `struct fdmap_write_record`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WriteRecord {
    /// The file's.
    pub id: u64,
    /// Bytes.
    pub offset: u64,
    /// Bytes, or [`TO_THE_END`].
    pub length: u64,
}

/// The file is followed already, or is not.
pub const STATUS_TWICE: u32 = 4;
/// As many files as can be are followed.
pub const STATUS_FULL: u32 = 5;

const _: () = assert!(size_of::<Control>() == 56);
const _: () = assert!(size_of::<FollowedFile>() == 64);
const _: () = assert!(size_of::<InFlight>() == 64);
const _: () = assert!(size_of::<WriteRecord>() == 24);

/// What a system call does: `enum fdmap_call`, number by number.
mod call {
    pub(super) const WRITE: u8 = 1;
    pub(super) const WRITEV: u8 = 2;
    pub(super) const PWRITE: u8 = 3;
    pub(super) const PWRITEV: u8 = 4;
    pub(super) const PWRITEV2: u8 = 5;
    pub(super) const SENDFILE: u8 = 6;
    pub(super) const SPLICE: u8 = 7;
    pub(super) const FALLOCATE: u8 = 8;
    pub(super) const FTRUNCATE: u8 = 9;
    pub(super) const LSEEK: u8 = 10;
    pub(super) const OPEN: u8 = 11;
    pub(super) const OPENAT: u8 = 12;
    pub(super) const OPENAT2: u8 = 13;
    pub(super) const MMAP: u8 = 14;
    pub(super) const OLD_MMAP: u8 = 15;
    pub(super) const IO_SUBMIT: u8 = 16;
    pub(super) const TRUNCATE: u8 = 17;
    pub(super) const MADVISE: u8 = 18;
}

/// Numbers of 64-bit system calls: `asm/unistd_64.h`.
const NATIVE: [(usize, u8); 20] = [
    (1, call::WRITE),
    (2, call::OPEN),
    (8, call::LSEEK),
    (9, call::MMAP),
    (18, call::PWRITE),
    (20, call::WRITEV),
    (28, call::MADVISE),
    (40, call::SENDFILE),
    (76, call::TRUNCATE),
    (77, call::FTRUNCATE),
    (85, call::OPENAT2), // creat, which always empties the file
    (209, call::IO_SUBMIT),
    (257, call::OPENAT),
    (275, call::SPLICE),
    (285, call::FALLOCATE),
    (296, call::PWRITEV),
    (304, call::OPENAT), // open_by_handle_at, with the flags in the same place
    (326, call::SPLICE), // copy_file_range, with the same arguments
    (328, call::PWRITEV2),
    (437, call::OPENAT2),
];

/// Numbers of 32-bit system calls: `asm/unistd_32.h`. What they write is not told from their arguments: for each that writes
/// it matters only which of them is the descriptor.
const COMPAT: [(usize, u8); 25] = [
    (4, call::WRITE),
    (5, call::OPEN),
    (8, call::OPENAT2), // creat
    (19, call::LSEEK),
    (90, call::OLD_MMAP),
    (92, call::TRUNCATE),
    (93, call::FTRUNCATE),
    (140, call::LSEEK), // _llseek
    (146, call::WRITEV),
    (181, call::PWRITE),
    (187, call::SENDFILE),
    (192, call::MMAP),     // mmap2
    (193, call::TRUNCATE), // truncate64
    (194, call::FTRUNCATE),
    (219, call::MADVISE),
    (239, call::SENDFILE), // sendfile64
    (248, call::IO_SUBMIT),
    (295, call::OPENAT),
    (313, call::SPLICE),
    (324, call::FALLOCATE),
    (334, call::PWRITEV),
    (342, call::OPENAT), // open_by_handle_at
    (377, call::SPLICE), // copy_file_range
    (379, call::PWRITEV2),
    (437, call::OPENAT2),
];

/// The table of system calls: `struct fdmap_call_number` for each number.
#[must_use]
pub fn table() -> [[u8; 2]; CALLS] {
    let mut table = [[0; 2]; CALLS];
    for (column, calls) in [(0, &NATIVE[..]), (1, &COMPAT[..])] {
        for (number, call) in calls {
            table[*number][column] = *call;
        }
    }
    table
}
