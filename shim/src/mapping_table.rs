//! The table of mappings of service files made by this process. Reads take no lock and do not allocate, except functions that
//! return a `Vec`. Changes need the lock of the session.

use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

use fdmap_proto::units::MappingId;
use fdmap_sys::address::AddressRange;

/// Maximum number of mappings in the table, equal to the number that the service tracks in one file. Further mappings are unknown to
/// the shim.
pub const MAX_MAPPINGS: usize = 4096;

static SLOTS: [Slot; MAX_MAPPINGS] = [const { Slot::empty() }; MAX_MAPPINGS];
/// Number of slots in use or used before; later slots are empty.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Number of changes of the table.
static CHANGES: AtomicU64 = AtomicU64::new(0);
/// Bounds of all mappings ever added.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);

/// A mapping of a service file, or the part of it that is still mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShimMapping {
    /// Mapped range, up to the end of its last page.
    pub range: AddressRange,
    /// File offset of the first byte.
    pub offset: u64,
    /// `st_dev` of the file.
    pub device: u64,
    /// `st_ino` of the file.
    pub inode: u64,
    /// The service's id of the mapping; `None` if it is not tracked.
    pub id: Option<MappingId>,
    /// The mapping is all that the id stands for: no part of it was unmapped.
    pub whole: bool,
    /// The process that mapped it. A forked child has the mapping too.
    pub pid: i32,
}

struct Slot {
    /// 0 if the slot is free.
    end: AtomicU64,
    start: AtomicU64,
    offset: AtomicU64,
    device: AtomicU64,
    inode: AtomicU64,
    id: AtomicU64,
    /// Negative if the mapping is not whole.
    pid: AtomicI32,
}

impl Slot {
    const fn empty() -> Self {
        Self {
            end: AtomicU64::new(0),
            start: AtomicU64::new(0),
            offset: AtomicU64::new(0),
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
            id: AtomicU64::new(0),
            pid: AtomicI32::new(0),
        }
    }

    fn range(&self) -> AddressRange {
        let end = self.end.load(Ordering::Acquire);
        AddressRange { start: self.start.load(Ordering::Relaxed), end }
    }

    fn load(&self) -> Option<ShimMapping> {
        let range = self.range();
        let pid = self.pid.load(Ordering::Relaxed);
        (range.end != 0).then(|| ShimMapping {
            range,
            offset: self.offset.load(Ordering::Relaxed),
            device: self.device.load(Ordering::Relaxed),
            inode: self.inode.load(Ordering::Relaxed),
            id: MappingId::new(self.id.load(Ordering::Relaxed)),
            whole: pid > 0,
            pid: pid.abs(),
        })
    }

    fn store(&self, mapping: &ShimMapping) {
        // A concurrent reader must not combine the old end with the new start.
        self.end.store(0, Ordering::Release);
        self.start.store(mapping.range.start, Ordering::Relaxed);
        self.offset.store(mapping.offset, Ordering::Relaxed);
        self.device.store(mapping.device, Ordering::Relaxed);
        self.inode.store(mapping.inode, Ordering::Relaxed);
        self.id.store(mapping.id.map_or(0, MappingId::get), Ordering::Relaxed);
        self.pid.store(if mapping.whole { mapping.pid } else { -mapping.pid }, Ordering::Relaxed);
        self.end.store(mapping.range.end, Ordering::Release);
    }
}

fn used() -> &'static [Slot] {
    &SLOTS[..USED.load(Ordering::Acquire).min(MAX_MAPPINGS)]
}

/// Checks whether a mapping was ever added.
pub fn was_ever_used() -> bool {
    USED.load(Ordering::Acquire) > 0
}

/// Checks whether a mapping overlaps the range.
#[inline]
pub fn overlaps(range: AddressRange) -> bool {
    let hull = AddressRange { start: LOWEST.load(Ordering::Relaxed), end: HIGHEST.load(Ordering::Relaxed) };
    !hull.intersect(range).is_empty() && used().iter().any(|slot| !slot.range().intersect(range).is_empty())
}

/// Returns the mappings that overlap the range, with their slots.
pub fn overlapping_with_slots(range: AddressRange) -> Vec<(usize, ShimMapping)> {
    let all = used().iter().enumerate().filter_map(|(number, slot)| Some((number, slot.load()?)));
    all.filter(|(_, mapping)| !mapping.range.intersect(range).is_empty()).collect()
}

/// Returns the mappings that overlap the range.
pub fn overlapping(range: AddressRange) -> Vec<ShimMapping> {
    overlapping_with_slots(range).into_iter().map(|(_, mapping)| mapping).collect()
}

/// Returns all mappings with their slots.
pub fn all() -> Vec<(usize, ShimMapping)> {
    overlapping_with_slots(AddressRange { start: 0, end: u64::MAX })
}

/// A number that increases whenever a mapping is added or removed.
pub fn change_count() -> u64 {
    CHANGES.load(Ordering::Acquire)
}

/// Adds a mapping and returns its slot; `None` if the table is full. Does not allocate.
pub fn add(mapping: &ShimMapping) -> Option<usize> {
    let free = SLOTS.iter().position(|slot| slot.end.load(Ordering::Acquire) == 0)?;
    SLOTS[free].store(mapping);
    CHANGES.fetch_add(1, Ordering::Release);
    LOWEST.fetch_min(mapping.range.start, Ordering::Relaxed);
    HIGHEST.fetch_max(mapping.range.end, Ordering::Relaxed);
    USED.fetch_max(free + 1, Ordering::Release);
    Some(free)
}

/// Sets the id of the mapping in `slot`, which is whole from then on.
pub fn set_id(slot: usize, id: Option<MappingId>) {
    if let Some(slot) = SLOTS.get(slot)
        && let Some(mapping) = slot.load()
    {
        slot.store(&ShimMapping { id, whole: true, ..mapping });
    }
}

/// Removes a range that is no longer mapped, or maps something else, from all mappings. Does not allocate.
pub fn remove_range(range: AddressRange) {
    for slot in used() {
        let Some(mapping) = slot.load() else { continue };
        let [before, after] = split_around(&mapping, range);
        if before == Some(mapping) {
            continue;
        }
        CHANGES.fetch_add(1, Ordering::Release);
        match (before, after) {
            (Some(before), after) => {
                slot.store(&before);
                // If the table is full, the second part becomes unknown to the shim; the service keeps tracking it.
                let _ = after.and_then(|after| add(&after));
            }
            (None, Some(after)) => slot.store(&after),
            (None, None) => slot.end.store(0, Ordering::Release),
        }
    }
}

/// Returns the parts of a mapping before and after a range; the whole mapping as the first part if they do not overlap. Pure.
fn split_around(mapping: &ShimMapping, range: AddressRange) -> [Option<ShimMapping>; 2] {
    let removed = mapping.range.intersect(range);
    if removed.is_empty() {
        return [Some(*mapping), None];
    }
    let part = |start: u64, end: u64| {
        let offset = mapping.offset + (start - mapping.range.start);
        (start < end).then_some(ShimMapping {
            range: AddressRange { start, end },
            offset,
            whole: false,
            ..*mapping
        })
    };
    [part(mapping.range.start, removed.start), part(removed.end, mapping.range.end)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: u64, end: u64) -> ShimMapping {
        ShimMapping {
            range: AddressRange { start, end },
            offset: 0x10_0000 + start,
            device: 1,
            inode: 2,
            id: MappingId::new(9),
            whole: true,
            pid: 5,
        }
    }

    /// One test, because the table is global.
    #[test]
    fn removed_ranges_split_and_free_mappings() {
        let range = |start, end| AddressRange { start, end };
        assert!(!overlaps(range(0, u64::MAX)));
        let first = add(&mapping(0x10000, 0x20000)).unwrap();
        add(&mapping(0x30000, 0x40000)).unwrap();
        assert!(overlaps(range(0x1f000, 0x30000)) && !overlaps(range(0x20000, 0x30000)));
        assert_eq!(overlapping_with_slots(range(0x1f000, 0x21000)), [(first, mapping(0x10000, 0x20000))]);

        remove_range(range(0x12000, 0x13000));
        let mut remaining: Vec<_> =
            all().into_iter().map(|(_, mapping)| (mapping.range, mapping.offset, mapping.whole)).collect();
        remaining.sort();
        let part = |start, end, whole| (range(start, end), 0x10_0000 + start, whole);
        assert_eq!(
            remaining,
            [part(0x10000, 0x12000, false), part(0x13000, 0x20000, false), part(0x30000, 0x40000, true)]
        );
        set_id(first, None);
        assert_eq!(overlapping_with_slots(range(0x10000, 0x11000))[0].1.id, None);

        remove_range(range(0, 0x35000));
        assert_eq!(all().len(), 1);
        assert_eq!(all()[0].1.range, range(0x35000, 0x40000));
        remove_range(range(0, u64::MAX));
        assert_eq!(all(), []);

        for nth in 0..u64::try_from(MAX_MAPPINGS).unwrap() {
            add(&mapping(nth * 0x1000 + 0x1000, nth * 0x1000 + 0x2000)).unwrap();
        }
        assert_eq!(add(&mapping(0, 0x1000)), None, "the table is full");
        remove_range(range(0, u64::MAX));
    }
}
