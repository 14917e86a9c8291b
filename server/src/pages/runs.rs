//! The pages of a snapshot as runs.

use std::sync::Arc;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::runs::Run;
use fdmap_proto::state::{PageAttributes, PageState, StateSet};
use fdmap_proto::units::{PageIndex, PageRange};

use super::attributes::AttributeMap;
use super::block::Block;
use super::blocks::{BLOCK_PAGES, BlockIndex, BlockRange};
use super::map::Snapshot;

/// What to read off a snapshot, and how finely.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// Runs in other states are left out.
    pub states: StateSet,
    /// Tell swap-cached from swapped, where the reading did.
    pub distinguish_swap_cached: bool,
    /// Give slots, and end a run where they do not follow one another.
    pub slots: bool,
    /// Give these attributes, and end a run where they change.
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

/// The runs of a range of pages, each as long as can be, in ascending order. Pages past the end of the file are holes.
#[derive(Clone, Debug)]
pub struct Runs {
    snapshot: Snapshot,
    attributes: Option<Arc<AttributeMap>>,
    options: RunOptions,
    /// What is still to be given.
    rest: PageRange,
    /// The block that holds the first page of `rest`, with the number of swapped pages before that page.
    here: Option<(BlockIndex, Arc<Block>, u64)>,
    /// A piece that may go on in the next one.
    pending: Option<Run>,
}

impl Runs {
    /// The runs of `range`.
    #[must_use]
    pub const fn new(
        snapshot: Snapshot,
        attributes: Option<Arc<AttributeMap>>,
        range: PageRange,
        options: RunOptions,
    ) -> Self {
        Self { snapshot, attributes, options, rest: range, here: None, pending: None }
    }

    /// The next pages alike that lie in one block, or between two.
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

    /// From the first page of `rest`, of which there is no block, up to the next block or to where that means something
    /// else: what was read is a hole, unless the probe was opaque.
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

/// The pages alike from `start` on in its block; `rank` swapped pages lie before it, and is moved on.
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

/// True if `next` goes on where `run` ends, alike in everything.
fn goes_on(run: &Run, next: &Run) -> bool {
    run.range.end() == next.range.start()
        && run.state == next.state
        && run.attributes == next.attributes
        && match (run.slot, next.slot) {
            (None, None) => true,
            (Some(first), Some(then)) => first.plus(run.range.len()) == Some(then),
            _ => false,
        }
}

impl Iterator for Runs {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        loop {
            let Some(piece) = self.piece() else {
                return self.pending.take();
            };
            if !self.options.states.contains(piece.state) {
                if let Some(run) = self.pending.take() {
                    return Some(run);
                }
                continue;
            }
            match &mut self.pending {
                Some(run) if goes_on(run, &piece) => {
                    run.range = PageRange::new(run.range.start(), piece.range.end()).unwrap_or(run.range);
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
