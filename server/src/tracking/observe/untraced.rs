//! Replaces `trace` in a service that is built without BPF: no writes are traced.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;

use super::observation::Thread;
use super::remaps::SpaceCalls;
use super::traced_writes::{HostCounters, TracedWrites};
use crate::probe::KernelAddress;

#[derive(Debug, thiserror::Error)]
#[error("fdmapd was built without the xarray feature")]
pub struct TraceError;

#[derive(Debug)]
pub enum WriteTracer {}

#[derive(Clone, Copy, Debug)]
pub enum FollowedId {}

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

    pub(crate) const fn other_writers_among(&self, _: &BTreeSet<Thread>, _: u64) -> BTreeSet<Thread> {
        match *self {}
    }

    pub(crate) const fn find_earlier_calls(&self, _: FollowedId) {
        match *self {}
    }

    pub(crate) const fn other_writer_is_calling(&self) -> bool {
        match *self {}
    }

    pub(crate) const fn requests_were_skipped(&self, _: FollowedId) -> bool {
        match *self {}
    }

    pub(crate) const fn is_permanently_attached(&self, _: FollowedId) -> bool {
        match *self {}
    }

    pub(crate) const fn forget_other_writers(&self) {
        match *self {}
    }

    pub(crate) const fn remaps(&self) -> (u64, u64) {
        match *self {}
    }

    pub(crate) fn remaps_of(&self, _: impl Iterator<Item = KernelAddress>) -> Option<SpaceCalls> {
        match *self {}
    }

    pub(crate) const fn forgotten_remaps(&self) -> u64 {
        match *self {}
    }

    pub(crate) const fn forget_remaps(&self) {
        match *self {}
    }

    pub const fn observes_io_uring(&self) -> bool {
        match *self {}
    }

    pub const fn host_counters(&self) -> HostCounters {
        match *self {}
    }
}
