//! Page counts and individual pages.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::attributes::PageAttributes;
use crate::provenance::Provenance;
use crate::state::{PageState, SwapSlot};
use crate::units::{PageIndex, PageRange, SnapshotId};

/// Number of pages in each state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PageSummary {
    /// Provenance of the counts.
    pub provenance: Provenance,
    /// Pages that were counted.
    pub range: PageRange,
    /// Pages without data.
    pub hole_pages: u64,
    /// Pages in memory.
    pub resident_pages: u64,
    /// Pages in swap and in the swap cache; 0 unless [`Provenance::swap_cached_distinguished`].
    pub swap_cached_pages: u64,
    /// Pages in swap.
    pub swapped_pages: u64,
    /// Pages whose state the probe could not determine.
    pub unknown_pages: u64,
    /// Number of runs of pages in the same state, swap slots ignored.
    pub runs: u64,
    /// Swapped pages by swap type; empty if the probe does not report slots.
    pub swap_types: BTreeMap<u32, u64>,
    /// Retained snapshot, if requested.
    #[serde(rename = "snapshot_id", skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotId>,
    /// Size of the file in pages when it was read.
    pub file_pages: u64,
}

impl PageSummary {
    /// Number of pages in `state`.
    #[must_use]
    pub const fn count(&self, state: PageState) -> u64 {
        match state {
            PageState::Hole => self.hole_pages,
            PageState::Resident => self.resident_pages,
            PageState::SwapCached => self.swap_cached_pages,
            PageState::Swapped => self.swapped_pages,
            PageState::Unknown => self.unknown_pages,
        }
    }
}

/// State of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PageInfo {
    /// Index of the page.
    pub page: PageIndex,
    /// State of the page.
    pub state: PageState,
    /// Swap slot, if the state has one and the probe reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<SwapSlot>,
    /// Attributes, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attributes: Option<PageAttributes>,
}
