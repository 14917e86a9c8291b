//! Bounds how often an event that other processes cause is logged.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The shortest time between two lines of one kind.
const INTERVAL: Duration = Duration::from_secs(1);

/// One kind of line.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    logged: Option<Instant>,
    /// Events since then.
    omitted: u64,
}

impl LogLimit {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(State { logged: None, omitted: 0 }))
    }

    /// Counts an event. Returns how many were omitted before it if it is to be logged.
    pub(crate) fn permit(&self) -> Option<u64> {
        self.permit_at(Instant::now())
    }

    fn permit_at(&self, now: Instant) -> Option<u64> {
        // No code panics with the lock held.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.logged.is_some_and(|logged| now.saturating_duration_since(logged) < INTERVAL) {
            state.omitted += 1;
            return None;
        }
        state.logged = Some(now);
        Some(std::mem::take(&mut state.omitted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_interval_counts_the_omitted_ones() {
        let (limit, start) = (LogLimit::new(), Instant::now());
        let at = |milliseconds| limit.permit_at(start + Duration::from_millis(milliseconds));
        assert_eq!(at(0), Some(0));
        assert_eq!([at(0), at(1), at(999)], [None; 3]);
        assert_eq!(at(1000), Some(3));
        assert_eq!(at(5000), Some(0));
    }
}
