use fdmap_proto::units::{PageIndex, PageRange};
use proptest::prelude::*;

use super::super::decode::model::{Model, any_model};
use super::*;
use crate::pages::oracle::{self, Page};
use crate::pages::{BLOCK_PAGES, BlockIndex, Scanned, Snapshot};

/// The records of one block of a model, as `walk_blocks` writes them.
fn walk(model: &Model, index: u64) -> (BlockRecord, Vec<SlotsCopy>) {
    let first = index * BLOCK_PAGES;
    let upper = model.slots(first, SHIFT);
    let mut record = BlockRecord { first, resident: 0, copied: 0, upper: 0, start: 1, careful: 0 };
    let mut copies = vec![SlotsCopy { slots: [u64::MAX; SLOTS] }];
    for (leaf, word) in upper.iter().enumerate() {
        if classify(*word) != XArrayEntry::Node {
            record.upper |= u64::from(*word != 0) << leaf;
            continue;
        }
        let slots = model.slots(first + to_u64(leaf * SLOTS), 0);
        let used = slots.iter().filter(|word| **word != 0).count();
        if used == SLOTS && slots.iter().all(|word| word & 1 == 0) {
            record.resident |= 1 << leaf;
        } else {
            record.copied |= 1 << leaf;
            copies.push(SlotsCopy { slots });
        }
    }
    if record.upper != 0 {
        copies.extend([SlotsCopy { slots: upper }; 2]);
    }
    (record, copies)
}

fn page(block: &Block, index: u64, page: u64) -> Page {
    let range = BlockIndex(index).alone();
    let snapshot = Snapshot::default().with(Scanned {
        range,
        blocks: vec![(BlockIndex(index), block.clone())],
        stamp: oracle::stamp(1, false),
        file_pages: range.pages().end().0,
    });
    (snapshot.state(PageIndex(page)), snapshot.slot(PageIndex(page)))
}

/// Pages to check in a block: the ends of entries, and the pages beside them.
fn edges(model: &Model, block: PageRange) -> Vec<u64> {
    let around = |page: u64| [page.saturating_sub(1), page, page + 1];
    let ends = model.items.iter().flat_map(|item| item.ends()).flat_map(around);
    ends.chain(around(block.start().0)).filter(|page| block.contains(PageIndex(*page))).collect()
}

/// Entries that need the careful walk: siblings in a leaf, and values that are no slots.
fn is_odd(copies: &[SlotsCopy]) -> bool {
    use XArrayEntry::{Poison, Sibling, Transient};
    let odd = |word: &u64| matches!(classify(*word), Sibling(_) | Transient | Poison);
    copies.iter().any(|copy| copy.slots.iter().any(odd))
}

proptest! {
    #[test]
    fn every_page_has_the_state_of_the_model(model in any_model(), nth in 0_u64..40) {
        let blocks: Vec<u64> = model.items.iter().map(|item| item.ends()[0] / BLOCK_PAGES).collect();
        let index = if blocks.is_empty() { nth } else { blocks[to_usize(nth) % blocks.len()] };
        // An entry above the blocks has no record of this kind.
        let block_pages = BlockIndex(index).pages();
        let (start, end) = (block_pages.start().0, block_pages.end().0);
        let fits = |item: &[u64; 2]| item[0] >= end || item[1] <= start || (item[0] >= start && item[1] <= end);
        prop_assume!(model.items.iter().all(|item| fits(&item.ends())));
        let (record, copies) = walk(&model, index);
        let mut builder = BlockBuilder::default();
        // What an earlier block left behind.
        builder.leaf(3, 7, 0, 0);
        match decode_block(&record, &copies, &mut builder) {
            Some(block) => {
                for at in edges(&model, block_pages) {
                    prop_assert_eq!(page(&block, index, at), model.page(at), "page {}", at);
                }
            }
            None => prop_assert!(is_odd(&copies[1..])),
        }
    }

    #[test]
    fn damaged_records_never_panic(
        bitmaps in any::<[u64; 3]>(), start in 0_u32..80, careful in 0_u32..2,
        words in proptest::collection::vec(prop_oneof![any::<u64>(), Just(0), Just(1026), (0_u64..70).prop_map(|n| n << 2 | 2)], SLOTS),
    ) {
        let [resident, copied, upper] = bitmaps;
        let copies = vec![SlotsCopy { slots: words.try_into().unwrap() }; 70];
        let record = BlockRecord { first: 0, resident, copied, upper, start, careful };
        let block = decode_block(&record, &copies, &mut BlockBuilder::default());
        prop_assert!(careful == 0 || block.is_none());
        prop_assert!(block.is_none() || to_usize(u64::from(start)) <= copies.len());
    }
}

#[test]
fn resident_block_is_stored_without_bitmaps() {
    let record = BlockRecord { first: 0, resident: u64::MAX, copied: 0, upper: 0, start: 0, careful: 0 };
    let block = decode_block(&record, &[], &mut BlockBuilder::default()).unwrap();
    assert_eq!(block, Block::uniform(PageState::Resident));
}

#[test]
fn changed_upper_node_is_no_answer() {
    let slots = std::array::from_fn(|slot| if slot < 8 { 0xffff_ea00_0000_0000 } else { 0 });
    let record = BlockRecord { first: 0, resident: 0, copied: 0, upper: 0xff, start: 0, careful: 0 };
    let decode = |record: &BlockRecord, again: [u64; SLOTS]| {
        let copies = [SlotsCopy { slots }, SlotsCopy { slots: again }];
        decode_block(record, &copies, &mut BlockBuilder::default()).map(|block| block.state(511))
    };
    assert_eq!(decode(&record, slots), Some(PageState::Resident));
    let mut again = slots;
    again[9] = 0xffff_ea00_0000_0000;
    assert_eq!(decode(&record, again), None, "a copy differs");
    assert_eq!(
        decode(&BlockRecord { upper: 0x7f, ..record }, slots),
        None,
        "the entry appeared after the first look"
    );
    assert_eq!(decode(&BlockRecord { careful: 1, ..record }, slots), None);
}

/// The kernel splits a swap entry of several leaves page by page: each part that is not finished has the value of the first page.
#[test]
fn leaves_of_an_entry_that_is_being_split_are_no_answer() {
    let value = |offset: u64| (offset + 4096) << 1 | 1;
    for (first_leaf, leaves) in [(0, 8), (8, 4), (12, 2), (62, 2)] {
        let decode = |finished: usize| {
            let slots = |leaf: usize| {
                let part = |slot: usize| leaf * SLOTS + slot;
                SlotsCopy {
                    slots: std::array::from_fn(|slot| {
                        value(if part(slot) < finished { to_u64(part(slot)) } else { 0 })
                    }),
                }
            };
            let copies: Vec<_> = (0..leaves).map(slots).collect();
            let copied = ((1_u64 << leaves) - 1) << first_leaf;
            let record = BlockRecord { first: 0, resident: 0, copied, upper: 0, start: 0, careful: 0 };
            decode_block(&record, &copies, &mut BlockBuilder::default())
        };
        let pages = leaves * SLOTS;
        for finished in 0..pages {
            assert_eq!(decode(finished), None, "{finished} of {pages} pages");
        }
        assert!(decode(pages).is_some());
    }
}
