//! The dirty page rate: the pages written between two checkpoints, divided by the time between them. QEMU calls the same
//! measurement `calc-dirty-rate`.
//!
//! The window is the caller's wait. It starts when the first checkpoint has returned and ends when the second one has, so a
//! write during the second checkpoint counts in the rate, and the time of that checkpoint counts in the window.

use std::time::Instant;

use fdmap_proto::DirtyRate;
use fdmap_proto::units::{Generation, PageSize, to_f64};

use super::error::TrackingError;
use super::tracker::Tracker;

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
    pub fn close(self, tracker: &Tracker, page_size: PageSize) -> Result<DirtyRate, TrackingError> {
        let generation = tracker.checkpoint(false, None)?.generation;
        let window = self.opened.elapsed();
        // Other clients may have closed generations within the window: count all of them.
        let counts = tracker.count(self.since);
        let coverage = tracker.coverage(&tracker.view(), self.since);
        let pages_per_second = counts.per_second(window);
        Ok(DirtyRate {
            window,
            observed_pages: counts.exact,
            conservative_pages: counts.conservative,
            pages_per_second,
            bytes_per_second: pages_per_second * to_f64(page_size.bytes()),
            coverage,
            generation,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::stamps::Counts;

    #[test]
    fn rate_is_all_pages_divided_by_the_window() {
        let rate = |exact, conservative, millis| {
            Counts { exact, conservative }.per_second(Duration::from_millis(millis))
        };
        for (exact, conservative, millis, expected) in
            [(0, 0, 1000, 0.0), (100, 0, 1000, 100.0), (60, 40, 500, 200.0), (3, 0, 2000, 1.5)]
        {
            assert!((rate(exact, conservative, millis) - expected).abs() < 1e-9);
        }
    }

    #[test]
    fn empty_window_has_rate_zero() {
        assert!(Counts { exact: 7, conservative: 0 }.per_second(Duration::ZERO).abs() < 1e-9);
    }
}
