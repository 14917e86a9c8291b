//! Attributes of pages: read on request, handed out and forgotten.

use std::collections::BTreeMap;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::state::{Mappers, PageAttributes, PageFlags};
use fdmap_proto::units::{PageIndex, to_usize};

use super::{BLOCK_PAGES, BlockIndex, LEAF_PAGES};

/// Attributes of one page in 24 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedAttributes {
    /// Flags under the bit numbers of /proc/kpageflags.
    pub flags: u64,
    /// Which of them are known.
    pub known_flags: u64,
    /// In how many page tables the page is mapped.
    pub map_count: u32,
    /// log2 of the pages in the folio or the large swap entry.
    pub order: u8,
    /// Which of the other fields are known: `HAS_*`.
    pub known: u8,
}

impl PackedAttributes {
    /// `order` is known.
    pub const HAS_ORDER: u8 = 1;
    /// `map_count` is known.
    pub const HAS_MAP_COUNT: u8 = 2;
    /// Whether the page is maybe pinned is known.
    pub const HAS_PINNED: u8 = 4;
    /// It is.
    pub const PINNED: u8 = 8;

    /// The attributes of `wanted` as words.
    #[must_use]
    pub fn unpack(self, wanted: AttributeSet) -> PageAttributes {
        let has = |bit| self.known & bit != 0;
        let map_count = (wanted.map_count && has(Self::HAS_MAP_COUNT)).then_some(self.map_count);
        PageAttributes {
            order: (wanted.order && has(Self::HAS_ORDER)).then_some(self.order),
            flags: (wanted.flags && self.known_flags != 0)
                .then_some(PageFlags { bits: self.flags, known: self.known_flags }),
            map_count,
            mappers: map_count.map(Mappers::of),
            maybe_pinned: (wanted.maybe_pinned && has(Self::HAS_PINNED)).then_some(has(Self::PINNED)),
        }
    }
}

/// Attributes of the pages of some blocks. Pages that are not in it have none that are known.
#[derive(Debug, Default)]
pub struct AttributeMap {
    blocks: BTreeMap<BlockIndex, Box<[PackedAttributes]>>,
}

impl AttributeMap {
    /// The attributes of the 64 pages of one leaf, to be set.
    pub fn leaf_mut(&mut self, leaf: PageIndex) -> &mut [PackedAttributes] {
        let pages = to_usize(BLOCK_PAGES);
        let block = self
            .blocks
            .entry(BlockIndex::of(leaf))
            .or_insert_with(|| vec![PackedAttributes::default(); pages].into_boxed_slice());
        let first = to_usize(leaf.0 % BLOCK_PAGES / LEAF_PAGES * LEAF_PAGES);
        &mut block[first..first + to_usize(LEAF_PAGES)]
    }

    /// Adds those of other blocks.
    pub fn append(&mut self, mut other: Self) {
        self.blocks.append(&mut other.blocks);
    }

    /// The attributes of one page.
    #[must_use]
    pub fn get(&self, page: PageIndex) -> PackedAttributes {
        let block = self.blocks.get(&BlockIndex::of(page));
        block.map_or_else(PackedAttributes::default, |block| block[to_usize(page.0 % BLOCK_PAGES)])
    }
}
