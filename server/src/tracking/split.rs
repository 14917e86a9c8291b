//! Splits page ranges at the boundaries of blocks.

use fdmap_proto::units::PageRange;

use crate::pages::BlockIndex;

/// The blocks that `ranges` touch, each with the ranges that overlap it. These ranges can reach beyond the block.
///
/// Sorted ranges that do not overlap yield each block once. Other ranges yield some blocks several times, and no page is lost.
pub(super) fn by_block(ranges: &[PageRange]) -> ByBlock<'_> {
    ByBlock { rest: ranges, within: None }
}

/// Iterator of [`by_block`].
#[derive(Clone, Debug)]
pub(super) struct ByBlock<'a> {
    rest: &'a [PageRange],
    /// The next block, if the first range of `rest` reaches into it from an earlier block.
    within: Option<BlockIndex>,
}

impl<'a> Iterator for ByBlock<'a> {
    type Item = (BlockIndex, &'a [PageRange]);

    fn next(&mut self) -> Option<Self::Item> {
        while self.rest.first()?.is_empty() {
            self.rest = &self.rest[1..];
        }
        let block = self.within.take().unwrap_or_else(|| BlockIndex::of(self.rest[0].start()));
        let (first, end) = (block.first_page(), block.pages().end());
        for (nth, range) in self.rest.iter().enumerate() {
            let begins_here = first <= range.start() && range.start() < end;
            if nth > 0 && !begins_here {
                let (here, rest) = self.rest.split_at(nth);
                self.rest = rest;
                return Some((block, here));
            }
            if range.end() > end && !range.is_empty() {
                let here = &self.rest[..=nth];
                self.rest = &self.rest[nth..];
                self.within = Some(BlockIndex(block.0 + 1));
                return Some((block, here));
            }
        }
        Some((block, std::mem::take(&mut self.rest)))
    }
}
