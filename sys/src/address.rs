//! Ranges of virtual addresses.

use std::fmt;

/// The virtual addresses `start..end` of some address space. The range is empty if `end <= start`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressRange {
    /// Address of the first byte.
    pub start: u64,
    /// Address after the last byte.
    pub end: u64,
}

impl AddressRange {
    /// `start..start + len`; `None` if the end overflows 64 bits.
    #[must_use]
    pub const fn at(start: u64, len: u64) -> Option<Self> {
        match start.checked_add(len) {
            Some(end) => Some(Self { start, end }),
            None => None,
        }
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.end <= self.start
    }

    #[must_use]
    pub const fn contains(self, address: u64) -> bool {
        self.start <= address && address < self.end
    }

    /// Checks whether every byte of `other` lies in `self`. Every range covers an empty one.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        other.is_empty() || (self.start <= other.start && other.end <= self.end)
    }

    /// The bytes that lie in both ranges; empty if they do not overlap.
    #[must_use]
    pub fn intersect(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        Self { start, end: self.end.min(other.end).max(start) }
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_with_end_before_start_is_empty() {
        let backwards = AddressRange { start: 2, end: 1 };
        assert!(backwards.is_empty());
        assert_eq!(backwards.len(), 0);
        assert_eq!(AddressRange::at(u64::MAX, 1), None);
    }

    #[test]
    fn intersection_of_disjoint_ranges_is_empty() {
        let (low, high) = (AddressRange { start: 0, end: 5 }, AddressRange { start: 7, end: 9 });
        assert!(low.intersect(high).is_empty() && high.intersect(low).is_empty());
        assert_eq!(low.intersect(AddressRange { start: 3, end: 9 }), AddressRange { start: 3, end: 5 });
        assert!(!low.covers(high) && low.covers(low) && low.covers(high.intersect(low)));
    }

    #[test]
    fn range_is_displayed_in_hex() {
        assert_eq!(AddressRange { start: 0x1000, end: 0x3000 }.to_string(), "0x1000..0x3000");
    }
}
