//! Progress and cancellation of a dump or a restore.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_proto::units::to_f64;
use serde::Serialize;

use super::cancellation::Cancellation;
use super::error::ImageError;

/// What a dump or a restore does just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::Display, strum::FromRepr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
#[repr(u8)]
pub enum Phase {
    /// Checkpoints, changes and page states; or the image is opened, and files are created.
    Preparing,
    /// Content of pages.
    Copying,
    /// The objects are completed and made durable; or seals are added.
    Completing,
}

/// State of a dump or a restore that other threads read, and its cancellation.
#[derive(Debug, Default)]
pub struct Control {
    cancellation: Cancellation,
    phase: AtomicU8,
    round: AtomicU64,
    total: AtomicU64,
    done: AtomicU64,
    bytes: AtomicU64,
    memory: AtomicU64,
    swap: AtomicU64,
    zero: AtomicU64,
    parent: AtomicU64,
    times: Mutex<Times>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Times {
    /// `None`: no round has begun.
    round_begun: Option<Instant>,
    expected_downtime: Option<Duration>,
}

/// Pages by source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PageSources {
    /// Pages that were read from memory.
    pub memory_pages: u64,
    /// Swapped pages, however they were read.
    pub swap_pages: u64,
    /// Those of memory and of swap that are zero.
    pub zero_pages: u64,
    /// Pages in the parent image.
    pub parent_pages: u64,
}

/// What has been done so far in a round.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Progress {
    pub phase: Phase,
    /// Number of the round of a dump, from 1.
    pub round: u64,
    /// Pages of the round, those in the parent included.
    pub total_pages: u64,
    /// Those of them that are done.
    pub done_pages: u64,
    /// Bytes that were stored, or restored.
    pub stored_bytes: u64,
    /// Of a dump, and of the source of a migration: where the pages come from.
    #[serde(flatten)]
    pub sources: PageSources,
    /// Time since the round began.
    #[serde(skip)]
    pub elapsed: Duration,
    /// Of a migration: the downtime if the writers had been paused when the round began, by the rate of the rounds before. `None` in the first
    /// round.
    #[serde(skip)]
    pub expected_downtime: Option<Duration>,
}

impl Progress {
    /// Mean rate of the round, pages per second.
    #[must_use]
    pub fn pages_per_second(&self) -> f64 {
        to_f64(self.done_pages) / self.elapsed.as_secs_f64().max(0.001)
    }

    /// Time until the round ends at this rate; `None`: there is no rate yet, or the number of pages is not known.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        let left = to_f64(self.total_pages.saturating_sub(self.done_pages));
        let is_known = self.done_pages > 0 && self.total_pages > 0;
        is_known.then(|| Duration::try_from_secs_f64(left / self.pages_per_second()).ok()).flatten()
    }
}

impl Control {
    /// Ends the operation with [`ImageError::Cancelled`] soon.
    pub fn cancel(&self) {
        self.cancellation.cancel();
    }

    /// What [`Self::cancel`] cancels, for stores.
    #[must_use]
    pub fn cancellation(&self) -> Cancellation {
        self.cancellation.clone()
    }

    /// What has been done so far.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let times = *self.times();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Progress {
            phase: Phase::from_repr(self.phase.load(Ordering::Relaxed)).unwrap_or(Phase::Preparing),
            round: read(&self.round),
            total_pages: read(&self.total),
            done_pages: read(&self.done),
            stored_bytes: read(&self.bytes),
            sources: PageSources {
                memory_pages: read(&self.memory),
                swap_pages: read(&self.swap),
                zero_pages: read(&self.zero),
                parent_pages: read(&self.parent),
            },
            elapsed: times.round_begun.map(|begun| begun.elapsed()).unwrap_or_default(),
            expected_downtime: times.expected_downtime,
        }
    }

    /// Returns an error once the operation is cancelled.
    ///
    /// # Errors
    /// [`ImageError::Cancelled`]
    pub fn check(&self) -> Result<(), ImageError> {
        if self.cancellation.is_cancelled() { Err(ImageError::Cancelled) } else { Ok(()) }
    }

    pub(crate) fn begin_round(&self) {
        self.enter(Phase::Preparing);
        self.round.fetch_add(1, Ordering::Relaxed);
        let sources = [&self.memory, &self.swap, &self.zero, &self.parent];
        for counter in [&self.total, &self.done, &self.bytes].into_iter().chain(sources) {
            counter.store(0, Ordering::Relaxed);
        }
        self.times().round_begun = Some(Instant::now());
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(feature = "migration")]
    pub(crate) fn expect_downtime(&self, downtime: Duration) {
        self.times().expected_downtime = Some(downtime);
    }

    pub(crate) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    pub(crate) fn expect(&self, pages: u64) {
        self.total.fetch_add(pages, Ordering::Relaxed);
    }

    pub(crate) fn advance(&self, pages: u64, bytes: u64) {
        self.done.fetch_add(pages, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count(&self, sources: &PageSources) {
        let PageSources { memory_pages, swap_pages, zero_pages, parent_pages } = *sources;
        self.memory.fetch_add(memory_pages, Ordering::Relaxed);
        self.swap.fetch_add(swap_pages, Ordering::Relaxed);
        self.zero.fetch_add(zero_pages, Ordering::Relaxed);
        self.parent.fetch_add(parent_pages, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(total_pages: u64, done_pages: u64, seconds: u64) -> Progress {
        Progress {
            total_pages,
            done_pages,
            elapsed: Duration::from_secs(seconds),
            ..Control::default().progress()
        }
    }

    #[test]
    fn remaining_time_follows_from_the_rate_of_the_round() {
        let seconds = Duration::from_secs;
        for (progress, rate, remaining) in [
            (progress(100, 0, 5), 0.0, None),
            (progress(100, 50, 5), 10.0, Some(seconds(5))),
            (progress(100, 100, 5), 20.0, Some(seconds(0))),
            // A file may grow.
            (progress(100, 150, 5), 30.0, Some(seconds(0))),
            (progress(0, 50, 5), 10.0, None),
        ] {
            assert!((progress.pages_per_second() - rate).abs() < 1e-9, "{progress:?}");
            assert_eq!(progress.remaining(), remaining, "{progress:?}");
        }
    }

    #[test]
    fn each_round_counts_from_zero() {
        let control = Control::default();
        assert_eq!(control.progress().elapsed, Duration::ZERO);
        for round in 1..3 {
            control.begin_round();
            control.expect(9);
            control.advance(2, 3);
            let sources = PageSources { memory_pages: 4, swap_pages: 5, zero_pages: 6, parent_pages: 7 };
            control.count(&sources);
            let now = control.progress();
            let counts = (now.round, now.total_pages, now.done_pages, now.stored_bytes);
            assert_eq!((counts, now.sources), ((round, 9, 2, 3), sources));
        }
    }
}
