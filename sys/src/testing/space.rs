//! The ioctls of linux/falloc.h that allocate and free the space of a file.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::errno::Errno;

use crate::error::{CallContext as _, SyscallError};

/// What the ioctl does to the range. The values are the request numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceCall {
    /// `FS_IOC_RESVSP64`: allocates, as `fallocate(FALLOC_FL_KEEP_SIZE)`.
    Reserve = 0x4030_582A,
    /// `FS_IOC_UNRESVSP64`: punches a hole.
    Unreserve = 0x4030_582B,
    /// `FS_IOC_ZERO_RANGE`
    Zero = 0x4030_5839,
}

/// Applies the call to `len` bytes at `start` of the file.
///
/// # Errors
/// `ioctl`.
pub fn change(fd: BorrowedFd<'_>, call: SpaceCall, start: u64, len: u64) -> Result<(), SyscallError> {
    // struct space_resv: l_type and l_whence (SEEK_SET), l_start, l_len, and 24 bytes that are unused.
    let space = [0, start, len, 0, 0, 0];
    // SAFETY: each of the requests reads one struct space_resv of 48 bytes, the size of `space`.
    let changed = unsafe { nix::libc::ioctl(fd.as_raw_fd(), call as u64, space.as_ptr()) };
    let what = || format!("ioctl({call:?}) of {len} bytes at {start} of descriptor {}", fd.as_raw_fd());
    Errno::result(changed).map(drop).call(what)
}
