use fdmap_proto::state::PageState;
use fdmap_proto::units::{PageIndex, PageRange};
use proptest::prelude::*;

use super::super::attributes::{AttributeDecoder, FlagTable, MapCounts};
use super::model::{Item, Model, ModelRewalk, RETRY, Recorded, any_model};
use super::*;
use crate::pages::oracle::{self, Page};
use crate::pages::{AttributeMap, BlockRange, PackedAttributes, Scanned, Snapshot};

fn decoding<'a, 'b>(
    recorded: &'a Recorded,
    walked: PageRange,
    rewalk: &'a mut ModelRewalk<'b>,
) -> Decoding<'a, ModelRewalk<'b>> {
    Decoding {
        walk: recorded.walk(),
        walked,
        hugetlb_order: None,
        rewalk,
        attributes: None,
        last_attempt: false,
    }
}

/// Scans `range` in walks of `limit` blocks.
fn scan(model: &Model, range: PageRange, limit: usize) -> (Vec<(BlockIndex, Block)>, Uncertainty) {
    let mut builder = BlockBuilder::default();
    let (mut blocks, mut uncertainty) = (Vec::new(), Uncertainty::default());
    let mut next = range.start();
    while next < range.end() {
        let recorded = model.walk(PageRange::new(next, range.end()).unwrap(), limit);
        let end = PageIndex(recorded.next);
        assert!(end > next, "the walk makes progress");
        let mut rewalk = ModelRewalk::new(model, 0);
        let walked = PageRange::new(next, end).unwrap();
        let decoded = decode(decoding(&recorded, walked, &mut rewalk), &mut builder).unwrap();
        blocks.extend(decoded.blocks);
        uncertainty += decoded.uncertainty;
        next = end;
    }
    (blocks, uncertainty)
}

fn snapshot(range: PageRange, blocks: Vec<(BlockIndex, Block)>) -> Snapshot {
    let range = BlockRange::around(range);
    Snapshot::default().with(Scanned {
        range,
        blocks,
        stamp: oracle::stamp(1, false),
        file_pages: range.pages().end().0,
    })
}

/// Pages to check: the ends of the entries and adjacent pages.
fn edge_pages(model: &Model, range: PageRange) -> Vec<u64> {
    let around = |page: u64| [page.saturating_sub(1), page, page + 1];
    let mut pages: Vec<u64> = model.items.iter().flat_map(|item| item.ends()).flat_map(around).collect();
    pages.extend(around(range.start().0));
    pages.retain(|page| range.contains(PageIndex(*page)));
    pages
}

fn got(snapshot: &Snapshot, page: u64) -> Page {
    (snapshot.state(PageIndex(page)), snapshot.slot(PageIndex(page)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_page_has_the_state_of_the_model(model in any_model(), limit in 0_usize..5, from in 0_u64..5) {
        let whole = BlockRange::around(PageRange::first(model.pages() + 5000)).pages();
        let from = PageIndex((from * 4096).min(whole.end().0));
        let range = PageRange::new(from, whole.end()).unwrap();
        let (blocks, uncertainty) = scan(&model, range, limit);
        prop_assert!(uncertainty.is_empty());
        prop_assert!(blocks.windows(2).all(|pair| pair[0].0 < pair[1].0), "blocks are in ascending order");
        let snapshot = snapshot(range, blocks);
        for page in edge_pages(&model, range) {
            prop_assert_eq!(got(&snapshot, page), model.page(page), "page {}", page);
        }
    }

    #[test]
    fn changing_leaf_is_walked_again(
        model in any_model(), trouble in proptest::collection::vec((any::<prop::sample::Index>(), 0_usize..64, any::<bool>()), 1..5),
        transient in 0_u32..MAX_ATTEMPTS + 4,
    ) {
        let range = BlockRange::around(PageRange::first(model.pages() + 1)).pages();
        let mut recorded = model.walk(range, usize::MAX);
        let leaves: Vec<usize> =
            (0..recorded.records.len()).filter(|at| recorded.records[*at].shift == 0).collect();
        prop_assume!(!leaves.is_empty());
        for (which, slot, retry) in trouble {
            let record = &mut recorded.records[*which.get(&leaves)];
            if retry { record.slots[slot] = RETRY } else { record.again[slot] ^= 0x40 }
        }
        // Two equal changes of one slot cancel out, so determine the torn leaves at the end.
        let torn = recorded.records.iter().filter(|record| record.shift == 0 && record.slots != record.again);
        let bad: Vec<u64> = torn.map(|record| record.base).collect();
        let mut rewalk = ModelRewalk::new(&model, transient);
        let decoded = decode(decoding(&recorded, range, &mut rewalk), &mut BlockBuilder::default()).unwrap();
        let resolved = transient < MAX_ATTEMPTS;
        prop_assert_eq!(decoded.uncertainty.unsettled_leaves, if resolved { 0 } else { bad.len() as u64 });
        let snapshot = snapshot(range, decoded.blocks);
        for page in edge_pages(&model, range) {
            let (expected, got) = (model.page(page), got(&snapshot, page));
            if resolved || !bad.contains(&leaf_base(page)) {
                prop_assert_eq!(got, expected, "page {}", page);
            } else {
                prop_assert!(got == expected || got.0 == PageState::Unknown, "page {}: {:?}", page, got);
                prop_assert!(!(got.0 == PageState::Hole && expected.0.is_data()));
            }
        }
    }

    #[test]
    fn page_has_its_state_before_or_after_a_concurrent_change(
        model in any_model(), edits in proptest::collection::vec(0_u64..70_000, 1..40), cut in any::<prop::sample::Index>(),
    ) {
        // The first records show the tree before the change, the others the tree after it.
        let range = BlockRange::around(PageRange::first(model.pages().max(70_000) + 1)).pages();
        let mut after = model.clone();
        edits.iter().for_each(|page| after.toggle(*page));
        let mut recorded = model.walk(range, usize::MAX);
        let later = after.walk(range, usize::MAX);
        if !recorded.records.is_empty() {
            let cut = cut.index(recorded.records.len());
            for record in &mut recorded.records[cut..] {
                let same = |other: &&NodeRecord| (other.base, other.shift) == (record.base, record.shift);
                match later.records.iter().find(same) {
                    Some(other) => *record = *other,
                    // The node was removed: an emptied node keeps empty slots until it is freed.
                    None => (record.slots, record.again) = ([0; SLOTS], [0; SLOTS]),
                }
            }
        }
        let mut rewalk = ModelRewalk::new(&after, 0);
        match decode(decoding(&recorded, range, &mut rewalk), &mut BlockBuilder::default()) {
            Err(DecodeError::Restart) => {}
            Err(other) => prop_assert!(false, "{}", other),
            Ok(decoded) => {
                let snapshot = snapshot(range, decoded.blocks);
                for page in edge_pages(&model, range).into_iter().chain(edits) {
                    let got = got(&snapshot, page);
                    prop_assert!(
                        got == model.page(page) || got == after.page(page),
                        "page {}: {:?} is neither {:?} nor {:?}", page, got, model.page(page), after.page(page)
                    );
                }
            }
        }
    }

    #[test]
    fn orders_equal_the_model(model in any_model()) {
        let range = BlockRange::around(PageRange::first(model.pages())).pages();
        let recorded = model.walk(range, usize::MAX);
        let mut rewalk = ModelRewalk::new(&model, 0);
        let mut map = AttributeMap::default();
        let (flags, counts) = (FlagTable::default(), MapCounts::default());
        let mut decoding = decoding(&recorded, range, &mut rewalk);
        decoding.attributes = Some(AttributeDecoder { map: &mut map, flags: &flags, counts: &counts });
        decode(decoding, &mut BlockBuilder::default()).unwrap();
        for page in edge_pages(&model, range) {
            let got = map.get(PageIndex(page));
            let expected = if model.page(page).0.is_data() { model.order(page) } else { None };
            let order = (got.known & PackedAttributes::HAS_ORDER != 0).then_some(u32::from(got.order));
            prop_assert_eq!(order, expected, "page {}", page);
        }
    }
}

#[test]
fn single_page_at_index_0_has_no_node() {
    let mut model = Model::default();
    model.toggle(0);
    let (blocks, _) = scan(&model, PageRange::first(4096), 100);
    let snapshot = snapshot(PageRange::first(4096), blocks);
    assert_eq!(snapshot.state(PageIndex(0)), PageState::Resident);
    assert_eq!(snapshot.state(PageIndex(1)), PageState::Hole);
}

fn transient_upper_node() -> (Model, Recorded, PageRange) {
    let mut model = Model::default();
    [3, 70_000, 300_000].into_iter().for_each(|page| model.toggle(page));
    let range = BlockRange::around(PageRange::first(model.pages())).pages();
    let mut recorded = model.walk(range, usize::MAX);
    assert!(recorded.records[0].shift >= 12);
    recorded.records[0].slots[0] = RETRY;
    (model, recorded, range)
}

#[test]
fn retry_entry_above_the_leaves_causes_a_restart() {
    let (model, recorded, range) = transient_upper_node();
    let mut rewalk = ModelRewalk::new(&model, 0);
    let result = decode(decoding(&recorded, range, &mut rewalk), &mut BlockBuilder::default());
    assert!(matches!(result, Err(DecodeError::Restart)));
}

#[test]
fn last_attempt_walks_leaf_by_leaf() {
    let (model, mut recorded, range) = transient_upper_node();
    // The walk skipped the nodes under the transient slot.
    recorded.records.retain(|record| record.shift >= 12 || record.base >= 1 << 18);
    let mut rewalk = ModelRewalk::new(&model, 0);
    let mut decoding = decoding(&recorded, range, &mut rewalk);
    decoding.last_attempt = true;
    let decoded = decode(decoding, &mut BlockBuilder::default()).unwrap();
    let snapshot = snapshot(range, decoded.blocks);
    for page in [2, 3, 4, 69_999, 70_000, 70_001, 299_999, 300_000] {
        assert_eq!(got(&snapshot, page), model.page(page), "page {page}");
    }
}

#[test]
fn unreadable_leaf_is_not_a_hole() {
    let mut model = Model::default();
    [100, 101, 5000].into_iter().for_each(|page| model.toggle(page));
    let range = PageRange::first(8192);
    let mut recorded = model.walk(range, usize::MAX);
    let record = recorded.records.iter_mut().find(|record| record.shift == 0 && record.base == 64).unwrap();
    record.fault = 1;
    let mut rewalk = ModelRewalk::new(&model, MAX_ATTEMPTS);
    let decoded = decode(decoding(&recorded, range, &mut rewalk), &mut BlockBuilder::default()).unwrap();
    assert_eq!(decoded.uncertainty.unsettled_leaves, 1);
    let snapshot = snapshot(range, decoded.blocks);
    assert_eq!(snapshot.state(PageIndex(71)), PageState::Unknown, "the page that changed in every attempt");
    assert_eq!(snapshot.state(PageIndex(100)), PageState::Resident);
}

/// Walks a file with folios of one page, and one of 512 pages, and returns how many walks of single leaves that took.
fn walk_during_a_change(change: impl Fn(&mut NodeRecord)) -> u32 {
    let mut model = Model::default();
    [100, 5000].into_iter().for_each(|page| model.toggle(page));
    model.items.insert(1, Item::folio(512, 9));
    let range = PageRange::first(8192);
    let mut recorded = model.walk(range, usize::MAX);
    recorded.records.iter_mut().for_each(change);
    let mut rewalk = ModelRewalk::new(&model, 0);
    let decoded = decode(decoding(&recorded, range, &mut rewalk), &mut BlockBuilder::default()).unwrap();
    let walks = rewalk.walks;
    let snapshot = snapshot(range, decoded.blocks);
    for page in [99, 100, 101, 511, 512, 600, 1023, 1024, 5000] {
        assert_eq!(got(&snapshot, page), model.page(page), "page {page}");
    }
    walks
}

#[test]
fn nodes_with_parts_of_entries_are_walked_again_if_a_change_was_in_progress() {
    assert_eq!(walk_during_a_change(|_| {}), 0);
    let walks = walk_during_a_change(|record| record.changing = 1);
    assert!(walks >= 8, "the eight leaves of the large folio: {walks}");
}

#[test]
fn node_above_the_leaves_is_walked_again_if_its_copies_differ() {
    let walks = walk_during_a_change(|record| {
        if record.shift == SHIFT {
            // The folio is stored slot by slot: the first copy has two of its eight slots.
            record.slots.iter_mut().skip(10).take(6).for_each(|word| *word = 0);
        }
    });
    assert!(walks >= 8, "{walks}");
}

#[test]
fn hugetlb_file_with_pages_of_another_order_is_refused() {
    let mut model = Model::default();
    model.toggle(0);
    model.toggle(1);
    let recorded = model.walk(PageRange::first(4096), usize::MAX);
    let mut rewalk = ModelRewalk::new(&model, 0);
    let mut decoding = decoding(&recorded, PageRange::first(4096), &mut rewalk);
    decoding.hugetlb_order = Some(9);
    let error = decode(decoding, &mut BlockBuilder::default()).unwrap_err();
    assert!(matches!(error, DecodeError::HugetlbOrder { expected: 9, got: 0, .. }), "{error}");
}
