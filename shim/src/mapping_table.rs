//! The mappings of service files that this process has made. Looked at without a lock and without allocating; changed by
//! whoever has the shim's lock.

use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

use fdmap_proto::units::MappingId;
use fdmap_sys::address::AddressRange;

/// Mappings at a time; others are not known to the shim. As many as the service tracks in one file.
pub const MOST: usize = 4096;

static SLOTS: [Slot; MOST] = [const { Slot::empty() }; MOST];
/// Slots from here on were never used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// How often the table was changed.
static CHANGES: AtomicU64 = AtomicU64::new(0);
/// All mappings that ever were lie between these.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);

/// One mapping, or what is left of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it lies; up to the end of the last page.
    pub range: AddressRange,
    /// Offset in the file of its first byte.
    pub offset: u64,
    /// The file's `st_dev`.
    pub device: u64,
    /// The file's `st_ino`.
    pub inode: u64,
    /// How the service calls it, if it observes its writes.
    pub id: Option<MappingId>,
    /// It is all that goes by this id.
    pub whole: bool,
    /// The process that mapped it. A fork has it too.
    pub pid: i32,
}

struct Slot {
    /// 0 in a free slot.
    end: AtomicU64,
    start: AtomicU64,
    offset: AtomicU64,
    device: AtomicU64,
    inode: AtomicU64,
    id: AtomicU64,
    /// Negative: not whole.
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

    fn load(&self) -> Option<Entry> {
        let range = self.range();
        let pid = self.pid.load(Ordering::Relaxed);
        (range.end != 0).then(|| Entry {
            range,
            offset: self.offset.load(Ordering::Relaxed),
            device: self.device.load(Ordering::Relaxed),
            inode: self.inode.load(Ordering::Relaxed),
            id: MappingId::new(self.id.load(Ordering::Relaxed)),
            whole: pid > 0,
            pid: pid.abs(),
        })
    }

    fn store(&self, entry: &Entry) {
        // Nobody is to see the old end with the new start.
        self.end.store(0, Ordering::Release);
        self.start.store(entry.range.start, Ordering::Relaxed);
        self.offset.store(entry.offset, Ordering::Relaxed);
        self.device.store(entry.device, Ordering::Relaxed);
        self.inode.store(entry.inode, Ordering::Relaxed);
        self.id.store(entry.id.map_or(0, MappingId::get), Ordering::Relaxed);
        self.pid.store(if entry.whole { entry.pid } else { -entry.pid }, Ordering::Relaxed);
        self.end.store(entry.range.end, Ordering::Release);
    }
}

fn used() -> &'static [Slot] {
    &SLOTS[..USED.load(Ordering::Acquire).min(MOST)]
}

/// True if there ever was a mapping.
pub fn any() -> bool {
    USED.load(Ordering::Acquire) > 0
}

/// True if some mapping lies in the range, or in a part of it.
#[inline]
pub fn overlaps(range: AddressRange) -> bool {
    let hull = AddressRange { start: LOWEST.load(Ordering::Relaxed), end: HIGHEST.load(Ordering::Relaxed) };
    !hull.intersect(range).is_empty() && used().iter().any(|slot| !slot.range().intersect(range).is_empty())
}

/// Those that lie in the range or in a part of it, with their slots.
pub fn within(range: AddressRange) -> Vec<(usize, Entry)> {
    let all = used().iter().enumerate().filter_map(|(slot, place)| Some((slot, place.load()?)));
    all.filter(|(_, entry)| !entry.range.intersect(range).is_empty()).collect()
}

/// The same without their slots.
pub fn entries(range: AddressRange) -> Vec<Entry> {
    within(range).into_iter().map(|(_, entry)| entry).collect()
}

/// All of them.
pub fn all() -> Vec<(usize, Entry)> {
    within(AddressRange { start: 0, end: u64::MAX })
}

/// Another number after each change of what is mapped where.
pub fn changes() -> u64 {
    CHANGES.load(Ordering::Acquire)
}

/// Puts another one in; `None` if there is no room. Allocates nothing.
pub fn add(entry: &Entry) -> Option<usize> {
    let free = SLOTS.iter().position(|slot| slot.end.load(Ordering::Acquire) == 0)?;
    SLOTS[free].store(entry);
    CHANGES.fetch_add(1, Ordering::Release);
    LOWEST.fetch_min(entry.range.start, Ordering::Relaxed);
    HIGHEST.fetch_max(entry.range.end, Ordering::Relaxed);
    USED.fetch_max(free + 1, Ordering::Release);
    Some(free)
}

/// Says how the service calls one from now on.
pub fn set_id(slot: usize, id: Option<MappingId>) {
    if let Some(slot) = SLOTS.get(slot)
        && let Some(entry) = slot.load()
    {
        slot.store(&Entry { id, whole: true, ..entry });
    }
}

/// Takes the range out of all of them: it is mapped no longer, or by something else. Allocates nothing.
pub fn cut(range: AddressRange) {
    for slot in used() {
        let Some(entry) = slot.load() else { continue };
        let [before, after] = left_of(&entry, range);
        if before == Some(entry) {
            continue;
        }
        CHANGES.fetch_add(1, Ordering::Release);
        match (before, after) {
            (Some(before), after) => {
                slot.store(&before);
                // Without room the rest is not known any more; the service goes on to observe it.
                let _ = after.and_then(|after| add(&after));
            }
            (None, Some(after)) => slot.store(&after),
            (None, None) => slot.end.store(0, Ordering::Release),
        }
    }
}

/// What is left of a mapping before and after a range; the mapping itself before, if the range touches it not at all. Pure.
fn left_of(entry: &Entry, range: AddressRange) -> [Option<Entry>; 2] {
    let gone = entry.range.intersect(range);
    if gone.is_empty() {
        return [Some(*entry), None];
    }
    let part = |start: u64, end: u64| {
        let offset = entry.offset + (start - entry.range.start);
        (start < end).then_some(Entry { range: AddressRange { start, end }, offset, whole: false, ..*entry })
    };
    [part(entry.range.start, gone.start), part(gone.end, entry.range.end)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(start: u64, end: u64) -> Entry {
        Entry {
            range: AddressRange { start, end },
            offset: 0x10_0000 + start,
            device: 1,
            inode: 2,
            id: MappingId::new(9),
            whole: true,
            pid: 5,
        }
    }

    /// One test, since the table is the process's.
    #[test]
    fn table_follows_what_is_unmapped() {
        let range = |start, end| AddressRange { start, end };
        assert!(!overlaps(range(0, u64::MAX)));
        let first = add(&entry(0x10000, 0x20000)).unwrap();
        add(&entry(0x30000, 0x40000)).unwrap();
        assert!(overlaps(range(0x1f000, 0x30000)) && !overlaps(range(0x20000, 0x30000)));
        assert_eq!(within(range(0x1f000, 0x21000)), [(first, entry(0x10000, 0x20000))]);

        cut(range(0x12000, 0x13000));
        let mut left: Vec<_> =
            all().into_iter().map(|(_, entry)| (entry.range, entry.offset, entry.whole)).collect();
        left.sort();
        let part = |start, end, whole| (range(start, end), 0x10_0000 + start, whole);
        assert_eq!(
            left,
            [part(0x10000, 0x12000, false), part(0x13000, 0x20000, false), part(0x30000, 0x40000, true)]
        );
        set_id(first, None);
        assert_eq!(within(range(0x10000, 0x11000))[0].1.id, None);

        cut(range(0, 0x35000));
        assert_eq!(all().len(), 1);
        assert_eq!(all()[0].1.range, range(0x35000, 0x40000));
        cut(range(0, u64::MAX));
        assert_eq!(all(), []);

        for nth in 0..u64::try_from(MOST).unwrap() {
            add(&entry(nth * 0x1000 + 0x1000, nth * 0x1000 + 0x2000)).unwrap();
        }
        assert_eq!(add(&entry(0, 0x1000)), None, "full");
        cut(range(0, u64::MAX));
    }
}
