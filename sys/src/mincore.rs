//! `mincore`: which pages of a file are in memory.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;

use crate::error::{Call, SyscallError};
use crate::mapping::Mapping;

/// A window on a file, for `mincore`. A shared read-only mapping of a read-only descriptor: it reserves no hugetlb
/// pages and does not stand in the way of `F_SEAL_WRITE`. It is never touched: reading a hole would allocate it.
#[derive(Debug)]
pub struct ResidencyWindow {
    mapping: Mapping,
    page_size: usize,
}

impl ResidencyWindow {
    /// A window of `len` bytes from `offset`, both multiples of `page_size`, on `fd`, opened read-only.
    ///
    /// # Errors
    /// `mmap`.
    pub fn open(fd: BorrowedFd<'_>, offset: u64, len: usize, page_size: usize) -> Result<Self, SyscallError> {
        Ok(Self { mapping: Mapping::shared(fd, offset, len, false)?, page_size })
    }

    /// Fills `out` with a byte for each page from the window's `first_page`th on: bit 0 is set if it is in memory.
    /// A caller that neither owns the file nor may write to it sees every page in memory.
    ///
    /// # Errors
    /// `mincore`; `EINVAL` if the pages do not lie in the window.
    pub fn read(&self, first_page: usize, out: &mut [u8]) -> Result<(), SyscallError> {
        let pages = out.len();
        let call = || format!("mincore of {pages} pages from page {first_page} of a window");
        let span = first_page.checked_mul(self.page_size).zip(pages.checked_mul(self.page_size));
        let (start, bytes) = span.ok_or(Errno::EINVAL).call(call)?;
        if start.checked_add(bytes).is_none_or(|end| end > self.mapping.len()) {
            return Err(Errno::EINVAL).call(call);
        }
        let address = self.mapping.as_ptr().wrapping_add(start);
        // SAFETY: the range lies in the mapping, as just checked, and the kernel writes one byte a page: out holds
        // bytes / page_size of them.
        let result = unsafe { nix::libc::mincore(address.cast(), bytes, out.as_mut_ptr()) };
        Errno::result(result).call(call)?;
        Ok(())
    }
}
