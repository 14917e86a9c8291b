//! Replaces `space_events` in a service that is built without BPF: no events of address spaces are counted.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fdmap_sys::address::AddressRange;

use super::guarded_ranges::GuardedRanges;
use super::space_counts::SpaceCounts;

#[derive(Debug, thiserror::Error)]
#[error("fdmapd was built without the xarray feature")]
pub struct SpaceEventsError;

#[derive(Debug)]
pub enum SpaceTracer {}

#[derive(Debug)]
pub enum SpaceSubscription {}

impl SpaceTracer {
    /// # Errors
    /// Always.
    pub const fn start() -> Result<Arc<Self>, SpaceEventsError> {
        Err(SpaceEventsError)
    }

    pub fn follow(self: &Arc<Self>, _: BorrowedFd<'_>) -> Result<SpaceSubscription, SpaceEventsError> {
        match **self {}
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
    pub const fn counts(&self) -> SpaceCounts {
        match *self {}
    }
}
