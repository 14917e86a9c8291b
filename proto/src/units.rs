//! Newtypes that keep page indexes, byte sizes, generations and ids apart, and the integer casts of the workspace.

use std::fmt;
use std::num::NonZeroU64;

use serde::{Serialize, Serializer};

// Byte offsets and page counts are 64-bit and index memory.
const _: () = assert!(usize::BITS == 64, "fdmap requires a 64-bit target");

/// Converts `u64` to `usize`; lossless on the 64-bit targets that fdmap supports.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // asserted above
pub const fn to_usize(n: u64) -> usize {
    n as usize
}

/// Converts `usize` to `u64`; lossless.
#[must_use]
pub const fn to_u64(n: usize) -> u64 {
    n as u64
}

/// Returns the low 32 bits.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // truncation is the purpose
pub const fn low_u32(n: u64) -> u32 {
    n as u32
}

/// Returns the low 8 bits.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // truncation is the purpose
pub const fn low_u8(n: u64) -> u8 {
    n as u8
}

/// Converts to `f64` for rates and percentages; exact up to 2^53.
#[must_use]
#[allow(clippy::cast_precision_loss)] // documented
pub const fn to_f64(n: u64) -> f64 {
    n as f64
}

/// Size of a page in bytes; a power of two of at least 512.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct PageSize(u64);

impl PageSize {
    /// Returns `None` unless `bytes` is a power of two of at least 512.
    #[must_use]
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() && bytes >= 512 { Some(Self(bytes)) } else { None }
    }

    /// The size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Number of pages that `bytes` bytes occupy, rounded up.
    #[must_use]
    pub const fn pages_in(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.0)
    }

    /// Byte offset of `page`; `None` if it exceeds 64 bits.
    #[must_use]
    pub const fn offset_of(self, page: PageIndex) -> Option<u64> {
        page.0.checked_mul(self.0)
    }

    /// Page that contains the byte at `offset`.
    #[must_use]
    pub const fn page_at(self, offset: u64) -> PageIndex {
        PageIndex(offset / self.0)
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0)
    }
}

/// Index of a page in a file: byte offset / base page size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// Index of the page `pages` pages later; saturates at `u64::MAX`.
    #[must_use]
    pub const fn plus(self, pages: u64) -> Self {
        Self(self.0.saturating_add(pages))
    }
}

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Half-open range of pages `start..end` with `start <= end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct PageRange {
    start: PageIndex,
    end: PageIndex,
}

impl PageRange {
    /// Returns `None` if `start > end`.
    #[must_use]
    pub const fn new(start: PageIndex, end: PageIndex) -> Option<Self> {
        if start.0 <= end.0 { Some(Self { start, end }) } else { None }
    }

    /// The range `0..pages`.
    #[must_use]
    pub const fn first(pages: u64) -> Self {
        Self { start: PageIndex(0), end: PageIndex(pages) }
    }

    /// The range of `pages` pages that begins at `start`; its end saturates at `u64::MAX`.
    #[must_use]
    pub const fn at(start: PageIndex, pages: u64) -> Self {
        Self { start, end: start.plus(pages) }
    }

    /// First page.
    #[must_use]
    pub const fn start(self) -> PageIndex {
        self.start
    }

    /// Page after the last.
    #[must_use]
    pub const fn end(self) -> PageIndex {
        self.end
    }

    /// Number of pages.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.end.0 - self.start.0
    }

    /// Returns true if the range contains no page.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.start.0 == self.end.0
    }

    /// Returns true if the range contains `page`.
    #[must_use]
    pub const fn contains(self, page: PageIndex) -> bool {
        self.start.0 <= page.0 && page.0 < self.end.0
    }

    /// Returns true if the range contains every page of `other`.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        other.is_empty() || (self.start.0 <= other.start.0 && other.end.0 <= self.end.0)
    }

    /// Pages that both ranges contain; empty if there are none.
    #[must_use]
    pub fn intersect(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        let end = self.end.min(other.end).max(start);
        Self { start, end }
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// Generation of writes to a file, numbered from 1; 0 means "none" and precedes all generations.
///
/// A generation has 31 bits; a dirty stamp uses the 32nd bit of its word for the conservative flag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Generation(u32);

impl Generation {
    /// Precedes the first generation.
    pub const NONE: Self = Self(0);
    /// First generation.
    pub const FIRST: Self = Self(1);
    /// Last valid generation, 2^31 - 2.
    pub const MAX: Self = Self((1 << 31) - 2);

    /// Returns `None` if `number` exceeds [`Self::MAX`].
    #[must_use]
    pub const fn new(number: u64) -> Option<Self> {
        if number <= Self::MAX.get() { Some(Self(low_u32(number))) } else { None }
    }

    /// The number, as on the wire.
    #[must_use]
    #[allow(clippy::cast_lossless)] // `From` is not const
    pub const fn get(self) -> u64 {
        self.0 as u64
    }

    /// Next generation; `None` after [`Self::MAX`].
    #[must_use]
    pub const fn next(self) -> Option<Self> {
        Self::new(self.get() + 1)
    }

    /// Previous generation; [`Self::NONE`] for the first and for [`Self::NONE`] itself.
    #[must_use]
    pub const fn previous(self) -> Self {
        Self(self.0.saturating_sub(1))
    }

    /// Returns true for [`Self::NONE`].
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(NonZeroU64);

        impl $name {
            /// Returns `None` for 0, which means "none" on the wire.
            #[must_use]
            pub const fn new(id: u64) -> Option<Self> {
                match NonZeroU64::new(id) {
                    Some(id) => Some(Self(id)),
                    None => None,
                }
            }

            /// The number, as on the wire.
            #[must_use]
            pub const fn get(self) -> u64 {
                self.0.get()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:016x}", self.0)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    };
}

id! {
    /// Random id of a file; never reused. Displayed as 16 hex digits.
    FileId
}
id! {
    /// Id of a retained snapshot; valid for one file and one service process. Displayed as 16 hex digits.
    SnapshotId
}
id! {
    /// Id of a tracked mapping; never reused. Displayed as 16 hex digits.
    MappingId
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> PageRange {
        PageRange::new(PageIndex(start), PageIndex(end)).unwrap()
    }

    #[test]
    fn range_that_ends_before_it_starts_is_rejected() {
        assert_eq!(PageRange::new(PageIndex(2), PageIndex(1)), None);
        assert!(range(2, 2).is_empty());
    }

    #[test]
    fn pages_of_an_unaligned_size_are_rounded_up() {
        let size = PageSize::new(4096).unwrap();
        assert_eq!(size.pages_in(0), 0);
        assert_eq!(size.pages_in(1), 1);
        assert_eq!(size.pages_in(4096), 1);
        assert_eq!(size.pages_in(4097), 2);
        assert_eq!(size.pages_in(u64::MAX), 1 << 52);
    }

    #[test]
    fn intersection_of_disjoint_ranges_is_empty() {
        assert!(range(0, 5).intersect(range(7, 9)).is_empty());
        assert!(range(7, 9).intersect(range(0, 5)).is_empty());
        assert_eq!(range(0, 5).intersect(range(3, 9)), range(3, 5));
    }

    #[test]
    fn generation_has_31_bits() {
        assert_eq!(Generation::NONE.next(), Some(Generation::FIRST));
        assert_eq!(Generation::FIRST.previous(), Generation::NONE);
        assert!(Generation::NONE.previous().is_none());
        assert_eq!(Generation::new(Generation::MAX.get()), Some(Generation::MAX));
        assert_eq!(Generation::MAX.next(), None);
        assert_eq!(Generation::new(1 << 32), None);
    }

    #[test]
    fn page_size_that_is_no_power_of_two_is_rejected() {
        assert_eq!(PageSize::new(4095), None);
        assert_eq!(PageSize::new(0), None);
        assert_eq!(PageSize::new(256), None);
    }
}
