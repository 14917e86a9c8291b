//! Decodes the node records of a walk over the page cache XArray to blocks. Pure: a [`Rewalk`] walks parts of the tree
//! again that changed during the walk.

use fdmap_proto::provenance::Uncertainty;
use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};

use super::attributes::AttributeDecoder;
use super::interface::ScanError;
use super::leaf::{LeafPages, gather_slots, leaf_base, plain_leaf};
use super::xarray_entry::{XArrayEntry, classify, resolve};
use crate::bpf::records::{AttributesRecord, NodeRecord, SHIFT, SLOTS};
use crate::pages::{BLOCK_PAGES, Block, BlockBuilder, BlockIndex};

/// The records of one run of the BPF program, in the order of the walk: a node precedes the nodes under it.
#[derive(Clone, Copy, Debug)]
pub struct Walk<'a> {
    /// `xa_head`
    pub head: u64,
    /// If the head is a node: each of its slots covers `1 << head_shift` pages.
    pub head_shift: u32,
    pub records: &'a [NodeRecord],
    /// Empty if attributes were not requested.
    pub attributes: &'a [AttributesRecord],
}

/// Walks single leaves again.
pub trait Rewalk {
    /// Walks the leaf of 64 pages at `leaf`. `attempt` counts from 0 and determines how long to wait before.
    ///
    /// # Errors
    /// The error of the walk.
    fn rewalk(&mut self, leaf: PageIndex, attempt: u32) -> Result<Walk<'_>, ScanError>;
}

/// Attempts to read a leaf that is not changing. With the waits between them, they take some milliseconds.
pub const MAX_ATTEMPTS: u32 = 16;

/// Why a walk could not be decoded.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The upper part of the tree was changing. The walk must start again at the head.
    #[error("the page cache XArray changed during the walk")]
    Restart,
    /// The size of a folio differs from the file's huge page size: its entry was being stored, or this kernel does not
    /// index hugetlb files by base pages.
    #[error("page {page} of a hugetlb file of order {expected} has order {got}")]
    HugetlbOrder {
        page: PageIndex,
        /// The order of the file's pages.
        expected: u8,
        /// The order in the tree.
        got: u8,
    },
    #[error(transparent)]
    Rewalk(#[from] ScanError),
}

/// Input of [`decode`].
#[derive(Debug)]
pub struct Decoding<'a, R> {
    pub walk: Walk<'a>,
    /// The pages that were walked. Starts and ends at multiples of 64.
    pub walked: PageRange,
    /// The order of the file's huge pages; `None` if the file is not on hugetlbfs.
    pub hugetlb_order: Option<u8>,
    pub rewalk: &'a mut R,
    /// `None` if attributes were not requested.
    pub attributes: Option<AttributeDecoder<'a>>,
    /// Walk changing parts again leaf by leaf, instead of returning [`DecodeError::Restart`].
    pub last_attempt: bool,
}

/// The result of [`decode`].
#[derive(Debug, Default)]
pub struct Decoded {
    /// Blocks that are not all hole, in ascending order.
    pub blocks: Vec<(BlockIndex, Block)>,
    pub uncertainty: Uncertainty,
}

/// Decodes a walk. `builder` only provides memory.
///
/// # Errors
/// [`DecodeError`]. The walk must then be discarded.
pub fn decode<R: Rewalk>(
    decoding: Decoding<'_, R>,
    builder: &mut BlockBuilder,
) -> Result<Decoded, DecodeError> {
    // An earlier walk may have failed in the middle of a block.
    builder.clear();
    let walk = decoding.walk;
    let mut decoder = Decoder { d: decoding, at: 0, builder, block: BlockIndex(0), out: Decoded::default() };
    match classify(walk.head) {
        // Pages beyond the range of the head are holes and were not walked.
        XArrayEntry::Node
            if !pages_under(0, walk.head_shift + SHIFT).intersect(decoder.d.walked).is_empty() =>
        {
            decoder.subtree(0, walk.head_shift)?;
        }
        XArrayEntry::Node => {}
        XArrayEntry::Hole => {}
        // A file with only page 0 has no node.
        _ if decoder.d.walked.contains(PageIndex(0)) => decoder.single_entry(walk.head)?,
        _ => {}
    }
    decoder.flush();
    Ok(decoder.out)
}

struct Decoder<'a, 'b, R> {
    d: Decoding<'a, R>,
    /// Index of the next record.
    at: usize,
    builder: &'b mut BlockBuilder,
    /// The block that the builder collects.
    block: BlockIndex,
    out: Decoded,
}

impl<R: Rewalk> Decoder<'_, '_, R> {
    /// Decodes the node at page `base`, whose slots cover `1 << shift` pages, and all nodes under it.
    fn subtree(&mut self, base: u64, shift: u32) -> Result<(), DecodeError> {
        let records = self.d.walk.records;
        let record = match records.get(self.at) {
            Some(record) if record.base == base && record.shift == shift => record,
            _ => return self.transient(base, shift + SHIFT),
        };
        self.at += 1;
        if record.fault != 0 {
            return self.transient(base, shift + SHIFT);
        }
        if shift == 0 {
            return self.leaf(record);
        }
        let is_changing = shift == SHIFT && !is_settled(record);
        for slot in 0..SLOTS {
            let first = base + (to_u64(slot) << shift);
            let pages = pages_under(first, shift).intersect(self.d.walked);
            if pages.is_empty() {
                continue;
            }
            if classify(record.slots[slot]) == XArrayEntry::Node {
                self.subtree(first, shift - SHIFT)?;
                continue;
            }
            // An empty slot, too, may belong to an entry that was being stored.
            if is_changing {
                self.settle(first)?;
                continue;
            }
            if record.slots[slot] == 0 {
                continue;
            }
            let resolved = resolve(&record.slots, slot);
            if resolved.entry == XArrayEntry::Transient {
                self.transient(first, shift)?;
                continue;
            }
            let mut leaf = leaf_base(pages.start().0);
            while leaf < pages.end().0 {
                let leaf_pages = LeafPages::under(&resolved, shift, leaf - first);
                // The attributes were read between the copies.
                self.put(leaf, &leaf_pages, shift == SHIFT)?;
                leaf += to_u64(SLOTS);
            }
        }
        Ok(())
    }

    fn leaf(&mut self, record: &NodeRecord) -> Result<(), DecodeError> {
        if !is_settled(record) {
            return self.settle(record.base);
        }
        let plain = if self.d.attributes.is_some() || self.d.hugetlb_order.is_some() {
            None
        } else {
            plain_leaf(&record.slots)
        };
        let Some(plain) = plain else {
            let pages = LeafPages::of_slots(&record.slots);
            return if pages.transient == 0 {
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

    /// Decodes the only entry of a tree without nodes.
    fn single_entry(&mut self, head: u64) -> Result<(), DecodeError> {
        let mut slots = [0; SLOTS];
        slots[0] = head;
        let pages = LeafPages::of_slots(&slots);
        if pages.transient != 0 {
            return self.transient(0, SHIFT);
        }
        self.put(0, &pages, false)
    }

    /// Handles `1 << shift` pages from `base` on that were changing, above the leaves or in a whole leaf.
    fn transient(&mut self, base: u64, shift: u32) -> Result<(), DecodeError> {
        if shift > SHIFT && !self.d.last_attempt {
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

    /// Walks one leaf again until it does not change during the walk.
    fn settle(&mut self, base: u64) -> Result<(), DecodeError> {
        let mut last = None;
        for attempt in 0..MAX_ATTEMPTS {
            let walk = self.d.rewalk.rewalk(PageIndex(base), attempt)?;
            match read_leaf(&walk, base) {
                LeafReading::Consistent(pages) => return self.put(base, &pages, false),
                LeafReading::Torn(pages) => last = Some(pages),
                LeafReading::Transient => {}
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

    /// `attributes`: the attributes of the walk, if any, belong to these pages.
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

    /// Switches the builder to the block that contains `base`.
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

/// True if all slots of a node with two copies had the copied values at one moment, and no change was in progress that stores several of
/// them: a large entry, or the parts of one that is split.
fn is_settled(record: &NodeRecord) -> bool {
    let has_parts = || {
        let is_part = |word: &u64| matches!(classify(*word), XArrayEntry::Swap(_) | XArrayEntry::Sibling(_));
        record.slots.iter().any(is_part)
    };
    record.slots == record.again && (record.changing == 0 || !has_parts())
}

/// The `1 << shift` pages from `base` on, limited to 64 bits.
const fn pages_under(base: u64, shift: u32) -> PageRange {
    let pages = if shift < u64::BITS { 1 << shift } else { u64::MAX };
    PageRange::at(PageIndex(base), pages)
}

const fn leaf_of(base: u64) -> usize {
    to_usize(base % BLOCK_PAGES / SLOTS as u64)
}

/// One reading of one leaf.
enum LeafReading {
    /// The leaf did not change.
    Consistent(LeafPages),
    /// The leaf changed: each page had its state at some moment, but not all at the same one. Changing pages are
    /// unknown.
    Torn(LeafPages),
    /// The path to the leaf changed.
    Transient,
}

fn read_leaf(walk: &Walk<'_>, base: u64) -> LeafReading {
    let consistent_if_known = |pages: LeafPages| {
        if pages.transient == 0 { LeafReading::Consistent(pages) } else { LeafReading::Torn(pages) }
    };
    let hole = || LeafPages::of_slots(&[0; SLOTS]);
    if classify(walk.head) != XArrayEntry::Node {
        let mut slots = [0; SLOTS];
        if base == 0 {
            slots[0] = walk.head;
        }
        return consistent_if_known(LeafPages::of_slots(&slots));
    }
    if walk.head_shift + SHIFT < u64::BITS && base >> (walk.head_shift + SHIFT) != 0 {
        return LeafReading::Consistent(hole());
    }
    let mut shift = walk.head_shift;
    for record in walk.records {
        let expected = if shift + SHIFT < u64::BITS { base >> (shift + SHIFT) << (shift + SHIFT) } else { 0 };
        if record.shift != shift || record.base != expected || record.fault != 0 {
            return LeafReading::Transient;
        }
        if shift == 0 {
            let pages = LeafPages::of_slots(&record.slots);
            return if is_settled(record) { consistent_if_known(pages) } else { LeafReading::Torn(pages) };
        }
        let slot = to_usize(base >> shift) % SLOTS;
        if classify(record.slots[slot]) == XArrayEntry::Node {
            shift -= SHIFT;
            continue;
        }
        let resolved = resolve(&record.slots, slot);
        if resolved.entry == XArrayEntry::Transient || (shift == SHIFT && !is_settled(record)) {
            return LeafReading::Transient;
        }
        return consistent_if_known(LeafPages::under(&resolved, shift, base & ((1 << shift) - 1)));
    }
    LeafReading::Transient
}

#[cfg(test)]
pub(super) mod model;
#[cfg(test)]
mod tests;
