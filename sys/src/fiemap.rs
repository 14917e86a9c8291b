//! `ioctl(FS_IOC_FIEMAP)`: where the content of a file is on its block device.

use std::os::fd::{AsRawFd, BorrowedFd};

use bytemuck::{Pod, Zeroable};
use nix::errno::Errno;

use crate::error::{CallContext, SyscallError};

/// An extent of a file. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Offset in the file.
    pub logical: u64,
    /// Offset on the block device.
    pub physical: u64,
    pub length: u64,
    /// `FIEMAP_EXTENT_*` of `linux/fiemap.h`.
    pub flags: u32,
}

/// `FIEMAP_EXTENT_LAST`: the last extent of the file.
pub const EXTENT_LAST: u32 = 0x1;
/// `FIEMAP_EXTENT_UNWRITTEN`: allocated, and zero for reads through the file.
pub const EXTENT_UNWRITTEN: u32 = 0x800;
/// `FIEMAP_EXTENT_MERGED`: the file system stores smaller extents.
pub const EXTENT_MERGED: u32 = 0x1000;

/// `struct fiemap` of `linux/fiemap.h`, without its extents.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Head {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
}

/// `struct fiemap_extent`
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

const _: () = assert!(size_of::<Head>() == 32 && size_of::<RawExtent>() == 56);

/// Extents of one call.
const BATCH: usize = 64;

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Request {
    head: Head,
    extents: [RawExtent; BATCH],
}

/// `_IOWR('f', 11, struct fiemap)`
const FS_IOC_FIEMAP: u64 = 0xc020_660b;

/// The extents of a file in ascending order of their offsets in the file. Holes have none.
///
/// # Errors
/// `ioctl(FS_IOC_FIEMAP)`: `EOPNOTSUPP` if the file system has no extents. `EFBIG` for more than `max_extents`.
pub fn extents(fd: BorrowedFd<'_>, max_extents: usize) -> Result<Vec<FileExtent>, SyscallError> {
    let mut found: Vec<FileExtent> = Vec::new();
    loop {
        let start = found.last().map_or(0, |last| last.logical.saturating_add(last.length));
        let call = || format!("ioctl(FS_IOC_FIEMAP) of descriptor {} from {start}", fd.as_raw_fd());
        let mut request = Request::zeroed();
        request.head.start = start;
        request.head.length = u64::MAX - start;
        request.head.extent_count = 64;
        // SAFETY: the kernel reads and writes one struct fiemap with room for extent_count extents, the layout of `request`.
        let result = unsafe { nix::libc::ioctl(fd.as_raw_fd(), FS_IOC_FIEMAP, &raw mut request) };
        Errno::result(result).call(call)?;
        let mapped = usize::try_from(request.head.mapped_extents).unwrap_or(BATCH).min(BATCH);
        found.extend(request.extents[..mapped].iter().map(|extent| FileExtent {
            logical: extent.logical,
            physical: extent.physical,
            length: extent.length,
            flags: extent.flags,
        }));
        let ended = found.last().is_none_or(|last| last.flags & EXTENT_LAST != 0 || last.length == 0);
        if mapped == 0 || ended {
            return Ok(found);
        }
        if found.len() > max_extents {
            return Err(Errno::EFBIG).call(call);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn extents_cover_the_data_of_a_file_or_the_file_system_has_none() {
        let mut file: File = tempfile::tempfile().unwrap();
        file.write_all(&[1; 8192]).unwrap();
        file.sync_all().unwrap();
        match extents(file.as_fd(), 100) {
            Ok(found) => {
                assert_eq!(found.first().map(|extent| extent.logical), Some(0));
                assert_eq!(found.iter().map(|extent| extent.length).sum::<u64>(), 8192);
            }
            Err(error) => assert_eq!(error.errno, Errno::EOPNOTSUPP),
        }
    }

    #[test]
    fn memfd_has_no_extents() {
        let file = crate::memfd::create("trial", None).unwrap();
        assert_eq!(extents(file.as_fd(), 100).unwrap_err().errno, Errno::EOPNOTSUPP);
    }
}
