//! Whether an ephemeral file ends. Pure.

use std::time::Instant;

/// What is known about the use of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    state: State,
    /// A descriptor was sent since the current sweep began, so the sweep may have missed its user.
    sent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No process was found to use it since the service has it.
    New {
        until: Instant,
    },
    Used,
    /// The last sweep found no user.
    Unused,
}

impl Usage {
    /// Of a file that no process has open. It does not end before `until`, unless a process opens it and closes it.
    pub(super) const fn new_until(until: Instant) -> Self {
        Self { state: State::New { until }, sent: false }
    }

    pub(super) const fn used() -> Self {
        Self { state: State::Used, sent: false }
    }

    pub(super) const fn note_sent(&mut self) {
        *self = Self { state: State::Used, sent: true };
    }

    pub(super) const fn begin_sweep(&mut self) {
        self.sent = false;
    }

    /// Records what a sweep found. True if the file ends: two consecutive sweeps found no user. One sweep is not enough: `/proc` does not
    /// show a descriptor that one process sends to another, and a program may be about to open the file again.
    pub(super) fn ends(&mut self, used: bool, now: Instant) -> bool {
        if used || self.sent {
            self.state = State::Used;
            return false;
        }
        match self.state {
            State::New { until } => now >= until,
            State::Used => {
                self.state = State::Unused;
                false
            }
            State::Unused => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn file_ends_after_two_sweeps_without_a_user() {
        let now = Instant::now();
        let mut usage = Usage::used();
        let found = [true, false, true, false, false].map(|used| usage.ends(used, now));
        assert_eq!(found, [false, false, false, false, true], "the second sweep without a user in a row");
    }

    #[test]
    fn new_file_ends_only_after_its_time() {
        let start = Instant::now();
        let until = start + Duration::from_secs(30);
        let mut usage = Usage::new_until(until);
        assert!(!usage.ends(false, start) && !usage.ends(false, start + Duration::from_secs(29)));
        assert!(usage.ends(false, until));
        let mut opened = Usage::new_until(until);
        assert!(!opened.ends(true, start) && !opened.ends(false, start));
        assert!(opened.ends(false, start), "its user has closed it");
    }

    #[test]
    fn file_that_was_sent_during_a_sweep_is_used() {
        let now = Instant::now();
        for mut usage in
            [Usage::used(), Usage::new_until(now), Usage::new_until(now + Duration::from_secs(30))]
        {
            usage.begin_sweep();
            usage.note_sent();
            assert!(!usage.ends(false, now), "its user may open it after the search");
            usage.begin_sweep();
            assert!(!usage.ends(false, now));
            usage.begin_sweep();
            assert!(usage.ends(false, now));
        }
    }
}
