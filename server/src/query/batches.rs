//! Answers, cut into messages of bounded size.

use std::iter::Peekable;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::runs::{ChangeColumns, RunColumns};
use fdmap_proto::state::StateSet;
use fdmap_proto::units::{PageIndex, PageRange};
use fdmap_proto::v1;

use super::request::{Encoding, ScanQuery};
use crate::pages::ScanResult;
use crate::pages::{self, AttributeMap, Differences, RunOptions, Runs, Snapshot, Summary};

/// Runs or changes in one message: some hundreds of kilobytes.
pub(super) const RUNS: usize = 8192;
/// Pages in one message of entries, or of bitmaps with slots: 128 KiB, which is still in the processor's cache when it is
/// sent, and in the client's when it is read. With four times as many a scan takes twice as long (docs/performance.md).
pub(super) const ENTRIES: u64 = 16 << 10;
/// Pages in one message of bitmaps: at most 640 KiB.
pub(super) const BITS: u64 = 1 << 20;

/// The batches of a scan.
#[derive(Debug)]
pub enum ScanBatches {
    /// Of runs.
    Runs(Peekable<Runs>),
    /// Of bitmaps or entries.
    Pages {
        /// What to read off.
        snapshot: Snapshot,
        /// What is still to be told.
        rest: PageRange,
        /// These states only.
        states: StateSet,
        /// Swap-cached told apart.
        distinguish_swap_cached: bool,
        /// `true`: entries. Else bitmaps.
        entries: bool,
        /// Slots with the bitmaps.
        slots: bool,
    },
}

impl ScanBatches {
    /// The answer to `query` about the pages of `range`.
    #[must_use]
    pub fn new(query: &ScanQuery, reading: ScanResult, range: PageRange) -> Self {
        let ScanResult { snapshot, attributes } = reading;
        let (states, distinguish_swap_cached) = (query.states, query.distinguish_swap_cached);
        match query.encoding {
            Encoding::Runs => {
                let options =
                    RunOptions { states, distinguish_swap_cached, slots: true, attributes: query.attributes };
                Self::Runs(Runs::new(snapshot, attributes, range, options).peekable())
            }
            Encoding::Bitmaps { slots } => {
                Self::Pages { snapshot, rest: range, states, distinguish_swap_cached, entries: false, slots }
            }
            Encoding::Entries => Self::Pages {
                snapshot,
                rest: range,
                states,
                distinguish_swap_cached,
                entries: true,
                slots: false,
            },
        }
    }
}

impl Iterator for ScanBatches {
    type Item = v1::scan_response::Body;

    fn next(&mut self) -> Option<Self::Item> {
        use v1::scan_response::Body;
        match self {
            Self::Runs(runs) => {
                let mut columns = RunColumns::new(runs.peek()?.range.start());
                while columns.len() < RUNS
                    && let Some(run) = runs.next()
                {
                    columns.push(&run);
                }
                Some(Body::Runs(columns.finish()))
            }
            Self::Pages { snapshot, rest, states, distinguish_swap_cached, entries, slots } => {
                if rest.is_empty() {
                    return None;
                }
                let pages = if *entries || *slots { ENTRIES } else { BITS };
                let now = cut(rest, pages);
                Some(if *entries {
                    let mut bytes = Vec::new();
                    pages::entries(snapshot, now, &mut bytes);
                    Body::Entries(v1::EntryBatch { first_page: now.start().0, entries: bytes.into() })
                } else {
                    Body::Bitmaps(bitmap_batch(snapshot, now, *states, *distinguish_swap_cached, *slots))
                })
            }
        }
    }
}

/// Cuts the next message's pages off. Messages begin at multiples of their length, so that a leaf's bits stay together in all
/// but the first.
pub(super) fn cut(rest: &mut PageRange, pages: u64) -> PageRange {
    let now = PageRange::at(rest.start(), pages - rest.start().0 % pages).intersect(*rest);
    *rest = PageRange::new(now.end(), rest.end()).unwrap_or_default();
    now
}

fn bitmap_batch(
    snapshot: &Snapshot,
    range: PageRange,
    states: StateSet,
    distinguish_swap_cached: bool,
    slots: bool,
) -> v1::BitmapBatch {
    let bitmaps = pages::bitmaps(snapshot, range, states, distinguish_swap_cached, slots);
    let [hole, resident, swap_cached, swapped, unknown] = bitmaps.states;
    v1::BitmapBatch {
        first_page: range.start().0,
        pages: range.len(),
        hole: hole.into(),
        resident: resident.into(),
        swap_cached: swap_cached.into(),
        swapped: swapped.into(),
        unknown: unknown.into(),
        slots: bitmaps.slots.into(),
    }
}

/// The batches of a diff.
#[derive(Debug)]
pub struct ChangeBatches {
    changes: Peekable<Differences>,
}

impl ChangeBatches {
    /// Of these differences.
    #[must_use]
    pub fn new(changes: Differences) -> Self {
        Self { changes: changes.peekable() }
    }
}

impl Iterator for ChangeBatches {
    type Item = v1::DiffBatch;

    fn next(&mut self) -> Option<v1::DiffBatch> {
        let mut columns = ChangeColumns::new(self.changes.peek()?.range.start());
        while columns.len() < RUNS
            && let Some(change) = self.changes.next()
        {
            columns.push(&change);
        }
        Some(columns.finish())
    }
}

/// Single pages, in the order asked.
#[must_use]
pub fn lookup_pages(
    pages: &[PageIndex],
    reading: &ScanResult,
    distinguish_swap_cached: bool,
    attributes: AttributeSet,
) -> Vec<v1::PageInfo> {
    let map: Option<&AttributeMap> = reading.attributes.as_deref();
    let info = |page: &PageIndex| {
        let state = reading.snapshot.state(*page);
        let attributes = map.map(|map| {
            let known = if state.is_data() { map.get(*page).unpack(attributes) } else { Default::default() };
            known.into()
        });
        let state = if distinguish_swap_cached { state } else { state.folded() };
        v1::PageInfo {
            page: page.0,
            state: v1::PageState::from(state).into(),
            slot: reading.snapshot.slot(*page).map(|slot| slot.raw()),
            attributes,
        }
    };
    pages.iter().map(info).collect()
}

/// The counts of a summary; provenance, range and the rest are the caller's to fill in.
#[must_use]
pub fn summary_message(summary: &Summary) -> v1::SummaryResponse {
    let swap_type = |(swap_type, pages): (&u8, &u64)| v1::SwapTypePages {
        swap_type: u32::from(*swap_type),
        pages: *pages,
    };
    v1::SummaryResponse {
        hole_pages: summary.hole,
        resident_pages: summary.resident,
        swap_cached_pages: summary.swap_cached,
        swapped_pages: summary.swapped,
        unknown_pages: summary.unknown,
        runs: summary.runs,
        swap_types: summary.swap_types.iter().map(swap_type).collect(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests;
