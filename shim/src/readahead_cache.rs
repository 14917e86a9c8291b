//! State of the readahead for sequential pagemap reads. No I/O except closing the cached descriptor.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use nix::libc;

use crate::descriptor::inode_of;
use crate::file_extent::FileExtent;

/// Page states fetched ahead of a sequential reader.
#[derive(Debug)]
pub struct Readahead {
    /// The process whose pagemap is read.
    pub pid: i32,
    pub extent: FileExtent,
    /// Change count of the mapping table when the states were fetched.
    pub mapping_changes: u64,
    /// `CLOCK_MONOTONIC` time at which the states expire.
    pub expires: Duration,
    /// The file, used to check that a hole is still a hole.
    pub file: OwnedFd,
}

impl Readahead {
    /// Checks whether the descriptor still refers to the file: the program may have closed it.
    pub fn is_open(&self) -> bool {
        inode_of(self.file.as_raw_fd()) == Some(self.extent.inode)
    }
}

/// The position of the last pagemap reader and the states fetched ahead of it.
#[derive(Debug, Default)]
pub struct ReadaheadCache {
    /// Process and address at which the next read starts if it is sequential.
    pub next: (i32, u64),
    /// Number of sequential reads so far.
    pub sequential_reads: u32,
    pub readahead: Option<Readahead>,
}

impl ReadaheadCache {
    /// Drops the states in a forked child without freeing memory. Closes the descriptor only if `consistent`: no other thread of
    /// the parent was changing the cache.
    pub fn reset_after_fork(&mut self, consistent: bool) {
        if let Some(readahead) = self.readahead.take() {
            if consistent && readahead.is_open() {
                // SAFETY: the inode proves that the descriptor is the cache's, and its owner is forgotten below.
                unsafe { libc::close(readahead.file.as_raw_fd()) };
            }
            std::mem::forget(readahead);
        }
    }

    /// Drops the states. Closes the descriptor unless the program has closed it and may use its number for another file.
    pub fn clear(&mut self) {
        if let Some(readahead) = self.readahead.take()
            && !readahead.is_open()
        {
            std::mem::forget(readahead.file);
        }
    }
}
