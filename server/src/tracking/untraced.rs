//! In place of `trace`, in a service that is built without BPF: nothing is traced.

use std::os::fd::BorrowedFd;

/// System calls cannot be traced.
#[derive(Debug, thiserror::Error)]
#[error("this service is built without BPF")]
pub struct TraceError;

/// There is none.
#[derive(Debug)]
pub enum WriteTrace {}

/// There is none either.
#[derive(Clone, Copy, Debug)]
pub enum Followed {}

/// Bytes of a file.
#[derive(Clone, Copy, Debug)]
pub struct ByteRange {
    /// The first one.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

/// What was written to a file.
#[derive(Clone, Debug)]
pub struct Traced {
    /// By calls that have ended.
    pub ended: Vec<ByteRange>,
    /// By calls under way.
    pub in_flight: Vec<ByteRange>,
    /// Something is not known.
    pub lost: bool,
    /// The file was mapped.
    pub mapped: bool,
}

/// Counts of what may write without a range being told.
#[derive(Clone, Copy, Debug, Default)]
pub struct OtherWriters {
    /// io_uring requests.
    pub io_uring: Option<u64>,
    /// Calls of `io_submit` that may write to a followed file.
    pub aio: u64,
    /// Calls of `truncate`, by path.
    pub paths: u64,
    /// Calls of `madvise(MADV_REMOVE)`.
    pub removals: u64,
}

impl WriteTrace {
    /// # Errors
    /// Always.
    pub const fn start() -> Result<Self, TraceError> {
        Err(TraceError)
    }

    pub const fn follow(&self, _: BorrowedFd<'_>) -> Result<Followed, TraceError> {
        match *self {}
    }

    pub const fn unfollow(&self, _: Followed) {
        match *self {}
    }

    pub const fn drain(&self, _: Followed) -> Traced {
        match *self {}
    }

    pub const fn other_writers(&self) -> OtherWriters {
        match *self {}
    }
}
