//! Retained snapshots: snapshots that a client leaves with the service for a later Diff.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_proto::units::{PageRange, SnapshotId};

use super::quota::QuotaPermit;
use super::{Caller, FileError, Quota};
use crate::pages::Snapshot;
use crate::random::random_id;

#[derive(Clone, Debug)]
pub struct RetainedSnapshot {
    pub snapshot: Snapshot,
    /// The pages that the scan covered.
    pub range: PageRange,
    uid: u32,
    expires: Instant,
    _permit: Arc<QuotaPermit>,
    /// Charged until the snapshot and the streams that report it are dropped.
    pub memory: Arc<QuotaPermit>,
}

/// The caller cannot use a retained snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RetainedError {
    /// The id is unknown, or the snapshot expired or was dropped.
    #[error("the file has no retained snapshot {0}")]
    NotFound(SnapshotId),
    #[error("retained snapshot {0} belongs to another user")]
    OtherUser(SnapshotId),
}

/// The retained snapshots of one file. Every call drops those that have expired.
#[derive(Debug, Default)]
pub struct RetainedSnapshots {
    by_id: Mutex<BTreeMap<SnapshotId, RetainedSnapshot>>,
}

impl RetainedSnapshots {
    /// Retains a snapshot, whose memory is charged, for `retain_for`.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn retain(
        &self,
        caller: &Caller,
        quota: &Arc<Quota>,
        (snapshot, memory): (Snapshot, Arc<QuotaPermit>),
        range: PageRange,
        retain_for: Duration,
    ) -> Result<SnapshotId, FileError> {
        let permit = Arc::new(quota.acquire(caller, 1)?);
        let expires = Instant::now() + retain_for;
        let retained =
            RetainedSnapshot { snapshot, range, uid: caller.uid, expires, _permit: permit, memory };
        let mut by_id = self.lock();
        let id = loop {
            let id = random_id(SnapshotId::new);
            if !by_id.contains_key(&id) {
                break id;
            }
        };
        by_id.insert(id, retained);
        Ok(id)
    }

    /// Returns a snapshot that the caller retained. Administrators get every user's.
    ///
    /// # Errors
    /// [`RetainedError`]
    pub fn get(&self, caller: &Caller, id: SnapshotId) -> Result<RetainedSnapshot, RetainedError> {
        let by_id = self.lock();
        let retained = by_id.get(&id).ok_or(RetainedError::NotFound(id))?;
        if retained.uid != caller.uid && !caller.admin {
            return Err(RetainedError::OtherUser(id));
        }
        Ok(retained.clone())
    }

    /// Drops a snapshot that the caller retained.
    ///
    /// # Errors
    /// [`RetainedError`]
    pub fn remove(&self, caller: &Caller, id: SnapshotId) -> Result<(), RetainedError> {
        self.get(caller, id)?;
        self.lock().remove(&id);
        Ok(())
    }

    /// Drops expired snapshots.
    pub fn sweep(&self) {
        drop(self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SnapshotId, RetainedSnapshot>> {
        // No code panics with the lock held.
        let mut by_id = self.by_id.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        by_id.retain(|_, retained| retained.expires > now);
        by_id
    }
}

#[cfg(test)]
mod tests {
    use super::super::Quotas;
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn caller(uid: u32) -> Caller {
        Caller::new(uid, uid, Vec::new(), 0)
    }

    fn one_per_user() -> (RetainedSnapshots, Arc<Quota>) {
        (RetainedSnapshots::default(), Quotas::new(1).quota("retained snapshots", 1))
    }

    fn retain(
        snapshots: &RetainedSnapshots,
        uid: u32,
        quota: &Arc<Quota>,
        retain_for: Duration,
    ) -> Result<SnapshotId, FileError> {
        let memory = Quotas::new(1).quota("bytes of page states", 1).acquire(&caller(uid), 1)?;
        let memory = Arc::new(memory);
        snapshots.retain(&caller(uid), quota, (Snapshot::default(), memory), PageRange::first(1), retain_for)
    }

    #[test]
    fn retained_snapshot_is_its_users_until_dropped() {
        let (snapshots, quota) = one_per_user();
        let id = retain(&snapshots, 5, &quota, HOUR).unwrap();
        assert!(snapshots.get(&caller(5), id).is_ok() && snapshots.get(&caller(0), id).is_ok());
        assert_eq!(snapshots.get(&caller(6), id).unwrap_err(), RetainedError::OtherUser(id));
        assert!(matches!(retain(&snapshots, 5, &quota, HOUR), Err(FileError::Limit { .. })));
        assert_eq!(snapshots.remove(&caller(6), id), Err(RetainedError::OtherUser(id)));
        snapshots.remove(&caller(5), id).unwrap();
        assert_eq!(snapshots.get(&caller(5), id).unwrap_err(), RetainedError::NotFound(id));
        retain(&snapshots, 5, &quota, HOUR).unwrap();
    }

    #[test]
    fn expired_snapshot_is_not_found_and_returns_its_quota() {
        let (snapshots, quota) = one_per_user();
        let id = retain(&snapshots, 5, &quota, Duration::ZERO).unwrap();
        assert_eq!(snapshots.get(&caller(5), id).unwrap_err(), RetainedError::NotFound(id));
        snapshots.sweep();
        retain(&snapshots, 5, &quota, Duration::ZERO).unwrap();
    }
}
