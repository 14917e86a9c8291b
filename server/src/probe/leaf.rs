//! Decodes the slots of one leaf, or of 64 pages under one slot of a higher node, to page states. Pure.

use fdmap_proto::state::SwapSlot;
use fdmap_proto::units::{low_u8, to_u64, to_usize};

use super::xarray_entry::{Resolved, XArrayEntry, resolve};
use crate::bpf::records::{SHIFT, SLOTS};

/// A leaf that contains only holes, folios, and swap slots of single pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainLeaf {
    /// Bitmap of pages with a folio or a swap slot.
    pub data: u64,
    /// Bitmap of pages with a swap slot.
    pub swapped: u64,
}

/// Bits of a value entry that would be set by a swap offset beyond the maximum: bits 51 to 58.
const OFFSET_OVERFLOW: u64 = ((1 << SwapSlot::TYPE_SHIFT) - SwapSlot::MAX_OFFSET) << 1;

/// The fast path. `None` if the leaf contains other entries; use [`LeafPages::of_slots`] then.
#[must_use]
pub fn plain_leaf(slots: &[u64; SLOTS]) -> Option<PlainLeaf> {
    // Most leaves contain entries of one kind only, which the union and the intersection of all slots show.
    let (any, all) = slots.iter().fold((0, u64::MAX), |(any, all), word| (any | word, all & word));
    if any == 0 {
        return Some(PlainLeaf { data: 0, swapped: 0 });
    }
    // No slot is empty: kernel pointers have the top bit set. If they do not, the slow path gives the same result.
    if any & 3 == 0 && all >> 63 == 1 {
        return Some(PlainLeaf { data: u64::MAX, swapped: 0 });
    }
    if any & 1 == 1 && repeats_a_value(slots) {
        return None;
    }
    // No slot has swap type 31 if the union does not have all bits of the type.
    if all & 1 == 1 && any & OFFSET_OVERFLOW == 0 && any >> (SwapSlot::TYPE_SHIFT + 1) != 31 {
        return Some(PlainLeaf { data: u64::MAX, swapped: u64::MAX });
    }
    let kinds = Kinds::of(slots);
    if kinds.internal & 2 != 0 || kinds.values & OFFSET_OVERFLOW != 0 {
        return None;
    }
    let is_poison = |word: &u64| word & 1 == 1 && word >> (SwapSlot::TYPE_SHIFT + 1) == 31;
    if kinds.values >> (SwapSlot::TYPE_SHIFT + 1) == 31 && slots.iter().any(is_poison) {
        return None;
    }
    let data = if kinds.full >> 63 == 1 { u64::MAX } else { bits(slots, |word| u64::from(word != 0)) };
    let swapped = if any & 1 == 0 { 0 } else { bits(slots, |word| word & 1) };
    Some(PlainLeaf { data, swapped })
}

/// True if a node holds a value twice in the way that it does while the kernel splits a large swap entry
/// (`shmem_split_large_entry`): first every part of the entry gets the value of the first, then one after another gets its own.
/// An unfinished rest of one part is the last part of an aligned group; a longer one has neighbours of equal value.
#[must_use]
pub fn repeats_a_value(slots: &[u64; SLOTS]) -> bool {
    // Bit 63 is clear if both words are the same value. Branch-free, so that the compiler vectorizes the loop.
    let differ = |first: u64, then: u64| {
        let difference = first ^ then | (then & 1).wrapping_sub(1);
        difference | difference.wrapping_neg()
    };
    let neighbours = slots.iter().zip(&slots[1..]);
    let all = neighbours.fold(u64::MAX, |all, (first, then)| all & differ(*first, *then));
    let ends = |all: u64, group: &[u64]| all & differ(group[0], group[group.len() - 1]);
    let all = [4, 8, 16, 32, 64].iter().fold(all, |all, size| slots.chunks_exact(*size).fold(all, ends));
    all >> 63 == 0
}

/// Properties of all slots of a leaf.
struct Kinds {
    /// Bit 1 is set if some slot has the low bits 10.
    internal: u64,
    /// Union of all value entries.
    values: u64,
    /// Bit 63 is set if each slot is a value entry or has the top bit set.
    full: u64,
}

impl Kinds {
    /// Branch-free, so that the compiler vectorizes the loop.
    fn of(slots: &[u64; SLOTS]) -> Self {
        let none = Self { internal: 0, values: 0, full: u64::MAX };
        slots.iter().fold(none, |Self { internal, values, full }, word| Self {
            internal: internal | (word & !(word << 1)),
            values: values | (word & (word & 1).wrapping_neg()),
            full: full & (word | word << 63),
        })
    }
}

/// Collects one bit of each slot.
fn bits(slots: &[u64; SLOTS], bit: impl Fn(u64) -> u64) -> u64 {
    let (octets, _) = slots.as_chunks::<8>();
    octets.iter().enumerate().fold(0, |bits, (nth, octet)| {
        // Eight slots at a time, so that the shift counts are constants.
        let eight = octet.iter().enumerate().fold(0, |eight, (i, word)| eight | bit(*word) << i);
        bits | eight << (nth * 8)
    })
}

/// Copies the swap slots of a plain leaf to the front of `out`, as [`SwapSlot::raw`] words, and returns their number.
pub fn gather_slots(slots: &[u64; SLOTS], out: &mut [u64; SLOTS]) -> usize {
    let mut count = 0;
    for word in slots {
        // Branch-free, because the pattern of swapped pages is unpredictable.
        out[count % SLOTS] = word >> 1;
        count += to_usize(word & 1);
    }
    count
}

/// The states of 64 pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeafPages {
    /// Bitmap of pages with a folio or a swap slot.
    pub data: u64,
    /// Bitmap of pages with a swap slot.
    pub swapped: u64,
    /// Bitmap of pages whose entry is neither a hole, a folio, nor a swap slot.
    pub unknown: u64,
    /// Bitmap of pages whose entry was changing; a subset of `unknown`.
    pub transient: u64,
    /// [`SwapSlot::raw`] of the pages in `swapped`.
    pub raw: [u64; SLOTS],
    /// log2 of the pages in the folio or large swap entry, for pages in `data`.
    pub order: [u8; SLOTS],
}

impl LeafPages {
    const HOLE: Self =
        Self { data: 0, swapped: 0, unknown: 0, transient: 0, raw: [0; SLOTS], order: [0; SLOTS] };

    /// Decodes a leaf node.
    #[must_use]
    pub fn of_slots(slots: &[u64; SLOTS]) -> Self {
        let mut pages = Self::HOLE;
        for i in 0..SLOTS {
            let resolved = resolve(slots, i);
            pages.put(i, &resolved, resolved.slots_in, 0);
        }
        pages
    }

    /// Decodes 64 pages under one slot of a node above the leaves, from page `page_in_slot` of that slot on.
    #[must_use]
    pub fn under(resolved: &Resolved, shift: u32, page_in_slot: u64) -> Self {
        let mut pages = Self::HOLE;
        let first = (resolved.slots_in << shift) + page_in_slot;
        for i in 0..SLOTS {
            pages.put(i, resolved, first + to_u64(i), shift);
        }
        pages
    }

    /// The swap slots of the pages in `swapped`, in page order.
    pub fn raw_slots(&self) -> impl Iterator<Item = u64> {
        (0..SLOTS).filter(|i| self.swapped >> i & 1 == 1).map(|i| self.raw[i])
    }

    fn put(&mut self, i: usize, resolved: &Resolved, page_in_entry: u64, shift: u32) {
        let bit = 1 << i;
        self.order[i] = low_u8(u64::from(shift + resolved.width.trailing_zeros()));
        match resolved.entry {
            XArrayEntry::Hole => {}
            XArrayEntry::Folio => self.data |= bit,
            XArrayEntry::Swap(first) => match first.plus(page_in_entry) {
                Some(slot) => {
                    self.data |= bit;
                    self.swapped |= bit;
                    self.raw[i] = slot.raw();
                }
                None => self.unknown |= bit,
            },
            XArrayEntry::Poison => self.unknown |= bit,
            XArrayEntry::Node | XArrayEntry::Sibling(_) | XArrayEntry::Transient => {
                self.unknown |= bit;
                self.transient |= bit;
            }
        }
    }
}

/// The first page of the leaf that contains `page`.
#[must_use]
pub const fn leaf_base(page: u64) -> u64 {
    page >> SHIFT << SHIFT
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_word() -> impl Strategy<Value = u64> {
        prop_oneof![
            4 => Just(0),
            4 => (1_u64..1 << 40).prop_map(|page| page << 6),
            4 => (0_u64..31, 0_u64..1 << 40).prop_map(|(area, offset)| (area << 58 | offset) << 1 | 1),
            1 => any::<u64>(),
        ]
    }

    proptest! {
        #[test]
        fn fast_path_agrees_with_the_slow_path(
            words in proptest::collection::vec(any_word(), SLOTS), plain in any::<bool>(), alike in 0_u64..4,
        ) {
            let mut slots: [u64; SLOTS] = words.try_into().unwrap();
            // Leaves of one kind, or of one kind except for some slots.
            match alike {
                0 => slots.iter_mut().zip(0..).for_each(|(word, i): (_, u64)| *word |= i << 1 | 1),
                1 => slots.iter_mut().zip(0..).skip(1).for_each(|(word, i): (_, u64)| *word |= i << 1 | 1),
                2 => slots.iter_mut().for_each(|word| *word = *word & !3 | 1 << 63),
                _ => {}
            }
            if plain {
                slots.iter_mut().filter(|word| **word & 3 == 2).for_each(|word| *word = 0);
            }
            let slow = LeafPages::of_slots(&slots);
            match plain_leaf(&slots) {
                Some(fast) => {
                    prop_assert_eq!((fast.data, fast.swapped), (slow.data, slow.swapped));
                    prop_assert_eq!((slow.unknown, slow.transient), (0, 0));
                    let raw: Vec<u64> = slow.raw_slots().collect();
                    let mut gathered = [0; SLOTS];
                    let count = gather_slots(&slots, &mut gathered);
                    prop_assert_eq!(&raw, &gathered[..count]);
                    let expected: Vec<u64> = slots.iter().filter(|word| **word & 1 == 1).map(|word| word >> 1).collect();
                    prop_assert_eq!(raw, expected);
                }
                None => prop_assert!(slow.unknown != 0 || slots.iter().any(|word| word & 3 == 2)),
            }
            prop_assert_eq!(slow.data & slow.unknown, 0);
            prop_assert_eq!(slow.swapped & !slow.data, 0);
        }
    }

    #[test]
    fn leaves_of_one_kind_take_the_fast_path() {
        assert_eq!(plain_leaf(&[0; SLOTS]), Some(PlainLeaf { data: 0, swapped: 0 }));
        assert_eq!(plain_leaf(&[64; SLOTS]), Some(PlainLeaf { data: u64::MAX, swapped: 0 }));
        let folios = std::array::from_fn(|i| 0xffff_ea00_0000_0000 + i as u64 * 64);
        assert_eq!(plain_leaf(&folios), Some(PlainLeaf { data: u64::MAX, swapped: 0 }));
        let mut one_hole = folios;
        one_hole[17] = 0;
        assert_eq!(plain_leaf(&one_hole), Some(PlainLeaf { data: !(1 << 17), swapped: 0 }));
        let swapped = std::array::from_fn(|i| (i as u64 + 5) << 1 | 1);
        assert_eq!(plain_leaf(&swapped), Some(PlainLeaf { data: u64::MAX, swapped: u64::MAX }));
        let areas = swapped.map(|word| word | (word >> 1 & 30) << 59);
        assert_eq!(plain_leaf(&areas), Some(PlainLeaf { data: u64::MAX, swapped: u64::MAX }));
        for odd in [31 << 59 | 5, OFFSET_OVERFLOW | 1, 1026] {
            let mut one_odd = areas;
            one_odd[40] = odd;
            assert_eq!(plain_leaf(&one_odd), None, "{odd:#x}");
        }
    }

    #[test]
    fn slots_of_an_entry_that_is_being_split_are_refused() {
        let value = |offset: u64| (offset + 4096) << 1 | 1;
        for (start, len) in [(0, 64), (16, 16), (32, 8), (62, 2)] {
            let mut slots: [u64; SLOTS] = std::array::from_fn(|i| value(1000 + 3 * i as u64));
            let whole = slots;
            for finished in 0..=len {
                for (part, word) in slots[start..start + len].iter_mut().enumerate() {
                    *word = value(if part < finished { part as u64 } else { 0 });
                }
                let is_split = finished == len;
                assert_eq!(plain_leaf(&slots).is_some(), is_split, "{finished} of {len} pages");
                let pages = LeafPages::of_slots(&slots);
                assert_eq!((pages.transient == 0, pages.unknown == 0), (is_split, is_split));
            }
            assert!(plain_leaf(&whole).is_some());
        }
        // The same poison in several pages is final.
        let poison = LeafPages::of_slots(&[(31_u64 << 58 | 2) << 1 | 1; SLOTS]);
        assert_eq!((poison.unknown, poison.transient), (u64::MAX, 0));
    }

    #[test]
    fn large_swap_entry_gives_each_page_its_slot() {
        // 2 MiB at slot 8 of a node whose slots cover 64 pages: this is the third of its eight leaves.
        let entry = XArrayEntry::Swap(SwapSlot::new(0, 4096).unwrap());
        let pages = LeafPages::under(&Resolved { entry, slots_in: 2, width: 8 }, 6, 0);
        assert_eq!(pages.swapped, u64::MAX);
        assert_eq!(pages.raw[0], 4096 + 128);
        assert_eq!(pages.raw[63], 4096 + 128 + 63);
        assert_eq!(pages.order, [9; SLOTS]);
    }
}
