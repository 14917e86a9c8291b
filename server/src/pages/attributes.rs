//! Page attributes, which are read on request and not kept in snapshots.

use std::collections::BTreeMap;
use std::sync::Arc;

use fdmap_proto::attributes::{KnownFlags, Mappers, PageAttributes, PageFlags};
use fdmap_proto::convert::AttributeSet;
use fdmap_proto::units::{PageIndex, PageRange, to_usize};

use super::blocks::LEAF_PAGES;

/// Attributes of one page in 24 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedAttributes {
    /// Flags under the bit numbers of /proc/kpageflags.
    pub flags: u64,
    /// Which bits of `flags` are known.
    pub known_flags: u64,
    /// Number of page table entries that map the page.
    pub map_count: u32,
    /// log2 of the pages in the folio or the large swap entry.
    pub order: u8,
    /// Which of the other fields are known: `HAS_*`.
    pub known: u8,
}

impl PackedAttributes {
    pub const HAS_ORDER: u8 = 1;
    pub const HAS_MAP_COUNT: u8 = 2;
    /// [`Self::PINNED`] is valid.
    pub const HAS_PINNED: u8 = 4;
    /// The page may be pinned.
    pub const PINNED: u8 = 8;

    /// The known attributes among `requested`.
    #[must_use]
    pub fn unpack(self, requested: AttributeSet) -> PageAttributes {
        let has = |bit| self.known & bit != 0;
        let map_count = (requested.map_count && has(Self::HAS_MAP_COUNT)).then_some(self.map_count);
        PageAttributes {
            order: (requested.order && has(Self::HAS_ORDER)).then_some(self.order),
            flags: (requested.flags && self.known_flags != 0).then_some(KnownFlags {
                set: PageFlags::from_bits_retain(self.flags),
                known: PageFlags::from_bits_retain(self.known_flags),
            }),
            map_count,
            mappers: map_count.map(Mappers::of),
            maybe_pinned: (requested.maybe_pinned && has(Self::HAS_PINNED)).then_some(has(Self::PINNED)),
        }
    }
}

/// Attributes of pages. Pages outside of the map have no known attributes. A page takes at most 24 bytes, and a leaf of
/// 64 pages about 80 more.
#[derive(Clone, Debug, Default)]
pub struct AttributeMap {
    /// Key: page / 64.
    leaves: BTreeMap<u64, Leaf>,
    /// Memory of the leaves, in bytes.
    bytes: usize,
}

#[derive(Clone, Debug)]
struct Leaf {
    /// Bitmap of pages with attributes.
    pages: u64,
    /// One value for each of these pages in page order, or a single value if all are equal.
    values: Arc<[PackedAttributes]>,
}

impl Leaf {
    fn new(pages: u64, values: &[PackedAttributes; LEAF]) -> Option<Self> {
        let with = (0..LEAF).filter(|page| pages >> page & 1 == 1);
        let mut values: Vec<_> = with.map(|page| values[page]).collect();
        let first = *values.first()?;
        if values.iter().all(|value| *value == first) {
            values.truncate(1);
        }
        Some(Self { pages, values: values.into() })
    }

    /// Memory in a map, in bytes.
    fn bytes(&self) -> usize {
        // A node of the tree is at least half full.
        let place = 2 * size_of::<(u64, Self)>();
        place + 16 + size_of_val(&*self.values)
    }

    fn get(&self, page: u64) -> Option<PackedAttributes> {
        if self.pages >> page & 1 == 0 {
            return None;
        }
        let nth = (self.pages & ((1 << page) - 1)).count_ones();
        self.values.get(to_usize(u64::from(nth))).or_else(|| self.values.first()).copied()
    }
}

/// Pages in a leaf.
const LEAF: usize = to_usize(LEAF_PAGES);

impl AttributeMap {
    /// Replaces the attributes of the 64 pages from `first` on, which is a multiple of 64. Pages outside of the bitmap
    /// `pages` have none.
    pub fn put_leaf(&mut self, first: PageIndex, pages: u64, values: &[PackedAttributes; LEAF]) {
        let at = first.0 / LEAF_PAGES;
        let replaced = match Leaf::new(pages, values) {
            Some(leaf) => {
                self.bytes += leaf.bytes();
                self.leaves.insert(at, leaf)
            }
            None => self.leaves.remove(&at),
        };
        self.bytes -= replaced.as_ref().map_or(0, Leaf::bytes);
    }

    /// Adds the leaves of `other`, which are of other pages.
    pub fn append(&mut self, mut other: Self) {
        self.bytes += other.bytes;
        self.leaves.append(&mut other.leaves);
    }

    /// The leaves that contain pages of `ranges`. Both maps share them.
    #[must_use]
    pub fn restricted(&self, ranges: &[PageRange]) -> Self {
        let leaves = ranges.iter().filter(|range| !range.is_empty()).flat_map(|range| {
            let (first, end) = (range.start().0 / LEAF_PAGES, range.end().0.div_ceil(LEAF_PAGES));
            self.leaves.range(first..end).map(|(at, leaf)| (*at, leaf.clone()))
        });
        let leaves: BTreeMap<_, _> = leaves.collect();
        let bytes = leaves.values().map(Leaf::bytes).sum();
        Self { leaves, bytes }
    }

    #[must_use]
    pub fn get(&self, page: PageIndex) -> PackedAttributes {
        let leaf = self.leaves.get(&(page.0 / LEAF_PAGES));
        leaf.and_then(|leaf| leaf.get(page.0 % LEAF_PAGES)).unwrap_or_default()
    }

    /// Approximate memory in bytes. Shared values are counted in each map.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packed(order: u8) -> PackedAttributes {
        PackedAttributes { order, known: PackedAttributes::HAS_ORDER, ..PackedAttributes::default() }
    }

    proptest! {
        #[test]
        fn leaves_return_the_stored_attributes(pages in any::<u64>(), orders in proptest::array::uniform32(0_u8..3), alike in any::<bool>()) {
            let values: [_; LEAF] = std::array::from_fn(|i| packed(if alike { 7 } else { orders[i / 2] }));
            let mut map = AttributeMap::default();
            map.put_leaf(PageIndex(128), u64::MAX, &[packed(9); LEAF]);
            map.put_leaf(PageIndex(128), pages, &values);
            for (i, value) in values.iter().enumerate() {
                let expected = if pages >> i & 1 == 1 { *value } else { PackedAttributes::default() };
                prop_assert_eq!(map.get(PageIndex(128 + i as u64)), expected);
            }
            prop_assert_eq!(map.get(PageIndex(127)), PackedAttributes::default());
            prop_assert_eq!(map.get(PageIndex(192)), PackedAttributes::default());
        }
    }

    #[test]
    fn single_pages_take_little_memory() {
        let mut map = AttributeMap::default();
        for block in 0..1024 {
            map.put_leaf(PageIndex(block * 4096), 1 << (block % 64), &[packed(0); LEAF]);
        }
        assert!(map.bytes() < 1024 * 130, "{} bytes", map.bytes());
    }

    #[test]
    fn restricted_map_has_the_requested_leaves_only() {
        let mut map = AttributeMap::default();
        for leaf in 0..100 {
            map.put_leaf(PageIndex(leaf * 64), u64::MAX, &[packed(1); LEAF]);
        }
        let range = |start, end| PageRange::new(PageIndex(start), PageIndex(end)).unwrap();
        let some = map.restricted(&[range(700, 701), range(64, 128), range(100, 129), range(5, 5)]);
        assert_eq!(some.leaves.keys().copied().collect::<Vec<_>>(), [1, 2, 10]);
        assert_eq!(some.get(PageIndex(700)), packed(1));
    }
}
