//! Accounting of shared snapshots: the service owns their memory, so a snapshot counts while any client has it open or mapped.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use fdmap_proto::units::PageSize;
use fdmap_sys::lease;

use super::quota::QuotaPermit;
use super::{Caller, FileError, Limits, Quota, Quotas};

/// The shared snapshots that some client still has open or mapped.
#[derive(Debug)]
pub struct SharedSnapshots {
    bytes: Arc<Quota>,
    count: Arc<Quota>,
    /// Of a single snapshot, of administrators too.
    max_bytes: u64,
    in_use: Mutex<Vec<InUse>>,
}

#[derive(Debug)]
struct InUse {
    /// The service's own open description. A lease on it shows whether others exist.
    fd: OwnedFd,
    _reservation: SnapshotReservation,
}

/// Quota for one shared snapshot, returned on drop.
#[derive(Debug)]
pub struct SnapshotReservation {
    _bytes: QuotaPermit,
    /// Each snapshot in use costs the service a descriptor.
    _count: QuotaPermit,
}

impl SharedSnapshots {
    #[must_use]
    pub fn new(quotas: &Quotas, limits: &Limits) -> Self {
        let Limits { shared_bytes_per_user, shared_bytes_of_users, shared_per_user, .. } = *limits;
        let resource = "bytes of shared snapshots";
        Self {
            bytes: quotas.quota_of_users(resource, shared_bytes_per_user, shared_bytes_of_users),
            count: quotas.quota("shared snapshots", u64::from(shared_per_user)),
            max_bytes: shared_bytes_per_user,
            in_use: Mutex::default(),
        }
    }

    /// Reserves quota for a snapshot of `bytes`, rounded up to pages.
    ///
    /// # Errors
    /// [`FileError::Limit`], [`FileError::SnapshotSize`]
    pub fn reserve(
        &self,
        caller: &Caller,
        bytes: u64,
        page_size: PageSize,
    ) -> Result<SnapshotReservation, FileError> {
        let bytes = page_size.pages_in(bytes).saturating_mul(page_size.bytes());
        if bytes > self.max_bytes {
            return Err(FileError::SnapshotSize { bytes, max_bytes: self.max_bytes });
        }
        self.sweep();
        Ok(SnapshotReservation {
            _count: self.count.acquire(caller, 1)?,
            _bytes: self.bytes.acquire(caller, bytes)?,
        })
    }

    /// Registers a snapshot that is about to be sent. `fd` must be an open description that no client shares.
    pub fn add(&self, fd: OwnedFd, reservation: SnapshotReservation) {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.push(InUse { fd, _reservation: reservation });
    }

    /// Drops the snapshots that no client has open or mapped.
    pub fn sweep(&self) {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        // Without leases, use is unknown: such snapshots are not counted.
        in_use.retain(|snapshot| matches!(lease::is_sole_opener(snapshot.fd.as_fd()), Ok(false)));
    }
}

#[cfg(test)]
mod tests {
    use fdmap_sys::{fd, memfd};

    use super::*;
    use crate::files::allocated::ram_bytes;

    const PAGE: u64 = 4096;

    fn shared(shared_bytes_per_user: u64, shared_per_user: u32) -> SharedSnapshots {
        let limits = Limits { shared_bytes_per_user, shared_per_user, ..Limits::default() };
        SharedSnapshots::new(&Quotas::new(16), &limits)
    }

    fn reserve(
        shared: &SharedSnapshots,
        caller: &Caller,
        bytes: u64,
    ) -> Result<SnapshotReservation, FileError> {
        shared.reserve(caller, bytes, PageSize::new(PAGE).unwrap())
    }

    #[test]
    fn bytes_count_until_the_client_closes_the_snapshot() {
        let shared = shared(10 * PAGE, 100);
        let caller = Caller::new(7, 7, Vec::new(), 1);
        let reservation = reserve(&shared, &caller, 7 * PAGE + 1).unwrap();
        let memfd = memfd::create("shared-snapshot", None).unwrap();
        let (service_fd, client_fd) =
            (fd::reopen(memfd.as_fd(), false).unwrap(), fd::reopen(memfd.as_fd(), false).unwrap());
        drop(memfd);
        shared.add(service_fd, reservation);
        assert!(matches!(reserve(&shared, &caller, 2 * PAGE + 1), Err(FileError::Limit { .. })));
        reserve(&shared, &caller, 2 * PAGE).unwrap();
        drop(client_fd);
        reserve(&shared, &caller, 10 * PAGE).unwrap();
    }

    #[test]
    fn number_of_snapshots_is_limited_too() {
        let shared = shared(1 << 30, 2);
        let caller = Caller::new(7, 7, Vec::new(), 1);
        let reservations: Vec<_> = (0..2).map(|_| reserve(&shared, &caller, 128).unwrap()).collect();
        assert!(matches!(reserve(&shared, &caller, 128), Err(FileError::Limit { .. })));
        drop(reservations);
        reserve(&shared, &caller, 128).unwrap();
    }

    #[test]
    fn snapshots_of_all_users_together_are_limited() {
        let (shared_bytes_per_user, shared_bytes_of_users) = (10 * PAGE, 15 * PAGE);
        let limits = Limits { shared_bytes_per_user, shared_bytes_of_users, ..Limits::default() };
        let shared = SharedSnapshots::new(&Quotas::new(16), &limits);
        let of_user = |uid, pages| reserve(&shared, &Caller::new(uid, uid, Vec::new(), 1), pages * PAGE);
        let _first = of_user(7, 10).unwrap();
        assert!(matches!(of_user(8, 6), Err(FileError::Limit { .. })));
        let _second = of_user(8, 5).unwrap();
        assert!(matches!(of_user(9, 1), Err(FileError::Limit { .. })));
        of_user(0, 10).unwrap();
    }

    /// Their memory is that of the service.
    #[test]
    fn snapshots_of_all_users_take_a_part_of_the_ram_by_default() {
        let Limits { shared_bytes_per_user, shared_bytes_of_users, .. } = Limits::default();
        assert!(shared_bytes_per_user <= shared_bytes_of_users / 4);
        assert!(shared_bytes_of_users <= ram_bytes() / 8);
    }

    #[test]
    fn size_of_one_snapshot_is_limited_for_administrators_too() {
        let shared = shared(10 * PAGE, 1);
        let root = Caller::new(0, 0, Vec::new(), 1);
        let reservations = [10 * PAGE, 10 * PAGE].map(|bytes| reserve(&shared, &root, bytes).unwrap());
        for bytes in [10 * PAGE + 1, u64::MAX] {
            assert!(matches!(reserve(&shared, &root, bytes), Err(FileError::SnapshotSize { .. })));
        }
        drop(reservations);
    }
}
