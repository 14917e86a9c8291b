//! Page states and swap slots.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::flag_set::flag_set;

/// State of one page of a file.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum PageState {
    /// No data: never written, or removed by hole punching or truncation.
    Hole,
    /// A folio in the page cache.
    Resident,
    /// The file refers to a swap slot, and a folio with the same content is in the swap cache.
    SwapCached,
    /// The data is in a swap slot.
    Swapped,
    /// The probe cannot determine the state, or a failed swap read destroyed the content. Never treat it as a hole.
    Unknown,
}

impl PageState {
    /// Returns true for the states that have a swap slot.
    #[must_use]
    pub const fn is_swapped(self) -> bool {
        matches!(self, Self::SwapCached | Self::Swapped)
    }

    /// Returns true if the page certainly holds data.
    #[must_use]
    pub const fn is_data(self) -> bool {
        matches!(self, Self::Resident | Self::SwapCached | Self::Swapped)
    }

    /// Maps `SwapCached` to `Swapped`, for answers that do not distinguish the two.
    #[must_use]
    pub const fn folded(self) -> Self {
        match self {
            Self::SwapCached => Self::Swapped,
            other => other,
        }
    }
}

flag_set! {
    /// A set of [`PageState`]s.
    StateSet: u8 of PageState {
        HOLE = 0x01 => Hole,
        RESIDENT = 0x02 => Resident,
        SWAP_CACHED = 0x04 => SwapCached,
        SWAPPED = 0x08 => Swapped,
        UNKNOWN = 0x10 => Unknown,
    }
}

/// Location of a swapped page: the swap type (index of the swap area) and the offset in pages.
///
/// Stored as the kernel's `swp_entry_t`, `type << 58 | offset` (`SWP_TYPE_SHIFT` in `linux/swapops.h`: the 63 bits of an
/// XArray value minus the 5 bits of the type). Consecutive slots are consecutive numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwapSlot(u64);

impl SwapSlot {
    /// Position of the swap type in [`SwapSlot::raw`].
    pub const TYPE_SHIFT: u32 = 58;
    /// Upper bound (exclusive) of offsets: a pagemap entry has 50 bits for them.
    pub const MAX_OFFSET: u64 = 1 << 50;
    /// Upper bound (exclusive) of swap types. Type 31, the last of the 5-bit values, is `SWP_PTE_MARKER`: the entry that a
    /// failed swap read leaves in the XArray (`make_poisoned_swp_entry`).
    pub const MAX_TYPES: u8 = 31;

    /// Returns `None` if the type or the offset is out of range.
    #[must_use]
    pub fn new(swap_type: u8, offset: u64) -> Option<Self> {
        (swap_type < Self::MAX_TYPES && offset < Self::MAX_OFFSET)
            .then_some(Self(u64::from(swap_type) << Self::TYPE_SHIFT | offset))
    }

    /// Returns `None` if `raw` is not a swap slot, for example the entry of a failed swap read.
    #[must_use]
    pub const fn from_raw(raw: u64) -> Option<Self> {
        if raw >> Self::TYPE_SHIFT < Self::MAX_TYPES as u64
            && raw & ((1 << Self::TYPE_SHIFT) - 1) < Self::MAX_OFFSET
        {
            Some(Self(raw))
        } else {
            None
        }
    }

    /// The slot as `type << 58 | offset`.
    #[must_use]
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// The kernel's index of the swap area.
    #[must_use]
    pub const fn swap_type(self) -> u8 {
        crate::units::low_u8(self.0 >> Self::TYPE_SHIFT)
    }

    /// Offset from the start of the swap area, in pages.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.0 & ((1 << Self::TYPE_SHIFT) - 1)
    }

    /// The slot `pages` slots later in the same area; `None` if its offset is out of range.
    #[must_use]
    pub fn plus(self, pages: u64) -> Option<Self> {
        let offset = self.offset().checked_add(pages)?;
        Self::new(self.swap_type(), offset)
    }
}

impl fmt::Display for SwapSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.swap_type(), self.offset())
    }
}

impl Serialize for SwapSlot {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Parts {
            r#type: u8,
            offset: u64,
        }
        Parts { r#type: self.swap_type(), offset: self.offset() }.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use strum::VariantArray as _;

    use super::*;

    proptest! {
        #[test]
        fn slot_keeps_type_and_offset(swap_type in 0_u8..31, offset in 0..SwapSlot::MAX_OFFSET) {
            let slot = SwapSlot::new(swap_type, offset).unwrap();
            prop_assert_eq!(slot.swap_type(), swap_type);
            prop_assert_eq!(slot.offset(), offset);
            prop_assert_eq!(SwapSlot::from_raw(slot.raw()), Some(slot));
        }

        #[test]
        fn word_is_a_slot_or_rejected(raw in any::<u64>()) {
            match SwapSlot::from_raw(raw) {
                Some(slot) => prop_assert_eq!(SwapSlot::new(slot.swap_type(), slot.offset()), Some(slot)),
                None => prop_assert!(raw >> 58 >= 31 || raw & ((1 << 58) - 1) >= 1 << 50),
            }
        }
    }

    #[test]
    fn marker_of_a_failed_swap_read_is_rejected() {
        assert_eq!(SwapSlot::from_raw(31 << 58 | 2), None);
        assert_eq!(SwapSlot::new(31, 2), None);
    }

    #[test]
    fn slot_does_not_overflow_into_the_next_area() {
        let last = SwapSlot::new(3, SwapSlot::MAX_OFFSET - 1).unwrap();
        assert_eq!(last.plus(1), None);
        assert_eq!(last.plus(0), Some(last));
    }

    #[test]
    fn state_set_contains_its_elements() {
        let set = StateSet::of(PageState::Swapped) | StateSet::HOLE;
        assert!(set.has(PageState::Swapped) && set.has(PageState::Hole));
        assert!(!set.has(PageState::Unknown));
        assert!(PageState::VARIANTS.iter().all(|state| StateSet::ALL.has(*state)));
        assert_eq!(set.elements().collect::<Vec<_>>(), [PageState::Hole, PageState::Swapped]);
    }

    #[test]
    fn states_have_the_same_name_in_text_and_json() {
        for state in PageState::VARIANTS {
            assert_eq!(serde_json::to_value(state).unwrap(), state.to_string());
            assert_eq!(state.to_string().parse(), Ok(*state));
        }
        assert_eq!(PageState::SwapCached.to_string(), "swap-cached");
    }
}
