//! Shared snapshots that clients hold: their memory is the service's, so it is counted until they let go of it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use fdmap_proto::units::PageSize;
use fdmap_sys::lease;

use super::quota::Share;
use super::{Caller, FileError, Quota};

/// The shared snapshots that were handed out and are still open or mapped somewhere.
#[derive(Debug)]
pub struct SharedSnapshots {
    bytes: Arc<Quota>,
    count: Arc<Quota>,
    most_bytes: u64,
    out: Mutex<Vec<Handed>>,
}

#[derive(Debug)]
struct Handed {
    /// A description of our own, to ask whether there are others.
    fd: OwnedFd,
    _room: Room,
}

/// Room for one snapshot, given back on drop.
#[derive(Debug)]
pub struct Room {
    _bytes: Share,
    /// Each snapshot that is out holds one of the service's descriptors.
    _count: Share,
}

impl SharedSnapshots {
    /// At most `most_bytes` and `most` of them for each user; no single one has more bytes, whoever asks for it.
    #[must_use]
    pub fn new(most_bytes: u64, most: u32) -> Self {
        Self {
            bytes: Quota::new("bytes of shared snapshots", most_bytes),
            count: Quota::new("shared snapshots", u64::from(most)),
            most_bytes,
            out: Mutex::default(),
        }
    }

    /// Takes room for a snapshot of `bytes`, the last page counted whole.
    ///
    /// # Errors
    /// [`FileError::Limit`], [`FileError::SnapshotSize`]
    pub fn reserve(&self, caller: &Caller, bytes: u64, page_size: PageSize) -> Result<Room, FileError> {
        let bytes = page_size.pages_in(bytes).saturating_mul(page_size.bytes());
        if bytes > self.most_bytes {
            return Err(FileError::SnapshotSize { bytes, most: self.most_bytes });
        }
        self.sweep();
        Ok(Room { _count: self.count.take(caller, 1)?, _bytes: self.bytes.take(caller, bytes)? })
    }

    /// A snapshot is handed out: `fd` is a description of our own, opened before that.
    pub fn handed(&self, fd: OwnedFd, room: Room) {
        self.out.lock().unwrap_or_else(PoisonError::into_inner).push(Handed { fd, _room: room });
    }

    /// Forgets those that nobody holds any more.
    pub fn sweep(&self) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        // Where leases do not work nothing can be said, and nothing is counted.
        out.retain(|handed| matches!(lease::is_sole_opener(handed.fd.as_fd()), Ok(false)));
    }
}

#[cfg(test)]
mod tests {
    use fdmap_sys::{fd, memfd};

    use super::*;

    const PAGE: u64 = 4096;

    fn reserve(shared: &SharedSnapshots, caller: &Caller, bytes: u64) -> Result<Room, FileError> {
        shared.reserve(caller, bytes, PageSize::new(PAGE).unwrap())
    }

    #[test]
    fn bytes_count_until_the_client_lets_go() {
        let shared = SharedSnapshots::new(10 * PAGE, 100);
        let caller = Caller::new(7, 7, Vec::new(), 1);
        let room = reserve(&shared, &caller, 7 * PAGE + 1).unwrap();
        let made = memfd::create("shared-snapshot", None).unwrap();
        let (ours, theirs) =
            (fd::reopen(made.as_fd(), false).unwrap(), fd::reopen(made.as_fd(), false).unwrap());
        drop(made);
        shared.handed(ours, room);
        assert!(matches!(reserve(&shared, &caller, 2 * PAGE + 1), Err(FileError::Limit { .. })));
        reserve(&shared, &caller, 2 * PAGE).unwrap();
        drop(theirs);
        reserve(&shared, &caller, 10 * PAGE).unwrap();
    }

    #[test]
    fn small_snapshots_are_bounded_in_number() {
        let shared = SharedSnapshots::new(1 << 30, 2);
        let caller = Caller::new(7, 7, Vec::new(), 1);
        let rooms: Vec<_> = (0..2).map(|_| reserve(&shared, &caller, 128).unwrap()).collect();
        assert!(matches!(reserve(&shared, &caller, 128), Err(FileError::Limit { .. })));
        drop(rooms);
        reserve(&shared, &caller, 128).unwrap();
    }

    #[test]
    fn administrators_are_bound_by_what_one_snapshot_may_have() {
        let shared = SharedSnapshots::new(10 * PAGE, 1);
        let root = Caller::new(0, 0, Vec::new(), 1);
        let rooms = [10 * PAGE, 10 * PAGE].map(|bytes| reserve(&shared, &root, bytes).unwrap());
        for bytes in [10 * PAGE + 1, u64::MAX] {
            assert!(matches!(reserve(&shared, &root, bytes), Err(FileError::SnapshotSize { .. })));
        }
        drop(rooms);
    }
}
