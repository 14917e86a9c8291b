//! The state of a migration that other threads read, and the request to finalize it.
//!
//! ```text
//!   source, writers paused by itself:     connecting -> copying -> finalizing -> committing -> ended
//!   source that awaits Finalize:          connecting -> copying <-> ready -Finalize-> finalizing -> committing -> ended
//!   destination:                          connecting -> copying -> ended
//! ```
//!
//! Each state may be followed by `ended`. Finalize is accepted in each state before that: the round in progress is completed first.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_proto::{FileInfo, error_chain};
use tokio::sync::watch;

use super::error::MigrationError;
use crate::image::{Control, ImageError};

/// Interval of looks whether the migration was cancelled.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

/// State of a migration, as `fdmap/v1/migration_control.proto` describes it.
#[derive(Clone, Debug)]
pub enum MigrationState {
    Connecting,
    Copying,
    Ready,
    Finalizing,
    Committing,
    Ended(Arc<MigrationEnd>),
}

/// How a migration has ended.
#[derive(Clone, Debug)]
pub enum MigrationEnd {
    /// The destination has the file. At the destination itself, there is no downtime.
    Completed { file: FileInfo, downtime: Duration, exact: bool },
    /// The destination has no file.
    Failed(String),
    /// The destination may have the file.
    Unknown(String),
}

/// State of a migration, for threads that watch or steer it.
#[derive(Debug)]
pub struct MigrationMonitor {
    state: watch::Sender<MigrationState>,
    awaits_finalize: bool,
    /// Finalize was called.
    is_finalized: Mutex<bool>,
    finalized: Condvar,
    is_connected: AtomicBool,
    reconnections: AtomicU32,
    skipped_pages: AtomicU64,
    pub(super) begun: Instant,
}

impl MigrationMonitor {
    /// `awaits_finalize`: the source makes rounds until [`Self::finalize`] is called.
    #[must_use]
    pub fn new(awaits_finalize: bool) -> Self {
        Self {
            state: watch::Sender::new(MigrationState::Connecting),
            awaits_finalize,
            is_finalized: Mutex::default(),
            finalized: Condvar::new(),
            is_connected: AtomicBool::new(false),
            reconnections: AtomicU32::new(0),
            skipped_pages: AtomicU64::new(0),
            begun: Instant::now(),
        }
    }

    /// The state, and its changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<MigrationState> {
        self.state.subscribe()
    }

    /// Pages of the file that the round does not read.
    #[must_use]
    pub fn skipped_pages(&self) -> u64 {
        self.skipped_pages.load(Ordering::Relaxed)
    }

    /// The connection is open, and how often the source opened it again.
    #[must_use]
    pub fn connection(&self) -> (bool, u32) {
        (self.is_connected.load(Ordering::Relaxed), self.reconnections.load(Ordering::Relaxed))
    }

    /// The writers are paused: the source sends the rest. Returns false if that is not awaited, or the migration had failed before.
    #[must_use]
    pub fn finalize(&self) -> bool {
        let mut is_finalized = self.is_finalized();
        let has_failed = matches!(
            &*self.state.borrow(),
            MigrationState::Ended(end) if !matches!(**end, MigrationEnd::Completed { .. })
        );
        let is_accepted = self.awaits_finalize && (*is_finalized || !has_failed);
        if is_accepted {
            *is_finalized = true;
            self.finalized.notify_all();
        }
        is_accepted
    }

    /// Waits for the end of the migration.
    pub async fn ended(&self) -> Arc<MigrationEnd> {
        let mut states = self.state.subscribe();
        loop {
            if let MigrationState::Ended(end) = &*states.borrow_and_update() {
                return Arc::clone(end);
            }
            // The sender is part of `self`.
            let _ = states.changed().await;
        }
    }

    fn is_finalized(&self) -> MutexGuard<'_, bool> {
        self.is_finalized.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) const fn awaits_finalize(&self) -> bool {
        self.awaits_finalize
    }

    /// Waits for [`Self::finalize`], at most for some time. Returns whether it was called.
    pub(super) fn wait_for_finalize(&self, most: Duration, control: &Control) -> Result<bool, ImageError> {
        let begun = Instant::now();
        let mut is_finalized = self.is_finalized();
        loop {
            control.check()?;
            let left = most.saturating_sub(begun.elapsed()).min(CANCEL_INTERVAL);
            if *is_finalized || left.is_zero() {
                return Ok(*is_finalized);
            }
            let waited = self.finalized.wait_timeout(is_finalized, left);
            is_finalized = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn enter(&self, state: &MigrationState) {
        let is_other = |now: &MigrationState| std::mem::discriminant(now) != std::mem::discriminant(state);
        self.state.send_if_modified(|now| {
            let changes = is_other(now);
            if changes {
                *now = state.clone();
            }
            changes
        });
    }

    pub(super) fn complete(&self, file: &FileInfo, downtime: Duration, exact: bool) {
        let end = MigrationEnd::Completed { file: file.clone(), downtime, exact };
        self.enter(&MigrationState::Ended(Arc::new(end)));
    }

    pub(super) fn fail(&self, error: &MigrationError) {
        let reason = error_chain(error);
        let end = match error {
            MigrationError::Unknown { .. } => MigrationEnd::Unknown(reason),
            _ => MigrationEnd::Failed(reason),
        };
        self.enter(&MigrationState::Ended(Arc::new(end)));
    }

    pub(super) fn connect(&self, is_connected: bool, reconnections: u32) {
        self.is_connected.store(is_connected, Ordering::Relaxed);
        self.reconnections.store(reconnections, Ordering::Relaxed);
    }

    pub(super) fn skip(&self, pages: u64) {
        self.skipped_pages.store(pages, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(monitor: &MigrationMonitor) {
        monitor.fail(&MigrationError::Ended("it broke".to_owned()));
    }

    #[test]
    fn finalize_is_accepted_until_a_failure_and_repeated_after_it() {
        let monitor = MigrationMonitor::new(true);
        for state in [MigrationState::Connecting, MigrationState::Copying, MigrationState::Ready] {
            monitor.enter(&state);
            assert!(monitor.finalize());
        }
        failed(&monitor);
        assert!(monitor.finalize(), "a repeated call gets the result of the first one");

        let monitor = MigrationMonitor::new(true);
        failed(&monitor);
        assert!(!monitor.finalize(), "it had failed before");
        assert!(!MigrationMonitor::new(false).finalize(), "it is not awaited");
    }

    #[test]
    fn waiting_for_finalize_ends_by_the_call_the_timeout_and_cancellation() {
        let monitor = MigrationMonitor::new(true);
        let control = Control::default();
        assert!(!monitor.wait_for_finalize(Duration::from_millis(1), &control).unwrap());
        assert!(!monitor.wait_for_finalize(Duration::ZERO, &control).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                assert!(monitor.finalize());
            });
            assert!(monitor.wait_for_finalize(Duration::from_secs(60), &control).unwrap());
        });
        assert!(monitor.wait_for_finalize(Duration::ZERO, &control).unwrap());
        control.cancel();
        assert!(matches!(monitor.wait_for_finalize(Duration::ZERO, &control), Err(ImageError::Cancelled)));
    }

    #[test]
    fn the_first_end_stays() {
        let monitor = MigrationMonitor::new(false);
        failed(&monitor);
        monitor.fail(&MigrationError::Ended("later".to_owned()));
        let state = monitor.state();
        let MigrationState::Ended(end) = &*state.borrow() else { panic!("not ended") };
        assert!(matches!(&**end, MigrationEnd::Failed(reason) if reason == "it broke"));
    }
}
