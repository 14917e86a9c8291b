//! Ephemeral files: files that the service deletes when no other process uses them, like the memfds of programs.
//!
//! A sweep finds the users of each file. The kernel counts them, where the probe can read that; else `search` looks for them in
//! `/proc`. What is not certain counts as a use.

pub mod search;
mod users;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fdmap_proto::error_chain;
use fdmap_proto::file::Lifetime;

use super::registry::Registry;
use super::service_file::ServiceFile;
use crate::own_program::search_process::Inode;
use search::Search;

/// Shortest time between two sweeps that an exhausted quota causes.
const MIN_SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Ends the ephemeral files of a registry.
#[derive(Debug, Default)]
pub struct EphemeralSweep {
    /// Time of the last sweep that an exhausted quota caused.
    last_forced_sweep: Mutex<Option<Instant>>,
    /// Locked during a sweep. Concurrent ones would count as two.
    search: Mutex<Search>,
}

impl EphemeralSweep {
    /// True if an exhausted quota may cause a sweep now. The next one may follow a second later.
    #[must_use]
    pub fn may_force_sweep(&self) -> bool {
        let mut last = self.last_forced_sweep.lock().unwrap_or_else(PoisonError::into_inner);
        let may = last.is_none_or(|last| last.elapsed() >= MIN_SWEEP_INTERVAL);
        if may {
            *last = Some(Instant::now());
        }
        may
    }

    /// Removes the ephemeral files that this sweep and the one before found unused from the registry. The caller calls
    /// [`Registry::finish`] for each of them. Does nothing while another sweep runs.
    pub fn sweep(&self, registry: &Registry) -> Vec<Arc<ServiceFile>> {
        let Ok(mut search) = self.search.try_lock() else { return Vec::new() };
        let mut files = registry.all();
        files.retain(|file| file.lifetime() == Lifetime::Ephemeral);
        for file in &files {
            file.usage().begin_sweep();
        }
        let counted: Vec<_> = files.iter().map(|file| is_used(file)).collect();
        // `None` if it is not needed, or found out nothing.
        let found = if counted.contains(&None) { search.inodes_in_use() } else { None };
        let now = Instant::now();
        let ends = |file: &Arc<ServiceFile>, counted: Option<bool>| {
            let used = counted.unwrap_or_else(|| is_among(&found, file.inode()));
            let mut usage = file.usage();
            // Under the lock: a descriptor that was sent before counts, and a later request finds the file gone.
            if usage.ends(used, now) { registry.take_out(file.id()) } else { None }
        };
        files.iter().zip(counted).filter_map(|(file, counted)| ends(file, counted)).collect()
    }
}

/// As [`ServiceFile::is_used`]. A file that cannot be read counts as used.
fn is_used(file: &ServiceFile) -> Option<bool> {
    file.is_used().unwrap_or_else(|error| {
        tracing::warn!(%file, error = error_chain(&error), "cannot count the users of a file");
        Some(true)
    })
}

/// Everything is in use if a search found out nothing.
fn is_among(found: &Option<BTreeSet<Inode>>, inode: Inode) -> bool {
    found.as_ref().is_none_or(|found| found.contains(&inode))
}
