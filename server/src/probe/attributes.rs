//! Decodes page attributes from the copied fields of `struct page` and `struct folio`. Pure.

use std::sync::atomic::{AtomicBool, Ordering};

use fdmap_proto::attributes::{KnownFlags, PageFlags};
use fdmap_proto::units::PageIndex;

use super::leaf::LeafPages;
use crate::bpf::records::{AttributesRecord, Known, RawAttributes, SLOTS};
use crate::pages::{AttributeMap, PackedAttributes};

/// A small folio with at least this many references may be pinned: `GUP_PIN_COUNTING_BIAS` of `linux/mm.h`.
const PIN_BIAS: u32 = 1024;

/// Translates this kernel's bit numbers of page flags to those of /proc/kpageflags.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlagTable {
    /// Pairs of this kernel's bit and the bit in /proc/kpageflags.
    bits: Vec<(u32, u32)>,
}

impl FlagTable {
    /// Builds the table from the members of the kernel's `enum pageflags`.
    #[must_use]
    pub fn new<'a>(members: impl IntoIterator<Item = (&'a str, i64)>) -> Self {
        let mut bits = Vec::new();
        for (name, value) in members {
            let Some(name) = name.strip_prefix("PG_") else {
                continue;
            };
            // Some bits have several names (PG_swapcache is PG_owner_priv_1); NAMES has the one that applies to shmem.
            let known = PageFlags::from_name(&name.to_uppercase());
            if let (Some(flag), Ok(bit @ 0..64)) = (known, u32::try_from(value)) {
                bits.push((bit, flag.bits().trailing_zeros()));
            }
        }
        Self { bits }
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bits.is_empty()
    }

    fn translate(&self, raw: u64) -> KnownFlags {
        let mut flags = KnownFlags::default();
        for (bit, kpf) in &self.bits {
            flags.known |= PageFlags::from_bits_retain(1 << kpf);
            flags.set |= PageFlags::from_bits_retain((raw >> bit & 1) << kpf);
        }
        flags
    }
}

/// Observations of how this kernel counts mappings.
#[derive(Debug, Default)]
pub struct MapCounts {
    /// A page of a large folio had its own map count. Kernels with `CONFIG_NO_PAGE_MAPCOUNT` never count these pages,
    /// so a count of 0 means nothing until this is set.
    per_page_counts_seen: AtomicBool,
}

/// Decodes the attributes of one walk.
#[derive(Debug)]
pub struct AttributeDecoder<'a> {
    /// The result.
    pub map: &'a mut AttributeMap,
    pub flags: &'a FlagTable,
    pub counts: &'a MapCounts,
}

impl AttributeDecoder<'_> {
    /// Decodes one leaf. `records` are in ascending order. Without a record for this leaf, only the orders are known.
    pub fn leaf(&mut self, base: PageIndex, pages: &LeafPages, records: &[AttributesRecord]) {
        let raw = records.binary_search_by_key(&base.0, |record| record.base).ok().map(|at| &records[at]);
        // Adjacent pages mostly have the same flags, so cache the last translation.
        let mut last = (0, self.flags.translate(0));
        let mut values = [PackedAttributes::default(); SLOTS];
        for (i, packed) in values.iter_mut().enumerate() {
            if pages.data >> i & 1 == 0 {
                continue;
            }
            *packed = PackedAttributes {
                order: pages.order[i],
                known: PackedAttributes::HAS_ORDER,
                ..PackedAttributes::default()
            };
            let Some(raw) = raw.map(|raw| &raw.pages[i]).filter(|_| pages.swapped >> i & 1 == 0) else {
                continue;
            };
            if raw.has(Known::FDMAP_KNOWN_FLAGS) {
                if last.0 != raw.flags {
                    last = (raw.flags, self.flags.translate(raw.flags));
                }
                (packed.flags, packed.known_flags) = (last.1.set.bits(), last.1.known.bits());
            }
            decode_counts(packed, raw, self.counts);
        }
        self.map.put_leaf(base, pages.data, &values);
    }
}

fn decode_counts(packed: &mut PackedAttributes, raw: &RawAttributes, counts: &MapCounts) {
    if let Some(count) = counts.of(packed.order, raw) {
        packed.map_count = count;
        packed.known |= PackedAttributes::HAS_MAP_COUNT;
    }
    let pinned = if packed.order > 0 {
        raw.has(Known::FDMAP_KNOWN_FOLIO).then_some(raw.pin_count > 0)
    } else {
        // Like the kernel, compare as unsigned: a count that overflowed is pinned.
        raw.has(Known::FDMAP_KNOWN_REFCOUNT).then_some(raw.refcount.cast_unsigned() >= PIN_BIAS)
    };
    if let Some(pinned) = pinned {
        packed.known |= PackedAttributes::HAS_PINNED | if pinned { PackedAttributes::PINNED } else { 0 };
    }
}

impl MapCounts {
    /// Number of page table entries that map the page; `None` if unknown.
    fn of(&self, order: u8, raw: &RawAttributes) -> Option<u32> {
        if !raw.has(Known::FDMAP_KNOWN_MAP_COUNT) {
            return None;
        }
        let of_page = count(raw.map_count)?;
        if order == 0 {
            return Some(of_page);
        }
        if !raw.has(Known::FDMAP_KNOWN_FOLIO) {
            return None;
        }
        let of_folio = count(raw.entire_map_count)?;
        if of_page > 0 {
            self.per_page_counts_seen.store(true, Ordering::Relaxed);
        } else if raw.has(Known::FDMAP_KNOWN_LARGE) {
            // If another page of the folio is mapped by itself, this count is 0 because this page is not mapped, or
            // because the kernel does not count single pages.
            let elsewhere = count(raw.large_map_count)? > of_folio;
            if elsewhere && !self.per_page_counts_seen.load(Ordering::Relaxed) {
                return None;
            }
        }
        Some(of_page + of_folio)
    }
}

/// The kernel's map counters start at -1. Lower values are invalid.
fn count(counter: i32) -> Option<u32> {
    u32::try_from(counter.checked_add(1)?).ok()
}

#[cfg(test)]
mod tests {
    use fdmap_proto::attributes::{Mappers, PageAttributes};
    use fdmap_proto::convert::AttributeSet;

    use super::*;

    const SMALL: RawAttributes = RawAttributes {
        flags: 1 << 4,
        map_count: 0,
        refcount: 2,
        entire_map_count: 0,
        pin_count: 0,
        large_map_count: 0,
        known: known(&[Known::FDMAP_KNOWN_FLAGS, Known::FDMAP_KNOWN_MAP_COUNT, Known::FDMAP_KNOWN_REFCOUNT]),
    };
    const LARGE: RawAttributes = RawAttributes {
        known: known(&[SMALL.known, Known::FDMAP_KNOWN_FOLIO, Known::FDMAP_KNOWN_LARGE]),
        map_count: -1,
        ..SMALL
    };

    const fn known(bits: &[Known]) -> Known {
        let (mut all, mut i) = (0, 0);
        while i < bits.len() {
            all |= bits[i].0;
            i += 1;
        }
        Known(all)
    }

    fn decode(order: u8, raw: RawAttributes, counts: &MapCounts) -> PageAttributes {
        let mut map = AttributeMap::default();
        let flags = FlagTable::new([("PG_dirty", 4), ("PG_uptodate", 3), ("PG_nonsense", 5)]);
        let mut pages = LeafPages::of_slots(&[0x1000; SLOTS]);
        pages.order = [order; SLOTS];
        let record = AttributesRecord { base: 64, pad: 0, pages: [raw; SLOTS] };
        AttributeDecoder { map: &mut map, flags: &flags, counts }.leaf(PageIndex(64), &pages, &[record]);
        map.get(PageIndex(70)).unpack(AttributeSet::ALL)
    }

    #[test]
    fn small_folio_has_flags_mappers_and_pins() {
        let got = decode(0, SMALL, &MapCounts::default());
        assert_eq!(got.order, Some(0));
        assert_eq!(got.flags.unwrap().valid().names().collect::<Vec<_>>(), ["dirty"]);
        assert_eq!(
            got.flags.unwrap().known,
            fdmap_proto::PageFlags::DIRTY | fdmap_proto::PageFlags::UPTODATE
        );
        assert_eq!((got.map_count, got.mappers), (Some(1), Some(Mappers::One)));
        assert_eq!(got.maybe_pinned, Some(false));
        let pinned = decode(0, RawAttributes { refcount: 1026, ..SMALL }, &MapCounts::default());
        assert_eq!(pinned.maybe_pinned, Some(true));
    }

    #[test]
    fn huge_mapping_counts_for_each_page() {
        let huge = RawAttributes { entire_map_count: 1, large_map_count: 1, ..LARGE };
        let got = decode(9, huge, &MapCounts::default());
        assert_eq!((got.map_count, got.mappers), (Some(2), Some(Mappers::Several)));
    }

    #[test]
    fn page_of_a_large_folio_is_uncounted_until_the_kernel_counts_one() {
        let counts = MapCounts::default();
        let elsewhere = RawAttributes { entire_map_count: -1, large_map_count: 3, ..LARGE };
        assert_eq!(decode(4, elsewhere, &counts).map_count, None);
        let counted = RawAttributes { map_count: 0, ..elsewhere };
        assert_eq!(decode(4, counted, &counts).map_count, Some(1));
        assert_eq!(decode(4, elsewhere, &counts).map_count, Some(0));
    }

    #[test]
    fn large_folio_is_pinned_by_its_own_counter() {
        let busy = RawAttributes { refcount: 5000, ..LARGE };
        assert_eq!(decode(4, busy, &MapCounts::default()).maybe_pinned, Some(false));
        let pinned = RawAttributes { pin_count: 1, ..LARGE };
        assert_eq!(decode(4, pinned, &MapCounts::default()).maybe_pinned, Some(true));
    }

    #[test]
    fn unread_fields_are_unknown() {
        let got = decode(0, RawAttributes { known: Known(0), ..SMALL }, &MapCounts::default());
        assert_eq!(got, PageAttributes { order: Some(0), ..PageAttributes::default() });
        let got = decode(4, SMALL, &MapCounts::default());
        assert_eq!((got.map_count, got.maybe_pinned), (None, None), "a large folio read as a small one");
    }
}
