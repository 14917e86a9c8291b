//! Charges users for tracked address spaces, and for their page tables.
//!
//! Write protection needs page tables for a whole mapping, whether it holds data or not, and the kernel charges them to the service,
//! which makes the call. A child has those of its parent, which the kernel charged to the parent, or gets them at a harvest, if the parent
//! freed its own before the fork. When tracking ends, those that are left still count (`left_page_tables`).

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use fdmap_proto::file::Backing;
use fdmap_sys::pagemap::Pagemap;

use super::caller::is_administrator;
use super::left_page_tables::{LeftPageTables, Measure};
use super::{Caller, FileError, Limits, Quota, QuotaPermit, Quotas};
use crate::tracking::{Charge, Charged, ChildCharges, MappingExtent, RecoveredSpace};

/// Entries of a page table, of each level.
const ENTRIES: u64 = 512;
const PAGE_TABLE_BYTES: u64 = 4096;
/// Bytes that one table of the highest of four levels maps. Each address space has one, so it does not count.
const ADDRESS_SPACE_BYTES: u64 = 1 << 48;

/// The limits on tracked address spaces.
#[derive(Debug)]
pub struct TrackedQuota {
    spaces: SpaceQuota,
    /// Of children, so that forks leave room for Track requests.
    children: SpaceQuota,
}

/// The limits on address spaces, and on their page tables.
#[derive(Clone, Debug)]
struct SpaceQuota {
    count: Arc<Quota>,
    page_table_bytes: Arc<Quota>,
    left: Arc<LeftPageTables>,
}

/// A charge for a tracked address space.
#[derive(Debug)]
struct TrackedCharge {
    user: u32,
    /// For the address space, and for its page tables. `None`: dropped.
    permits: Option<[QuotaPermit; 2]>,
    /// Of an address space that may have page tables of the service.
    pagemap: OnceLock<Arc<Pagemap>>,
    left: Arc<LeftPageTables>,
}

/// Charges a user for the children of a process, as for the Track request whose mappings they inherit.
#[derive(Debug)]
struct ChildQuota {
    children: SpaceQuota,
    uid: u32,
    /// Of one child.
    bytes: u64,
}

impl TrackedQuota {
    pub(crate) fn new(quotas: &Quotas, limits: &Limits, measure: &Measure) -> Self {
        let quota = |[spaces, page_tables, left]: [&'static str; 3], max_spaces: u32| SpaceQuota {
            count: quotas.quota(spaces, max_spaces.into()),
            page_table_bytes: quotas.quota(page_tables, limits.page_table_bytes_per_user),
            left: Arc::new(LeftPageTables::new(Arc::clone(measure), quotas.quota(left, max_spaces.into()))),
        };
        let spaces = [
            "tracked address spaces",
            "bytes of page tables of tracked mappings",
            "address spaces with page tables left",
        ];
        let children = [
            "tracked children",
            "bytes of page tables of tracked children",
            "children with page tables left",
        ];
        Self {
            spaces: quota(spaces, limits.tracked_per_user),
            children: quota(children, limits.tracked_children_per_user),
        }
    }

    /// Charges the caller for an address space that maps `extents`.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn acquire(
        &self,
        caller: &Caller,
        backing: Backing,
        extents: &[MappingExtent],
    ) -> Result<Charge, FileError> {
        self.spaces.acquire(caller.uid, page_table_bytes(backing, extents.iter()), caller.admin)
    }

    /// Charges user `uid`, whose process maps `extents`, for children of the process.
    #[must_use]
    pub fn of_children(
        &self,
        uid: u32,
        backing: Backing,
        extents: &[MappingExtent],
    ) -> Arc<dyn ChildCharges> {
        let bytes = page_table_bytes(backing, extents.iter());
        Arc::new(ChildQuota { children: self.children.clone(), uid, bytes })
    }

    /// Charges the user whom a previous process of the service charged. The limits do not apply: they may be lower now.
    #[must_use]
    pub fn charge_again(&self, backing: Backing, recovered: &RecoveredSpace<'_>) -> Charge {
        let RecoveredSpace { user, extents } = recovered;
        let bytes = page_table_bytes(backing, extents.iter().copied());
        let SpaceQuota { count, page_table_bytes, .. } = &self.spaces;
        self.spaces.charge(count.charge_again(*user, 1), page_table_bytes.charge_again(*user, bytes))
    }

    /// True if the charges for page tables that address spaces of the caller have left are those of `time`, or later.
    #[must_use]
    pub fn is_measured_since(&self, caller: &Caller, time: Instant) -> bool {
        self.spaces.left.is_measured_since(self.spaces.count.owner_of(caller.uid), time)
    }

    /// Drops the charges for page tables that address spaces had left, and that were freed.
    pub fn sweep(&self) {
        for quota in [&self.spaces, &self.children] {
            quota.left.measure_all();
        }
    }
}

impl SpaceQuota {
    fn acquire(&self, uid: u32, bytes: u64, unlimited: bool) -> Result<Charge, FileError> {
        let acquire = || {
            let space = self.count.acquire_for(uid, 1, unlimited)?;
            Ok(self.charge(space, self.page_table_bytes.acquire_for(uid, bytes, unlimited)?))
        };
        acquire().or_else(|_: FileError| {
            self.left.measure_again(self.count.owner_of(uid));
            acquire()
        })
    }

    fn charge(&self, space: QuotaPermit, page_tables: QuotaPermit) -> Charge {
        let (user, left) = (space.uid(), Arc::clone(&self.left));
        let permits = Some([space, page_tables]);
        Arc::new(TrackedCharge { user, permits, pagemap: OnceLock::new(), left })
    }
}

impl Charged for TrackedCharge {
    fn user(&self) -> u32 {
        self.user
    }

    fn set_address_space(&self, pagemap: Arc<Pagemap>) {
        // A charge is for one address space.
        let _ = self.pagemap.set(pagemap);
    }
}

impl Drop for TrackedCharge {
    fn drop(&mut self) {
        if let (Some(pagemap), Some([space, page_tables])) = (self.pagemap.take(), self.permits.take()) {
            self.left.keep(pagemap, space, page_tables);
        }
    }
}

impl ChildCharges for ChildQuota {
    fn charge(&self) -> Option<Charge> {
        self.children.acquire(self.uid, self.bytes, is_administrator(self.uid)).ok()
    }
}

/// The page tables that map `extents`, in bytes.
fn page_table_bytes<'a>(backing: Backing, extents: impl Iterator<Item = &'a MappingExtent>) -> u64 {
    let page_bytes = match backing {
        Backing::Hugetlb(page_bytes) => page_bytes,
        Backing::Shmem | Backing::ShmemThp => 4096,
    };
    let mut ranges: Vec<_> =
        extents.map(|extent| extent.range).filter(|range| range.start < range.end).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let mut tables = 0_u64;
    let mut table_span = page_bytes.saturating_mul(ENTRIES);
    while table_span < ADDRESS_SPACE_BYTES {
        let mut counted_until = 0;
        for range in &ranges {
            let first = (range.start / table_span).max(counted_until);
            let end = range.end.div_ceil(table_span);
            tables = tables.saturating_add(end.saturating_sub(first));
            counted_until = counted_until.max(end);
        }
        table_span = table_span.saturating_mul(ENTRIES);
    }
    tables.saturating_mul(PAGE_TABLE_BYTES)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fdmap_proto::units::PageIndex;
    use fdmap_sys::address::AddressRange;
    use proptest::prelude::*;

    use super::*;

    fn extents(ranges: &[(u64, u64)]) -> Vec<MappingExtent> {
        let extent =
            |&(start, end)| MappingExtent { range: AddressRange { start, end }, first_page: PageIndex(0) };
        ranges.iter().map(extent).collect()
    }

    fn bytes(backing: Backing, ranges: &[(u64, u64)]) -> u64 {
        page_table_bytes(backing, extents(ranges).iter())
    }

    #[test]
    fn tables_of_all_levels_but_the_highest_count_once() {
        const GIB: u64 = 1 << 30;
        let at = 1 << 40;
        let huge = Backing::Hugetlb(2 << 20);
        let gigantic = Backing::Hugetlb(GIB);
        for (backing, ranges, tables) in [
            (Backing::Shmem, &[(at, at + GIB)][..], 512 + 1 + 1),
            (Backing::ShmemThp, &[(at, at + GIB)], 512 + 1 + 1),
            (huge, &[(at, at + GIB)], 1 + 1),
            (gigantic, &[(at, at + 4 * GIB)], 1),
            // One page on both sides of a border.
            (Backing::Shmem, &[(at - 4096, at + 4096)], 2 + 2 + 2),
            // Far from each other, and in one table.
            (Backing::Shmem, &[(at + GIB, at + GIB + 4096), (at, at + 4096)], 2 + 2 + 1),
            (Backing::Shmem, &[(at + 8192, at + 12288), (at, at + 4096)], 1 + 1 + 1),
            (Backing::Shmem, &[(at, at)], 0),
            (Backing::Shmem, &[], 0),
        ] {
            assert_eq!(bytes(backing, ranges), tables * 4096, "{backing:?} {ranges:x?}");
        }
    }

    proptest! {
        #[test]
        fn tables_are_those_of_each_page(
            ranges in prop::collection::vec((0_u64..1 << 12, 0_u64..1 << 11), 0..8),
        ) {
            let pages = |&(first, count): &(u64, u64)| first * 97..first * 97 + count;
            let mapped = ranges.iter().map(|range| (pages(range).start << 12, pages(range).end << 12));
            let mapped: Vec<_> = mapped.collect();
            let tables: BTreeSet<_> = ranges
                .iter()
                .flat_map(pages)
                .flat_map(|page| [9, 18, 27].map(|level| (level, page >> level)))
                .collect();
            prop_assert_eq!(bytes(Backing::Shmem, &mapped), tables.len() as u64 * 4096);
        }
    }

    const GIBIBYTE: &[(u64, u64)] = &[(1 << 40, (1 << 40) + (1 << 30))];

    fn caller(uid: u32) -> Caller {
        Caller::new(uid, uid, Vec::new(), 0)
    }

    /// Of two children, and of page tables for this many gibibytes.
    fn quota(gibibytes: u64) -> TrackedQuota {
        let limits = Limits {
            tracked_per_user: 100,
            tracked_children_per_user: 2,
            page_table_bytes_per_user: gibibytes * bytes(Backing::Shmem, GIBIBYTE),
            ..Limits::default()
        };
        let unknown: Measure = Arc::new(|_| None);
        TrackedQuota::new(&Quotas::new(16), &limits, &unknown)
    }

    #[test]
    fn page_tables_of_a_user_are_bounded_while_they_are_charged() {
        let (tracked, gibibyte) = (quota(2), &extents(GIBIBYTE));
        let charge = || tracked.acquire(&caller(1), Backing::Shmem, gibibyte);
        let count = |more| tracked.spaces.count.acquire_for(1, more, false).unwrap_err().to_string();
        let used =
            |gibibytes: u64| format!("{} bytes of page tables", gibibytes * bytes(Backing::Shmem, GIBIBYTE));
        let (first, second) = (charge().unwrap(), charge().unwrap());
        assert_eq!(first.user(), 1);
        assert!(charge().unwrap_err().to_string().contains(&used(2)));
        // A refused request is not charged.
        assert!(count(99).contains("2 tracked address spaces"));
        drop(first);
        let third = charge().unwrap();
        let extents = gibibyte.iter().collect();
        let again = tracked.charge_again(Backing::Shmem, &RecoveredSpace { user: 1, extents });
        assert_eq!(again.user(), 1);
        assert!(charge().unwrap_err().to_string().contains(&used(3)));
        assert!(count(98).contains("3 tracked address spaces"));
        drop((second, third, again));
        charge().unwrap();
    }

    #[test]
    fn children_are_charged_to_the_user_of_their_parent() {
        let (tracked, gibibyte) = (quota(2), &extents(GIBIBYTE));
        let of = |uid, extents| tracked.of_children(uid, Backing::Shmem, extents);
        let charges = of(1, gibibyte);
        let held = [charges.charge().unwrap(), charges.charge().unwrap()];
        assert!(charges.charge().is_none(), "two children");
        assert!(of(2, gibibyte).charge().is_some(), "another user");
        let of_root = of(0, gibibyte);
        assert_eq!((0..5).filter_map(|_| of_root.charge()).collect::<Vec<_>>().len(), 5);
        // They leave room for Track requests.
        drop([0; 2].map(|_| tracked.acquire(&caller(1), Backing::Shmem, gibibyte).unwrap()));
        drop(held);
        // Children have page tables like their parent.
        let two = &extents(&[(1 << 40, (1 << 40) + (2 << 30))]);
        let child = of(1, gibibyte).charge();
        assert!(child.is_some() && of(1, two).charge().is_none());
        // A refused child is not charged.
        assert!(of(1, gibibyte).charge().is_some());
    }
}
