//! Numbers that must not be mistaken for one another: page indexes, page counts, byte sizes,
//! generations and ids.
//!
//! All integer casts of the project live here.

use std::fmt;
use std::num::NonZeroU64;

// Offsets and page counts are kept in 64 bits and index memory; nothing else was ever tried.
const _: () = assert!(usize::BITS == 64, "fdmap needs a 64-bit machine");

/// `u64` to `usize`, the same width on every machine fdmap builds for.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // asserted above
pub const fn to_usize(n: u64) -> usize {
    n as usize
}

/// `usize` to `u64`.
#[must_use]
pub const fn to_u64(n: usize) -> u64 {
    n as u64
}

/// The low 32 bits.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // it is what the name says
pub const fn low_u32(n: u64) -> u32 {
    n as u32
}

/// The low 8 bits.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // it is what the name says
pub const fn low_u8(n: u64) -> u8 {
    n as u8
}

/// For shares and rates shown to people; exact up to 2^53.
#[must_use]
#[allow(clippy::cast_precision_loss)] // only ever shown
pub const fn to_f64(n: u64) -> f64 {
    n as f64
}

/// Bytes in one page: a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSize(u64);

impl PageSize {
    /// `None` unless `bytes` is a power of two of at least 512.
    #[must_use]
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() && bytes >= 512 { Some(Self(bytes)) } else { None }
    }

    /// Bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Pages that hold `bytes`, the last one counted whole.
    #[must_use]
    pub const fn pages_in(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.0)
    }

    /// Offset of the first byte of `page`; `None` past the end of 64 bits.
    #[must_use]
    pub const fn offset_of(self, page: PageIndex) -> Option<u64> {
        page.0.checked_mul(self.0)
    }

    /// The page that holds the byte at `offset`.
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

/// A page of a file: offset in the file / page size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// The page `pages` further on, or the last nameable one.
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

/// The pages `start` up to, not including, `end`; `start <= end` always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageRange {
    start: PageIndex,
    end: PageIndex,
}

impl PageRange {
    /// `None` if `start` lies after `end`.
    #[must_use]
    pub const fn new(start: PageIndex, end: PageIndex) -> Option<Self> {
        if start.0 <= end.0 { Some(Self { start, end }) } else { None }
    }

    /// The first `pages` pages of a file.
    #[must_use]
    pub const fn first(pages: u64) -> Self {
        Self { start: PageIndex(0), end: PageIndex(pages) }
    }

    /// `pages` pages from `start` on, cut at the last nameable page.
    #[must_use]
    pub const fn at(start: PageIndex, pages: u64) -> Self {
        Self { start, end: start.plus(pages) }
    }

    /// The first page.
    #[must_use]
    pub const fn start(self) -> PageIndex {
        self.start
    }

    /// The page after the last.
    #[must_use]
    pub const fn end(self) -> PageIndex {
        self.end
    }

    /// Number of pages.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.end.0 - self.start.0
    }

    /// True when it holds no page.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.start.0 == self.end.0
    }

    /// True when `page` lies in it.
    #[must_use]
    pub const fn contains(self, page: PageIndex) -> bool {
        self.start.0 <= page.0 && page.0 < self.end.0
    }

    /// True when every page of `other` lies in it.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        other.is_empty() || (self.start.0 <= other.start.0 && other.end.0 <= self.end.0)
    }

    /// The pages that lie in both; empty if none does.
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

/// A generation of writes to a file, counted from 1 on; 0 stands for "none", the time before the first.
///
/// It fits into 31 bits, so that a page's stamp has a bit to spare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(u32);

impl Generation {
    /// Before the first generation.
    pub const NONE: Self = Self(0);
    /// The first one.
    pub const FIRST: Self = Self(1);
    /// The last one that there can be.
    pub const MAX: Self = Self((1 << 31) - 2);

    /// `None` if it is larger than [`Self::MAX`].
    #[must_use]
    pub const fn new(number: u64) -> Option<Self> {
        if number <= Self::MAX.get() { Some(Self(low_u32(number))) } else { None }
    }

    /// The number as it goes over the wire.
    #[must_use]
    #[allow(clippy::cast_lossless)] // `From` is not const
    pub const fn get(self) -> u64 {
        self.0 as u64
    }

    /// The generation after it; `None` after [`Self::MAX`].
    #[must_use]
    pub const fn next(self) -> Option<Self> {
        Self::new(self.get() + 1)
    }

    /// The generation before it; [`Self::NONE`] before the first.
    #[must_use]
    pub const fn previous(self) -> Self {
        Self(self.0.saturating_sub(1))
    }

    /// True for [`Self::NONE`].
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
            /// `None` for 0, which on the wire means "none".
            #[must_use]
            pub const fn new(id: u64) -> Option<Self> {
                match NonZeroU64::new(id) {
                    Some(id) => Some(Self(id)),
                    None => None,
                }
            }

            /// The number as it goes over the wire.
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
    };
}

id! {
    /// A file of the service; drawn at random, never used again for another file. Shown as 16 hex digits.
    FileId
}
id! {
    /// A kept snapshot of one file in one run of the service. Shown as 16 hex digits.
    SnapshotId
}
id! {
    /// A mapping whose writes are observed; never used again for another mapping. Shown as 16 hex digits.
    MappingId
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> PageRange {
        PageRange::new(PageIndex(start), PageIndex(end)).unwrap()
    }

    #[test]
    fn backwards_range_is_refused() {
        assert_eq!(PageRange::new(PageIndex(2), PageIndex(1)), None);
        assert!(range(2, 2).is_empty());
    }

    #[test]
    fn last_page_of_an_odd_size_counts_whole() {
        let size = PageSize::new(4096).unwrap();
        assert_eq!(size.pages_in(0), 0);
        assert_eq!(size.pages_in(1), 1);
        assert_eq!(size.pages_in(4096), 1);
        assert_eq!(size.pages_in(4097), 2);
        assert_eq!(size.pages_in(u64::MAX), 1 << 52);
    }

    #[test]
    fn intersection_of_strangers_is_empty() {
        assert!(range(0, 5).intersect(range(7, 9)).is_empty());
        assert!(range(7, 9).intersect(range(0, 5)).is_empty());
        assert_eq!(range(0, 5).intersect(range(3, 9)), range(3, 5));
    }

    #[test]
    fn generations_end_at_31_bits() {
        assert_eq!(Generation::NONE.next(), Some(Generation::FIRST));
        assert_eq!(Generation::FIRST.previous(), Generation::NONE);
        assert!(Generation::NONE.previous().is_none());
        assert_eq!(Generation::new(Generation::MAX.get()), Some(Generation::MAX));
        assert_eq!(Generation::MAX.next(), None);
        assert_eq!(Generation::new(1 << 32), None);
    }

    #[test]
    fn page_size_must_be_a_power_of_two() {
        assert_eq!(PageSize::new(4095), None);
        assert_eq!(PageSize::new(0), None);
        assert_eq!(PageSize::new(256), None);
    }
}
