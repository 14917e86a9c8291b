//! `mincore(2)`: which pages of a file are resident.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;

use crate::error::{CallContext, SyscallError};
use crate::mapping::SharedMapping;

/// A mapping of part of a file for `mincore`. It is shared, read-only and made from a read-only descriptor: such a mapping
/// reserves no hugetlb pages and does not prevent `F_SEAL_WRITE`. Its memory is never accessed: reading a hole allocates a page.
#[derive(Debug)]
pub struct ResidencyWindow {
    mapping: SharedMapping,
    page_size: usize,
}

impl ResidencyWindow {
    /// Maps `len` bytes at `offset`, both multiples of `page_size`, of `fd`, which must be open read-only.
    ///
    /// # Errors
    /// `mmap`.
    pub fn open(fd: BorrowedFd<'_>, offset: u64, len: usize, page_size: usize) -> Result<Self, SyscallError> {
        Ok(Self { mapping: SharedMapping::shared(fd, offset, len, false)?, page_size })
    }

    /// Fills `out` with one byte for each page, starting at page `first_page` of the window; bit 0 is set if the page is resident.
    /// For a caller that neither owns the file nor may write to it the kernel reports every page as resident.
    ///
    /// # Errors
    /// `mincore`; `EINVAL` if the pages exceed the window.
    pub fn read(&self, first_page: usize, out: &mut [u8]) -> Result<(), SyscallError> {
        let pages = out.len();
        let call = || format!("mincore of {pages} pages from page {first_page} of a window");
        let span = first_page.checked_mul(self.page_size).zip(pages.checked_mul(self.page_size));
        let (start, bytes) = span.ok_or(Errno::EINVAL).call(call)?;
        if start.checked_add(bytes).is_none_or(|end| end > self.mapping.len()) {
            return Err(Errno::EINVAL).call(call);
        }
        let address = self.mapping.as_ptr().wrapping_add(start);
        // SAFETY: the range was just checked to lie in the mapping, and the kernel writes one byte for each page: `out` holds
        // bytes / page_size bytes.
        let result = unsafe { nix::libc::mincore(address.cast(), bytes, out.as_mut_ptr()) };
        Errno::result(result).call(call)?;
        Ok(())
    }
}
