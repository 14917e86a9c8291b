//! Snapshots that clients leave with the service to compare with later.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_proto::units::{PageRange, SnapshotId};

use super::quota::Share;
use super::{Caller, FileError, Quota};
use crate::pages::Snapshot;
use crate::random::random_id;

/// A kept snapshot.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The states.
    pub snapshot: Snapshot,
    /// The pages that were read for it.
    pub range: PageRange,
    uid: u32,
    until: Instant,
    /// Counts for its user while it is kept.
    _share: Arc<Share>,
}

/// Why there is no such snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RetainedError {
    /// It was never kept, its time is over, or it was let go of.
    #[error("no snapshot {0} is kept of this file")]
    NotFound(SnapshotId),
    /// It is somebody else's.
    #[error("snapshot {0} is kept for another user")]
    NotYours(SnapshotId),
}

/// The kept snapshots of one file.
#[derive(Debug, Default)]
pub struct RetainedSnapshots {
    kept: Mutex<BTreeMap<SnapshotId, Kept>>,
}

impl RetainedSnapshots {
    /// Keeps a snapshot for `time`.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn keep(
        &self,
        caller: &Caller,
        quota: &Arc<Quota>,
        snapshot: Snapshot,
        range: PageRange,
        time: Duration,
    ) -> Result<SnapshotId, FileError> {
        let share = Arc::new(quota.take(caller, 1)?);
        let kept = Kept { snapshot, range, uid: caller.uid, until: Instant::now() + time, _share: share };
        let mut all = self.lock();
        let id = loop {
            let id = random_id(SnapshotId::new);
            if !all.contains_key(&id) {
                break id;
            }
        };
        all.insert(id, kept);
        Ok(id)
    }

    /// A kept snapshot of the caller's.
    ///
    /// # Errors
    /// [`RetainedError`]
    pub fn get(&self, caller: &Caller, id: SnapshotId) -> Result<Kept, RetainedError> {
        let all = self.lock();
        let kept = all.get(&id).ok_or(RetainedError::NotFound(id))?;
        if kept.uid != caller.uid && !caller.admin {
            return Err(RetainedError::NotYours(id));
        }
        Ok(kept.clone())
    }

    /// Lets go of a kept snapshot of the caller's.
    ///
    /// # Errors
    /// [`RetainedError`]
    pub fn release(&self, caller: &Caller, id: SnapshotId) -> Result<(), RetainedError> {
        self.get(caller, id)?;
        self.lock().remove(&id);
        Ok(())
    }

    /// Lets go of those whose time is over; so does every other call.
    pub fn sweep(&self) {
        drop(self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<SnapshotId, Kept>> {
        // Nothing panics while it is held.
        let mut all = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        all.retain(|_, kept| kept.until > now);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(uid: u32) -> Caller {
        Caller::new(uid, uid, Vec::new(), 0)
    }

    fn keep(
        kept: &RetainedSnapshots,
        uid: u32,
        quota: &Arc<Quota>,
        time: Duration,
    ) -> Result<SnapshotId, FileError> {
        kept.keep(&caller(uid), quota, Snapshot::default(), PageRange::first(1), time)
    }

    #[test]
    fn snapshot_is_kept_for_its_user_until_released() {
        let (kept, quota) = (RetainedSnapshots::default(), Quota::new("kept snapshots", 1));
        let hour = Duration::from_secs(3600);
        let id = keep(&kept, 5, &quota, hour).unwrap();
        assert!(kept.get(&caller(5), id).is_ok() && kept.get(&caller(0), id).is_ok());
        assert_eq!(kept.get(&caller(6), id).unwrap_err(), RetainedError::NotYours(id));
        assert!(matches!(keep(&kept, 5, &quota, hour), Err(FileError::Limit { .. })));
        assert_eq!(kept.release(&caller(6), id), Err(RetainedError::NotYours(id)));
        kept.release(&caller(5), id).unwrap();
        assert_eq!(kept.get(&caller(5), id).unwrap_err(), RetainedError::NotFound(id));
        keep(&kept, 5, &quota, hour).unwrap();
    }

    #[test]
    fn snapshot_whose_time_is_over_is_gone_and_counts_no_more() {
        let (kept, quota) = (RetainedSnapshots::default(), Quota::new("kept snapshots", 1));
        let id = keep(&kept, 5, &quota, Duration::ZERO).unwrap();
        assert_eq!(kept.get(&caller(5), id).unwrap_err(), RetainedError::NotFound(id));
        kept.sweep();
        keep(&kept, 5, &quota, Duration::ZERO).unwrap();
    }
}
