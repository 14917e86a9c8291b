//! Counts of pages by state.

use std::collections::BTreeMap;

use fdmap_proto::state::{PageState, StateSet};
use fdmap_proto::units::PageRange;

use super::map::Snapshot;
use super::runs::{RunOptions, Runs};

/// Numbers of pages of a range, by state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub hole: u64,
    pub resident: u64,
    /// 0 unless swap-cached pages are distinguished.
    pub swap_cached: u64,
    pub swapped: u64,
    pub unknown: u64,
    /// Number of runs of pages in one state.
    pub runs: u64,
    /// Swapped and swap-cached pages by swap type, if slots are known.
    pub swap_types: BTreeMap<u8, u64>,
}

impl Summary {
    #[must_use]
    pub fn of(snapshot: &Snapshot, range: PageRange, distinguish_swap_cached: bool) -> Self {
        let mut summary = Self::default();
        let options = RunOptions { distinguish_swap_cached, slots: false, ..RunOptions::default() };
        for run in Runs::new(snapshot.clone(), None, range, options) {
            summary.runs += 1;
            *summary.count(run.state) += run.range.len();
        }
        if summary.swapped + summary.swap_cached > 0 {
            let states = StateSet::SWAPPED;
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

    /// Sum of all states.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.hole + self.resident + self.swap_cached + self.swapped + self.unknown
    }
}
