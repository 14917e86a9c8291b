//! Searches of all tasks for calls in progress that the programs do not count: calls that began before their file or address
//! space was followed, and calls for which a map had no room.

use std::io::Read as _;
use std::time::{Duration, Instant};

use fdmap_sys::pidfd::is_in_initial_pid_namespace;
use libbpf_rs::{Iter, Link, Object};

use crate::bpf::{TraceError, attach_one};

/// The shortest time between two searches for the same calls.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The program `find_calls` of an object. It counts the tasks that it finds in such calls.
#[derive(Debug)]
pub(super) struct TaskSearch(Link);

impl TaskSearch {
    pub(super) fn new(object: &Object) -> Result<Self, TraceError> {
        attach_one(object, "find_calls").map(Self)
    }

    /// Runs the program. Returns true if it examined every task of the host; outside of the initial pid namespace it cannot.
    pub(super) fn run(&self) -> bool {
        if !is_in_initial_pid_namespace() {
            return false;
        }
        let run = || Iter::new(&self.0)?.read_to_end(&mut Vec::new()).map_err(libbpf_rs::Error::from);
        let done = run();
        if let Err(error) = &done {
            let error = fdmap_proto::error_chain(error);
            tracing::warn!(error, "search for system calls in progress failed");
        }
        done.is_ok()
    }
}

/// What searches have shown about the calls on one file or address space. `T`: how many calls had no room so far.
#[derive(Debug)]
pub(super) struct Uncounted<T> {
    /// The calls without room when no call was in progress that is not counted.
    excluded: Option<T>,
    /// When a search found a call in progress.
    found: Option<Instant>,
}

impl<T> Default for Uncounted<T> {
    fn default() -> Self {
        Self { excluded: None, found: None }
    }
}

impl<T: PartialEq> Uncounted<T> {
    /// True if every call that is in progress is counted.
    pub(super) fn is_excluded(&self, uncounted: &T) -> bool {
        self.excluded.as_ref() == Some(uncounted)
    }

    /// True if a search is to be made.
    pub(super) fn is_due(&self, uncounted: &T, now: Instant) -> bool {
        let waits = self.found.is_some_and(|found| now.duration_since(found) < RETRY_INTERVAL);
        !self.is_excluded(uncounted) && !waits
    }

    /// A search was made. `uncounted`: before it; `found`: a call is in progress, or may be.
    pub(super) fn note(&mut self, uncounted: T, found: bool, now: Instant) {
        if found {
            self.found = Some(now);
        } else {
            self.excluded = Some(uncounted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_is_repeated_until_it_finds_no_call_and_after_a_call_without_room() {
        let (now, mut calls) = (Instant::now(), Uncounted::default());
        assert!(calls.is_due(&0, now) && !calls.is_excluded(&0));
        calls.note(0, true, now);
        assert!(!calls.is_excluded(&0));
        assert!(!calls.is_due(&0, now + RETRY_INTERVAL / 2) && calls.is_due(&0, now + RETRY_INTERVAL));
        calls.note(0, false, now);
        assert!(calls.is_excluded(&0) && !calls.is_due(&0, now + RETRY_INTERVAL));
        // A call had no room after the search began.
        assert!(!calls.is_excluded(&1));
        assert!(calls.is_due(&1, now + RETRY_INTERVAL));
        calls.note(1, false, now);
        assert!(calls.is_excluded(&1));
    }
}
