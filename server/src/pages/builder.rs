//! Builds a block from the output of a probe.

use fdmap_proto::state::{PageState, SwapSlot};
use fdmap_proto::units::to_usize;

use super::bits::{Bits, Plane};
use super::block::Block;
use super::blocks::{BLOCK_LEAVES, BLOCK_PAGES};
use super::slots::SlotCollector;

/// Collects the pages of one block in ascending order. Other pages are holes. A builder is reused for the next block.
#[derive(Debug)]
pub struct BlockBuilder {
    data: Plane,
    swapped: Plane,
    unknown: Plane,
    slots: SlotCollector,
    touched: bool,
}

impl Default for BlockBuilder {
    fn default() -> Self {
        let empty = [0; BLOCK_LEAVES];
        Self { data: empty, swapped: empty, unknown: empty, slots: SlotCollector::default(), touched: false }
    }
}

impl BlockBuilder {
    /// Discards the collected pages.
    pub fn clear(&mut self) {
        self.data = [0; BLOCK_LEAVES];
        self.swapped = [0; BLOCK_LEAVES];
        self.unknown = [0; BLOCK_LEAVES];
        self.slots.clear();
        self.touched = false;
    }

    /// Sets the pages of one leaf. `swapped` must be a subset of `data`, and `unknown` disjoint from it. The caller
    /// must push the slots of the leaf's swapped pages ([`Self::push_slots`]) before it sets the next leaf.
    pub fn leaf(&mut self, leaf: usize, data: u64, swapped: u64, unknown: u64) {
        debug_assert!(swapped & !data == 0 && unknown & data == 0);
        self.data[leaf] |= data;
        self.swapped[leaf] |= swapped;
        self.unknown[leaf] |= unknown;
        self.touched |= (data | unknown) != 0;
    }

    /// Adds the slots of swapped pages in page order, as valid [`SwapSlot::raw`] words.
    pub fn push_slots(&mut self, raw: &[u64]) {
        self.slots.push(raw);
    }

    /// Adds the slots of `len` swapped pages; each follows the one before it.
    pub fn push_slot_run(&mut self, first: SwapSlot, len: usize) {
        self.slots.push_run(first.raw(), len);
    }

    /// Sets the pages `start..end` of the block to `state`. `slot` is the slot of the first page; the slots of the
    /// others follow it.
    pub fn fill(&mut self, start: u64, end: u64, state: PageState, slot: Option<SwapSlot>) {
        debug_assert!(start <= end && end <= BLOCK_PAGES);
        let mut page = start;
        while page < end {
            let leaf_end = (page / 64 + 1) * 64;
            let upto = end.min(leaf_end);
            let mask = (u64::MAX >> (64 - (upto - page))) << (page % 64);
            let (data, swapped, unknown) = match state {
                PageState::Hole => (0, 0, 0),
                PageState::Resident => (mask, 0, 0),
                PageState::SwapCached | PageState::Swapped => (mask, mask, 0),
                PageState::Unknown => (0, 0, mask),
            };
            self.leaf(to_usize(page / 64), data, swapped, unknown);
            page = upto;
        }
        if let Some(slot) = slot {
            self.slots.push_run(slot.raw(), to_usize(end - start));
        }
    }

    /// The block, or `None` if every page is a hole. The builder is empty afterwards.
    pub fn finish(&mut self) -> Option<Block> {
        if !self.touched {
            return None;
        }
        // An incomplete list of slots cannot be assigned to pages, so drop it.
        let swapped: usize = self.swapped.iter().map(|word| to_usize(u64::from(word.count_ones()))).sum();
        debug_assert!(self.slots.len() == 0 || self.slots.len() == swapped);
        if self.slots.len() != swapped {
            self.slots.clear();
        }
        let block = Block {
            data: Bits::new(&self.data),
            swapped: Bits::new(&self.swapped),
            cached: Bits::None,
            unknown: Bits::new(&self.unknown),
            slots: self.slots.finish(),
        };
        self.clear();
        Some(block)
    }
}
