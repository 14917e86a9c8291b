//! Single operations on one file, by a process that maps it and has descriptors of it. See `tests/tests/operations`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::service_file::FileOf;

/// Commands for the file of the operations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperationCommand {
    /// Creates a memfd in place of the previous file; replies with its descriptor. The size of hugetlb pages is in bytes, 0 for
    /// shmem. `unit`: see [`FileOperation`].
    Create { name: String, bytes: u64, hugetlb: u64, unit: u64 },
    /// Opens a file of another process by path, in place of the previous file.
    Open { path: PathBuf, unit: u64 },
    /// Unmaps all mappings, and closes the file.
    Close,
    /// Maps the file; replies with the mapping.
    Map {
        /// Map and track this file through the client library, instead of calling `mmap` alone.
        tracked: Option<FileOf>,
        /// `madvise(MADV_HUGEPAGE)`
        huge_pages: bool,
    },
    /// Stores to the page at each multiple of `step` bytes of a mapping.
    Fill { mapping: usize, step: u64, content: u64 },
    /// Replies with a page of a mapping: its number in the file, its address, and its size, which is 0 if there is no such page.
    Address { mapping: usize, page: u64 },
    /// Performs an operation, whose content is a word that fills each written page. Replies with the pages whose content may have
    /// changed.
    Perform { operation: FileOperation, content: u64 },
}

/// One operation. Pages are taken modulo the current size. An operation whose page does not exist does nothing. Operations that
/// allocate, free or unmap pages concern whole units of the file: so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileOperation {
    Mapping { call: MappingCall, mapping: usize, page: u64 },
    Descriptor { call: DescriptorCall, by: By, page: u64, pages: u64 },
}

/// An operation on one page of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MappingCall {
    Store,
    /// A forked child stores and exits.
    StoreInChild,
    /// A store through a duplicate: `mremap` with an old length of 0.
    StoreToDuplicate,
    /// `pread` of another file into the page.
    Read,
    /// `madvise(MADV_REMOVE)`
    Remove,
    /// `madvise(MADV_DONTNEED)`: frees the page tables.
    Zap,
    /// `madvise(MADV_PAGEOUT)` from this page to the end of the mapping.
    PageOut,
    /// `munmap` of the page, without the client library.
    Tear,
    /// Unmaps the mapping, through the client library if that maps it.
    Unmap,
}

/// An operation on some pages by a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DescriptorCall {
    Pwrite,
    Writev,
    Splice,
    /// `copy_file_range`
    Copy,
    Sendfile,
    AioWrite,
    UringWrite,
    /// `fallocate(FALLOC_FL_PUNCH_HOLE)`
    Punch,
    /// `FS_IOC_UNRESVSP64`
    PunchByIoctl,
    /// `fallocate(FALLOC_FL_KEEP_SIZE)`
    Allocate,
    /// `ftruncate` to a number of pages.
    Ftruncate,
    /// `truncate` to a number of pages.
    TruncatePath,
    /// Calls on another file, which do not write to this one.
    OtherFile,
}

/// The descriptor that a call uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum By {
    /// Opened by path, as the service passes it.
    Path,
    /// The descriptor of `memfd_create` itself, whose writes raise no event. By path, if another process created the file.
    Origin,
}
