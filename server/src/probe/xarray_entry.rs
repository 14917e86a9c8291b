//! Entries of the page cache XArray, as defined in `linux/xarray.h` and `mm/shmem.c`. Pure.

use fdmap_proto::state::SwapSlot;
use fdmap_proto::units::to_usize;

use crate::bpf::records::SLOTS;

/// The content of one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XArrayEntry {
    Hole,
    /// A folio. The position in the tree determines which of its pages the slot holds.
    Folio,
    /// The swap slot of the first page of the entry.
    Swap(SwapSlot),
    /// A value entry that is not a swap slot, which remains after a failed swap read.
    Poison,
    Node,
    /// Belongs to the canonical entry in this slot of the same node.
    Sibling(usize),
    /// `XA_RETRY_ENTRY`, or an entry that a page cache does not contain: the node is changing.
    Transient,
}

/// Decodes the word of a slot.
#[must_use]
pub fn classify(word: u64) -> XArrayEntry {
    match word & 3 {
        0 if word == 0 => XArrayEntry::Hole,
        0 => XArrayEntry::Folio,
        2 if is_node(word) => XArrayEntry::Node,
        2 if is_sibling(word) => XArrayEntry::Sibling(to_usize(word >> 2)),
        2 => XArrayEntry::Transient,
        // Low bit set: a value entry of 63 bits, which shmem uses for swap slots only (swp_to_radix_entry).
        _ => SwapSlot::from_raw(word >> 1).map_or(XArrayEntry::Poison, XArrayEntry::Swap),
    }
}

/// `xa_is_node()`: an internal entry above 4096.
#[must_use]
pub const fn is_node(word: u64) -> bool {
    word & 3 == 2 && word > 4096
}

/// `xa_is_sibling()`: an internal entry that holds the number of an earlier slot.
const fn is_sibling(word: u64) -> bool {
    word & 3 == 2 && word < ((SLOTS as u64 - 1) << 2 | 2)
}

/// The canonical entry of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// A hole, a folio, a swap slot, poison, or [`XArrayEntry::Transient`].
    pub entry: XArrayEntry,
    /// Distance of the slot from the canonical slot, in slots.
    pub slots_in: u64,
    /// Number of slots that the entry occupies: a power of two.
    pub width: u64,
}

/// Resolves sibling entries. Inconsistent slots are [`XArrayEntry::Transient`], because the node was changing.
#[must_use]
pub fn resolve(slots: &[u64; SLOTS], slot: usize) -> Resolved {
    let transient = Resolved { entry: XArrayEntry::Transient, slots_in: 0, width: 1 };
    let (first, entry) = match classify(slots[slot]) {
        XArrayEntry::Sibling(first) if first < slot => (first, classify(slots[first])),
        XArrayEntry::Sibling(_) | XArrayEntry::Node => return transient,
        entry => (slot, entry),
    };
    if entry == XArrayEntry::Hole && first == slot {
        return Resolved { entry, slots_in: 0, width: 1 };
    }
    if !matches!(entry, XArrayEntry::Folio | XArrayEntry::Swap(_) | XArrayEntry::Poison) {
        return transient;
    }
    // While the kernel splits a large swap entry (shmem_split_large_entry), its parts have the value of the first one.
    let repeats = |(at, word): (usize, &u64)| at != first && *word == slots[first];
    if matches!(entry, XArrayEntry::Swap(_)) && slots.iter().enumerate().any(repeats) {
        return transient;
    }
    let width = 1 + slots[first + 1..]
        .iter()
        .take_while(|word| classify(**word) == XArrayEntry::Sibling(first))
        .count();
    // An entry of order n occupies 2^n slots, starting at a multiple of 2^n.
    if !width.is_power_of_two() || !first.is_multiple_of(width) || slot >= first + width {
        return transient;
    }
    let n = fdmap_proto::units::to_u64;
    Resolved { entry, slots_in: n(slot - first), width: n(width) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn sibling(first: u64) -> u64 {
        first << 2 | 2
    }

    #[test]
    fn entries_are_classified_like_in_the_kernels_headers() {
        assert_eq!(classify(0), XArrayEntry::Hole);
        assert_eq!(classify(0xffff_ea00_1234_5640), XArrayEntry::Folio);
        assert_eq!(classify(0xffff_8880_1234_5642), XArrayEntry::Node);
        assert_eq!(classify(1026), XArrayEntry::Transient, "XA_RETRY_ENTRY");
        assert_eq!(classify(1030), XArrayEntry::Transient, "XA_ZERO_ENTRY");
        assert_eq!(classify(sibling(0)), XArrayEntry::Sibling(0));
        assert_eq!(classify(sibling(62)), XArrayEntry::Sibling(62));
        assert_eq!(classify(sibling(63)), XArrayEntry::Transient, "the last slot has no siblings");
        let slot = SwapSlot::new(3, 77).unwrap();
        assert_eq!(classify(slot.raw() << 1 | 1), XArrayEntry::Swap(slot));
        assert_eq!(classify((31_u64 << 58 | 2) << 1 | 1), XArrayEntry::Poison);
    }

    #[test]
    fn siblings_resolve_to_their_canonical_entry() {
        let mut slots = [0; SLOTS];
        slots[16] = 0x1000;
        slots[17..32].fill(sibling(16));
        for slot in 16..32 {
            let expected = Resolved { entry: XArrayEntry::Folio, slots_in: slot as u64 - 16, width: 16 };
            assert_eq!(resolve(&slots, slot), expected);
        }
        assert_eq!(resolve(&slots, 15).entry, XArrayEntry::Hole);
    }

    #[test]
    fn sibling_without_an_entry_is_transient_not_a_hole() {
        let mut slots = [0; SLOTS];
        slots[17..32].fill(sibling(16));
        assert_eq!(resolve(&slots, 20).entry, XArrayEntry::Transient);
        slots[16] = 1026;
        assert_eq!(resolve(&slots, 20).entry, XArrayEntry::Transient);
        slots[16] = 0x1000;
        slots[31] = 0;
        assert_eq!(resolve(&slots, 20).entry, XArrayEntry::Transient, "no folio has 15 slots");
        assert_eq!(resolve(&slots, 16).entry, XArrayEntry::Transient);
    }

    proptest! {
        #[test]
        fn arbitrary_slots_resolve_without_panic(words in proptest::collection::vec(
            prop_oneof![any::<u64>(), (0_u64..70).prop_map(sibling), Just(0), Just(0x1000), Just(1026)], SLOTS)) {
            let slots: [u64; SLOTS] = words.try_into().unwrap();
            for slot in 0..SLOTS {
                let resolved = resolve(&slots, slot);
                prop_assert!(resolved.slots_in < resolved.width);
                prop_assert!(!matches!(resolved.entry, XArrayEntry::Node | XArrayEntry::Sibling(_)));
                if slots[slot] != 0 {
                    prop_assert_ne!(resolved.entry, XArrayEntry::Hole);
                }
            }
        }
    }
}
