//! Decodes the records of a walk by counts (`bpf/block_walk.bpf.c`) to blocks. Pure.

use fdmap_proto::state::PageState;
use fdmap_proto::units::{to_u64, to_usize};

use super::leaf::{gather_slots, plain_leaf};
use super::xarray_entry::{XArrayEntry, classify, resolve};
use crate::bpf::records::{BlockRecord, SHIFT, SLOTS, SlotsCopy};
use crate::pages::{Block, BlockBuilder};

/// Decodes a record to its block, or to an empty block if all pages are holes. `None`: walk the block another way, because the
/// record is not an answer, or has entries that need a second look: siblings in a leaf, or entries that were changing. `builder` only
/// provides memory.
pub(super) fn decode_block(
    record: &BlockRecord,
    copies: &[SlotsCopy],
    builder: &mut BlockBuilder,
) -> Option<Block> {
    if record.careful != 0 {
        return None;
    }
    if record.resident == u64::MAX {
        return Some(Block::uniform(PageState::Resident));
    }
    builder.clear();
    let copies = copies.get(to_usize(u64::from(record.start))..)?;
    let (leaves, rest) = copies.split_at_checked(to_usize(u64::from(record.copied.count_ones())))?;
    let upper = if record.upper == 0 { &[0; SLOTS] } else { upper_slots(record.upper, rest)? };
    if splits_a_value(record.copied, leaves) {
        return None;
    }
    let mut leaves = leaves.iter();
    for leaf in 0..SLOTS {
        let is_in = |bitmap: u64| bitmap >> leaf & 1 == 1;
        if is_in(record.resident) {
            builder.leaf(leaf, u64::MAX, 0, 0);
        } else if is_in(record.copied) {
            put_leaf(leaf, &leaves.next()?.slots, builder)?;
        } else if is_in(record.upper) {
            put_upper(leaf, upper, builder)?;
        }
    }
    Some(builder.finish().unwrap_or_default())
}

/// True if the last page of a leaf has the value of the first page of an earlier leaf that can belong to the same entry. While the kernel
/// splits a swap entry of several leaves, that page is the last one that gets its own value (`leaf::repeats_a_value`).
fn splits_a_value(copied: u64, leaves: &[SlotsCopy]) -> bool {
    let mut firsts = [0; SLOTS];
    let indexes = (0..SLOTS).filter(|leaf| copied >> leaf & 1 == 1);
    for (leaf, copy) in indexes.zip(leaves) {
        firsts[leaf] = copy.slots[0];
        let last = copy.slots[SLOTS - 1];
        let is_repeated = |log: u32| last == firsts[leaf >> log << log];
        if last & 1 == 1 && (1..=SHIFT).any(is_repeated) {
            return true;
        }
    }
    false
}

/// The slots of the node above the leaves. `None` if it changed during the walk, or if an entry has slots that are not in `upper`.
fn upper_slots(upper: u64, copies: &[SlotsCopy]) -> Option<&[u64; SLOTS]> {
    let [first, again, ..] = copies else { return None };
    let is_upper = |word: u64| u64::from(!matches!(classify(word), XArrayEntry::Hole | XArrayEntry::Node));
    let seen = (0..SLOTS).fold(0, |bits, slot| bits | is_upper(first.slots[slot]) << slot);
    (first.slots == again.slots && seen == upper).then_some(&first.slots)
}

fn put_leaf(leaf: usize, slots: &[u64; SLOTS], builder: &mut BlockBuilder) -> Option<()> {
    let plain = plain_leaf(slots)?;
    builder.leaf(leaf, plain.data, plain.swapped, 0);
    if plain.swapped == u64::MAX {
        builder.push_slots(&slots.map(|word| word >> 1));
    } else if plain.swapped != 0 {
        let mut raw = [0; SLOTS];
        let count = gather_slots(slots, &mut raw);
        builder.push_slots(&raw[..count]);
    }
    Some(())
}

/// Puts the 64 pages of an entry above the leaves.
fn put_upper(leaf: usize, upper: &[u64; SLOTS], builder: &mut BlockBuilder) -> Option<()> {
    let resolved = resolve(upper, leaf);
    match resolved.entry {
        XArrayEntry::Folio => builder.leaf(leaf, u64::MAX, 0, 0),
        XArrayEntry::Swap(entry) => {
            let first = entry.plus(resolved.slots_in << SHIFT)?;
            // The slot of the last page must be valid, too.
            first.plus(to_u64(SLOTS) - 1)?;
            builder.leaf(leaf, u64::MAX, u64::MAX, 0);
            builder.push_slot_run(first, SLOTS);
        }
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests;
