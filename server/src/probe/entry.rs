//! What an entry of the page cache XArray means (`linux/xarray.h`, `mm/shmem.c`). Pure.

use fdmap_proto::state::SwapSlot;
use fdmap_proto::units::to_usize;

use super::record::SLOTS;

/// One entry of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// No page.
    Hole,
    /// A folio, and by its place in the tree the pages under it.
    Folio,
    /// A swap slot: that of the first page under the entry.
    Swap(SwapSlot),
    /// A value that is no swap slot: what a failed swap read leaves.
    Poison,
    /// A node of the next level.
    Node,
    /// Belongs to the entry in this slot of the same node.
    Sibling(usize),
    /// An entry that says "look again" (`XA_RETRY_ENTRY`), or one that no page cache has.
    Moving,
}

/// What `word`, read from a slot, means.
#[must_use]
pub fn classify(word: u64) -> Entry {
    match word & 3 {
        0 if word == 0 => Entry::Hole,
        0 => Entry::Folio,
        2 if is_node(word) => Entry::Node,
        2 if is_sibling(word) => Entry::Sibling(to_usize(word >> 2)),
        2 => Entry::Moving,
        // Low bit set: a value of 63 bits, which shmem uses for swap entries only (swp_to_radix_entry).
        _ => SwapSlot::from_raw(word >> 1).map_or(Entry::Poison, Entry::Swap),
    }
}

/// `xa_is_node`: an internal entry above 4096.
#[must_use]
pub const fn is_node(word: u64) -> bool {
    word & 3 == 2 && word > 4096
}

/// `xa_is_sibling`: an internal entry that is the number of an earlier slot.
const fn is_sibling(word: u64) -> bool {
    word & 3 == 2 && word < ((SLOTS as u64 - 1) << 2 | 2)
}

/// The entry that stands for slot `slot` of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// A hole, a folio, a swap slot or poison; anything else is [`Entry::Moving`].
    pub entry: Entry,
    /// Slots between the entry's own and `slot`.
    pub slots_in: u64,
    /// Slots that the entry takes: a power of two.
    pub width: u64,
}

/// Looks through siblings. What does not fit together is [`Entry::Moving`]: the node was being changed.
#[must_use]
pub fn resolve(slots: &[u64; SLOTS], slot: usize) -> Resolved {
    let moving = Resolved { entry: Entry::Moving, slots_in: 0, width: 1 };
    let (first, entry) = match classify(slots[slot]) {
        Entry::Sibling(first) if first < slot => (first, classify(slots[first])),
        Entry::Sibling(_) | Entry::Node => return moving,
        entry => (slot, entry),
    };
    if entry == Entry::Hole && first == slot {
        return Resolved { entry, slots_in: 0, width: 1 };
    }
    if !matches!(entry, Entry::Folio | Entry::Swap(_) | Entry::Poison) {
        return moving;
    }
    let width =
        1 + slots[first + 1..].iter().take_while(|word| classify(**word) == Entry::Sibling(first)).count();
    // An entry of order n takes 2^n slots from a multiple of 2^n on.
    if !width.is_power_of_two() || !first.is_multiple_of(width) || slot >= first + width {
        return moving;
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
    fn entries_mean_what_the_kernels_headers_say() {
        assert_eq!(classify(0), Entry::Hole);
        assert_eq!(classify(0xffff_ea00_1234_5640), Entry::Folio);
        assert_eq!(classify(0xffff_8880_1234_5642), Entry::Node);
        assert_eq!(classify(1026), Entry::Moving, "XA_RETRY_ENTRY");
        assert_eq!(classify(1030), Entry::Moving, "XA_ZERO_ENTRY");
        assert_eq!(classify(sibling(0)), Entry::Sibling(0));
        assert_eq!(classify(sibling(62)), Entry::Sibling(62));
        assert_eq!(classify(sibling(63)), Entry::Moving, "the last slot has no siblings");
        let slot = SwapSlot::new(3, 77).unwrap();
        assert_eq!(classify(slot.raw() << 1 | 1), Entry::Swap(slot));
        assert_eq!(classify((31_u64 << 58 | 2) << 1 | 1), Entry::Poison);
    }

    #[test]
    fn siblings_lead_to_their_entry() {
        let mut slots = [0; SLOTS];
        slots[16] = 0x1000;
        slots[17..32].fill(sibling(16));
        for slot in 16..32 {
            let expected = Resolved { entry: Entry::Folio, slots_in: slot as u64 - 16, width: 16 };
            assert_eq!(resolve(&slots, slot), expected);
        }
        assert_eq!(resolve(&slots, 15).entry, Entry::Hole);
    }

    #[test]
    fn sibling_of_nothing_is_moving_not_a_hole() {
        let mut slots = [0; SLOTS];
        slots[17..32].fill(sibling(16));
        assert_eq!(resolve(&slots, 20).entry, Entry::Moving);
        slots[16] = 1026;
        assert_eq!(resolve(&slots, 20).entry, Entry::Moving);
        slots[16] = 0x1000;
        slots[31] = 0;
        assert_eq!(resolve(&slots, 20).entry, Entry::Moving, "15 slots are no folio");
        assert_eq!(resolve(&slots, 16).entry, Entry::Moving);
    }

    proptest! {
        #[test]
        fn any_slots_are_resolved_without_panic(words in proptest::collection::vec(
            prop_oneof![any::<u64>(), (0_u64..70).prop_map(sibling), Just(0), Just(0x1000), Just(1026)], SLOTS)) {
            let slots: [u64; SLOTS] = words.try_into().unwrap();
            for slot in 0..SLOTS {
                let resolved = resolve(&slots, slot);
                prop_assert!(resolved.slots_in < resolved.width);
                prop_assert!(!matches!(resolved.entry, Entry::Node | Entry::Sibling(_)));
                if slots[slot] != 0 {
                    prop_assert_ne!(resolved.entry, Entry::Hole);
                }
            }
        }
    }
}
