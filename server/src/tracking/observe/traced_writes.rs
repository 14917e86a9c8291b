//! What the write tracer reports.

use std::collections::BTreeSet;

use super::byte_range::ByteRange;
use super::observation::Thread;

/// The writes to a file since the last drain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TracedWrites {
    /// Written by calls that ended since the last drain, in ascending order, without overlap.
    pub(crate) ended: Vec<ByteRange>,
    /// `ended` contains bytes that no call wrote: there were too many ranges.
    pub(crate) merged: bool,
    /// May be written by calls in flight, in ascending order, without overlap.
    pub(crate) in_flight: Vec<ByteRange>,
    /// A write could not be recorded. Its range is unknown.
    pub(crate) lost: bool,
    /// A process mapped the file, or tried to, or is in a call that maps it: mmap, mremap, remap_file_pages or shmat.
    pub(crate) mapped: bool,
    /// The same for the calls that no seal refuses: mremap and remap_file_pages.
    pub(crate) remapped: bool,
    /// Threads whose calls on the file ended since the last drain, or are in flight, whether or not they changed content.
    pub(crate) threads: BTreeSet<Thread>,
    /// io_uring requests that may write to the file are in flight, or ended since the last drain.
    pub(crate) requests: bool,
    /// A call attached the file to a device, with or without success.
    pub(crate) attached: bool,
    /// The file was attached to what may write to it at any time from then on: iommufd or FUSE passthrough. True also if it is not
    /// known which file was.
    pub(crate) permanently_attached: bool,
}

/// Counters of calls that do not name their file, for the whole host, while any file is followed. Each call counts when
/// it ends, most also when they begin: if a counter is unchanged, no such call ended in between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostCounters {
    /// Calls and requests that may have written to any followed file.
    pub(crate) unmatched: u64,
    /// Calls and requests that truncate or empty a file by its path.
    pub(crate) paths: u64,
    /// Calls and requests that write to a file of a stacked file system, such as overlayfs.
    pub(crate) stacked: u64,
    /// Calls that attach files to a device which could not be determined.
    pub(crate) attached: u64,
    /// Calls of mmap that map a file of a stacked file system, and not privately.
    pub(crate) stacked_mappings: u64,
    /// Those of `stacked` that raise no event on the file of the lower file system.
    pub(crate) stacked_silent: u64,
}
