//! Changed pages as runs and as bitmaps.

use std::collections::VecDeque;

use fdmap_proto::runs::ChangedRun;
use fdmap_proto::units::{Generation, PageIndex, PageRange, to_u64, to_usize};

use super::StampMap;
use super::block::{StampBlock, Written};
use crate::pages::{BLOCK_LEAVES, BLOCK_PAGES, BlockIndex, LEAF_PAGES, put_word};

/// Blocks that are copied from the map at once.
const BATCH: usize = 32;

/// The pages that were written after a generation, as runs of maximal length in ascending order. The iterator uses the
/// stamps at the time of its creation.
#[derive(Debug)]
pub struct Changed {
    stamps: StampMap,
    since: Generation,
    /// The block with the next pages, and the other copied blocks.
    here: Option<(BlockIndex, Written)>,
    batch: VecDeque<(BlockIndex, StampBlock)>,
    /// Pages that are not returned yet: those of `here`, of `batch`, and of later blocks.
    rest: PageRange,
    /// The first block that is not copied yet.
    next: BlockIndex,
    /// A run that may continue in the next block.
    pending: Option<ChangedRun>,
}

impl Changed {
    pub(super) const fn new(stamps: StampMap, since: Generation, range: PageRange) -> Self {
        let next = BlockIndex::of(range.start());
        Self { stamps, since, here: None, batch: VecDeque::new(), rest: range, next, pending: None }
    }

    /// Advances to the next block with changed pages.
    fn advance(&mut self) -> Option<()> {
        if self.batch.is_empty() {
            let range = PageRange::new(self.next.first_page().max(self.rest.start()), self.rest.end())?;
            let blocks = self.stamps.newer_blocks(range, self.since);
            self.batch.extend(blocks.take(BATCH).map(|(index, block)| (*index, block.clone())));
            self.next = match self.batch.back() {
                Some((last, _)) => BlockIndex(last.0 + 1),
                None => BlockIndex::of(self.rest.end()),
            };
        }
        let (index, block) = self.batch.pop_front()?;
        self.rest = PageRange::new(self.rest.start().max(index.first_page()), self.rest.end())?;
        self.here = Some((index, block.written(self.since, Generation::MAX)));
        Some(())
    }

    /// The next run of changed pages in one block.
    fn piece(&mut self) -> Option<ChangedRun> {
        loop {
            let Some((index, written)) = &self.here else {
                self.advance()?;
                continue;
            };
            let first = index.first_page();
            let end = self.rest.intersect(index.pages()).end().0.saturating_sub(first.0);
            let mut page = self.rest.start().0.saturating_sub(first.0);
            if page < end && !written.all.get(page) {
                page = written.all.run_end(page);
            }
            if page >= end {
                self.here = None;
                continue;
            }
            let upto = written.all.run_end(page).min(written.conservative.run_end(page)).min(end);
            let run = ChangedRun {
                range: PageRange::at(first.plus(page), upto - page),
                conservative: written.conservative.get(page),
            };
            self.rest = PageRange::new(run.range.end(), self.rest.end())?;
            return Some(run);
        }
    }
}

impl Iterator for Changed {
    type Item = ChangedRun;

    fn next(&mut self) -> Option<ChangedRun> {
        loop {
            let Some(piece) = self.piece() else {
                return self.pending.take();
            };
            match &mut self.pending {
                Some(run)
                    if run.range.end() == piece.range.start() && run.conservative == piece.conservative =>
                {
                    run.range = PageRange::at(run.range.start(), run.range.len() + piece.range.len());
                }
                pending => {
                    if let Some(run) = pending.replace(piece) {
                        return Some(run);
                    }
                }
            }
        }
    }
}

/// The same pages, with observed and conservative pages merged.
pub(super) fn joined(changed: Changed) -> impl Iterator<Item = PageRange> + Send + 'static {
    let mut changed = changed.map(|run| run.range).peekable();
    std::iter::from_fn(move || {
        let mut range = changed.next()?;
        while let Some(next) = changed.next_if(|next| next.start() == range.end()) {
            range = PageRange::at(range.start(), range.len() + next.len());
        }
        Some(range)
    })
}

/// The bitmaps of the changed pages of `range` and of the conservative ones among them.
pub(super) fn bits(stamps: &StampMap, since: Generation, range: PageRange) -> (Vec<u8>, Vec<u8>) {
    let mut out = (Vec::new(), Vec::new());
    for (index, block) in stamps.newer_blocks(range, since) {
        let written = block.written(since, Generation::MAX);
        for leaf in 0..BLOCK_LEAVES {
            let first = index.first_page().plus(to_u64(leaf) * LEAF_PAGES);
            let mask = mask_of(first, range);
            put(&mut out.0, range, first, written.all.word(leaf) & mask);
            put(&mut out.1, range, first, written.conservative.word(leaf) & mask);
        }
    }
    out
}

fn put(bitmap: &mut Vec<u8>, range: PageRange, first: PageIndex, word: u64) {
    if word != 0 {
        bitmap.resize(to_usize(range.len().div_ceil(8)), 0);
        put_word(bitmap, range, first, word);
    }
}

/// Bitmap of the 64 pages from `first` on that are in `range`.
fn mask_of(first: PageIndex, range: PageRange) -> u64 {
    let pages = PageRange::at(first, LEAF_PAGES).intersect(range);
    match pages.len() {
        0 => 0,
        len => (u64::MAX >> (LEAF_PAGES - len)) << (pages.start().0 - first.0),
    }
}

/// Number of changed pages of the block in `range`, and of conservative ones among them.
pub(super) fn count(written: &Written, index: BlockIndex, range: PageRange) -> (u64, u64) {
    let first = index.first_page().0;
    let at = |page: PageIndex| page.0.saturating_sub(first).min(BLOCK_PAGES);
    let (start, end) = (at(range.start()), at(range.end()));
    let within = |bits: &crate::pages::Bits| bits.rank(end) - bits.rank(start);
    (within(&written.all), within(&written.conservative))
}
