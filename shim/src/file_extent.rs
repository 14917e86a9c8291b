//! A mapped part of a service file with the states of its pages. No I/O.

use fdmap_client::SharedSnapshot;
use fdmap_client::proto::{PageIndex, PagemapEntry};
use fdmap_sys::address::AddressRange;

/// A part of an address space that maps a service file.
#[derive(Debug)]
pub struct FileExtent {
    pub range: AddressRange,
    /// `st_dev` of the file.
    pub device: u64,
    /// `st_ino` of the file.
    pub inode: u64,
    /// File page mapped at the start of `range`.
    pub first_page: u64,
    /// Page size in bytes.
    pub page_bytes: u64,
    /// States of the mapped pages; `None` if the whole range lies beyond the end of the file.
    pub states: Option<SharedSnapshot>,
    /// The service may track writes through this mapping, so its write protection must be hidden from the program.
    pub tracked_by_service: bool,
}

impl FileExtent {
    /// An untracked extent without page states.
    #[cfg(test)]
    pub const fn without_states(range: AddressRange) -> Self {
        Self {
            range,
            device: 0,
            inode: 0,
            first_page: 0,
            page_bytes: 4096,
            states: None,
            tracked_by_service: false,
        }
    }

    /// The file's pagemap entry for the page mapped at `address`, which lies in the extent.
    pub fn entry(&self, address: u64, page_bytes: u64) -> PagemapEntry {
        let page = PageIndex(self.first_page + (address - self.range.start) / page_bytes);
        self.states.as_ref().and_then(|states| states.entry(page)).unwrap_or_default()
    }

    /// File offset of the byte mapped at `address`.
    pub fn offset(&self, address: u64) -> Option<u64> {
        self.first_page.checked_mul(self.page_bytes)?.checked_add(address.checked_sub(self.range.start)?)
    }
}
