//! Ranges of pages, cut at blocks.

use fdmap_proto::units::PageRange;

use crate::pages::BlockIndex;

/// The blocks that `ranges` touch, each with the ranges that reach into it; these may reach beyond it as well.
///
/// Sorted ranges that do not overlap give each block once. Others give some blocks several times, and no page is lost.
pub(super) fn by_block(ranges: &[PageRange]) -> ByBlock<'_> {
    ByBlock { rest: ranges, within: None }
}

/// See [`by_block`].
#[derive(Clone, Debug)]
pub(super) struct ByBlock<'a> {
    rest: &'a [PageRange],
    /// The block to go on with, if the first of `rest` reaches into it from an earlier one.
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
