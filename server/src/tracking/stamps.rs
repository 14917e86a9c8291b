//! The stamps of a file's pages.

mod block;
mod changed;

use fdmap_proto::units::{Generation, PageIndex, PageRange};
use im::OrdMap;

pub(super) use block::{Stamps, covers, inside, put};
pub use changed::Changed;

use self::block::StampBlock;
use super::split::by_block;
use super::stamp::PageStamp;
use crate::pages::{BLOCK_PAGES, BlockIndex, BlockRange};

/// The stamp of each page of a file. Cloning is O(1); a clone never changes.
///
/// Memory: blocks of 4096 pages that were never stamped take nothing, blocks with one stamp 1/50 byte a page, blocks with up
/// to 256 runs of pages alike half a byte a page; all others take 4 bytes a page. A block that becomes simple again by being
/// stamped page by page shrinks by the time 512 pages of it were.
#[derive(Clone, Debug, Default)]
pub struct StampMap {
    /// Blocks of which some page was stamped.
    blocks: OrdMap<BlockIndex, StampBlock>,
}

/// Numbers of changed pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages that surely were written.
    pub exact: u64,
    /// Pages that are told as written though nobody saw it.
    pub conservative: u64,
}

impl StampMap {
    /// Stamps the pages of `range`; a page that has a newer stamp keeps it. Takes time by the blocks in the range.
    pub fn stamp(&mut self, range: PageRange, stamp: PageStamp) {
        self.stamp_all(&[range], stamp);
    }

    /// Stamps the pages of `ranges`; pages that have a newer stamp keep it. Meant for ranges that are sorted and do not
    /// overlap, of which each block is touched once; others are only slower.
    pub fn stamp_all(&mut self, ranges: &[PageRange], stamp: PageStamp) {
        if stamp == PageStamp::NEVER {
            return;
        }
        for (index, ranges) in by_block(ranges) {
            let whole = covers(ranges, index);
            match self.blocks.get_mut(&index) {
                Some(block) if !whole || block.newest() >= stamp.generation() => {
                    block.stamp(index, ranges, stamp);
                }
                Some(block) => *block = StampBlock::uniform(stamp),
                None if whole => {
                    self.blocks.insert(index, StampBlock::uniform(stamp));
                }
                None => {
                    let mut block = StampBlock::uniform(PageStamp::NEVER);
                    block.stamp(index, ranges, stamp);
                    self.blocks.insert(index, block);
                }
            }
        }
    }

    /// Replaces the stamps of a block.
    pub(super) fn put(&mut self, index: BlockIndex, stamps: &Stamps) {
        let block = StampBlock::new(stamps);
        if block.newest() == Generation::NONE {
            self.blocks.remove(&index);
        } else {
            self.blocks.insert(index, block);
        }
    }

    /// The stamp of one page.
    #[must_use]
    pub fn stamp_of(&self, page: PageIndex) -> PageStamp {
        let block = self.blocks.get(&BlockIndex::of(page));
        block.map_or(PageStamp::NEVER, |block| block.get(page.0 % BLOCK_PAGES))
    }

    /// The pages of `range` that were written after `since`. What is stamped later does not show.
    #[must_use]
    pub fn changed(&self, since: Generation, range: PageRange) -> Changed {
        Changed::new(self.clone(), since, range)
    }

    /// The pages of `range` that were ever written.
    pub fn ever(&self, range: PageRange) -> impl Iterator<Item = PageRange> + Send + 'static {
        changed::joined(self.changed(Generation::NONE, range))
    }

    /// The bitmaps of the pages of `range` that were written after `since`, and of those of them that nobody saw: bit
    /// p % 8 of byte p / 8 belongs to the `p`th page of the range. One without any bit is empty.
    #[must_use]
    pub fn changed_bits(&self, since: Generation, range: PageRange) -> (Vec<u8>, Vec<u8>) {
        changed::bits(self, since, range)
    }

    /// How many pages of `range` were last written after `since`, and not after `until`.
    #[must_use]
    pub fn count(&self, since: Generation, until: Option<Generation>, range: PageRange) -> Counts {
        let until = until.unwrap_or(Generation::MAX);
        let mut counts = Counts::default();
        for (index, block) in self.newer_blocks(range, since) {
            let (all, conservative) = changed::count(&block.written(since, until), *index, range);
            counts.exact += all - conservative;
            counts.conservative += conservative;
        }
        counts
    }

    /// Bytes of memory that it takes, about, what it shares with clones included. Takes time by the blocks.
    #[must_use]
    pub fn bytes(&self) -> usize {
        // A node of the tree is half full at worst.
        let places = 2 * self.blocks.len() * size_of::<(BlockIndex, StampBlock)>();
        places + self.blocks.values().map(StampBlock::heap_bytes).sum::<usize>()
    }

    /// The blocks around `range` of which some page was written after `since`.
    fn newer_blocks(
        &self,
        range: PageRange,
        since: Generation,
    ) -> impl Iterator<Item = (&BlockIndex, &StampBlock)> {
        let blocks = BlockRange::around(range);
        self.blocks.range(blocks.start()..blocks.end()).filter(move |(_, block)| block.newest() > since)
    }
}

#[cfg(test)]
pub(super) mod tests;
