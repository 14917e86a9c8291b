//! The dirty page rate: the pages written between two checkpoints, divided by the time between them. QEMU calls the same
//! measurement `calc-dirty-rate`.
//!
//! The window is the caller's wait. It starts when the first checkpoint has returned and ends when the second one has, so a
//! write during the second checkpoint counts in the rate, and the time of that checkpoint counts in the window.

use std::time::{Duration, Instant};

use fdmap_proto::tracking::Coverage;
use fdmap_proto::units::{Generation, to_f64};

use super::error::TrackingError;
use super::stamps::Counts;
use super::tracker::Tracker;

/// A dirty page rate, with the measurement that it comes from.
#[derive(Clone, Debug)]
pub struct DirtyRate {
    /// Time between the two checkpoints.
    pub window: Duration,
    /// Pages written in the window. Another client's checkpoints within the window change nothing here.
    pub counts: Counts,
    /// Coverage of the window.
    pub coverage: Coverage,
    /// The generation that the second checkpoint closed.
    pub generation: Generation,
}

impl DirtyRate {
    /// Observed and conservative pages, divided by the window.
    #[must_use]
    pub fn pages_per_second(&self) -> f64 {
        pages_per_second(self.counts, self.window)
    }
}

/// Observed and conservative pages, divided by `window`. 0 for a window without a length.
#[must_use]
pub fn pages_per_second(counts: Counts, window: Duration) -> f64 {
    if window.is_zero() {
        return 0.0;
    }
    to_f64(counts.exact + counts.conservative) / window.as_secs_f64()
}

/// A measurement whose window is open.
#[derive(Clone, Copy, Debug)]
pub struct DirtyRateWindow {
    since: Generation,
    opened: Instant,
}

impl DirtyRateWindow {
    /// Takes the first checkpoint and opens the window.
    ///
    /// # Errors
    /// [`TrackingError`] of the checkpoint.
    pub fn open(tracker: &Tracker) -> Result<Self, TrackingError> {
        let since = tracker.checkpoint(false, None)?.generation;
        Ok(Self { since, opened: Instant::now() })
    }

    /// Takes the second checkpoint and closes the window.
    ///
    /// # Errors
    /// [`TrackingError`] of the checkpoint.
    pub fn close(self, tracker: &Tracker) -> Result<DirtyRate, TrackingError> {
        let generation = tracker.checkpoint(false, None)?.generation;
        let window = self.opened.elapsed();
        // Other clients may have closed generations within the window: count all of them.
        let counts = tracker.count(self.since);
        let coverage = tracker.coverage(&tracker.view(), self.since);
        Ok(DirtyRate { window, counts, coverage, generation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_all_pages_divided_by_the_window() {
        let rate = |exact, conservative, millis| {
            pages_per_second(Counts { exact, conservative }, Duration::from_millis(millis))
        };
        for (exact, conservative, millis, expected) in
            [(0, 0, 1000, 0.0), (100, 0, 1000, 100.0), (60, 40, 500, 200.0), (3, 0, 2000, 1.5)]
        {
            assert!((rate(exact, conservative, millis) - expected).abs() < 1e-9);
        }
    }

    #[test]
    fn empty_window_has_rate_zero() {
        assert!(pages_per_second(Counts { exact: 7, conservative: 0 }, Duration::ZERO).abs() < 1e-9);
    }
}
