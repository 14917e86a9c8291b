//! How long one operation waits, in total, for processes that hold their mmap_lock.
//!
//! An operation on a file asks all address spaces that are tracked, of any number of users. Each wait uses up what is left.

use std::cell::Cell;
use std::time::Duration;

/// For all waits of one operation together.
const PER_OPERATION: Duration = Duration::from_millis(500);
/// What each wait gets in any case.
const LEAST: Duration = Duration::from_millis(20);

thread_local! {
    /// An operation runs on one thread.
    static LEFT: Cell<Duration> = const { Cell::new(PER_OPERATION) };
}

/// An operation begins on this thread.
pub(crate) fn reset() {
    LEFT.set(PER_OPERATION);
}

/// One wait.
pub(super) struct Patience {
    left: Duration,
    /// All of the wait so far.
    waited: Duration,
}

impl Patience {
    pub(super) fn begin() -> Self {
        Self { left: LEFT.get().max(LEAST), waited: Duration::ZERO }
    }

    /// Has waited for another `time`. False if that is enough.
    pub(super) fn spend(&mut self, time: Duration) -> bool {
        self.waited += time;
        self.waited < self.left
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        LEFT.set(LEFT.get().saturating_sub(self.waited));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_of_an_operation_share_its_patience() {
        reset();
        let waits = |time| {
            let mut patience = Patience::begin();
            (1..).find(|_| !patience.spend(time)).unwrap_or(0)
        };
        let unit = Duration::from_millis(10);
        assert_eq!(waits(unit), 50);
        assert_eq!((waits(unit), waits(unit)), (2, 2), "nothing but the least is left");
        reset();
        drop(Patience::begin());
        assert_eq!(waits(Duration::from_millis(400)), 2);
    }
}
