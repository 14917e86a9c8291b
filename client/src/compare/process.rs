//! The mappings of a process.

use fdmap_proto::{PageIndex, PageRange, PageSize};
use procfs::process::{MMPermissions, MMapPath, Process};

use crate::ClientError;

/// A part of an address space that maps a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileMapping {
    /// The first address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// `start` / page size.
    pub first_virtual_page: u64,
    /// The pages of the file.
    pub pages: PageRange,
    /// Device and inode number of the file, as in stat(2).
    pub inode: (u64, u64),
    /// `MAP_SHARED`: a private mapping has pages of its own, which are no pages of the file.
    pub shared: bool,
    /// It can be written to.
    pub writable: bool,
}

/// The mappings of files without a path, as memfds are, in order of their addresses.
///
/// # Errors
/// [`ClientError::Path`] if `/proc/PID/maps` cannot be read.
pub fn mappings_of(pid: u32, page_size: PageSize) -> Result<Vec<FileMapping>, ClientError> {
    let failed = |error: procfs::ProcError| ClientError::Path {
        what: "reading",
        path: format!("/proc/{pid}/maps").into(),
        error: std::io::Error::other(error),
    };
    let process = i32::try_from(pid).map_err(|_| ClientError::Unexpected("no process has that number"))?;
    let maps = Process::new(process).and_then(|process| process.maps()).map_err(failed)?;
    let mut mappings = Vec::new();
    for map in maps {
        if map.inode == 0 || !matches!(map.pathname, MMapPath::Path(_) | MMapPath::Other(_)) {
            continue;
        }
        let (start, end) = map.address;
        let device = nix::sys::stat::makedev(id(map.dev.0), id(map.dev.1));
        mappings.push(FileMapping {
            start,
            end,
            first_virtual_page: start / page_size.bytes(),
            pages: PageRange::at(
                PageIndex(map.offset / page_size.bytes()),
                (end - start) / page_size.bytes(),
            ),
            inode: (device, map.inode),
            shared: map.perms.contains(MMPermissions::SHARED),
            writable: map.perms.contains(MMPermissions::WRITE),
        });
    }
    Ok(mappings)
}

fn id(number: i32) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use fdmap_sys::mapping::SharedMapping;
    use fdmap_sys::{fd, memfd};

    use super::*;

    #[test]
    fn own_mapping_of_a_memfd_is_found() {
        let file = memfd::create("found", None).unwrap();
        memfd::resize(file.as_fd(), 10 * 4096).unwrap();
        let mapping = SharedMapping::shared(&file, 2 * 4096, 3 * 4096, true).unwrap();
        let stat = fd::stat(&file).unwrap();
        let page_size = PageSize::new(4096).unwrap();
        let found: Vec<_> = mappings_of(std::process::id(), page_size)
            .unwrap()
            .into_iter()
            .filter(|mapping| mapping.inode == (stat.st_dev, stat.st_ino))
            .collect();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].start, mapping.as_ptr() as u64);
        assert_eq!(found[0].pages, PageRange::at(PageIndex(2), 3));
        assert!(found[0].shared && found[0].writable);
    }
}
