//! Progress and cancellation of a dump or a restore.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

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
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Progress {
            phase: Phase::from_repr(self.phase.load(Ordering::Relaxed)).unwrap_or(Phase::Preparing),
            round: read(&self.round),
            total_pages: read(&self.total),
            done_pages: read(&self.done),
            stored_bytes: read(&self.bytes),
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
        for counter in [&self.total, &self.done, &self.bytes] {
            counter.store(0, Ordering::Relaxed);
        }
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
}
