//! Ephemeral files: files that the service deletes when no process uses them. Programs that know nothing of the service use
//! them as their memfds, which they expect to be freed with the last descriptor and mapping.
//!
//! A file is deleted when two consecutive sweeps find no user. One sweep is not enough: a descriptor that one process sends to
//! another belongs to neither while it is in flight.

mod users;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_proto::units::FileId;

use super::quota::{Quota, QuotaPermit};
use super::{Caller, FileError};
use crate::store::FdStore;
use users::{Inode, inodes_in_use};

/// Shortest time between two sweeps that an exhausted quota causes.
const MIN_SWEEP_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct EphemeralFiles {
    quota: Arc<Quota>,
    files: Mutex<BTreeMap<FileId, EphemeralFile>>,
    /// Time of the last sweep that an exhausted quota caused.
    last_forced_sweep: Mutex<Option<Instant>>,
    /// Held during a sweep. Sweeps are slow, and concurrent ones would count as two.
    sweeping: Mutex<()>,
}

#[derive(Debug)]
struct EphemeralFile {
    _permit: QuotaPermit,
    inode: Inode,
    /// The last sweep found no user.
    unused: bool,
    /// A descriptor was sent since the current sweep began, so the sweep may have missed its user.
    sent: bool,
}

impl EphemeralFiles {
    #[must_use]
    pub fn new(quota: Arc<Quota>) -> Self {
        Self {
            quota,
            files: Mutex::default(),
            last_forced_sweep: Mutex::default(),
            sweeping: Mutex::default(),
        }
    }

    /// Charges the user for one file, administrators too: each file costs descriptors of the service, and a program that creates memfds
    /// without end must leave some to others.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn charge(&self, caller: &Caller) -> Result<QuotaPermit, FileError> {
        self.quota.acquire_for(caller.uid, 1, false)
    }

    pub fn add(&self, file: FileId, inode: Inode, permit: QuotaPermit) {
        self.lock().insert(file, EphemeralFile { _permit: permit, inode, unused: false, sent: true });
    }

    /// A file was deleted by request: its user may have another one, also while processes still use this one.
    pub fn forget(&self, file: FileId) {
        self.lock().remove(&file);
    }

    /// Notes that a client gets a descriptor of `file`. The caller must look the file up again afterwards: a sweep may have
    /// deleted it just before.
    pub fn note_sent(&self, file: FileId) {
        if let Some(entry) = self.lock().get_mut(&file) {
            entry.sent = true;
        }
    }

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

    fn lock(&self) -> MutexGuard<'_, BTreeMap<FileId, EphemeralFile>> {
        // No code panics with the lock held.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `delete` for each file that this sweep and the one before found unused, and returns what `delete` returned.
    /// Reads `/proc` of every process.
    pub fn sweep<T>(&self, delete: impl FnMut(FileId) -> Option<T>) -> Vec<T> {
        let _sweeping = self.sweeping.lock().unwrap_or_else(PoisonError::into_inner);
        let mut files = self.lock();
        if files.is_empty() {
            return Vec::new();
        }
        for entry in files.values_mut() {
            entry.sent = false;
        }
        drop(files);
        // The parent process holds the stored descriptors of every file, so its descriptors do not count. Without a store, the
        // parent counts as any process: it may be a shell that started the service in the background and then executed the
        // program that creates files.
        let store_process = FdStore::from_env().is_some().then(std::os::unix::process::parent_id);
        let Some(in_use) = inodes_in_use(std::process::id(), store_process) else { return Vec::new() };
        // Delete under the lock: a descriptor sent earlier set `sent`, and a later request finds the file gone.
        let mut files = self.lock();
        take_unused(&mut files, &in_use).into_iter().filter_map(delete).collect()
    }
}

/// Removes and returns the files that were unused twice in a row. Pure.
fn take_unused(files: &mut BTreeMap<FileId, EphemeralFile>, in_use: &BTreeSet<Inode>) -> Vec<FileId> {
    let mut removed = Vec::new();
    files.retain(|file, entry| {
        let unused = !entry.sent && !in_use.contains(&entry.inode);
        if unused && entry.unused {
            removed.push(*file);
            return false;
        }
        entry.unused = unused;
        true
    });
    removed
}

#[cfg(test)]
mod tests {
    use super::super::Quotas;
    use super::*;

    #[test]
    fn file_is_deleted_after_two_sweeps_without_a_user() {
        let [first, second] = [7, 8].map(|id| FileId::new(id).unwrap());
        let quota = Quotas::new(1).quota("ephemeral files", 2);
        let ephemeral = EphemeralFiles::new(Arc::clone(&quota));
        let root = Caller::new(0, 0, Vec::new(), 0);
        for (file, inode) in [(first, (1, 10)), (second, (1, 11))] {
            ephemeral.add(file, inode, ephemeral.charge(&root).unwrap());
        }
        assert!(ephemeral.charge(&root).is_err(), "root is limited, too");
        assert_eq!(take_unused(&mut ephemeral.lock(), &BTreeSet::new()), []);
        assert_eq!(
            take_unused(&mut ephemeral.lock(), &BTreeSet::new()),
            [],
            "both were added during the sweep"
        );
        let mut files = ephemeral.lock();
        files.values_mut().for_each(|entry| entry.sent = false);
        let both = BTreeSet::from([(1, 10), (1, 11)]);
        let one = BTreeSet::from([(1, 11)]);
        assert_eq!(take_unused(&mut files, &both), []);
        assert_eq!(take_unused(&mut files, &one), []);
        assert_eq!(take_unused(&mut files, &both), [], "the first file was in use again");
        assert_eq!(take_unused(&mut files, &one), []);
        assert_eq!(take_unused(&mut files, &one), [first]);
        assert!(ephemeral.charge(&root).is_ok());
        assert_eq!(take_unused(&mut files, &one), []);
        drop(files);
        let none = BTreeSet::new();
        assert_eq!(take_unused(&mut ephemeral.lock(), &none), []);
        ephemeral.note_sent(second);
        assert_eq!(take_unused(&mut ephemeral.lock(), &none), [], "a descriptor was sent during the sweep");
        let third = ephemeral.charge(&root).unwrap();
        assert!(ephemeral.charge(&root).is_err());
        ephemeral.forget(second);
        assert!(ephemeral.charge(&root).is_ok(), "a deleted file does not count");
        drop(third);
    }
}
