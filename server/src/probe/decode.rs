//! The records of a walk over the page cache XArray: from nodes to blocks. Pure: looking again, where a part of the tree
//! was being changed, is asked of a [`Rewalk`].

use fdmap_proto::provenance::Uncertainty;
use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};

use super::ScanError;
use super::attributes::AttributeDecoder;
use super::entry::{Entry, classify, resolve};
use super::leaf::{LeafPages, gather_slots, leaf_base, plain_leaf};
use super::record::{AttributesRecord, NodeRecord, SHIFT, SLOTS};
use crate::pages::{BLOCK_PAGES, Block, BlockBuilder, BlockIndex};

/// The records of one run of the BPF program, in the order of the walk: a node stands before those under it.
#[derive(Clone, Copy, Debug)]
pub struct Walk<'a> {
    /// `xa_head`
    pub head: u64,
    /// If the head is a node: a slot of it stands for `1 << head_shift` pages.
    pub head_shift: u32,
    /// The nodes.
    pub records: &'a [NodeRecord],
    /// Attributes, if they were asked for.
    pub attributes: &'a [AttributesRecord],
}

/// Walks the leaf of 64 pages at a page once more.
pub trait Rewalk {
    /// A fresh walk of that leaf alone; `attempt` counts from 0 and says how long to wait first.
    ///
    /// # Errors
    /// The walk's.
    fn rewalk(&mut self, leaf: PageIndex, attempt: u32) -> Result<Walk<'_>, ScanError>;
}

/// Attempts to find a leaf at rest. With the waits between them they span some milliseconds.
pub const ATTEMPTS: u32 = 16;

/// Why a walk could not be decoded.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The upper part of the tree was being changed: walk again from the head.
    #[error("the tree of the file changed under the walk")]
    Restart,
    /// A folio's size is not that of the file's huge pages: its entry was being stored, or this kernel counts the pages
    /// of hugetlb files otherwise.
    #[error("page {page} of a hugetlb file of order {expected} has order {got}")]
    HugetlbOrder {
        /// The page.
        page: PageIndex,
        /// By the file.
        expected: u8,
        /// By the tree.
        got: u8,
    },
    /// Looking again failed.
    #[error(transparent)]
    Rewalk(#[from] ScanError),
}

/// How to decode a walk.
#[derive(Debug)]
pub struct Decoding<'a, R> {
    /// The records.
    pub walk: Walk<'a>,
    /// The pages that were walked; begins and ends at multiples of 64.
    pub walked: PageRange,
    /// The order of the pages of a hugetlb file.
    pub hugetlb_order: Option<u8>,
    /// Where to look again.
    pub rewalk: &'a mut R,
    /// Where attributes go, if they are wanted.
    pub attributes: Option<AttributeDecoder<'a>>,
    /// Settle what moves leaf by leaf instead of asking for a restart.
    pub last_chance: bool,
}

/// What a walk came to.
#[derive(Debug, Default)]
pub struct Decoded {
    /// Blocks that are not all hole, in ascending order.
    pub blocks: Vec<(BlockIndex, Block)>,
    /// What could not be settled.
    pub uncertainty: Uncertainty,
}

/// Decodes a walk.
///
/// # Errors
/// [`DecodeError`]; nothing of the walk is to be used then.
pub fn decode<R: Rewalk>(
    decoding: Decoding<'_, R>,
    builder: &mut BlockBuilder,
) -> Result<Decoded, DecodeError> {
    // A walk before may have been given up in mid-block.
    builder.clear();
    let walk = decoding.walk;
    let mut decoder = Decoder { d: decoding, at: 0, builder, block: BlockIndex(0), out: Decoded::default() };
    match classify(walk.head) {
        // Pages beyond what the head covers are a hole, and were not walked.
        Entry::Node if !pages_under(0, walk.head_shift + SHIFT).intersect(decoder.d.walked).is_empty() => {
            decoder.subtree(0, walk.head_shift)?;
        }
        Entry::Node => {}
        Entry::Hole => {}
        // A single page at index 0 needs no node.
        _ if decoder.d.walked.contains(PageIndex(0)) => decoder.head_alone(walk.head)?,
        _ => {}
    }
    decoder.flush();
    Ok(decoder.out)
}

struct Decoder<'a, 'b, R> {
    d: Decoding<'a, R>,
    /// The next record.
    at: usize,
    builder: &'b mut BlockBuilder,
    /// The block in the builder.
    block: BlockIndex,
    out: Decoded,
}

impl<R: Rewalk> Decoder<'_, '_, R> {
    /// The node that begins at `base`, whose slots stand for `1 << shift` pages, and all under it.
    fn subtree(&mut self, base: u64, shift: u32) -> Result<(), DecodeError> {
        let records = self.d.walk.records;
        let record = match records.get(self.at) {
            Some(record) if record.base == base && record.shift == shift => record,
            _ => return self.moving(base, shift + SHIFT),
        };
        self.at += 1;
        if record.fault != 0 {
            return self.moving(base, shift + SHIFT);
        }
        if shift == 0 {
            return self.leaf(record);
        }
        for slot in 0..SLOTS {
            let first = base + (to_u64(slot) << shift);
            let pages = pages_under(first, shift).intersect(self.d.walked);
            if pages.is_empty() || record.slots[slot] == 0 {
                continue;
            }
            if classify(record.slots[slot]) == Entry::Node {
                self.subtree(first, shift - SHIFT)?;
                continue;
            }
            let resolved = resolve(&record.slots, slot);
            if resolved.entry == Entry::Moving {
                self.moving(first, shift)?;
                continue;
            }
            // Where attributes were read, the node was copied once more after them.
            let own = slot - to_usize(resolved.slots_in);
            let unchanged = record.slots[own..=slot] == record.again[own..=slot];
            let mut leaf = leaf_base(pages.start().0);
            while leaf < pages.end().0 {
                let leaf_pages = LeafPages::under(&resolved, shift, leaf - first);
                self.put(leaf, &leaf_pages, unchanged)?;
                leaf += to_u64(SLOTS);
            }
        }
        Ok(())
    }

    fn leaf(&mut self, record: &NodeRecord) -> Result<(), DecodeError> {
        if record.slots != record.again {
            return self.settle(record.base);
        }
        let plain = if self.d.attributes.is_some() || self.d.hugetlb_order.is_some() {
            None
        } else {
            plain_leaf(&record.slots)
        };
        let Some(plain) = plain else {
            let pages = LeafPages::of_slots(&record.slots);
            return if pages.moving == 0 {
                self.put(record.base, &pages, true)
            } else {
                self.settle(record.base)
            };
        };
        self.enter(record.base);
        self.builder.leaf(leaf_of(record.base), plain.data, plain.swapped, 0);
        if plain.swapped == u64::MAX {
            self.builder.push_slots(&record.slots.map(|word| word >> 1));
        } else if plain.swapped != 0 {
            let mut raw = [0; SLOTS];
            let count = gather_slots(&record.slots, &mut raw);
            self.builder.push_slots(&raw[..count]);
        }
        Ok(())
    }

    /// The one entry of a tree without nodes.
    fn head_alone(&mut self, head: u64) -> Result<(), DecodeError> {
        let mut slots = [0; SLOTS];
        slots[0] = head;
        let pages = LeafPages::of_slots(&slots);
        if pages.moving != 0 {
            return self.moving(0, SHIFT);
        }
        self.put(0, &pages, false)
    }

    /// `1 << shift` pages from `base` on were being changed, above the leaves or as a whole leaf.
    fn moving(&mut self, base: u64, shift: u32) -> Result<(), DecodeError> {
        if shift > SHIFT && !self.d.last_chance {
            return Err(DecodeError::Restart);
        }
        let pages = pages_under(base, shift).intersect(self.d.walked);
        let mut leaf = leaf_base(pages.start().0);
        while leaf < pages.end().0 {
            self.settle(leaf)?;
            leaf += to_u64(SLOTS);
        }
        Ok(())
    }

    /// Looks at one leaf again until it is at rest.
    fn settle(&mut self, base: u64) -> Result<(), DecodeError> {
        let mut last = None;
        for attempt in 0..ATTEMPTS {
            let walk = self.d.rewalk.rewalk(PageIndex(base), attempt)?;
            match look(&walk, base) {
                Look::Rest(pages) => return self.put(base, &pages, false),
                Look::Torn(pages) => last = Some(pages),
                Look::Moving => {}
            }
        }
        self.out.uncertainty.unsettled_leaves += 1;
        match last {
            Some(pages) => self.put(base, &pages, false),
            None => {
                self.enter(base);
                self.builder.leaf(leaf_of(base), 0, 0, u64::MAX);
                Ok(())
            }
        }
    }

    /// `attributes`: what the walk read of them, if it did, belongs to these pages.
    fn put(&mut self, base: u64, pages: &LeafPages, attributes: bool) -> Result<(), DecodeError> {
        if let Some(expected) = self.d.hugetlb_order {
            let odd = (0..SLOTS).find(|i| pages.data >> i & 1 == 1 && pages.order[*i] != expected);
            if let Some(i) = odd {
                let page = PageIndex(base + to_u64(i));
                return Err(DecodeError::HugetlbOrder { page, expected, got: pages.order[i] });
            }
        }
        self.enter(base);
        self.builder.leaf(leaf_of(base), pages.data, pages.swapped, pages.unknown);
        let (mut raw, mut count) = ([0; SLOTS], 0);
        for (place, slot) in raw.iter_mut().zip(pages.raw_slots()) {
            *place = slot;
            count += 1;
        }
        self.builder.push_slots(&raw[..count]);
        if let Some(decoder) = &mut self.d.attributes {
            let records = if attributes { self.d.walk.attributes } else { &[] };
            decoder.leaf(PageIndex(base), pages, records);
        }
        Ok(())
    }

    /// Makes the builder's block the one of `base`.
    fn enter(&mut self, base: u64) {
        let block = BlockIndex::of(PageIndex(base));
        if block != self.block {
            self.flush();
            self.block = block;
        }
    }

    fn flush(&mut self) {
        self.out.blocks.extend(self.builder.finish().map(|block| (self.block, block)));
    }
}

/// The `1 << shift` pages from `base` on; all there are, if that is more than 64 bits can say.
const fn pages_under(base: u64, shift: u32) -> PageRange {
    let pages = if shift < u64::BITS { 1 << shift } else { u64::MAX };
    PageRange::at(PageIndex(base), pages)
}

const fn leaf_of(base: u64) -> usize {
    to_usize(base % BLOCK_PAGES / SLOTS as u64)
}

/// One look at one leaf.
enum Look {
    /// Nothing was being changed.
    Rest(LeafPages),
    /// Each page can be told, but they may not have been so at once; pages that cannot be told are unknown.
    Torn(LeafPages),
    /// Not even that.
    Moving,
}

fn look(walk: &Walk<'_>, base: u64) -> Look {
    let rest_if_told = |pages: LeafPages| {
        if pages.moving == 0 { Look::Rest(pages) } else { Look::Torn(pages) }
    };
    let hole = || LeafPages::of_slots(&[0; SLOTS]);
    if classify(walk.head) != Entry::Node {
        let mut slots = [0; SLOTS];
        if base == 0 {
            slots[0] = walk.head;
        }
        return rest_if_told(LeafPages::of_slots(&slots));
    }
    if walk.head_shift + SHIFT < u64::BITS && base >> (walk.head_shift + SHIFT) != 0 {
        return Look::Rest(hole());
    }
    let mut shift = walk.head_shift;
    for record in walk.records {
        let expected = if shift + SHIFT < u64::BITS { base >> (shift + SHIFT) << (shift + SHIFT) } else { 0 };
        if record.shift != shift || record.base != expected || record.fault != 0 {
            return Look::Moving;
        }
        if shift == 0 {
            let pages = LeafPages::of_slots(&record.slots);
            return if record.slots == record.again { rest_if_told(pages) } else { Look::Torn(pages) };
        }
        let slot = to_usize(base >> shift) % SLOTS;
        if classify(record.slots[slot]) == Entry::Node {
            shift -= SHIFT;
            continue;
        }
        let resolved = resolve(&record.slots, slot);
        if resolved.entry == Entry::Moving {
            return Look::Moving;
        }
        return rest_if_told(LeafPages::under(&resolved, shift, base & ((1 << shift) - 1)));
    }
    Look::Moving
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
