//! Comparison of answers with the list of pages.

use std::sync::Arc;

use fdmap_proto::attributes::PageAttributes;
use fdmap_proto::columns;
use fdmap_proto::convert::AttributeSet;
use fdmap_proto::pagemap_entry::PagemapEntry;
use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::runs::{Change, Run};
use fdmap_proto::state::PageState;
use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};
use fdmap_proto::v1;
use fdmap_server::pages::{BlockRange, ScanResult, Snapshot, Summary, diff as differences};
use fdmap_server::query::{
    DiffBatches, DiffQuery, LookupQuery, ScanBatches, ScanQuery, SummaryQuery, lookup_pages, resolve_range,
    summary_message,
};
use prost::Message as _;

use super::LIMITS;
use super::model::Model;
use fdmap_proto::VariantArray as _;

/// Size of one message. The default limit of gRPC clients is 4 MiB.
const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// Messages of one answer that are checked: the bitmaps of the largest file would take millions.
const MAX_MESSAGES: usize = 5;

/// The runs of `range`, from the list.
fn expected_runs(
    model: &Model,
    range: PageRange,
    distinguish_swap_cached: bool,
    requested: Option<AttributeSet>,
) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut add = |range: PageRange| {
        let page = range.start().0;
        let (state, slot) = model.page(page, distinguish_swap_cached);
        let attributes = requested.map(|requested| match state.is_data() {
            true => model.attributes_of(page).unpack(requested),
            false => PageAttributes::default(),
        });
        match runs.last_mut() {
            Some(run)
                if run.state == state
                    && run.attributes == attributes
                    && run.slot.and_then(|first| first.plus(run.range.len())) == slot =>
            {
                run.range = PageRange::at(run.range.start(), run.range.len() + range.len());
            }
            _ => runs.push(Run { range, state, slot, attributes }),
        }
    };
    // Pages before and after the list are holes.
    let inside = model.window().intersect(range);
    if inside.is_empty() {
        add(range);
        return runs;
    }
    let before = PageRange::new(range.start(), inside.start()).unwrap_or_default();
    let behind = PageRange::new(inside.end(), range.end()).unwrap_or_default();
    Some(before).filter(|range| !range.is_empty()).into_iter().for_each(&mut add);
    (inside.start().0..inside.end().0).for_each(|page| add(PageRange::at(PageIndex(page), 1)));
    Some(behind).filter(|range| !range.is_empty()).into_iter().for_each(&mut add);
    runs
}

fn check_provenance(model: &Model, snapshot: &Snapshot, ranges: &[PageRange]) {
    let Some(provenance) = snapshot.provenance(ranges, ProbeKind::Xarray, 1) else {
        panic!("no provenance for {ranges:?} of {} pages", model.file_pages);
    };
    let unknown = |range: &PageRange| {
        let inside = model.window().intersect(*range);
        (inside.start().0..inside.end().0)
            .filter(|page| model.page(*page, true).0 == PageState::Unknown)
            .count()
    };
    assert_eq!(provenance.uncertainty.unknown_pages, to_u64(ranges.iter().map(unknown).sum()));
    assert_eq!(provenance.swap_cached_distinguished, model.distinguish_swap_cached);
}

/// Answers a Scan as `rpc` does.
pub(super) fn scan(model: &Model, request: &v1::ScanRequest) {
    let Ok(query) = ScanQuery::new(request.clone(), &LIMITS) else { return };
    let Ok(range) = resolve_range(query.range, model.file_pages) else { return };
    if query.check_pages(range, &LIMITS).is_err() {
        return;
    }
    let snapshot = model.snapshot();
    check_provenance(model, &snapshot, &[range]);
    let attributes = query.options().attributes.then(|| Arc::new(model.attribute_map()));
    let mut messages = Vec::new();
    for body in ScanBatches::new(&query, ScanResult { snapshot, attributes }, range).take(MAX_MESSAGES) {
        let response = v1::ScanResponse { body: Some(body) };
        assert!(response.encoded_len() <= MAX_MESSAGE_BYTES, "a message of {} bytes", response.encoded_len());
        messages.extend(response.body);
    }
    let expected = Expected::of(request);
    match v1::Encoding::try_from(request.encoding) {
        Ok(v1::Encoding::Bitmaps) => check_bitmaps(model, range, &expected, messages),
        Ok(v1::Encoding::Entries) => check_entries(model, range, messages),
        Ok(v1::Encoding::Auto) if query.attributes.is_empty() => check_auto(model, range, &expected, messages),
        _ => check_runs(model, range, &expected, query.attributes, messages),
    }
}

/// The content of a Scan answer, by pages.proto.
#[derive(Clone)]
struct Expected {
    states: Vec<i32>,
    distinguish_swap_cached: bool,
    slots: bool,
}

impl Expected {
    fn of(request: &v1::ScanRequest) -> Self {
        let cached = i32::from(v1::PageState::SwapCached);
        Self {
            states: request.states.clone(),
            distinguish_swap_cached: request.distinguish_swap_cached || request.states.contains(&cached),
            slots: request.slots,
        }
    }

    fn has(&self, state: PageState) -> bool {
        self.states.is_empty() || self.states.contains(&v1::PageState::from(state).into())
    }
}

fn check_runs(
    model: &Model,
    range: PageRange,
    selected: &Expected,
    attributes: AttributeSet,
    messages: Vec<v1::scan_response::Body>,
) {
    let all = messages.len() < MAX_MESSAGES;
    let mut got = Vec::new();
    for message in messages {
        let v1::scan_response::Body::Runs(batch) = message else { panic!("not runs: {message:?}") };
        let first = PageIndex(batch.first_page);
        let runs = columns::decode(batch).unwrap();
        assert_eq!(runs.first().map(|run| run.range.start()), Some(first));
        got.extend(runs);
    }
    let requested = (!attributes.is_empty()).then_some(attributes);
    let mut expected = expected_runs(model, range, selected.distinguish_swap_cached, requested);
    expected.retain(|run| selected.has(run.state) && !run.range.is_empty());
    if !all {
        expected.truncate(got.len());
    }
    assert_eq!(got.len(), expected.len(), "{got:?} instead of {expected:?}");
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!(got, expected);
    }
}

/// Checks that a batch starts at `next`, and advances `next` to its end.
fn advance(next: &mut PageIndex, first_page: u64, pages: u64) -> PageRange {
    assert_eq!(first_page, next.0, "the batch does not start where the previous one ended");
    assert!(pages > 0, "an empty batch");
    *next = next.plus(pages);
    PageRange::at(PageIndex(first_page), pages)
}

fn check_entries(model: &Model, range: PageRange, messages: Vec<v1::scan_response::Body>) {
    let all = messages.len() < MAX_MESSAGES;
    let mut next = range.start();
    for message in messages {
        let v1::scan_response::Body::Entries(batch) = message else { panic!("not entries: {message:?}") };
        let (words, rest) = batch.entries.as_chunks::<8>();
        assert!(rest.is_empty(), "the last entry is incomplete");
        let covered = advance(&mut next, batch.first_page, to_u64(words.len()));
        let inside = model.window().intersect(covered);
        let mut data = 0;
        for page in inside.start().0..inside.end().0 {
            let (state, slot) = model.page(page, false);
            let word = u64::from_le_bytes(words[to_usize(page - covered.start().0)]);
            assert_eq!(PagemapEntry(word), PagemapEntry::encode(state, slot), "page {page}");
            data += usize::from(word != 0);
        }
        assert_eq!(
            words.iter().filter(|word| **word != [0; 8]).count(),
            data,
            "pages outside the list are holes"
        );
    }
    assert!(next == range.end() || !all, "the answer for {range} ends at {next}");
}

fn check_bitmaps(
    model: &Model,
    range: PageRange,
    selected: &Expected,
    messages: Vec<v1::scan_response::Body>,
) {
    let all = messages.len() < MAX_MESSAGES;
    let mut next = range.start();
    for message in messages {
        let v1::scan_response::Body::Bitmaps(batch) = message else { panic!("not bitmaps: {message:?}") };
        let covered = advance(&mut next, batch.first_page, batch.pages);
        check_bitmap_batch(model, covered, selected, &batch);
    }
    assert!(next == range.end() || !all, "the answer for {range} ends at {next}");
}

fn check_bitmap_batch(model: &Model, covered: PageRange, selected: &Expected, batch: &v1::BitmapBatch) {
    let inside = model.window().intersect(covered);
    let bitmaps = [&batch.hole, &batch.resident, &batch.swap_cached, &batch.swapped, &batch.unknown];
    let mut expected_ones = [0; 5];
    let outside = covered.len() - inside.len();
    expected_ones[0] = if selected.has(PageState::Hole) { outside } else { 0 };
    let mut slots = Vec::new();
    for page in inside.start().0..inside.end().0 {
        let (is, slot) = model.page(page, selected.distinguish_swap_cached);
        let nth = page - covered.start().0;
        for ((bitmap, state), ones) in
            bitmaps.iter().zip(PageState::VARIANTS.iter().copied()).zip(&mut expected_ones)
        {
            let expected = state == is && selected.has(state);
            let bit = bitmap.get(to_usize(nth / 8)).is_some_and(|byte| byte >> (nth % 8) & 1 == 1);
            assert_eq!(bit, expected, "page {page} in the bitmap of {state}");
            *ones += u64::from(expected);
        }
        if selected.slots && selected.has(is) {
            slots.extend(slot.into_iter().flat_map(|slot| slot.raw().to_le_bytes()));
        }
    }
    for ((bitmap, state), expected) in
        bitmaps.iter().zip(PageState::VARIANTS.iter().copied()).zip(expected_ones)
    {
        let whole = bitmap.is_empty() || to_u64(bitmap.len()) == batch.pages.div_ceil(8);
        assert!(whole, "the bitmap of {state} has {} bytes for {covered}", bitmap.len());
        let ones: u64 = bitmap.iter().map(|byte| u64::from(byte.count_ones())).sum();
        assert_eq!(ones, expected, "pages {covered} in the bitmap of {state}");
    }
    assert_eq!(batch.slots, slots, "the slots of pages {covered}");
}

/// Checks an answer whose messages have runs or bitmaps: put together, they are the runs of the model.
fn check_auto(
    model: &Model,
    range: PageRange,
    selected: &Expected,
    messages: Vec<v1::scan_response::Body>,
) {
    let all = messages.len() < MAX_MESSAGES;
    let selected = &Expected { slots: true, ..selected.clone() };
    let expected_of = |range| {
        let mut runs = expected_runs(model, range, selected.distinguish_swap_cached, None);
        runs.retain(|run| selected.has(run.state) && !run.range.is_empty());
        runs
    };
    let mut got: Vec<Run> = Vec::new();
    let mut next = range.start();
    for message in messages {
        let runs = match message {
            v1::scan_response::Body::Runs(batch) => columns::decode(batch).unwrap(),
            v1::scan_response::Body::Bitmaps(batch) => {
                assert!(batch.first_page >= next.0, "the batch overlaps the previous one");
                next = PageIndex(batch.first_page);
                let covered = advance(&mut next, batch.first_page, batch.pages);
                check_bitmap_batch(model, covered, selected, &batch);
                expected_of(covered)
            }
            other => panic!("neither runs nor bitmaps: {other:?}"),
        };
        for run in runs {
            next = run.range.end().max(next);
            if !got.last_mut().is_some_and(|last| last.append(&run)) {
                got.push(run);
            }
        }
    }
    let mut expected = expected_of(range);
    if !all {
        // The last message can end within a run.
        got.pop();
        expected.truncate(got.len());
    }
    assert_eq!(got, expected);
}

/// Answers a Lookup as `rpc` does.
pub(super) fn lookup(model: &Model, request: &v1::LookupRequest) {
    let Ok(query) = LookupQuery::new(request.clone(), &LIMITS) else { return };
    let Ok(ranges) = query.ranges(model.file_pages) else {
        assert!(request.pages.iter().any(|page| *page >= model.file_pages));
        return;
    };
    let snapshot = model.snapshot();
    check_provenance(model, &snapshot, &ranges);
    let attributes = query.options().attributes.then(|| Arc::new(model.attribute_map()));
    let result = ScanResult { snapshot, attributes };
    let got = lookup_pages(&query.pages, &result, query.distinguish_swap_cached, query.attributes);
    assert_eq!(got.len(), request.pages.len());
    for (got, page) in got.iter().zip(&request.pages) {
        let (state, slot) = model.page(*page, request.distinguish_swap_cached);
        let attributes = (!request.attributes.is_empty()).then(|| match state.is_data() {
            true => model.attributes_of(*page).unpack(query.attributes).into(),
            false => v1::PageAttributes::default(),
        });
        let state = v1::PageState::from(state).into();
        let slot = slot.map(|slot| slot.raw());
        assert_eq!(*got, v1::PageInfo { page: *page, state, slot, attributes });
    }
}

/// Answers a Summary as `rpc` does.
pub(super) fn summary(model: &Model, request: &v1::SummaryRequest) {
    let Ok(query) = SummaryQuery::new(request.clone(), &LIMITS) else { return };
    let Ok(range) = resolve_range(query.range, model.file_pages) else { return };
    let snapshot = model.snapshot();
    check_provenance(model, &snapshot, &[range]);
    let got = summary_message(&Summary::of(&snapshot, range, query.distinguish_swap_cached));

    let mut expected = v1::SummaryResponse::default();
    let mut last = None;
    for run in expected_runs(model, range, request.distinguish_swap_cached, None) {
        let pages = run.range.len();
        match run.state {
            PageState::Hole => expected.hole_pages += pages,
            PageState::Resident => expected.resident_pages += pages,
            PageState::SwapCached => expected.swap_cached_pages += pages,
            PageState::Swapped => expected.swapped_pages += pages,
            PageState::Unknown => expected.unknown_pages += pages,
        }
        expected.runs += u64::from(pages > 0 && last.replace(run.state) != Some(run.state));
        if let Some(slot) = run.slot {
            let swap_type = u32::from(slot.swap_type());
            match expected.swap_types.iter_mut().find(|counted| counted.swap_type == swap_type) {
                Some(counted) => counted.pages += pages,
                None => expected.swap_types.push(v1::SwapTypePages { swap_type, pages }),
            }
        }
    }
    expected.swap_types.sort_unstable_by_key(|counted| counted.swap_type);
    assert_eq!(got, expected);
}

/// Answers a Diff of two retained snapshots as `rpc` does. The second one is the result of a scan of the blocks of `scanned`.
pub(super) fn diff(before: &Model, after: &Model, scanned: BlockRange, request: &v1::DiffRequest) {
    let Ok(query) = DiffQuery::new(request.clone(), &LIMITS) else { return };
    let Ok(range) = query.compared(PageRange::first(before.file_pages)) else { return };
    let from = before.snapshot();
    let to = from.with(after.scanned(scanned, 2));
    check_provenance(after, &to, &[range]);
    let mut got = Vec::new();
    for batch in DiffBatches::new(differences(&from, &to, range, before.distinguish_swap_cached)) {
        let response = v1::DiffResponse { body: Some(v1::diff_response::Body::Batch(batch.clone())) };
        assert!(response.encoded_len() <= MAX_MESSAGE_BYTES, "a message of {} bytes", response.encoded_len());
        let changes = columns::decode(batch.clone()).unwrap();
        assert_eq!(changes.first().map(|change| change.range.start().0), Some(batch.first_page));
        got.extend(changes);
    }

    let mut expected: Vec<Change> = Vec::new();
    let inside = after.window().intersect(range);
    for page in inside.start().0..inside.end().0 {
        let (was, is) = (
            before.page(page, before.distinguish_swap_cached),
            after.page(page, before.distinguish_swap_cached),
        );
        if was == is {
            continue;
        }
        match expected.last_mut() {
            Some(change)
                if change.range.end().0 == page
                    && (change.before, change.after) == (was.0, is.0)
                    && change.slot_before.and_then(|slot| slot.plus(change.range.len())) == was.1
                    && change.slot_after.and_then(|slot| slot.plus(change.range.len())) == is.1 =>
            {
                change.range = PageRange::at(change.range.start(), change.range.len() + 1);
            }
            _ => expected.push(Change {
                range: PageRange::at(PageIndex(page), 1),
                before: was.0,
                slot_before: was.1,
                after: is.0,
                slot_after: is.1,
            }),
        }
    }
    assert_eq!(got.len(), expected.len(), "{got:?} instead of {expected:?}");
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!(got, expected);
    }
}
