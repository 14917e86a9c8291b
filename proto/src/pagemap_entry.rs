//! 64-bit entries of `/proc/PID/pagemap` (`Documentation/admin-guide/mm/pagemap.rst`). fdmap answers in the same layout.

use crate::state::{PageState, SwapSlot};

/// Entry of one page, read from `/proc/PID/pagemap` or from an answer of fdmap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagemapEntry(pub u64);

impl PagemapEntry {
    /// Bit 63: the page is present in the page table; in answers of fdmap, in memory.
    pub const PRESENT: u64 = 1 << 63;
    /// Bit 62: the page is swapped.
    pub const SWAP: u64 = 1 << 62;
    /// Bit 61: the page belongs to a file mapping or to shared memory.
    pub const FILE: u64 = 1 << 61;
    /// Bit 56: exactly one page table maps the page.
    pub const MMAP_EXCLUSIVE: u64 = 1 << 56;
    /// Bit 55: soft-dirty. In answers of fdmap: the page was written after the requested generation.
    pub const SOFT_DIRTY: u64 = 1 << 55;
    /// Bits 0 to 54: page frame number, or swap type and offset.
    pub const FRAME: u64 = (1 << 55) - 1;
    /// Width of the swap type in the low bits (`MAX_SWAPFILES_SHIFT`).
    const TYPE_BITS: u32 = 5;

    /// Encodes a page state. `SwapCached` becomes a swap entry. `Unknown` sets both `PRESENT` and `SWAP`, a combination that
    /// the kernel never reports.
    #[must_use]
    pub const fn encode(state: PageState, slot: Option<SwapSlot>) -> Self {
        Self(match state {
            PageState::Hole => 0,
            PageState::Resident => Self::PRESENT | Self::FILE,
            PageState::Unknown => Self::PRESENT | Self::SWAP | Self::FILE,
            PageState::Swapped | PageState::SwapCached => {
                let frame = match slot {
                    Some(slot) => slot.offset() << Self::TYPE_BITS | slot.swap_type() as u64,
                    None => 0,
                };
                Self::SWAP | Self::FILE | frame
            }
        })
    }

    /// Decodes the state from an entry that fdmap encoded.
    #[must_use]
    pub const fn state(self) -> PageState {
        match (self.is_present(), self.is_swap()) {
            (true, true) => PageState::Unknown,
            (true, false) => PageState::Resident,
            (false, true) => PageState::Swapped,
            (false, false) => PageState::Hole,
        }
    }

    /// Returns true if bit 63 is set.
    #[must_use]
    pub const fn is_present(self) -> bool {
        self.0 & Self::PRESENT != 0
    }

    /// Returns true if bit 62 is set.
    #[must_use]
    pub const fn is_swap(self) -> bool {
        self.0 & Self::SWAP != 0
    }

    /// Swap type and offset of a swap entry. Returns `None` if both are 0: the kernel hides them from unprivileged readers,
    /// and the syscalls probe does not know them. Slot 0 of area 0 never holds a page, because a swap area begins with its
    /// header.
    #[must_use]
    pub fn slot(self) -> Option<SwapSlot> {
        let frame = self.0 & Self::FRAME;
        if !self.is_swap() || self.is_present() || frame == 0 {
            return None;
        }
        SwapSlot::new(crate::units::low_u8(frame & 0x1f), frame >> Self::TYPE_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn encoded_slot_is_decoded(swap_type in 0_u8..31, offset in 1..SwapSlot::MAX_OFFSET) {
            let slot = SwapSlot::new(swap_type, offset);
            let entry = PagemapEntry::encode(PageState::Swapped, slot);
            prop_assert_eq!(entry.slot(), slot);
            prop_assert_eq!(entry.state(), PageState::Swapped);
            prop_assert_eq!(entry.0 & 0x1f, u64::from(swap_type));
        }
    }

    #[test]
    fn states_use_the_bits_of_the_kernel() {
        assert_eq!(PagemapEntry::encode(PageState::Hole, None).0, 0);
        assert_eq!(PagemapEntry::encode(PageState::Resident, None).0, 0b101 << 61);
        assert_eq!(PagemapEntry::encode(PageState::Swapped, None).0, 0b011 << 61);
        for state in [PageState::Hole, PageState::Resident, PageState::Swapped, PageState::Unknown] {
            assert_eq!(PagemapEntry::encode(state, None).state(), state);
        }
        assert_eq!(PagemapEntry::encode(PageState::SwapCached, None).state(), PageState::Swapped);
    }

    #[test]
    fn entry_without_a_location_has_no_slot() {
        assert_eq!(PagemapEntry::encode(PageState::Swapped, None).slot(), None);
        assert_eq!(PagemapEntry(PagemapEntry::PRESENT | 77).slot(), None);
    }
}
