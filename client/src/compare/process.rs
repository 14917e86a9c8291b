//! File mappings of a process.

use fdmap_proto::{PageIndex, PageRange, PageSize};
use fdmap_sys::maps::Maps;

use crate::ClientError;

/// Mapping of a file in an address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileMapping {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// Virtual page number of `start`: `start` / page size.
    pub first_virtual_page: u64,
    /// Mapped pages of the file.
    pub pages: PageRange,
    /// Device and inode number of the file, as in stat(2).
    pub inode: (u64, u64),
    /// `MAP_SHARED`. Pages of a private mapping may be copies that do not belong to the file.
    pub shared: bool,
    /// The mapping is writable.
    pub writable: bool,
}

/// Returns the file mappings of process `pid` in address order.
///
/// # Errors
/// [`ClientError::Syscall`] if `/proc/PID/maps` cannot be read.
pub fn mappings_of(pid: u32, page_size: PageSize) -> Result<Vec<FileMapping>, ClientError> {
    let vmas = Maps::open(pid)?.all()?;
    let files = vmas.into_iter().filter(|vma| vma.inode != 0);
    let mapping = |vma: fdmap_sys::maps::Vma| FileMapping {
        start: vma.range.start,
        end: vma.range.end,
        first_virtual_page: vma.range.start / page_size.bytes(),
        pages: PageRange::at(PageIndex(vma.offset / page_size.bytes()), vma.range.len() / page_size.bytes()),
        inode: (vma.device, vma.inode),
        shared: vma.shared,
        writable: vma.writable,
    };
    Ok(files.map(mapping).collect())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use fdmap_sys::mapping::SharedMapping;
    use fdmap_sys::{fd, memfd};

    use super::*;

    #[test]
    fn mapping_of_a_memfd_is_listed() {
        let file = memfd::create("listed", None).unwrap();
        memfd::resize(file.as_fd(), 10 * 4096).unwrap();
        let mapping = SharedMapping::shared(&file, 2 * 4096, 3 * 4096, true).unwrap();
        let stat = fd::stat(&file).unwrap();
        let page_size = PageSize::new(4096).unwrap();
        let listed: Vec<_> = mappings_of(std::process::id(), page_size)
            .unwrap()
            .into_iter()
            .filter(|mapping| mapping.inode == (stat.st_dev, stat.st_ino))
            .collect();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].start, mapping.as_ptr() as u64);
        assert_eq!(listed[0].pages, PageRange::at(PageIndex(2), 3));
        assert!(listed[0].shared && listed[0].writable);
    }
}
