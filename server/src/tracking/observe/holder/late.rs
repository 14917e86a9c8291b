//! Calls that were not answered in time, of all users. Each still runs, or will run when its address space is unlocked, also if
//! its result is not needed any more.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::lane::Lane;
use crate::probe::KernelAddress;

/// The address space of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpaceOwner {
    pub(crate) pid: u32,
    /// `None`: unknown.
    pub(crate) mm: Option<KernelAddress>,
}

impl SpaceOwner {
    /// True unless the address spaces are known to differ.
    fn may_be(self, other: Self) -> bool {
        match (self.mm, other.mm) {
            (Some(mm), Some(other)) => mm == other,
            _ => self.pid == other.pid,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct LateCalls(Mutex<Vec<LateCall>>);

#[derive(Debug)]
struct LateCall {
    user: u32,
    owner: SpaceOwner,
    lane: Arc<Lane>,
}

impl LateCalls {
    pub(super) fn add(&self, user: u32, owner: SpaceOwner, lane: &Arc<Lane>) {
        self.running().push(LateCall { user, owner, lane: Arc::clone(lane) });
    }

    /// The result of a call has arrived. Another call may use its lane.
    pub(super) fn remove(&self, lane: &Arc<Lane>) {
        self.running().retain(|call| !Arc::ptr_eq(&call.lane, lane));
    }

    pub(super) fn count_of(&self, user: u32) -> usize {
        self.running().iter().filter(|call| call.user == user).count()
    }

    /// True if a call on this address space may still run.
    pub(super) fn concerns(&self, owner: SpaceOwner) -> bool {
        self.running().iter().any(|call| call.owner.may_be(owner))
    }

    /// The calls without a result. A holder that has ended, with all its threads, has closed its lanes.
    fn running(&self) -> MutexGuard<'_, Vec<LateCall>> {
        // No code panics with the lock held.
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        calls.retain(|call| !call.lane.is_ready(Duration::ZERO));
        calls
    }
}
