//! Division of an answer into messages of bounded size.

use std::iter::Peekable;

use fdmap_proto::columns::Columns;
use fdmap_proto::convert::AttributeSet;
use fdmap_proto::state::StateSet;
use fdmap_proto::units::{PageIndex, PageRange};
use fdmap_proto::v1;

use super::density::{MAX_BITMAP_PAGES, MAX_ENTRY_PAGES, MAX_RUNS, sparse_part};
use super::request::{Encoding, ScanQuery};
use crate::pages::{self, AttributeMap, Differences, RunOptions, Runs, ScanResult, Snapshot, Summary};

/// The message bodies of a Scan answer.
#[derive(Debug)]
pub enum ScanBatches {
    Runs(Peekable<Runs>),
    /// Runs where they are long, elsewhere bitmaps with slots.
    Auto {
        snapshot: Snapshot,
        /// The pages of the messages that follow.
        rest: PageRange,
        options: RunOptions,
    },
    /// Bitmaps or entries.
    Pages {
        snapshot: Snapshot,
        /// The pages of the messages that follow.
        rest: PageRange,
        /// The states that have a bitmap.
        states: StateSet,
        distinguish_swap_cached: bool,
        /// `true`: entries. `false`: bitmaps.
        entries: bool,
        /// Bitmaps carry swap slots.
        slots: bool,
    },
}

impl ScanBatches {
    /// The answer to `query` for the pages of `range`.
    #[must_use]
    pub fn new(query: &ScanQuery, result: ScanResult, range: PageRange) -> Self {
        let ScanResult { snapshot, attributes } = result;
        let (states, distinguish_swap_cached) = (query.states, query.distinguish_swap_cached);
        let options =
            RunOptions { states, distinguish_swap_cached, slots: true, attributes: query.attributes };
        match query.encoding {
            Encoding::Runs => Self::Runs(Runs::new(snapshot, attributes, range, options).peekable()),
            Encoding::Auto => Self::Auto { snapshot, rest: range, options },
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
            Self::Runs(runs) => run_batch(runs).map(Body::Runs),
            Self::Auto { snapshot, rest, options } => {
                let runs = |range| Runs::new(snapshot.clone(), None, range, *options);
                while !rest.is_empty() {
                    let sparse = sparse_part(runs(*rest).map(|run| run.range), *rest);
                    if sparse.is_empty() {
                        let now = split_off(rest, MAX_ENTRY_PAGES);
                        let RunOptions { states, distinguish_swap_cached, .. } = *options;
                        let bitmaps = bitmap_batch(snapshot, now, states, distinguish_swap_cached, true);
                        return Some(Body::Bitmaps(bitmaps));
                    }
                    *rest = PageRange::new(sparse.end(), rest.end()).unwrap_or_default();
                    if let Some(batch) = run_batch(&mut runs(sparse).peekable()) {
                        return Some(Body::Runs(batch));
                    }
                }
                None
            }
            Self::Pages { snapshot, rest, states, distinguish_swap_cached, entries, slots } => {
                if rest.is_empty() {
                    return None;
                }
                let max_pages = if *entries || *slots { MAX_ENTRY_PAGES } else { MAX_BITMAP_PAGES };
                let now = split_off(rest, max_pages);
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

/// The next message of runs, if any is left.
fn run_batch(runs: &mut Peekable<Runs>) -> Option<v1::RunBatch> {
    let mut columns = Columns::<v1::RunBatch>::new(runs.peek()?.range.start());
    while columns.len() < MAX_RUNS
        && let Some(run) = runs.next()
    {
        columns.push(&run);
    }
    Some(columns.finish())
}

/// Removes the pages of the next message from `rest` and returns them. Every message but the first starts at a multiple of
/// `max_pages`, so that it holds whole blocks.
pub(super) fn split_off(rest: &mut PageRange, max_pages: u64) -> PageRange {
    let now = PageRange::at(rest.start(), max_pages - rest.start().0 % max_pages).intersect(*rest);
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

/// The message bodies of a Diff answer.
#[derive(Debug)]
pub struct DiffBatches {
    changes: Peekable<Differences>,
}

impl DiffBatches {
    #[must_use]
    pub fn new(changes: Differences) -> Self {
        Self { changes: changes.peekable() }
    }
}

impl Iterator for DiffBatches {
    type Item = v1::DiffBatch;

    fn next(&mut self) -> Option<v1::DiffBatch> {
        let mut columns = Columns::<v1::DiffBatch>::new(self.changes.peek()?.range.start());
        while columns.len() < MAX_RUNS
            && let Some(change) = self.changes.next()
        {
            columns.push(&change);
        }
        Some(columns.finish())
    }
}

/// The pages of a Lookup answer, in the order of `pages`.
#[must_use]
pub fn lookup_pages(
    pages: &[PageIndex],
    result: &ScanResult,
    distinguish_swap_cached: bool,
    attributes: AttributeSet,
) -> Vec<v1::PageInfo> {
    let map: Option<&AttributeMap> = result.attributes.as_deref();
    let info = |page: &PageIndex| {
        let state = result.snapshot.state(*page);
        let attributes = map.map(|map| {
            let known = if state.is_data() { map.get(*page).unpack(attributes) } else { Default::default() };
            known.into()
        });
        let state = if distinguish_swap_cached { state } else { state.folded() };
        v1::PageInfo {
            page: page.0,
            state: v1::PageState::from(state).into(),
            slot: result.snapshot.slot(*page).map(|slot| slot.raw()),
            attributes,
        }
    };
    pages.iter().map(info).collect()
}

/// The counts of a Summary answer. The caller adds provenance, range, file size and snapshot id.
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
