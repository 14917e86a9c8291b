use std::collections::BTreeMap;
use std::sync::Arc;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::pagemap_entry::PagemapEntry;
use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::runs::Run;
use fdmap_proto::shared_snapshot;
use fdmap_proto::state::{PageState, StateSet, SwapSlot};
use fdmap_proto::units::{PageIndex, PageRange, to_u64};
use proptest::prelude::*;

use super::oracle::{self, Page, any_file, page_of, runs, scanned, snapshot};
use super::*;
use fdmap_proto::VariantArray as _;

const MAX_PAGES: u64 = 3 * BLOCK_PAGES + 77;

fn any_range() -> impl Strategy<Value = PageRange> {
    (0..MAX_PAGES + 100, 0..MAX_PAGES).prop_map(|(start, len)| PageRange::at(PageIndex(start), len))
}

fn any_states() -> impl Strategy<Value = StateSet> {
    proptest::collection::vec(0_usize..5, 0..5)
        .prop_map(|states| states.into_iter().map(|i| PageState::VARIANTS[i]).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn runs_equal_the_oracle(
        file in any_file(MAX_PAGES), range in any_range(), distinguish_swap_cached in any::<bool>(), slots in any::<bool>(),
        states in any_states(),
    ) {
        let snapshot = snapshot(&file);
        let options = RunOptions { distinguish_swap_cached, slots, ..RunOptions::default() };
        let expected = runs(&file, range, distinguish_swap_cached, slots);
        let got: Vec<Run> = Runs::new(snapshot.clone(), None, range, options).collect();
        prop_assert_eq!(&got, &expected);

        let some: Vec<Run> = Runs::new(snapshot, None, range, RunOptions { states, ..options }).collect();
        let expected: Vec<Run> = expected.into_iter().filter(|run| states.has(run.state)).collect();
        prop_assert_eq!(some, expected);
    }

    #[test]
    fn single_pages_equal_the_oracle(file in any_file(MAX_PAGES)) {
        let snapshot = snapshot(&file);
        for page in 0..to_u64(file.len()) + 2 {
            let (state, slot) = page_of(&file, page, true);
            prop_assert_eq!(snapshot.state(PageIndex(page)), state);
            prop_assert_eq!(snapshot.slot(PageIndex(page)), slot);
        }
    }

    #[test]
    fn summary_counts_every_page_once(file in any_file(MAX_PAGES), range in any_range(), distinguish_swap_cached in any::<bool>()) {
        let summary = Summary::of(&snapshot(&file), range, distinguish_swap_cached);
        let mut counts: BTreeMap<PageState, u64> = BTreeMap::new();
        let mut types: BTreeMap<u8, u64> = BTreeMap::new();
        for page in range.start().0..range.end().0 {
            let (state, slot) = page_of(&file, page, distinguish_swap_cached);
            *counts.entry(state).or_default() += 1;
            if let Some(slot) = slot {
                *types.entry(slot.swap_type()).or_default() += 1;
            }
        }
        let count = |state| counts.get(&state).copied().unwrap_or(0);
        prop_assert_eq!(summary.pages(), range.len());
        prop_assert_eq!(summary.hole, count(PageState::Hole));
        prop_assert_eq!(summary.resident, count(PageState::Resident));
        prop_assert_eq!(summary.swap_cached, count(PageState::SwapCached));
        prop_assert_eq!(summary.swapped, count(PageState::Swapped));
        prop_assert_eq!(summary.unknown, count(PageState::Unknown));
        prop_assert_eq!(&summary.swap_types, &types);
        prop_assert_eq!(summary.runs, to_u64(runs(&file, range, distinguish_swap_cached, false).len()));
    }

    #[test]
    fn bitmaps_equal_the_oracle(
        file in any_file(MAX_PAGES), range in any_range(), distinguish_swap_cached in any::<bool>(), states in any_states(),
    ) {
        let got = bitmaps(&snapshot(&file), range, states, distinguish_swap_cached, true);
        let mut slots = Vec::new();
        for nth in 0..range.len() {
            let (state, slot) = page_of(&file, range.start().0 + nth, distinguish_swap_cached);
            for (bitmap, of) in got.states.iter().zip(PageState::VARIANTS.iter().copied()) {
                let bit = bitmap.get((nth / 8) as usize).is_some_and(|byte| byte >> (nth % 8) & 1 == 1);
                prop_assert_eq!(bit, state == of && states.has(of), "page {} {}", nth, of);
            }
            if states.has(state) {
                slots.extend(slot.iter().flat_map(|slot| slot.raw().to_le_bytes()));
            }
        }
        prop_assert_eq!(&got.slots, &slots);
        let bytes = range.len().div_ceil(8) as usize;
        prop_assert!(got.states.iter().all(|bitmap| bitmap.is_empty() || bitmap.len() == bytes));
        let spare = got.states.iter().filter_map(|b| b.last()).fold(0, |or, byte| or | byte);
        prop_assert!(range.len() % 8 == 0 || u64::from(spare) >> (range.len() % 8) == 0, "bits past the end are clear");
    }

    #[test]
    fn entries_and_state_words_equal_the_oracle(file in any_file(MAX_PAGES), range in any_range()) {
        let snapshot = snapshot(&file);
        let mut bytes = vec![0xaa; 3];
        entries(&snapshot, range, &mut bytes);
        let bytes = &bytes[3..];
        let words = state_words(&snapshot, range);
        prop_assert_eq!(to_u64(bytes.len()), range.len() * 8);
        prop_assert_eq!(to_u64(words.len()), range.len().div_ceil(4));
        for nth in 0..range.len() {
            let (state, slot) = page_of(&file, range.start().0 + nth, false);
            prop_assert_eq!(shared_snapshot::entry_at(bytes, nth), Some(PagemapEntry::encode(state, slot)));
            prop_assert_eq!(shared_snapshot::state_at(&words, nth), Some(state));
        }
    }

    #[test]
    fn differences_equal_the_oracle(
        file in any_file(MAX_PAGES), edits in proptest::collection::vec((0..MAX_PAGES, 0_usize..5, 1_u64..300), 0..10),
        range in any_range(), distinguish_swap_cached in any::<bool>(),
    ) {
        let mut after = file.clone();
        for (start, state, len) in edits {
            let state = PageState::VARIANTS[state];
            let slot = state.is_swapped().then(|| SwapSlot::new(0, 7 + start).unwrap());
            let end = (start + len).min(to_u64(after.len()));
            for page in start..end {
                after[page as usize] = (state, slot.and_then(|slot| slot.plus(page - start)));
            }
        }
        let one = snapshot(&file);
        let whole = BlockRange::around(PageRange::first(to_u64(after.len())));
        let two = one.with(scanned(&after, whole, 2));
        let changes: Vec<_> = diff(&one, &two, range, distinguish_swap_cached).collect();
        let mut next = range.start().0;
        let same = |page| page_of(&file, page, distinguish_swap_cached) == page_of(&after, page, distinguish_swap_cached);
        for change in &changes {
            prop_assert!((next..change.range.start().0).all(same));
            for nth in 0..change.range.len() {
                let page = change.range.start().0 + nth;
                prop_assert!(!same(page));
                let slot = |first: Option<SwapSlot>| first.and_then(|slot| slot.plus(nth));
                prop_assert_eq!(page_of(&file, page, distinguish_swap_cached), (change.before, slot(change.slot_before)));
                prop_assert_eq!(page_of(&after, page, distinguish_swap_cached), (change.after, slot(change.slot_after)));
            }
            next = change.range.end().0;
        }
        prop_assert!((next..range.end().0.max(next)).all(same));
        for pair in changes.windows(2) {
            let follows = |a: Option<SwapSlot>, b| a.and_then(|slot| slot.plus(pair[0].range.len())) == b;
            let joinable = pair[0].range.end() == pair[1].range.start()
                && (pair[0].before, pair[0].after) == (pair[1].before, pair[1].after)
                && follows(pair[0].slot_before, pair[1].slot_before)
                && follows(pair[0].slot_after, pair[1].slot_after);
            prop_assert!(!joinable, "changes have maximal length");
        }
    }

    #[test]
    fn opaque_range_equals_blocks_of_unknown_pages(
        file in any_file(MAX_PAGES), (from, to) in (0_u64..4, 0_u64..5), (again, until) in (0_u64..4, 0_u64..5),
        range in any_range(), slots in any::<bool>(),
    ) {
        let blocks = |from: u64, to: u64| BlockRange::new(BlockIndex(from), BlockIndex(to.max(from))).unwrap();
        let before = snapshot(&file);
        let stamp = ScanStamp { opaque: true, ..oracle::stamp(2, false) };
        let opaque_scan = Scanned { range: blocks(from, to), blocks: Vec::new(), stamp, file_pages: 0 };
        let opaque = before.with(opaque_scan);
        // A later scan reads a part of the range.
        let opaque = opaque.with(scanned(&file, blocks(again, until), 3));
        let mut expected_pages = file;
        expected_pages.resize((4 * BLOCK_PAGES) as usize, (PageState::Hole, None));
        for page in (from * BLOCK_PAGES..to.max(from).min(4) * BLOCK_PAGES).map(PageIndex) {
            if !blocks(again, until).pages().contains(page) {
                expected_pages[page.0 as usize] = (PageState::Unknown, None);
            }
        }
        let expected = snapshot(&expected_pages);
        let options = RunOptions { slots, ..RunOptions::default() };
        let runs = |snapshot: &Snapshot| Runs::new(snapshot.clone(), None, range, options).collect::<Vec<Run>>();
        prop_assert_eq!(runs(&opaque), runs(&expected));
        let encodings = |snapshot: &Snapshot| {
            let bitmaps = bitmaps(snapshot, range, StateSet::ALL, true, true);
            let mut words = Vec::new();
            entries(snapshot, range, &mut words);
            (bitmaps.states, bitmaps.slots, words, state_words(snapshot, range))
        };
        prop_assert_eq!(encodings(&opaque), encodings(&expected));
        prop_assert_eq!(diff(&expected, &opaque, range, true).next(), None);
        let changes = |to| diff(&before, to, range, true).collect::<Vec<_>>();
        prop_assert_eq!(changes(&opaque), changes(&expected));
        let unknown = |snapshot: &Snapshot| {
            snapshot.provenance(&[range], ProbeKind::Xarray, 1).map(|provenance| provenance.uncertainty.unknown_pages)
        };
        if let (Some(got), Some(expected)) = (unknown(&opaque), unknown(&expected)) {
            prop_assert_eq!(got, expected);
        }
        for page in (range.start().0..range.end().0).map(PageIndex) {
            prop_assert_eq!(opaque.state(page), expected.state(page));
        }
    }

    #[test]
    fn partial_scan_leaves_other_blocks_unchanged(
        one in any_file(MAX_PAGES), two in any_file(MAX_PAGES), range in any_range(),
    ) {
        let blocks = BlockRange::around(range.intersect(PageRange::first(MAX_PAGES)));
        let mixed = snapshot(&one).with(scanned(&two, blocks, 2));
        for page in 0..MAX_PAGES {
            let from = if blocks.pages().contains(PageIndex(page)) { &two } else { &one };
            let expected = page_of(from, page, true);
            prop_assert_eq!((mixed.state(PageIndex(page)), mixed.slot(PageIndex(page))), expected);
        }
    }
}

/// A byte of a bitmap has pages of both blocks if the range begins in the middle of a byte's pages.
#[test]
fn block_in_one_state_sets_no_bits_of_the_next_one() {
    let states = [PageState::Hole, PageState::Resident, PageState::Unknown];
    for (first, second) in states.into_iter().flat_map(|first| states.map(|second| (first, second))) {
        let file: Vec<Page> = (0..2 * BLOCK_PAGES)
            .map(|page| (if page < BLOCK_PAGES { first } else { second }, None))
            .collect();
        let snapshot = snapshot(&file);
        for before in 1..20 {
            let range = PageRange::at(PageIndex(BLOCK_PAGES - before), 40);
            let got = bitmaps(&snapshot, range, StateSet::ALL, true, false);
            for nth in 0..range.len() {
                let set = got.states.iter().zip(PageState::VARIANTS).filter(|(bitmap, _)| {
                    bitmap.get((nth / 8) as usize).is_some_and(|byte| byte >> (nth % 8) & 1 == 1)
                });
                let set: Vec<_> = set.map(|(_, state)| *state).collect();
                assert_eq!(set, [if nth < before { first } else { second }], "page {nth} of {range}");
            }
        }
    }
}

fn resident_file(pages: usize) -> Vec<Page> {
    vec![(PageState::Resident, None); pages]
}

#[test]
fn unchanged_blocks_are_shared_between_snapshots() {
    let mut file = resident_file(3 * 4096);
    file[5] = (PageState::Hole, None);
    let one = snapshot(&file);
    file[4096 + 9] = (PageState::Hole, None);
    let two = one.with(scanned(&file, BlockRange::around(PageRange::first(3 * 4096)), 2));
    let same =
        |index| Arc::ptr_eq(one.block(BlockIndex(index)).unwrap(), two.block(BlockIndex(index)).unwrap());
    assert_eq!((same(0), same(1), same(2)), (true, false, true));
}

#[test]
fn uniform_blocks_take_less_than_a_twentieth_of_a_byte_a_page() {
    let bytes = snapshot(&resident_file(64 * 4096)).bytes();
    assert!(bytes < 64 * 4096 / 20, "{bytes} bytes");
}

#[test]
fn worst_block_takes_less_than_12_bytes_a_page() {
    // No two slots are contiguous, swap areas differ, and every third page is resident.
    let file: Vec<Page> = (0..4096_u64)
        .map(|page| match page % 3 {
            0 => (PageState::Resident, None),
            _ => (PageState::Swapped, SwapSlot::new((page % 7) as u8, page * 1000)),
        })
        .collect();
    let bytes = snapshot(&file).bytes();
    assert!(bytes < 4096 * 12, "{bytes} bytes");
}

#[test]
fn runs_end_where_attributes_change() {
    let file = resident_file(300);
    let mut map = AttributeMap::default();
    for leaf in 0..5 {
        let of_page = |page| PackedAttributes {
            order: if leaf * 64 + page < 100 { 0 } else { 2 },
            known: PackedAttributes::HAS_ORDER,
            ..Default::default()
        };
        map.put_leaf(PageIndex(leaf * 64), u64::MAX, &std::array::from_fn(|page| of_page(page as u64)));
    }
    let options = RunOptions { attributes: AttributeSet::ALL, ..RunOptions::default() };
    let runs: Vec<Run> =
        Runs::new(snapshot(&file), Some(Arc::new(map)), PageRange::first(400), options).collect();
    let orders: Vec<_> = runs.iter().map(|run| (run.range.len(), run.attributes.unwrap().order)).collect();
    assert_eq!(orders, [(100, Some(0)), (200, Some(2)), (100, None)]);
    assert_eq!(runs[0].attributes.unwrap().map_count, None, "attributes that were not read are unknown");
}

#[test]
fn slots_continue_after_a_run_that_attributes_split() {
    let file: Vec<Page> =
        (0..200_u64).map(|page| (PageState::Swapped, SwapSlot::new(0, 50 + page))).collect();
    let mut map = AttributeMap::default();
    let order = PackedAttributes { order: 1, known: PackedAttributes::HAS_ORDER, ..Default::default() };
    map.put_leaf(PageIndex(64), 1 << 6, &[order; 64]);
    let options = RunOptions { attributes: AttributeSet::ALL, ..RunOptions::default() };
    let runs: Vec<Run> =
        Runs::new(snapshot(&file), Some(Arc::new(map)), PageRange::first(200), options).collect();
    let slots: Vec<_> = runs.iter().map(|run| (run.range.start().0, run.slot.unwrap().offset())).collect();
    assert_eq!(slots, [(0, 50), (70, 120), (71, 121)]);
}

#[test]
fn sparse_terabyte_is_one_run() {
    let snapshot = snapshot(&[]);
    let range = PageRange::first(1 << 28);
    let all: Vec<Run> = Runs::new(snapshot, None, range, RunOptions::default()).collect();
    assert_eq!(all, [Run { range, state: PageState::Hole, slot: None, attributes: None }]);
}

#[test]
fn opaque_exabyte_takes_no_memory() {
    let pages = PageRange::first(1 << 51);
    let stamp = ScanStamp { opaque: true, ..oracle::stamp(1, false) };
    let range = BlockRange::around(pages);
    let opaque = Snapshot::default().with(Scanned { range, blocks: Vec::new(), stamp, file_pages: 1 << 51 });
    assert_eq!(opaque.bytes(), 0);
    let summary = Summary::of(&opaque, pages, false);
    assert_eq!((summary.unknown, summary.pages(), summary.runs), (1 << 51, 1 << 51, 1));
    assert_eq!(
        opaque.provenance(&[pages], ProbeKind::Syscalls, 1).unwrap().uncertainty.unknown_pages,
        1 << 51
    );
    let seen = snapshot(&[]);
    assert_eq!(
        diff(&seen, &opaque, pages, false).map(|change| change.range.len()).collect::<Vec<_>>(),
        [1 << 51]
    );
    assert_eq!(diff(&opaque, &opaque.clone(), pages, false).count(), 0);
}
