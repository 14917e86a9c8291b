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
        let pages = block.pages();
        let crosses = |range: &PageRange| !range.is_empty() && range.end() > pages.end();
        let mut count = 1;
        if !crosses(&self.rest[0]) {
            for range in &self.rest[1..] {
                if !pages.contains(range.start()) {
                    break;
                }
                count += 1;
                if crosses(range) {
                    break;
                }
            }
        }
        let (here, rest) = self.rest.split_at(count);
        if crosses(&here[count - 1]) {
            self.within = Some(BlockIndex(block.0 + 1));
            self.rest = &self.rest[count - 1..];
        } else {
            self.rest = rest;
        }
        Some((block, here))
    }
}
