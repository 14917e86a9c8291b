//! Attributes of pages: from what was read of `struct page` and `struct folio`. Pure.

use std::sync::atomic::{AtomicBool, Ordering};

use fdmap_proto::state::PageFlags;
use fdmap_proto::units::PageIndex;

use super::leaf::LeafPages;
use super::record::{
    AttributesRecord, KNOWN_FLAGS, KNOWN_FOLIO, KNOWN_LARGE, KNOWN_MAP_COUNT, KNOWN_REFCOUNT, RawAttributes,
    SLOTS,
};
use crate::pages::{AttributeMap, PackedAttributes};

/// References beyond which a small folio counts as maybe pinned: `GUP_PIN_COUNTING_BIAS` of `linux/mm.h`.
const PIN_BIAS: u32 = 1024;

/// This kernel's numbers of the page flags that fdmap reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlagTable {
    /// The kernel's bit, and that of /proc/kpageflags.
    bits: Vec<(u32, u32)>,
}

impl FlagTable {
    /// From the members of the kernel's `enum pageflags`.
    #[must_use]
    pub fn new<'a>(members: impl IntoIterator<Item = (&'a str, i64)>) -> Self {
        let mut bits = Vec::new();
        for (name, value) in members {
            let Some(name) = name.strip_prefix("PG_") else {
                continue;
            };
            // Names that are a second meaning of a bit (PG_swapcache is PG_owner_priv_1) are what shmem uses it for.
            let known = PageFlags::NAMES.iter().find(|(_, known)| *known == name);
            if let (Some((kpf, _)), Ok(bit @ 0..64)) = (known, u32::try_from(value)) {
                bits.push((bit, *kpf));
            }
        }
        Self { bits }
    }

    /// True if it knows no flag.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bits.is_empty()
    }

    fn translate(&self, raw: u64) -> PageFlags {
        let mut flags = PageFlags::default();
        for (bit, kpf) in &self.bits {
            flags.known |= 1 << kpf;
            flags.bits |= (raw >> bit & 1) << kpf;
        }
        flags
    }
}

/// What is known of how this kernel counts mappings.
#[derive(Debug, Default)]
pub struct MapCounts {
    /// Pages of large folios have been seen to have counts of their own. Kernels built with
    /// `CONFIG_NO_PAGE_MAPCOUNT` never count them: there a 0 says nothing.
    of_pages_seen: AtomicBool,
}

/// Turns what was read into attributes.
#[derive(Debug)]
pub struct AttributeDecoder<'a> {
    /// Where they go.
    pub map: &'a mut AttributeMap,
    /// The kernel's flags.
    pub flags: &'a FlagTable,
    /// How it counts mappings.
    pub counts: &'a MapCounts,
}

impl AttributeDecoder<'_> {
    /// The pages of one leaf. `records` are in ascending order; if none is for this leaf, only orders are known.
    pub fn leaf(&mut self, base: PageIndex, pages: &LeafPages, records: &[AttributesRecord]) {
        let raw = records.binary_search_by_key(&base.0, |record| record.base).ok().map(|at| &records[at]);
        // Neighbours mostly have the same flags.
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
            if raw.known & KNOWN_FLAGS != 0 {
                if last.0 != raw.flags {
                    last = (raw.flags, self.flags.translate(raw.flags));
                }
                (packed.flags, packed.known_flags) = (last.1.bits, last.1.known);
            }
            resident(packed, raw, self.counts);
        }
        self.map.put_leaf(base, pages.data, &values);
    }
}

fn resident(packed: &mut PackedAttributes, raw: &RawAttributes, counts: &MapCounts) {
    let has = |bit| raw.known & bit == bit;
    if let Some(count) = counts.of(packed.order, raw) {
        packed.map_count = count;
        packed.known |= PackedAttributes::HAS_MAP_COUNT;
    }
    let pinned = if packed.order > 0 {
        has(KNOWN_FOLIO).then_some(raw.pin_count > 0)
    } else {
        // As the kernel does: an overflowed count compares as unsigned and is pinned.
        has(KNOWN_REFCOUNT).then_some(raw.refcount.cast_unsigned() >= PIN_BIAS)
    };
    if let Some(pinned) = pinned {
        packed.known |= PackedAttributes::HAS_PINNED | if pinned { PackedAttributes::PINNED } else { 0 };
    }
}

impl MapCounts {
    /// Page tables that map the page; `None` if that cannot be told.
    fn of(&self, order: u8, raw: &RawAttributes) -> Option<u32> {
        let has = |bit| raw.known & bit == bit;
        if !has(KNOWN_MAP_COUNT) {
            return None;
        }
        let of_page = count(raw.map_count)?;
        if order == 0 {
            return Some(of_page);
        }
        if !has(KNOWN_FOLIO) {
            return None;
        }
        let of_folio = count(raw.entire_map_count)?;
        if of_page > 0 {
            self.of_pages_seen.store(true, Ordering::Relaxed);
        } else if has(KNOWN_LARGE) {
            // Some page of the folio is mapped by itself. Is it just not this one, or are they not counted?
            let elsewhere = count(raw.large_map_count)? > of_folio;
            if elsewhere && !self.of_pages_seen.load(Ordering::Relaxed) {
                return None;
            }
        }
        Some(of_page + of_folio)
    }
}

/// The kernel's counters of mappings begin at -1; anything below is no count.
fn count(counter: i32) -> Option<u32> {
    u32::try_from(counter.checked_add(1)?).ok()
}

#[cfg(test)]
mod tests {
    use fdmap_proto::convert::AttributeSet;
    use fdmap_proto::state::{Mappers, PageAttributes};

    use super::*;

    const SMALL: RawAttributes = RawAttributes {
        flags: 1 << 4,
        map_count: 0,
        refcount: 2,
        entire_map_count: 0,
        pin_count: 0,
        large_map_count: 0,
        known: KNOWN_FLAGS | KNOWN_MAP_COUNT | KNOWN_REFCOUNT,
    };
    const LARGE: RawAttributes =
        RawAttributes { known: SMALL.known | KNOWN_FOLIO | KNOWN_LARGE, map_count: -1, ..SMALL };

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
    fn small_folio_tells_flags_mappers_and_pins() {
        let got = decode(0, SMALL, &MapCounts::default());
        assert_eq!(got.order, Some(0));
        assert_eq!(got.flags.unwrap().names().collect::<Vec<_>>(), ["dirty"]);
        assert_eq!(got.flags.unwrap().known, 1 << 4 | 1 << 3);
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
    fn uncounted_page_of_a_large_folio_is_unknown_until_the_kernel_was_seen_to_count() {
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
    fn what_was_not_read_is_unknown() {
        let got = decode(0, RawAttributes { known: 0, ..SMALL }, &MapCounts::default());
        assert_eq!(got, PageAttributes { order: Some(0), ..PageAttributes::default() });
        let got = decode(4, SMALL, &MapCounts::default());
        assert_eq!((got.map_count, got.maybe_pinned), (None, None), "a large folio read as a small one");
    }
}
