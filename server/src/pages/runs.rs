//! Iterates over the pages of a snapshot as runs.

use std::sync::Arc;

use fdmap_proto::attributes::PageAttributes;
use fdmap_proto::convert::AttributeSet;
use fdmap_proto::runs::Run;
use fdmap_proto::state::{PageState, StateSet};
use fdmap_proto::units::{PageIndex, PageRange};

use super::attributes::AttributeMap;
use super::block::Block;
use super::blocks::{BLOCK_PAGES, BlockIndex, BlockRange};
use super::map::Snapshot;

/// What runs contain, and where they end.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// Runs in other states are omitted.
    pub states: StateSet,
    /// Distinguish swap-cached from swapped, where the scan did.
    pub distinguish_swap_cached: bool,
    /// Report slots, and end a run where slots are not contiguous.
    pub slots: bool,
    /// Report these attributes, and end a run where they change.
    pub attributes: AttributeSet,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            states: StateSet::ALL,
            distinguish_swap_cached: false,
            slots: true,
            attributes: AttributeSet::NONE,
        }
    }
}

/// The runs of a range of pages, each of maximal length, in ascending order. Pages beyond the end of the file are
/// holes.
#[derive(Clone, Debug)]
pub struct Runs {
    snapshot: Snapshot,
    attributes: Option<Arc<AttributeMap>>,
    options: RunOptions,
    /// Pages that are not returned yet.
    rest: PageRange,
    /// The block with the first page of `rest`, and the number of swapped pages before that page.
    here: Option<(BlockIndex, Arc<Block>, u64)>,
    /// A run that may continue in the next block.
    pending: Option<Run>,
}

impl Runs {
    #[must_use]
    pub const fn new(
        snapshot: Snapshot,
        attributes: Option<Arc<AttributeMap>>,
        range: PageRange,
        options: RunOptions,
    ) -> Self {
        Self { snapshot, attributes, options, rest: range, here: None, pending: None }
    }

    /// The next equal pages in one block, or between two blocks.
    fn piece(&mut self) -> Option<Run> {
        if self.rest.is_empty() {
            return None;
        }
        let start = self.rest.start();
        let index = BlockIndex::of(start);
        if !matches!(&self.here, Some((here, ..)) if *here == index) {
            self.here = self
                .snapshot
                .blocks()
                .get(&index)
                .map(|block| (index, Arc::clone(block), block.swapped.rank(start.0 % BLOCK_PAGES)));
        }
        let mut piece = match &mut self.here {
            None => self.between(index),
            Some((_, block, rank)) => piece_of(block, rank, start, self.rest.end(), self.options),
        };
        if !piece.state.is_data() {
            piece.attributes = self.attributes.as_ref().map(|_| PageAttributes::default());
        } else if let Some(map) = &self.attributes {
            let wanted = self.options.attributes;
            let first = map.get(start).unpack(wanted);
            let alike = (start.0 + 1..piece.range.end().0)
                .find(|page| map.get(PageIndex(*page)).unpack(wanted) != first)
                .unwrap_or(piece.range.end().0);
            if let (Some((_, _, rank)), true) = (&mut self.here, piece.state.is_swapped()) {
                *rank -= piece.range.end().0 - alike;
            }
            piece.range = PageRange::at(start, alike - start.0);
            piece.attributes = Some(first);
        }
        self.rest = PageRange::new(piece.range.end(), self.rest.end()).unwrap_or_default();
        Some(piece)
    }

    /// The run from the first page of `rest`, which has no block, to the next block or the next change of opacity. A
    /// page without a block is a hole, or unknown if its range is opaque.
    fn between(&self, index: BlockIndex) -> Run {
        let next = self.snapshot.blocks().range(index..).next().map(|(next, _)| next.first_page());
        let rest = self.rest;
        let opaque = self.snapshot.opaque(BlockRange::around(rest)).next();
        let opaque = opaque.map(|opaque| opaque.pages().intersect(rest)).filter(|opaque| !opaque.is_empty());
        let (state, end) = match opaque {
            Some(opaque) if opaque.contains(rest.start()) => (PageState::Unknown, opaque.end()),
            Some(opaque) => (PageState::Hole, opaque.start()),
            None => (PageState::Hole, rest.end()),
        };
        let range = PageRange::new(rest.start(), end.min(next.unwrap_or(end))).unwrap_or_default();
        Run { range, state, slot: None, attributes: None }
    }
}

/// The equal pages from `start` on in its block. `rank` is the number of swapped pages before `start`, and is updated.
fn piece_of(block: &Block, rank: &mut u64, start: PageIndex, end: PageIndex, options: RunOptions) -> Run {
    let page = start.0 % BLOCK_PAGES;
    let limit = (end.0 - start.0).saturating_add(page).min(BLOCK_PAGES);
    let state = block.state(page);
    let state = if options.distinguish_swap_cached { state } else { state.folded() };
    let mut upto =
        limit.min(block.data.run_end(page)).min(block.swapped.run_end(page)).min(block.unknown.run_end(page));
    if options.distinguish_swap_cached {
        upto = upto.min(block.cached.run_end(page));
    }
    let mut slot = None;
    if state.is_swapped() {
        let mut pages = upto - page;
        if options.slots && block.slots.are_seen() {
            slot = block.slots.get(*rank);
            pages = block.slots.run_end(*rank, *rank + pages) - *rank;
        }
        *rank += pages;
        upto = page + pages;
    }
    Run { range: PageRange::at(start, upto - page), state, slot, attributes: None }
}

impl Iterator for Runs {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        loop {
            let Some(piece) = self.piece() else {
                return self.pending.take();
            };
            if !self.options.states.has(piece.state) {
                if let Some(run) = self.pending.take() {
                    return Some(run);
                }
                continue;
            }
            let continues = self.pending.as_mut().is_some_and(|run| run.append(&piece));
            if !continues && let Some(run) = self.pending.replace(piece) {
                return Some(run);
            }
        }
    }
}
