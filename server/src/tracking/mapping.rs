//! Where processes map a tracked file. Data only.

use fdmap_proto::units::{MappingId, PageIndex, PageRange, PageSize};
use fdmap_sys::address::AddressRange;

/// Identity of a tracked file, as `stat` and `/proc/PID/maps` report it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MappedFile {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// The base page size, also for hugetlb files.
    pub(crate) page_size: PageSize,
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
    /// The owner called Untrack, which harvested the mapping. The owner no longer writes through it, so that the end of the
    /// mapping loses no write.
    pub(crate) ending: bool,
}
