//! Where processes map a tracked file. Data only.

use fdmap_proto::units::{MappingId, PageIndex, PageRange, PageSize};
use fdmap_sys::address::AddressRange;

/// Identity of a tracked file, as `stat` and `/proc/PID/maps` report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappedFile {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// The base page size, also for hugetlb files.
    pub(crate) page_size: PageSize,
    pub(crate) hugetlb: bool,
}

/// A contiguous part of the file, mapped by one VMA or by several adjacent VMAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingExtent {
    pub range: AddressRange,
    /// The page of the file that is mapped at the start of `range`.
    pub first_page: PageIndex,
}

impl MappingExtent {
    /// The pages of the file that the extent maps.
    #[must_use]
    pub const fn pages(&self, page_size: PageSize) -> PageRange {
        PageRange::at(self.first_page, (self.range.end - self.range.start) / page_size.bytes())
    }

    /// The pages of the file that the extent maps in `range`.
    pub(crate) fn pages_in(&self, range: AddressRange, page_size: PageSize) -> PageRange {
        let part = self.range.intersect(range);
        if part.is_empty() {
            return PageRange::default();
        }
        PageRange::at(self.page_at(part.start, page_size), part.len().div_ceil(page_size.bytes()))
    }

    /// The parts of the extent outside of `ranges`, which are sorted and consist of whole pages.
    pub(crate) fn without(&self, ranges: &[AddressRange], page_size: PageSize) -> Vec<Self> {
        let mut parts = Vec::new();
        let mut start = self.range.start;
        let end = AddressRange { start: self.range.end, end: u64::MAX };
        for range in ranges.iter().chain([&end]) {
            let part = AddressRange { start, end: range.start.min(self.range.end) };
            if !part.is_empty() {
                parts.push(Self { range: part, first_page: self.page_at(start, page_size) });
            }
            start = start.max(range.end);
            if start >= self.range.end {
                break;
            }
        }
        parts
    }

    /// The page of the file at `address`, which lies in the extent.
    pub(crate) const fn page_at(&self, address: u64, page_size: PageSize) -> PageIndex {
        self.first_page.plus((address - self.range.start) / page_size.bytes())
    }
}

/// The part of an extent that one VMA maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VmaExtent {
    pub(crate) extent: MappingExtent,
    /// The whole VMA. It may reach beyond the extent.
    pub(crate) vma: AddressRange,
}

/// One mapping that a client registered, and the extents of it that are still mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegisteredMapping {
    pub(crate) id: MappingId,
    /// In ascending order of addresses.
    pub(crate) extents: Vec<MappingExtent>,
    pub(crate) ending: Ending,
}

/// Whether the owner of a mapping called Untrack, which promises that no thread writes through the mapping any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ending {
    /// No promise, or a broken one: the writes since the last harvest are lost when the mapping ends.
    #[default]
    Unannounced,
    /// Untrack harvested the mapping, which was not writable then. Its end loses no write.
    Announced,
    /// As [`Self::Announced`], and the mapping still existed at a later checkpoint.
    Overdue,
}

impl Ending {
    /// True if the end of the mapping loses no write.
    #[must_use]
    pub(crate) const fn loses_no_write(self) -> bool {
        !matches!(self, Self::Unannounced)
    }

    /// The state after a checkpoint that found the mapping; `writable`: it is writable now. The owner has the time until the
    /// second checkpoint to unmap it, since a checkpoint may come between Untrack and munmap(2).
    #[must_use]
    pub(crate) const fn after_checkpoint(self, writable: bool) -> Self {
        match self {
            Self::Announced if !writable => Self::Overdue,
            Self::Announced | Self::Overdue | Self::Unannounced => Self::Unannounced,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_end_is_trusted_until_the_second_checkpoint_or_a_writable_one() {
        let (read_only, writable) = (false, true);
        for (before, found, after) in [
            (Ending::Announced, read_only, Ending::Overdue),
            (Ending::Announced, writable, Ending::Unannounced),
            (Ending::Overdue, read_only, Ending::Unannounced),
            (Ending::Overdue, writable, Ending::Unannounced),
            (Ending::Unannounced, read_only, Ending::Unannounced),
            (Ending::Unannounced, writable, Ending::Unannounced),
        ] {
            assert_eq!(before.after_checkpoint(found), after, "{before:?}, writable: {found}");
        }
        assert!(Ending::Announced.loses_no_write() && Ending::Overdue.loses_no_write());
        assert!(!Ending::default().loses_no_write());
    }

    #[test]
    fn extent_is_split_around_ranges() {
        let page_size = PageSize::new(4096).unwrap();
        let range = |start: u64, end: u64| AddressRange { start: start * 4096, end: end * 4096 };
        let extent = MappingExtent { range: range(10, 20), first_page: PageIndex(100) };
        for (ranges, expected) in [
            (vec![], vec![(10, 20)]),
            (vec![range(0, 10), range(20, 30)], vec![(10, 20)]),
            (vec![range(0, 12), range(14, 15)], vec![(12, 14), (15, 20)]),
            (vec![range(18, 40)], vec![(10, 18)]),
            (vec![range(0, 40)], vec![]),
        ] {
            let parts = extent.without(&ranges, page_size);
            let expected: Vec<_> = expected
                .into_iter()
                .map(|(start, end)| MappingExtent {
                    range: range(start, end),
                    first_page: PageIndex(90 + start),
                })
                .collect();
            assert_eq!(parts, expected, "{ranges:?}");
        }
        assert_eq!(extent.pages_in(range(12, 14), page_size), PageRange::at(PageIndex(102), 2));
        assert!(extent.pages_in(range(0, 5), page_size).is_empty());
    }
}
