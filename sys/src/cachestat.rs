//! `cachestat(2)` (Linux 6.5): counts the pages of a file in the page cache. The dirty and writeback counts are omitted: they are
//! always 0 for shmem.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;

use crate::error::{CallContext, SyscallError};

// linux/mman.h; the number is the same on every architecture.
const SYS_CACHESTAT: nix::libc::c_long = 451;

/// Page counts of a file range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Pages in the page cache.
    pub cached: u64,
    /// Pages evicted from the page cache; for shmem these are swapped out.
    pub evicted: u64,
}

/// Counts the pages in `len` bytes at `offset`; a `len` of 0 means up to the end of the file.
///
/// # Errors
/// `cachestat`: `ENOSYS` before Linux 6.5, `EOPNOTSUPP` for hugetlb, `EPERM` if the caller may neither write to the file nor owns it.
pub fn count(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<CacheCounts, SyscallError> {
    // struct cachestat_range and struct cachestat of linux/mman.h.
    let range = [offset, len];
    let mut counts = [0_u64; 5];
    // SAFETY: the kernel reads 16 bytes of `range` and writes 40 bytes to `counts`: exactly their sizes.
    let result = unsafe {
        nix::libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0_u32)
    };
    Errno::result(result)
        .call(|| format!("cachestat of {len} bytes at {offset} of descriptor {}", fd.as_raw_fd()))?;
    let [cached, _dirty, _writeback, evicted, _recently_evicted] = counts;
    Ok(CacheCounts { cached, evicted })
}
