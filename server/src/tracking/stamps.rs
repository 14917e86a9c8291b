//! The stamps of a file's pages.

mod block;
mod changed;

use std::time::Duration;

use fdmap_proto::units::{Generation, PageIndex, PageRange, to_f64};
use im::OrdMap;

pub(super) use block::{Stamps, covers, inside, put};
pub use changed::Changed;

use self::block::StampBlock;
use super::dirty_stamp::DirtyStamp;
use super::split::by_block;
use crate::pages::{BLOCK_PAGES, BlockIndex, BlockRange};

/// The stamp of each page of a file. Cloning is O(1); a clone never changes.
///
/// Memory: a block of 4096 pages takes nothing if it was never stamped, 1/50 byte a page if all stamps are equal, up to
/// half a byte a page with up to 256 runs, and 4 bytes a page otherwise. A block is compacted after 512 pages were
/// stamped in place.
#[derive(Clone, Debug, Default)]
pub struct StampMap {
    /// Blocks with a stamped page.
    blocks: OrdMap<BlockIndex, StampBlock>,
}

/// Numbers of changed pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Observed writes.
    pub exact: u64,
    /// Pages that are reported although no write was observed.
    pub conservative: u64,
}

impl Counts {
    /// Observed and conservative pages, divided by `window`. 0 for a window without a length.
    #[must_use]
    pub fn per_second(self, window: Duration) -> f64 {
        if window.is_zero() {
            return 0.0;
        }
        to_f64(self.exact + self.conservative) / window.as_secs_f64()
    }
}

impl StampMap {
    /// Stamps the pages of `range`. A page with a newer stamp keeps it. Takes time proportional to the blocks in the
    /// range.
    pub fn stamp(&mut self, range: PageRange, stamp: DirtyStamp) {
        self.stamp_all(&[range], stamp);
    }

    /// Stamps the pages of `ranges`. A page with a newer stamp keeps it. Sorted ranges without overlap are fastest,
    /// because each block is then updated once.
    pub fn stamp_all(&mut self, ranges: &[PageRange], stamp: DirtyStamp) {
        if stamp == DirtyStamp::NEVER {
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
                    let mut block = StampBlock::uniform(DirtyStamp::NEVER);
                    block.stamp(index, ranges, stamp);
                    self.blocks.insert(index, block);
                }
            }
        }
    }

    pub(super) fn put(&mut self, index: BlockIndex, stamps: &Stamps) {
        let block = StampBlock::new(stamps);
        if block.newest() == Generation::NONE {
            self.blocks.remove(&index);
        } else {
            self.blocks.insert(index, block);
        }
    }

    #[must_use]
    pub fn stamp_of(&self, page: PageIndex) -> DirtyStamp {
        let block = self.blocks.get(&BlockIndex::of(page));
        block.map_or(DirtyStamp::NEVER, |block| block.get(page.0 % BLOCK_PAGES))
    }

    /// The pages of `range` that were written after `since`. Later stamps have no effect on the iterator.
    #[must_use]
    pub fn changed(&self, since: Generation, range: PageRange) -> Changed {
        Changed::new(self.clone(), since, range)
    }

    /// The pages of `range` that were ever written.
    pub fn ever(&self, range: PageRange) -> impl Iterator<Item = PageRange> + Send + 'static {
        changed::joined(self.changed(Generation::NONE, range))
    }

    /// Bitmaps of the pages of `range` that were written after `since`, and of the conservative ones among them. Bit p
    /// % 8 of byte p / 8 stands for page p of the range. A bitmap without set bits is empty.
    #[must_use]
    pub fn changed_bits(&self, since: Generation, range: PageRange) -> (Vec<u8>, Vec<u8>) {
        changed::bits(self, since, range)
    }

    /// Numbers of pages of `range` whose last write is after `since` and not after `until`.
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

    /// Approximate memory in bytes, including memory shared with clones. Takes time proportional to the blocks.
    #[must_use]
    pub fn bytes(&self) -> usize {
        // A node of the tree is at least half full.
        let places = 2 * self.blocks.len() * size_of::<(BlockIndex, StampBlock)>();
        places + self.blocks.values().map(StampBlock::heap_bytes).sum::<usize>()
    }

    /// Number of blocks with a stamped page.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// The blocks around `range` with a page that was written after `since`.
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
