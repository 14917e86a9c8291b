//! Page tables of address spaces that are no longer tracked. The end of tracking frees none: they stay until the process unmaps the
//! memory, or ends. Until then they count for their user.
//!
//! The kernel does not record which page tables of an address space a Track request allocated. But there are no more of them than the
//! address space has in all, which the kernel counts. So the smaller of both numbers counts.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_sys::pagemap::Pagemap;

use super::{Quota, QuotaPermit};
use crate::probe::{KernelAddress, PageTables};

/// Within this time, refused requests of a user do not measure its address spaces again: some microseconds for each.
const INTERVAL: Duration = Duration::from_millis(100);

/// Measures the page tables of the address space of a pagemap; `None`: unknown. Waits for no process.
pub(crate) type Measure = Arc<dyn Fn(BorrowedFd<'_>) -> Option<PageTables> + Send + Sync>;

/// Address spaces that have page tables left, of all users.
pub(super) struct LeftPageTables {
    measure: Measure,
    /// Bounds the entries. Those beyond it count as if they were tracked.
    quota: Arc<Quota>,
    users: Mutex<HashMap<u32, OfUser>>,
}

#[derive(Debug)]
struct OfUser {
    /// Of the last measurement, and of the last one that has ended.
    began: Instant,
    measured: Instant,
    spaces: HashMap<KernelAddress, Left>,
}

/// The charge for one address space.
#[derive(Debug)]
struct Left {
    /// Keeps the kernel from using the address of the address space for another one.
    pagemap: Arc<Pagemap>,
    /// For the entry.
    _entry: QuotaPermit,
    page_tables: QuotaPermit,
}

impl LeftPageTables {
    pub(super) fn new(measure: Measure, quota: Arc<Quota>) -> Self {
        Self { measure, quota, users: Mutex::default() }
    }

    /// Keeps the charge `page_tables` for the address space of `pagemap`, which is no longer tracked, as far as that has page tables.
    /// `space` was the charge for the address space. Drops both if nothing is known about the page tables.
    pub(super) fn keep(&self, pagemap: Arc<Pagemap>, space: QuotaPermit, page_tables: QuotaPermit) {
        let uid = page_tables.uid();
        let mut users = self.lock();
        let Some(PageTables { space: address, bytes }) = (self.measure)(pagemap.as_fd()) else { return };
        if bytes == 0 || page_tables.amount() == 0 {
            return;
        }
        let of_user = || {
            let now = Instant::now();
            OfUser { began: now, measured: now, spaces: HashMap::new() }
        };
        match users.entry(uid).or_insert_with(of_user).spaces.entry(address) {
            Entry::Occupied(mut entry) => {
                let left = entry.get_mut();
                left.page_tables.absorb(page_tables);
                left.shrink(bytes);
            }
            Entry::Vacant(entry) => {
                let own = self.quota.acquire_for(uid, 1, false);
                entry.insert(Left { pagemap, _entry: own.unwrap_or(space), page_tables }).shrink(bytes);
            }
        }
    }

    /// Reduces the charges of a user to the page tables that its address spaces still have, unless that was done just now.
    pub(super) fn measure_again(&self, uid: u32) {
        let is_due = |of_user: &OfUser| of_user.began.elapsed() >= INTERVAL;
        if self.lock().get(&uid).is_some_and(is_due) {
            self.measure_user(uid);
        }
    }

    /// Reduces the charges of all users.
    pub(super) fn measure_all(&self) {
        let users: Vec<u32> = self.lock().keys().copied().collect();
        users.into_iter().for_each(|uid| self.measure_user(uid));
    }

    /// True if the charges of the user are those of `time`, or later.
    pub(super) fn is_measured_since(&self, uid: u32, time: Instant) -> bool {
        self.lock().get(&uid).is_none_or(|of_user| of_user.measured >= time)
    }

    fn measure_user(&self, uid: u32) {
        let began = Instant::now();
        let spaces: Vec<_> = match self.lock().get_mut(&uid) {
            Some(of_user) => {
                of_user.began = began;
                of_user.spaces.keys().copied().collect()
            }
            None => return,
        };
        // Others may take the lock in between.
        spaces.into_iter().for_each(|space| self.measure_one(uid, space));
        if let Some(of_user) = self.lock().get_mut(&uid) {
            of_user.measured = of_user.measured.max(began);
        }
    }

    fn measure_one(&self, uid: u32, space: KernelAddress) {
        let mut users = self.lock();
        let Some(of_user) = users.get_mut(&uid) else { return };
        let Some(left) = of_user.spaces.get_mut(&space) else { return };
        // Without a measurement, the charge stays.
        let Some(tables) = (self.measure)(left.pagemap.as_fd()) else { return };
        left.shrink(tables.bytes);
        if tables.bytes == 0 {
            of_user.spaces.remove(&space);
        }
        if of_user.spaces.is_empty() {
            users.remove(&uid);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, OfUser>> {
        // No code panics with the lock held.
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Left {
    /// The address space has page tables of `bytes` in all.
    fn shrink(&mut self, bytes: u64) {
        // Reducing a charge never fails.
        let _ = self.page_tables.resize(self.page_tables.amount().min(bytes), true);
    }
}

impl fmt::Debug for LeftPageTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeftPageTables").field("users", &self.users).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::super::{Caller, Quotas};
    use super::*;

    /// Results of measurements, by the descriptors of pagemaps.
    type Measured = Arc<Mutex<HashMap<i32, PageTables>>>;

    struct Case {
        quota: Arc<Quota>,
        spaces: Arc<Quota>,
        measured: Measured,
        left: LeftPageTables,
    }

    impl Case {
        fn new() -> Self {
            let quotas = Quotas::new(16);
            let measured = Measured::default();
            let its = Arc::clone(&measured);
            let measure =
                move |pagemap: BorrowedFd<'_>| its.lock().unwrap().get(&pagemap.as_raw_fd()).copied();
            Self {
                quota: quotas.quota("page tables", 100),
                spaces: quotas.quota("spaces", 2),
                measured,
                left: LeftPageTables::new(Arc::new(measure), quotas.quota("entries", 1)),
            }
        }

        /// A pagemap of this address space, which has this many bytes of page tables.
        fn pagemap(&self, space: u64, bytes: u64) -> Arc<Pagemap> {
            let pagemap = Arc::new(Pagemap::open(None).unwrap());
            self.set(&pagemap, space, bytes);
            pagemap
        }

        fn set(&self, pagemap: &Pagemap, space: u64, bytes: u64) {
            let tables = PageTables { space: KernelAddress::new(space).unwrap(), bytes };
            self.measured.lock().unwrap().insert(pagemap.as_fd().as_raw_fd(), tables);
        }

        /// Tracking for this many bytes ends.
        fn end(&self, pagemap: &Arc<Pagemap>, uid: u32, charged: u64) {
            let caller = Caller::new(uid, uid, Vec::new(), 0);
            let space = self.spaces.acquire(&caller, 1).unwrap();
            self.left.keep(Arc::clone(pagemap), space, self.quota.acquire(&caller, charged).unwrap());
        }

        /// Asserts how much the user may still have of both.
        #[track_caller]
        fn assert_free(&self, uid: u32, page_tables: u64, spaces: u64) {
            for (quota, free) in [(&self.quota, page_tables), (&self.spaces, spaces)] {
                assert!(quota.acquire_for(uid, free, false).is_ok(), "not {free}");
                assert!(quota.acquire_for(uid, free + 1, false).is_err(), "more than {free}");
            }
        }

        /// Measures when that is due.
        fn measure(&self, uid: u32) {
            std::thread::sleep(INTERVAL);
            self.left.measure_again(uid);
        }
    }

    #[test]
    fn page_tables_that_are_left_count_until_they_are_freed() {
        let case = Case::new();
        let pagemap = case.pagemap(1, 50);
        case.end(&pagemap, 7, 30);
        case.assert_free(7, 70, 2);
        // Measured just now, and of another user.
        case.set(&pagemap, 1, 20);
        let began = Instant::now();
        case.left.measure_again(7);
        case.measure(8);
        case.assert_free(7, 70, 2);
        assert!(!case.left.is_measured_since(7, began) && case.left.is_measured_since(8, began));
        case.measure(7);
        case.assert_free(7, 80, 2);
        assert!(case.left.is_measured_since(7, began));
        // The process has others by now.
        case.set(&pagemap, 1, 90);
        case.left.measure_all();
        case.assert_free(7, 80, 2);
        case.set(&pagemap, 1, 0);
        case.left.measure_all();
        case.assert_free(7, 100, 2);
        assert!(case.left.lock().is_empty());
    }

    #[test]
    fn charges_of_one_address_space_are_added_up_to_its_page_tables() {
        let case = Case::new();
        let (first, second) = (case.pagemap(1, 50), case.pagemap(1, 50));
        case.end(&first, 7, 20);
        for (charged, free) in [(20, 60), (20, 50), (20, 50)] {
            case.end(&second, 7, charged);
            case.assert_free(7, free, 2);
        }
        // Each user is charged for its own requests, and each address space for its own page tables.
        case.end(&first, 8, 10);
        case.assert_free(8, 90, 2);
        let third = case.pagemap(2, 50);
        case.end(&third, 7, 5);
        // There is room for one entry of each user: a further one counts as tracked.
        case.assert_free(7, 45, 1);
        case.set(&third, 2, 0);
        case.left.measure_all();
        case.assert_free(7, 50, 2);
    }

    #[test]
    fn address_space_that_ended_or_is_unknown_has_no_page_tables_left() {
        let case = Case::new();
        case.end(&case.pagemap(1, 0), 7, 30);
        case.end(&Arc::new(Pagemap::open(None).unwrap()), 7, 30);
        case.end(&case.pagemap(1, 50), 7, 0);
        case.assert_free(7, 100, 2);
        let pagemap = case.pagemap(1, 50);
        case.end(&pagemap, 7, 30);
        // What cannot be measured any more counts.
        case.measured.lock().unwrap().clear();
        case.left.measure_all();
        case.assert_free(7, 70, 2);
    }
}
