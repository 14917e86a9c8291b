//! Replaces `space_events` in a service that is built without BPF: no events of address spaces are counted.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fdmap_sys::address::AddressRange;

use super::guarded_ranges::GuardedRanges;
use super::own_calls::CallCounter;
use super::space_counts::SpaceCounts;
use super::trace::TraceError;

#[derive(Debug)]
pub enum SpaceTracer {}

#[derive(Debug)]
pub enum SpaceSubscription {}

impl SpaceTracer {
    /// # Errors
    /// Always.
    pub const fn start() -> Result<Arc<Self>, TraceError> {
        Err(TraceError)
    }

    pub fn follow(self: &Arc<Self>, _: BorrowedFd<'_>) -> Result<SpaceSubscription, TraceError> {
        match **self {}
    }
}

impl CallCounter for SpaceTracer {
    fn add_holder(&self) -> BorrowedFd<'_> {
        match *self {}
    }

    fn remove_holder(&self, _: u64) {
        match *self {}
    }
}

impl SpaceSubscription {
    pub const fn unprotect_again(&self, _: AddressRange) {
        match *self {}
    }

    pub fn serve_guards(&mut self, _: GuardedRanges) {
        match *self {}
    }

    #[must_use]
    pub const fn complete_counts(&self) -> Option<SpaceCounts> {
        match *self {}
    }

    #[must_use]
    pub const fn counts(&self) -> SpaceCounts {
        match *self {}
    }
}
