use fdmap_proto::columns;
use fdmap_proto::pagemap_entry::PagemapEntry;
use fdmap_proto::state::PageState;
use proptest::prelude::*;

use super::*;
use crate::files::Limits;
use crate::pages::ScanResult;
use crate::pages::oracle::{any_file, page_of, snapshot};
use fdmap_proto::VariantArray as _;

const MAX_PAGES: u64 = 20_000;

fn query(encoding: v1::Encoding) -> ScanQuery {
    let request = v1::ScanRequest {
        file: Some(fdmap_proto::convert::FileName::Name("ram".to_owned()).into()),
        encoding: encoding.into(),
        distinguish_swap_cached: true,
        slots: true,
        ..Default::default()
    };
    ScanQuery::new(request, &Limits::default()).unwrap()
}

/// Each page of the batch has the bit of its state only, and its slot.
fn check_bitmaps(
    file: &[(PageState, Option<fdmap_proto::SwapSlot>)],
    batch: &v1::BitmapBatch,
) -> Result<(), TestCaseError> {
    let maps = [&batch.hole, &batch.resident, &batch.swap_cached, &batch.swapped, &batch.unknown];
    let mut slots = batch.slots.as_chunks::<8>().0.iter();
    for nth in 0..batch.pages {
        let (state, slot) = page_of(file, batch.first_page + nth, true);
        for (map, of) in maps.iter().zip(PageState::VARIANTS.iter().copied()) {
            let bit = map.get((nth / 8) as usize).is_some_and(|byte| byte >> (nth % 8) & 1 == 1);
            prop_assert_eq!(bit, of == state);
        }
        if let Some(slot) = slot {
            prop_assert_eq!(slots.next(), Some(&slot.raw().to_le_bytes()));
        }
    }
    prop_assert_eq!(slots.next(), None);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_encoding_reports_every_page(file in any_file(MAX_PAGES), start in 0..MAX_PAGES, len in 1..MAX_PAGES) {
        let range = PageRange::at(PageIndex(start), len);
        let result = ScanResult { snapshot: snapshot(&file), attributes: None };
        let batches = |encoding| ScanBatches::new(&query(encoding), result.clone(), range);

        let mut next = start;
        for body in batches(v1::Encoding::Runs) {
            let v1::scan_response::Body::Runs(batch) = body else { panic!("{body:?}") };
            for run in columns::decode(batch).unwrap() {
                prop_assert_eq!(run.range.start().0, next);
                for page in run.range.start().0..run.range.end().0 {
                    prop_assert_eq!(page_of(&file, page, true), (run.state, run.slot_of(PageIndex(page))));
                }
                next = run.range.end().0;
            }
        }
        prop_assert_eq!(next, range.end().0);

        let mut next = start;
        for body in batches(v1::Encoding::Auto) {
            match body {
                v1::scan_response::Body::Runs(batch) => {
                    for run in columns::decode(batch).unwrap() {
                        prop_assert_eq!(run.range.start().0, next);
                        for page in run.range.start().0..run.range.end().0 {
                            let got = (run.state, run.slot_of(PageIndex(page)));
                            prop_assert_eq!(page_of(&file, page, true), got);
                        }
                        next = run.range.end().0;
                    }
                }
                v1::scan_response::Body::Bitmaps(batch) => {
                    prop_assert_eq!(batch.first_page, next);
                    check_bitmaps(&file, &batch)?;
                    next += batch.pages;
                }
                other => panic!("{other:?}"),
            }
        }
        prop_assert_eq!(next, range.end().0);

        let mut next = start;
        for body in batches(v1::Encoding::Entries) {
            let v1::scan_response::Body::Entries(batch) = body else { panic!("{body:?}") };
            prop_assert_eq!(batch.first_page, next);
            for word in batch.entries.as_chunks::<8>().0 {
                let (state, slot) = page_of(&file, next, false);
                prop_assert_eq!(PagemapEntry(u64::from_le_bytes(*word)), PagemapEntry::encode(state, slot));
                next += 1;
            }
        }
        prop_assert_eq!(next, range.end().0);

        let mut next = start;
        for body in batches(v1::Encoding::Bitmaps) {
            let v1::scan_response::Body::Bitmaps(batch) = body else { panic!("{body:?}") };
            prop_assert_eq!(batch.first_page, next);
            check_bitmaps(&file, &batch)?;
            next += batch.pages;
        }
        prop_assert_eq!(next, range.end().0);
    }
}

#[test]
fn message_size_is_bounded_for_every_file() {
    use prost::Message as _;
    // The worst case for runs: adjacent pages differ, and their slots are far apart.
    let file: Vec<_> = (0..200_000_u64)
        .map(|page| match page % 2 {
            0 => (PageState::Resident, None),
            _ => (PageState::Swapped, fdmap_proto::SwapSlot::new((page % 30) as u8, (page * 7919) << 18)),
        })
        .collect();
    let result = ScanResult { snapshot: snapshot(&file), attributes: None };
    for encoding in [v1::Encoding::Auto, v1::Encoding::Runs, v1::Encoding::Bitmaps, v1::Encoding::Entries] {
        for body in ScanBatches::new(&query(encoding), result.clone(), PageRange::first(200_000)) {
            let bytes = v1::ScanResponse { body: Some(body) }.encoded_len();
            assert!(bytes < 1 << 20, "{encoding:?}: {bytes} bytes");
        }
    }
}

#[test]
fn huge_hole_is_one_message_of_runs() {
    let result = ScanResult { snapshot: snapshot(&[]), attributes: None };
    for encoding in [v1::Encoding::Runs, v1::Encoding::Auto] {
        let batches = ScanBatches::new(&query(encoding), result.clone(), PageRange::first(1 << 40));
        assert_eq!(batches.count(), 1);
    }
}

/// Resident pages, then pages of two states in turn, then a hole.
fn file_with_a_dense_part() -> (ScanResult, PageRange) {
    let state = |page: u64| match page {
        40_000..80_000 if page.is_multiple_of(2) => PageState::Hole,
        0..80_000 => PageState::Resident,
        _ => PageState::Hole,
    };
    let file: Vec<_> = (0..80_000).map(|page| (state(page), None)).collect();
    (ScanResult { snapshot: snapshot(&file), attributes: None }, PageRange::first(1 << 40))
}

#[test]
fn auto_has_bitmaps_where_runs_are_short() {
    let (result, range) = file_with_a_dense_part();
    let kind = |body| match body {
        v1::scan_response::Body::Runs(batch) => ("runs", batch.first_page),
        v1::scan_response::Body::Bitmaps(batch) => ("bitmaps", batch.first_page),
        other => panic!("{other:?}"),
    };
    let got: Vec<_> = ScanBatches::new(&query(v1::Encoding::Auto), result, range).map(kind).collect();
    let window = MAX_ENTRY_PAGES;
    let expected = [
        ("runs", 0),
        ("bitmaps", 2 * window),
        ("bitmaps", 3 * window),
        ("bitmaps", 4 * window),
        ("runs", 5 * window),
    ];
    assert_eq!(got, expected);
}

#[test]
fn auto_omits_states_that_are_not_requested() {
    let (result, range) = file_with_a_dense_part();
    let request = |states| ScanQuery { states, ..query(v1::Encoding::Auto) };
    let count = |states| ScanBatches::new(&request(states), result.clone(), range).count();
    assert_eq!(count(StateSet::of(PageState::Swapped)), 0);
    assert_eq!(count(StateSet::of(PageState::Resident)), 4, "runs, and three bitmaps");
}

#[test]
fn lookup_answer_keeps_the_order_of_the_request() {
    let file = vec![(PageState::Hole, None), (PageState::SwapCached, fdmap_proto::SwapSlot::new(1, 5))];
    let result = ScanResult { snapshot: snapshot(&file), attributes: None };
    let pages = [PageIndex(1), PageIndex(0), PageIndex(1)];
    let got = lookup_pages(&pages, &result, false, AttributeSet::NONE);
    let states: Vec<_> = got.iter().map(|info| (info.page, info.state(), info.slot.is_some())).collect();
    use v1::PageState::{Hole, Swapped};
    assert_eq!(states, [(1, Swapped, true), (0, Hole, false), (1, Swapped, true)]);
}
