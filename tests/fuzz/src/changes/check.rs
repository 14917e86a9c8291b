//! Comparison of answers with the lists of pages and stamps.

use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::columns;
use fdmap_proto::file::is_invisible;
use fdmap_proto::pagemap_entry::PagemapEntry;
use fdmap_proto::runs::{ChangedPages, ChangedRun};
use fdmap_proto::units::{Generation, PageIndex, PageRange, to_u64, to_usize};
use fdmap_proto::v1;
use fdmap_proto::v1::changes_response::Body;
use fdmap_proto::{MAX_CURSOR_NAME_BYTES, convert};
use fdmap_server::pages::ScanResult;
use fdmap_server::query::{
    ChangedBatches, ChangesQuery, ChangesStart, Encoding, cursor_name, dirty_rate_window, resolve_range,
};
use prost::Message as _;

use super::stamps::StampList;
use crate::scan::model::Model;

/// Size of one message. The default limit of gRPC clients is 4 MiB.
const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// Messages of one answer that are checked: the bitmaps of the largest file would take millions.
const MAX_MESSAGES: usize = 5;

/// A name is valid exactly if it has 1 to 64 bytes, and no control or format character.
pub(super) fn cursor(name: String) {
    let valid = (1..=MAX_CURSOR_NAME_BYTES).contains(&name.len()) && !name.chars().any(is_invisible);
    assert_eq!(cursor_name(name.clone()).ok(), valid.then_some(name));
}

/// A window is valid exactly if it is a normalized duration of 1 ms to 1 minute.
pub(super) fn window(window: Option<prost_types::Duration>) {
    let wire = window.unwrap_or_default();
    let nanos = i128::from(wire.seconds) * 1_000_000_000 + i128::from(wire.nanos);
    let valid = (0..1_000_000_000).contains(&wire.nanos) && (1_000_000..=60_000_000_000).contains(&nanos);
    let accepted = dirty_rate_window(window).ok();
    assert_eq!(accepted.is_some(), valid, "{wire:?}");
    if let Some(accepted) = accepted {
        assert_eq!(convert::duration_to_wire(accepted), wire);
        assert!(accepted <= Duration::from_secs(60));
    }
}

/// Answers a Changes request as `rpc` does. A cursor has frozen all stamps.
pub(super) fn changes(model: &Model, stamps: &StampList, request: &v1::ChangesRequest) {
    let Ok(query) = ChangesQuery::new(request.clone()) else { return };
    check_query(&query, request);
    let Ok(range) = resolve_range(query.range, model.file_pages) else {
        let range = request.range.unwrap_or_default();
        assert!(range.start == range.end || range.end > model.file_pages, "{range:?} was refused");
        return;
    };
    let since = match &query.start {
        ChangesStart::Since(since) => *since,
        ChangesStart::Cursor(_) => Generation::NONE,
    };
    let attributes = (!query.attributes.is_empty()).then(|| Arc::new(model.attribute_map()));
    let needs_states = attributes.is_some() || query.encoding == Encoding::Entries;
    let result = needs_states.then(|| ScanResult { snapshot: model.snapshot(), attributes });
    let batches = ChangedBatches::new(&query, stamps.map.clone(), since, range, result);
    let mut messages = Vec::new();
    for body in batches.take(MAX_MESSAGES) {
        let response = v1::ChangesResponse { body: Some(body) };
        assert!(response.encoded_len() <= MAX_MESSAGE_BYTES, "a message of {} bytes", response.encoded_len());
        messages.extend(response.body);
    }
    match query.encoding {
        Encoding::Runs | Encoding::Auto => check_runs(model, stamps, &query, since, range, messages),
        Encoding::Bitmaps { .. } => check_bitmaps(stamps, since, range, messages),
        Encoding::Entries => check_entries(model, stamps, since, range, messages),
    }
}

/// Accepted fields are in the ranges that tracking.proto documents.
fn check_query(query: &ChangesQuery, request: &v1::ChangesRequest) {
    match &query.start {
        ChangesStart::Since(since) => {
            assert_eq!((since.get(), request.cursor.as_str()), (request.since_generation, ""));
        }
        ChangesStart::Cursor(name) => {
            assert_eq!((request.since_generation, name), (0, &request.cursor));
            cursor(name.clone());
        }
    }
    let runs = matches!(query.encoding, Encoding::Runs | Encoding::Auto);
    assert!(runs || request.attributes.is_empty(), "attributes require runs");
    assert_eq!(query.range.map(v1::PageRange::from), request.range);
    assert!(v1::Encoding::try_from(request.encoding).is_ok());
}

fn expected_runs(
    model: &Model,
    stamps: &StampList,
    query: &ChangesQuery,
    since: Generation,
    range: PageRange,
) -> Vec<ChangedPages> {
    let mut runs: Vec<ChangedPages> = Vec::new();
    let inside = stamps.window().intersect(range);
    for page in inside.start().0..inside.end().0 {
        let Some(conservative) = stamps.changed(page, since) else { continue };
        let requested = !query.attributes.is_empty();
        let attributes = requested.then(|| model.attributes_of(page).unpack(query.attributes));
        match runs.last_mut() {
            Some(last)
                if last.run.range.end().0 == page
                    && last.run.conservative == conservative
                    && last.attributes == attributes =>
            {
                last.run.range = PageRange::at(last.run.range.start(), last.run.range.len() + 1);
            }
            _ => {
                let run = ChangedRun { range: PageRange::at(PageIndex(page), 1), conservative };
                runs.push(ChangedPages { run, attributes });
            }
        }
    }
    runs
}

fn check_runs(
    model: &Model,
    stamps: &StampList,
    query: &ChangesQuery,
    since: Generation,
    range: PageRange,
    messages: Vec<Body>,
) {
    let all = messages.len() < MAX_MESSAGES;
    let mut got = Vec::new();
    for message in messages {
        let Body::Runs(batch) = message else { panic!("not runs: {message:?}") };
        let first = batch.first_page;
        let runs = columns::decode(batch).unwrap();
        assert_eq!(runs.first().map(|run: &ChangedPages| run.run.range.start().0), Some(first));
        got.extend(runs);
    }
    let mut expected = expected_runs(model, stamps, query, since, range);
    if !all {
        expected.truncate(got.len());
    }
    assert_eq!(got, expected);
}

fn check_bitmaps(stamps: &StampList, since: Generation, range: PageRange, messages: Vec<Body>) {
    let all = messages.len() < MAX_MESSAGES;
    let mut next = range.start();
    for message in messages {
        let Body::Bitmaps(batch) = message else { panic!("not bitmaps: {message:?}") };
        let covered = advance(&mut next, batch.first_page, batch.pages);
        let inside = stamps.window().intersect(covered);
        let mut expected = [0_u64; 2];
        for page in inside.start().0..inside.end().0 {
            let nth = page - covered.start().0;
            let changed = stamps.changed(page, since);
            for ((bitmap, bit), ones) in [&batch.changed, &batch.conservative]
                .into_iter()
                .zip([changed.is_some(), changed == Some(true)])
                .zip(&mut expected)
            {
                let got = bitmap.get(to_usize(nth / 8)).is_some_and(|byte| byte >> (nth % 8) & 1 == 1);
                assert_eq!(got, bit, "page {page}");
                *ones += u64::from(bit);
            }
        }
        for (bitmap, expected) in [&batch.changed, &batch.conservative].into_iter().zip(expected) {
            let whole = bitmap.is_empty() || to_u64(bitmap.len()) == covered.len().div_ceil(8);
            assert!(whole, "a bitmap of {} bytes for {covered}", bitmap.len());
            let ones: u64 = bitmap.iter().map(|byte| u64::from(byte.count_ones())).sum();
            assert_eq!(ones, expected, "changed pages of {covered}");
        }
    }
    assert!(next == range.end() || !all, "the answer for {range} ends at {next}");
}

fn check_entries(
    model: &Model,
    stamps: &StampList,
    since: Generation,
    range: PageRange,
    messages: Vec<Body>,
) {
    let all = messages.len() < MAX_MESSAGES;
    let mut next = range.start();
    for message in messages {
        let Body::Entries(batch) = message else { panic!("not entries: {message:?}") };
        let (words, rest) = batch.entries.as_chunks::<8>();
        assert!(rest.is_empty(), "the last entry is incomplete");
        let covered = advance(&mut next, batch.first_page, to_u64(words.len()));
        // Both lists start at the same page.
        let end = model.window().end().max(stamps.window().end());
        let listed = PageRange::new(stamps.window().start(), end).unwrap().intersect(covered);
        let mut data = 0;
        for page in listed.start().0..listed.end().0 {
            let (state, slot) = model.page(page, false);
            let changed = stamps.changed(page, since).map_or(0, |_| PagemapEntry::SOFT_DIRTY);
            let expected = PagemapEntry::encode(state, slot).0 | changed;
            let word = u64::from_le_bytes(words[to_usize(page - covered.start().0)]);
            assert_eq!(word, expected, "page {page}");
            data += usize::from(word != 0);
        }
        let nonzero = words.iter().filter(|word| **word != [0; 8]).count();
        assert_eq!(nonzero, data, "pages outside the lists are holes and unchanged");
    }
    assert!(next == range.end() || !all, "the answer for {range} ends at {next}");
}

/// Checks that a batch starts at `next`, and advances `next` to its end.
fn advance(next: &mut PageIndex, first_page: u64, pages: u64) -> PageRange {
    assert_eq!(first_page, next.0, "the batch does not start where the previous one ended");
    assert!(pages > 0, "an empty batch");
    *next = next.plus(pages);
    PageRange::at(PageIndex(first_page), pages)
}
