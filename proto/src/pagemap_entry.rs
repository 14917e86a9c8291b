//! The 64-bit word of `/proc/PID/pagemap`, as the kernel lays it out
//! (`Documentation/admin-guide/mm/pagemap.rst`) and as fdmap answers in it.

use crate::state::{PageState, SwapSlot};

/// One word of `/proc/PID/pagemap`, or of an answer in that layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagemapEntry(pub u64);

impl PagemapEntry {
    /// Bit 63: the page is in memory.
    pub const PRESENT: u64 = 1 << 63;
    /// Bit 62: the page is swapped.
    pub const SWAP: u64 = 1 << 62;
    /// Bit 61: the page belongs to a file or to shared memory.
    pub const FILE: u64 = 1 << 61;
    /// Bit 56: the page is mapped by one page table only.
    pub const MMAP_EXCLUSIVE: u64 = 1 << 56;
    /// Bit 55: the page was written since some moment that the asker knows.
    pub const SOFT_DIRTY: u64 = 1 << 55;
    /// Bits 0 to 54: page frame, or swap type and offset.
    pub const FRAME: u64 = (1 << 55) - 1;
    /// Bits of the swap type within the frame (`MAX_SWAPFILES_SHIFT`).
    const TYPE_BITS: u32 = 5;

    /// What fdmap answers for a page. `SwapCached` is told as swapped; `Unknown` has both `PRESENT` and `SWAP`
    /// set, which no kernel ever reports.
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

    /// The state that an answer of fdmap tells.
    #[must_use]
    pub const fn state(self) -> PageState {
        match (self.is_present(), self.is_swap()) {
            (true, true) => PageState::Unknown,
            (true, false) => PageState::Resident,
            (false, true) => PageState::Swapped,
            (false, false) => PageState::Hole,
        }
    }

    /// True if bit 63 is set.
    #[must_use]
    pub const fn is_present(self) -> bool {
        self.0 & Self::PRESENT != 0
    }

    /// True if bit 62 is set.
    #[must_use]
    pub const fn is_swap(self) -> bool {
        self.0 & Self::SWAP != 0
    }

    /// Swap type and offset, if it is a swap entry. A reader without privileges sees 0 for both, and the
    /// syscalls probe answers so: then this is slot 0 of area 0, which no page ever has (a swap area begins
    /// with its header), and `None` is returned.
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
        fn slot_survives_the_entry(swap_type in 0_u8..31, offset in 1..SwapSlot::MAX_OFFSET) {
            let slot = SwapSlot::new(swap_type, offset);
            let entry = PagemapEntry::encode(PageState::Swapped, slot);
            prop_assert_eq!(entry.slot(), slot);
            prop_assert_eq!(entry.state(), PageState::Swapped);
            prop_assert_eq!(entry.0 & 0x1f, u64::from(swap_type));
        }
    }

    #[test]
    fn each_state_is_told_by_the_kernels_bits() {
        assert_eq!(PagemapEntry::encode(PageState::Hole, None).0, 0);
        assert_eq!(PagemapEntry::encode(PageState::Resident, None).0, 0b101 << 61);
        assert_eq!(PagemapEntry::encode(PageState::Swapped, None).0, 0b011 << 61);
        for state in [PageState::Hole, PageState::Resident, PageState::Swapped, PageState::Unknown] {
            assert_eq!(PagemapEntry::encode(state, None).state(), state);
        }
        assert_eq!(PagemapEntry::encode(PageState::SwapCached, None).state(), PageState::Swapped);
    }

    #[test]
    fn entry_without_a_slot_has_none() {
        assert_eq!(PagemapEntry::encode(PageState::Swapped, None).slot(), None);
        assert_eq!(PagemapEntry(PagemapEntry::PRESENT | 77).slot(), None);
    }
}
