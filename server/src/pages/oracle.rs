//! The oracle of the tests: one element for each page.

use std::time::UNIX_EPOCH;

use fdmap_proto::provenance::{Moment, Uncertainty};
use fdmap_proto::runs::Run;
use fdmap_proto::state::{PageState, SwapSlot};
use fdmap_proto::units::{PageIndex, PageRange, to_u64};
use proptest::prelude::*;

use super::{BLOCK_PAGES, BlockBuilder, BlockIndex, BlockRange, ScanStamp, Scanned, Snapshot};
use fdmap_proto::VariantArray as _;

pub(crate) type Page = (PageState, Option<SwapSlot>);

/// A file as a list of pages, in runs of random length so that every form of block occurs.
pub(crate) fn any_file(max_pages: u64) -> impl Strategy<Value = Vec<Page>> {
    let piece = (0_usize..5, 1_u64..400, 0_u64..1 << 40, any::<bool>(), any::<bool>());
    (0..=max_pages, proptest::collection::vec(piece, 1..60)).prop_map(|(pages, pieces)| {
        let mut file = Vec::new();
        for (state, len, offset, scattered, long) in pieces.into_iter().cycle() {
            if to_u64(file.len()) >= pages {
                break;
            }
            let state = PageState::VARIANTS[state];
            let len = if long { len * 37 } else { len % 7 + 1 };
            for i in 0..len.min(pages - to_u64(file.len())) {
                let offset = if scattered { offset.wrapping_mul(i + 1) % (1 << 45) } else { offset + i };
                let slot = state.is_swapped().then(|| SwapSlot::new(1, offset).unwrap());
                file.push((state, slot));
            }
        }
        file
    })
}

pub(crate) fn stamp(at: u64, distinguish_swap_cached: bool) -> ScanStamp {
    let moment = Moment { monotonic_ns: at, wall: UNIX_EPOCH };
    ScanStamp {
        begin: moment,
        end: moment,
        distinguish_swap_cached,
        uncertainty: Uncertainty::default(),
        opaque: false,
    }
}

/// The scan of `range` that a probe would return.
pub(crate) fn scanned(file: &[Page], range: BlockRange, at: u64) -> Scanned {
    let mut builder = BlockBuilder::default();
    let mut blocks = Vec::new();
    for index in (range.start().0..range.end().0).map(BlockIndex) {
        let mut cached = [0_u64; 64];
        for page in 0..BLOCK_PAGES {
            let Some((state, slot)) = file.get((index.0 * BLOCK_PAGES + page) as usize) else {
                break;
            };
            builder.fill(page, page + 1, *state, *slot);
            if *state == PageState::SwapCached {
                cached[(page / 64) as usize] |= 1 << (page % 64);
            }
        }
        blocks.extend(builder.finish().map(|block| (index, block.with_cached(&cached))));
    }
    Scanned { range, blocks, stamp: stamp(at, true), file_pages: to_u64(file.len()) }
}

pub(crate) fn snapshot(file: &[Page]) -> Snapshot {
    let whole = BlockRange::around(PageRange::first(to_u64(file.len())));
    Snapshot::default().with(scanned(file, whole, 1))
}

/// Page `page`. Pages beyond the end of the file are holes.
pub(crate) fn page_of(file: &[Page], page: u64, distinguish_swap_cached: bool) -> Page {
    let (state, slot) = file.get(page as usize).copied().unwrap_or((PageState::Hole, None));
    (if distinguish_swap_cached { state } else { state.folded() }, slot)
}

/// The runs of `range`, page by page.
pub(crate) fn runs(file: &[Page], range: PageRange, distinguish_swap_cached: bool, slots: bool) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for page in range.start().0..range.end().0 {
        let (state, slot) = page_of(file, page, distinguish_swap_cached);
        let slot = slot.filter(|_| slots);
        match runs.last_mut() {
            Some(run)
                if run.state == state && run.slot.and_then(|first| first.plus(run.range.len())) == slot =>
            {
                run.range = PageRange::at(run.range.start(), run.range.len() + 1);
            }
            _ => {
                let range = PageRange::at(PageIndex(page), 1);
                runs.push(Run { range, state, slot, attributes: None });
            }
        }
    }
    runs
}
