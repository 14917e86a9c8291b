//! The states of 4096 pages.

use fdmap_proto::state::{PageState, SwapSlot};

use super::bits::Bits;
use super::blocks::BLOCK_PAGES;
use super::slots::Slots;

/// The states and swap slots of the 4096 pages of one block. Two blocks are equal if and only if their pages are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Resident, swap-cached or swapped.
    pub(super) data: Bits,
    /// Swap-cached or swapped; a subset of `data`.
    pub(super) swapped: Bits,
    /// Swap-cached; a subset of `swapped`.
    pub(super) cached: Bits,
    /// Disjoint from `data`.
    pub(super) unknown: Bits,
    pub(super) slots: Slots,
}

impl Block {
    /// A block whose pages are all in `state`, which must not have slots.
    #[must_use]
    pub fn uniform(state: PageState) -> Self {
        debug_assert!(!state.is_swapped());
        match state {
            PageState::Resident => Self { data: Bits::All, ..Self::default() },
            PageState::Unknown => Self { unknown: Bits::All, ..Self::default() },
            _ => Self::default(),
        }
    }

    /// True if no page holds data and none is unknown.
    #[must_use]
    pub const fn is_hole(&self) -> bool {
        matches!((&self.data, &self.unknown), (Bits::None, Bits::None))
    }

    /// True if some page holds data.
    #[must_use]
    pub const fn has_data(&self) -> bool {
        !matches!(self.data, Bits::None)
    }

    /// Runs of pages that hold data or are unknown, as first page and page after the last.
    pub fn data_runs(&self) -> impl Iterator<Item = (u64, u64)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < BLOCK_PAGES {
                let start = at;
                at = self.data.run_end(start).min(self.unknown.run_end(start));
                if self.data.get(start) || self.unknown.get(start) {
                    return Some((start, at));
                }
            }
            None
        })
    }

    /// The state of the `page`th page of the block.
    #[must_use]
    pub fn state(&self, page: u64) -> PageState {
        if self.cached.get(page) {
            PageState::SwapCached
        } else if self.swapped.get(page) {
            PageState::Swapped
        } else if self.data.get(page) {
            PageState::Resident
        } else if self.unknown.get(page) {
            PageState::Unknown
        } else {
            PageState::Hole
        }
    }

    /// The swap slot of the `page`th page, if it has one and the probe reports slots.
    #[must_use]
    pub fn slot(&self, page: u64) -> Option<SwapSlot> {
        if self.slots.are_seen() && self.swapped.get(page) {
            self.slots.get(self.swapped.rank(page))
        } else {
            None
        }
    }

    /// Bitmap of the pages of one leaf in `state`. Without `distinguish_swap_cached`, swap-cached counts as swapped.
    #[must_use]
    pub fn state_word(&self, leaf: usize, state: PageState, distinguish_swap_cached: bool) -> u64 {
        let (data, swapped) = (self.data.word(leaf), self.swapped.word(leaf));
        let cached = if distinguish_swap_cached { self.cached.word(leaf) } else { 0 };
        match state {
            PageState::Hole => !(data | self.unknown.word(leaf)),
            PageState::Resident => data & !swapped,
            PageState::SwapCached => cached,
            PageState::Swapped => swapped & !cached,
            PageState::Unknown => self.unknown.word(leaf),
        }
    }

    /// True if all pages are in `state`, false if none is; `None` if only some are, or if that takes a closer look.
    #[must_use]
    pub const fn is_all(&self, state: PageState) -> Option<bool> {
        match (&self.data, &self.swapped, &self.unknown) {
            (Bits::All, Bits::None, _) => Some(matches!(state, PageState::Resident)),
            (Bits::None, _, Bits::All) => Some(matches!(state, PageState::Unknown)),
            (Bits::None, _, Bits::None) => Some(matches!(state, PageState::Hole)),
            _ => None,
        }
    }

    /// True if some page is swapped or swap-cached.
    #[must_use]
    pub const fn has_swapped(&self) -> bool {
        !matches!(self.swapped, Bits::None)
    }

    /// The swapped and swap-cached pages of one leaf.
    #[must_use]
    pub fn swapped_word(&self, leaf: usize) -> u64 {
        self.swapped.word(leaf)
    }

    /// Memory of the block in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.data.heap_bytes()
            + self.swapped.heap_bytes()
            + self.cached.heap_bytes()
            + self.unknown.heap_bytes()
            + self.slots.heap_bytes()
    }

    /// The same block, with the swapped pages in `cached` marked as swap-cached.
    #[must_use]
    pub fn with_cached(&self, cached: &super::bits::Plane) -> Self {
        let mut plane = *cached;
        for (leaf, word) in plane.iter_mut().enumerate() {
            *word &= self.swapped.word(leaf);
        }
        Self { cached: Bits::new(&plane), ..self.clone() }
    }
}
