//! A model of the page cache XArray for tests: a sorted list of entries, walked in the order of the BPF program.

use fdmap_proto::state::{PageState, SwapSlot};
use fdmap_proto::units::{PageIndex, PageRange};
use proptest::prelude::*;

use super::{Rewalk, Walk};
use crate::bpf::records::{NodeRecord, SHIFT, SLOTS};
use crate::pages::oracle::Page;
use crate::probe::ScanError;

pub(super) const RETRY: u64 = 1026;
const NODE: u64 = 0xffff_8880_0000_0002;

/// An entry of `1 << order` pages at `index`, which is a multiple of the number of pages.
#[derive(Clone, Copy, Debug)]
pub(in crate::probe) struct Item {
    index: u64,
    order: u32,
    word: u64,
}

impl Item {
    pub(in crate::probe) const fn ends(&self) -> [u64; 2] {
        [self.index, self.end()]
    }

    /// A folio of `1 << order` pages.
    pub(super) const fn folio(index: u64, order: u32) -> Self {
        Self { index, order, word: 0xffff_ea00_0000_2000 }
    }

    const fn end(&self) -> u64 {
        self.index + (1 << self.order)
    }
}

/// The entries of a file, in ascending order and without overlap.
#[derive(Clone, Debug, Default)]
pub(in crate::probe) struct Model {
    pub(in crate::probe) items: Vec<Item>,
}

pub(in crate::probe) fn any_model() -> impl Strategy<Value = Model> {
    // Gap before the entry, order, kind, swap offset, repetitions.
    let piece = (
        prop_oneof![4 => Just(0_u64), 3 => 1_u64..70, 1 => 0_u64..20_000, 1 => 0_u64..10_000_000],
        prop_oneof![6 => Just(0_u32), 2 => 1_u32..7, 2 => 7_u32..11, 1 => Just(18_u32)],
        0_u32..8,
        0_u64..1 << 40,
        1_u64..90,
    );
    proptest::collection::vec(piece, 0..25).prop_map(|pieces| {
        let mut items = Vec::new();
        let mut next = 0;
        for (gap, order, kind, offset, count) in pieces {
            let repeat = if order == 0 { count } else { 1 };
            next += gap;
            for i in 0..repeat {
                let index = next.next_multiple_of(1 << order);
                let word = match kind {
                    0..4 => 0xffff_ea00_0000_0000 | index << 6,
                    4..7 => {
                        SwapSlot::new(1, (offset + i).next_multiple_of(1 << order)).unwrap().raw() << 1 | 1
                    }
                    _ => (31_u64 << 58 | 2) << 1 | 1,
                };
                items.push(Item { index, order, word });
                next = index + (1 << order);
            }
        }
        Model { items }
    })
}

impl Model {
    /// The oracle: state and slot of a page.
    pub(in crate::probe) fn page(&self, page: u64) -> Page {
        let at = self.items.partition_point(|item| item.end() <= page);
        let Some(item) = self.items.get(at).filter(|item| item.index <= page) else {
            return (PageState::Hole, None);
        };
        if item.word & 1 == 0 {
            return (PageState::Resident, None);
        }
        match SwapSlot::from_raw(item.word >> 1) {
            Some(slot) => (PageState::Swapped, slot.plus(page - item.index)),
            None => (PageState::Unknown, None),
        }
    }

    pub(super) fn order(&self, page: u64) -> Option<u32> {
        self.items.iter().find(|item| item.index <= page && page < item.end()).map(|item| item.order)
    }

    pub(super) fn pages(&self) -> u64 {
        self.items.last().map_or(0, Item::end)
    }

    /// Changes a page of order 0 into a hole or back into a resident page.
    pub(super) fn toggle(&mut self, page: u64) {
        let at = self.items.partition_point(|item| item.end() <= page);
        match self.items.get(at) {
            Some(item) if item.index <= page => {
                if item.order == 0 {
                    self.items.remove(at);
                }
            }
            _ => self.items.insert(at, Item { index: page, order: 0, word: 0xffff_ea00_0000_1000 }),
        }
    }

    fn head(&self) -> (u64, u32) {
        match self.items.as_slice() {
            [] => (0, 0),
            [item] if item.index == 0 && item.order == 0 => (item.word, 0),
            items => {
                let last = items.last().map_or(0, Item::end) - 1;
                let mut shift = 0;
                while last >> shift >> SHIFT != 0 || items[0].order > shift + SHIFT - 1 && items.len() == 1 {
                    shift += SHIFT;
                }
                (NODE, shift)
            }
        }
    }

    pub(in crate::probe) fn slots(&self, base: u64, shift: u32) -> [u64; SLOTS] {
        let mut slots = [0; SLOTS];
        for (i, slot) in slots.iter_mut().enumerate() {
            let first = base + ((i as u64) << shift);
            let at = self.items.partition_point(|item| item.end() <= first);
            let Some(item) = self.items.get(at).filter(|item| item.index < first + (1 << shift)) else {
                continue;
            };
            *slot = if item.order < shift {
                NODE
            } else if item.index == first {
                item.word
            } else {
                // A sibling entry holds the number of the canonical slot.
                ((item.index - base) >> shift) << 2 | 2
            };
        }
        slots
    }

    /// Walks in the order of `walk_file`. Stops after `limit` blocks, or after one if `limit` is 0.
    pub(super) fn walk(&self, range: PageRange, limit: usize) -> Recorded {
        let (head, head_shift) = self.head();
        let mut out = Recorded { head, head_shift, records: Vec::new(), next: range.end().0, blocks: 0 };
        if head == NODE {
            let cover = PageRange::first(1 << (head_shift + SHIFT));
            self.visit(0, head_shift, range.intersect(cover), limit.max(1), &mut out);
        }
        out
    }

    fn visit(&self, base: u64, shift: u32, range: PageRange, limit: usize, out: &mut Recorded) {
        if range.is_empty() || out.next <= range.start().0 {
            return;
        }
        if shift == SHIFT {
            if out.blocks == limit {
                out.next = range.start().0;
                return;
            }
            out.blocks += 1;
        }
        let slots = self.slots(base, shift);
        out.records.push(NodeRecord { base, shift, fault: 0, changing: 0, slots, again: slots });
        for (i, slot) in slots.iter().enumerate().filter(|_| shift > 0) {
            let first = base + ((i as u64) << shift);
            let pages = PageRange::at(PageIndex(first), 1 << shift).intersect(range);
            if *slot == NODE && !pages.is_empty() {
                self.visit(first, shift - SHIFT, pages, limit, out);
            }
        }
    }
}

/// The records of one walk.
#[derive(Clone, Debug)]
pub(super) struct Recorded {
    head: u64,
    head_shift: u32,
    pub(super) records: Vec<NodeRecord>,
    pub(super) next: u64,
    blocks: usize,
}

impl Recorded {
    pub(super) fn walk(&self) -> Walk<'_> {
        Walk { head: self.head, head_shift: self.head_shift, records: &self.records, attributes: &[] }
    }
}

/// Walks leaves of a model again. The first `transient` attempts find a changing leaf.
pub(in crate::probe) struct ModelRewalk<'a> {
    pub(super) model: &'a Model,
    pub(super) transient: u32,
    pub(super) last: Option<Recorded>,
    pub(super) walks: u32,
}

impl<'a> ModelRewalk<'a> {
    pub(super) const fn new(model: &'a Model, transient: u32) -> Self {
        Self { model, transient, last: None, walks: 0 }
    }
}

impl Rewalk for ModelRewalk<'_> {
    fn rewalk(&mut self, leaf: PageIndex, attempt: u32) -> Result<Walk<'_>, ScanError> {
        self.walks += 1;
        let mut walk = self.model.walk(PageRange::at(leaf, 64), 0);
        if attempt < self.transient {
            for record in walk.records.iter_mut().filter(|record| record.shift == 0) {
                record.slots[7] = RETRY;
            }
        }
        Ok(self.last.insert(walk).walk())
    }
}
