//! Blocks and leaves: the units in which states are read and stored.

use fdmap_proto::units::{PageIndex, PageRange};

/// Pages in a block: what one level-1 node of the XArray covers.
pub const BLOCK_PAGES: u64 = 4096;
/// Pages in a leaf: the number of slots in an XArray node.
pub const LEAF_PAGES: u64 = 64;
/// Leaves in a block.
pub const BLOCK_LEAVES: usize = 64;

/// A block of a file: page index / 4096.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockIndex(pub u64);

impl BlockIndex {
    /// The block that holds `page`.
    #[must_use]
    pub const fn of(page: PageIndex) -> Self {
        Self(page.0 / BLOCK_PAGES)
    }

    #[must_use]
    pub const fn first_page(self) -> PageIndex {
        PageIndex(self.0 * BLOCK_PAGES)
    }

    #[must_use]
    pub const fn pages(self) -> PageRange {
        PageRange::at(self.first_page(), BLOCK_PAGES)
    }

    /// The range of this block alone.
    #[must_use]
    pub const fn alone(self) -> BlockRange {
        BlockRange { start: self, end: Self(self.0 + 1) }
    }
}

/// Blocks from `start` up to but not including `end`. `start <= end` always holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockRange {
    start: BlockIndex,
    end: BlockIndex,
}

impl BlockRange {
    /// The blocks that hold the pages of `range`.
    #[must_use]
    pub const fn around(range: PageRange) -> Self {
        let start = BlockIndex::of(range.start());
        if range.is_empty() {
            return Self { start, end: start };
        }
        Self { start, end: BlockIndex(range.end().0.div_ceil(BLOCK_PAGES)) }
    }

    /// `None` if `start` lies after `end`.
    #[must_use]
    pub const fn new(start: BlockIndex, end: BlockIndex) -> Option<Self> {
        if start.0 <= end.0 { Some(Self { start, end }) } else { None }
    }

    /// Sorts `ranges` and merges those that touch or overlap.
    pub fn join(ranges: &mut Vec<Self>) {
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, range| {
            let touch = next.start <= range.end;
            if touch {
                range.end = range.end.max(next.end);
            }
            touch
        });
    }

    /// Splits the range into parts of at most `max_blocks` blocks, in ascending order.
    pub fn parts(self, max_blocks: u64) -> impl Iterator<Item = Self> {
        let end_of = move |start: BlockIndex| BlockIndex(start.0.saturating_add(max_blocks).min(self.end.0));
        let first = (!self.is_empty()).then(|| Self { start: self.start, end: end_of(self.start) });
        std::iter::successors(first, move |part| {
            (part.end < self.end).then(|| Self { start: part.end, end: end_of(part.end) })
        })
    }

    #[must_use]
    pub const fn start(self) -> BlockIndex {
        self.start
    }

    /// The block after the last.
    #[must_use]
    pub const fn end(self) -> BlockIndex {
        self.end
    }

    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.start.0 == self.end.0
    }

    #[must_use]
    pub const fn len(self) -> u64 {
        self.end.0 - self.start.0
    }

    #[must_use]
    pub const fn pages(self) -> PageRange {
        PageRange::at(self.start.first_page(), self.len().saturating_mul(BLOCK_PAGES))
    }
}
