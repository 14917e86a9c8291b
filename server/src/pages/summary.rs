//! Counts of pages.

use std::collections::BTreeMap;

use fdmap_proto::state::{PageState, StateSet};
use fdmap_proto::units::PageRange;

use super::map::Snapshot;
use super::runs::{RunOptions, Runs};

/// How many pages of a range are in which state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Pages without data.
    pub hole: u64,
    /// Pages in memory.
    pub resident: u64,
    /// Pages in swap and in memory; 0 unless told apart.
    pub swap_cached: u64,
    /// Pages in swap.
    pub swapped: u64,
    /// Pages whose state is unknown.
    pub unknown: u64,
    /// Runs of pages in one state.
    pub runs: u64,
    /// Swapped and swap-cached pages by swap type, where slots are seen.
    pub swap_types: BTreeMap<u8, u64>,
}

impl Summary {
    /// Of the pages of `range`.
    #[must_use]
    pub fn of(snapshot: &Snapshot, range: PageRange, distinguish_swap_cached: bool) -> Self {
        let mut summary = Self::default();
        let options = RunOptions { distinguish_swap_cached, slots: false, ..RunOptions::default() };
        for run in Runs::new(snapshot.clone(), None, range, options) {
            summary.runs += 1;
            *summary.count(run.state) += run.range.len();
        }
        if summary.swapped + summary.swap_cached > 0 {
            let states = StateSet::NONE.with(PageState::Swapped);
            let options = RunOptions { states, ..RunOptions::default() };
            for run in Runs::new(snapshot.clone(), None, range, options) {
                if let Some(slot) = run.slot {
                    *summary.swap_types.entry(slot.swap_type()).or_default() += run.range.len();
                }
            }
        }
        summary
    }

    fn count(&mut self, state: PageState) -> &mut u64 {
        match state {
            PageState::Hole => &mut self.hole,
            PageState::Resident => &mut self.resident,
            PageState::SwapCached => &mut self.swap_cached,
            PageState::Swapped => &mut self.swapped,
            PageState::Unknown => &mut self.unknown,
        }
    }

    /// All pages counted.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.hole + self.resident + self.swap_cached + self.swapped + self.unknown
    }
}
