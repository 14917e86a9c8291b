//! Replaces `trace` in a service that is built without BPF: no writes are traced.

use std::os::fd::BorrowedFd;

#[derive(Debug, thiserror::Error)]
#[error("fdmapd was built without the xarray feature")]
pub struct TraceError;

#[derive(Debug)]
pub enum WriteTracer {}

#[derive(Clone, Copy, Debug)]
pub enum FollowedId {}

#[derive(Clone, Copy, Debug)]
pub struct ByteRange {
    pub offset: u64,
    pub length: u64,
}

#[derive(Clone, Debug)]
pub struct TracedWrites {
    pub ended: Vec<ByteRange>,
    pub in_flight: Vec<ByteRange>,
    pub lost: bool,
    pub mapped: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct RangelessWrites {
    pub io_uring: Option<u64>,
    pub aio: u64,
    pub paths: u64,
    pub removals: u64,
}

impl WriteTracer {
    /// # Errors
    /// Always.
    pub const fn start() -> Result<Self, TraceError> {
        Err(TraceError)
    }

    pub const fn follow(&self, _: BorrowedFd<'_>) -> Result<FollowedId, TraceError> {
        match *self {}
    }

    pub const fn unfollow(&self, _: FollowedId) {
        match *self {}
    }

    pub const fn drain(&self, _: FollowedId) -> TracedWrites {
        match *self {}
    }

    pub const fn rangeless_writes(&self) -> RangelessWrites {
        match *self {}
    }
}
