//! What is known of one page.

use std::fmt;

/// What the kernel holds for one page of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageState {
    /// No data: never written, or punched out, or truncated away.
    Hole,
    /// A folio in the page cache.
    Resident,
    /// The file holds a swap slot while a folio of the same content is still in memory.
    SwapCached,
    /// The data lies at a swap slot.
    Swapped,
    /// The probe cannot see it, or the content was lost to a failed swap read. Never to be taken for a hole.
    Unknown,
}

impl PageState {
    /// Every state, in the order of the enum.
    pub const ALL: [Self; 5] = [Self::Hole, Self::Resident, Self::SwapCached, Self::Swapped, Self::Unknown];

    /// True for the states that go with a swap slot.
    #[must_use]
    pub const fn is_swapped(self) -> bool {
        matches!(self, Self::SwapCached | Self::Swapped)
    }

    /// True if the page certainly holds data.
    #[must_use]
    pub const fn is_data(self) -> bool {
        matches!(self, Self::Resident | Self::SwapCached | Self::Swapped)
    }

    /// `SwapCached` taken as `Swapped`: the answer when the two are not told apart.
    #[must_use]
    pub const fn folded(self) -> Self {
        match self {
            Self::SwapCached => Self::Swapped,
            other => other,
        }
    }

    /// Lower case, words joined by a hyphen.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hole => "hole",
            Self::Resident => "resident",
            Self::SwapCached => "swap-cached",
            Self::Swapped => "swapped",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for PageState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A set of [`PageState`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSet(u8);

impl StateSet {
    /// Every state.
    pub const ALL: Self = Self(0b1_1111);
    /// No state.
    pub const NONE: Self = Self(0);

    /// With `state` as well.
    #[must_use]
    pub const fn with(self, state: PageState) -> Self {
        Self(self.0 | Self::bit(state))
    }

    /// True if `state` is in it.
    #[must_use]
    pub const fn contains(self, state: PageState) -> bool {
        self.0 & Self::bit(state) != 0
    }

    const fn bit(state: PageState) -> u8 {
        match state {
            PageState::Hole => 1,
            PageState::Resident => 2,
            PageState::SwapCached => 4,
            PageState::Swapped => 8,
            PageState::Unknown => 16,
        }
    }
}

/// Where a swapped page lies: a swap area's number and an offset in it, in pages.
///
/// Kept as the kernel's `swp_entry_t`: `type << 58 | offset` (`SWP_TYPE_SHIFT` in `linux/swapops.h`: the 63 bits
/// of an XArray value less the 5 bits of a type), so that slots that follow one another are numbers that do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwapSlot(u64);

impl SwapSlot {
    /// Bits of the offset within [`SwapSlot::raw`].
    pub const TYPE_SHIFT: u32 = 58;
    /// Offsets are below this: a pagemap entry has 50 bits for them. It is 4 EiB of 4 KiB pages.
    pub const MAX_OFFSET: u64 = 1 << 50;
    /// Types are below this. 31, the last one of 5 bits, is `SWP_PTE_MARKER`: what a failed swap read leaves in the
    /// XArray (`make_poisoned_swp_entry`).
    pub const MAX_TYPES: u8 = 31;

    /// `None` if the numbers are those of no swap area.
    #[must_use]
    pub fn new(swap_type: u8, offset: u64) -> Option<Self> {
        (swap_type < Self::MAX_TYPES && offset < Self::MAX_OFFSET)
            .then_some(Self(u64::from(swap_type) << Self::TYPE_SHIFT | offset))
    }

    /// `None` if the word names no swap area, as the entry of a failed swap read does.
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

    /// `type << 58 | offset`.
    #[must_use]
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// The kernel's number of the swap area.
    #[must_use]
    pub const fn swap_type(self) -> u8 {
        crate::units::low_u8(self.0 >> Self::TYPE_SHIFT)
    }

    /// Pages from the start of the swap area.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.0 & ((1 << Self::TYPE_SHIFT) - 1)
    }

    /// The slot `pages` further on in the same area; `None` past its last nameable one.
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

/// Flags of a folio under the bit numbers of `/proc/kpageflags` (`linux/kernel-page-flags.h`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageFlags {
    /// Bits that are set; only those in `known` mean anything.
    pub bits: u64,
    /// Bits that the probe can see.
    pub known: u64,
}

impl PageFlags {
    /// The flags that a probe may report, with the kernel's names.
    pub const NAMES: [(u32, &'static str); 14] = [
        (0, "locked"),
        (2, "referenced"),
        (3, "uptodate"),
        (4, "dirty"),
        (5, "lru"),
        (6, "active"),
        (8, "writeback"),
        (9, "reclaim"),
        (13, "swapcache"),
        (14, "swapbacked"),
        (18, "unevictable"),
        (19, "hwpoison"),
        (33, "mlocked"),
        (35, "private"),
    ];

    /// Names of the flags that are known to be set.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let set = self.bits & self.known;
        Self::NAMES.into_iter().filter(move |(bit, _)| set >> bit & 1 == 1).map(|(_, name)| name)
    }
}

/// Whether a page is mapped, and by how many page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mappers {
    /// Mapped nowhere.
    None,
    /// By exactly one page table.
    One,
    /// By more than one.
    Several,
}

impl Mappers {
    /// From a count of page tables.
    #[must_use]
    pub const fn of(map_count: u32) -> Self {
        match map_count {
            0 => Self::None,
            1 => Self::One,
            _ => Self::Several,
        }
    }
}

/// What was asked of a page beyond its state. `None` is unknown, never false or zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageAttributes {
    /// log2 of the pages in the folio or the large swap entry that holds the page.
    pub order: Option<u8>,
    /// Flags of the folio.
    pub flags: Option<PageFlags>,
    /// In how many page tables the page is mapped.
    pub map_count: Option<u32>,
    /// The same in coarse, for kernels that know no more.
    pub mappers: Option<Mappers>,
    /// Whether the folio may be pinned for DMA. A small folio with 1024 or more references counts as pinned
    /// (`GUP_PIN_COUNTING_BIAS`), so it may be true of one that is merely much referenced.
    pub maybe_pinned: Option<bool>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slot_keeps_its_two_numbers(swap_type in 0_u8..31, offset in 0..SwapSlot::MAX_OFFSET) {
            let slot = SwapSlot::new(swap_type, offset).unwrap();
            prop_assert_eq!(slot.swap_type(), swap_type);
            prop_assert_eq!(slot.offset(), offset);
            prop_assert_eq!(SwapSlot::from_raw(slot.raw()), Some(slot));
        }

        #[test]
        fn any_word_is_a_slot_or_refused(raw in any::<u64>()) {
            match SwapSlot::from_raw(raw) {
                Some(slot) => prop_assert_eq!(SwapSlot::new(slot.swap_type(), slot.offset()), Some(slot)),
                None => prop_assert!(raw >> 58 >= 31 || raw & ((1 << 58) - 1) >= 1 << 50),
            }
        }
    }

    #[test]
    fn marker_of_a_failed_swap_read_is_no_slot() {
        assert_eq!(SwapSlot::from_raw(31 << 58 | 2), None);
        assert_eq!(SwapSlot::new(31, 2), None);
    }

    #[test]
    fn slot_does_not_run_into_the_next_area() {
        let last = SwapSlot::new(3, SwapSlot::MAX_OFFSET - 1).unwrap();
        assert_eq!(last.plus(1), None);
        assert_eq!(last.plus(0), Some(last));
    }

    #[test]
    fn state_set_holds_what_was_put_in() {
        let set = StateSet::NONE.with(PageState::Swapped).with(PageState::Hole);
        assert!(set.contains(PageState::Swapped) && set.contains(PageState::Hole));
        assert!(!set.contains(PageState::Unknown));
        assert!(PageState::ALL.into_iter().all(|state| StateSet::ALL.contains(state)));
    }
}
