//! A mapping that something else owns and unmaps.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;

use nix::errno::Errno;
use nix::libc;

use super::raw_mapping::RawMapping;
use crate::error::{CallContext as _, SyscallError};
use crate::mapping::SharedMapping;

/// The range of another object, borrowed from it. Offers what [`RawMapping`] does by shared reference: of that, nothing unmaps a
/// part of the range. The range is never unmapped by this type.
#[derive(Debug)]
pub struct BorrowedMapping<'a> {
    mapping: ManuallyDrop<RawMapping>,
    owner: PhantomData<&'a ()>,
}

impl<'a> BorrowedMapping<'a> {
    /// The pages of a mapped file. A page that loses its protection or its file raises `SIGSEGV` or `SIGBUS` for users of the
    /// owner, too.
    #[must_use]
    pub fn of(mapping: &'a SharedMapping) -> Self {
        // SAFETY: the range is mapped as long as the mapping is borrowed. Other processes may write to it at any time, so that
        // only copies and atomics access it.
        unsafe { Self::from_raw_parts(mapping.as_ptr(), mapping.len()) }
    }

    /// A range by its address.
    ///
    /// # Safety
    /// The range starts at a page. During `'a` it stays mapped, and its content may change at any time: no references exist into it, except to atomics.
    #[inline]
    #[must_use]
    pub unsafe fn from_raw_parts(start: *mut u8, len: usize) -> Self {
        // SAFETY: the caller guarantees it. The result is never dropped, so it unmaps nothing.
        let mapping = ManuallyDrop::new(unsafe { RawMapping::from_raw(start.cast(), len) });
        Self { mapping, owner: PhantomData }
    }

    /// Stores 8 bytes.
    ///
    /// # Panics
    /// If `at` is not a multiple of 8, or outside of the range.
    #[inline]
    pub fn store(&self, at: usize, value: u64) {
        // SAFETY: word() checked the address.
        unsafe { self.word(at).write_volatile(value) };
    }

    /// Reads 8 bytes.
    ///
    /// # Panics
    /// As [`Self::store`].
    #[inline]
    #[must_use]
    pub fn load(&self, at: usize) -> u64 {
        // SAFETY: word() checked the address. All bit patterns are valid for u64.
        unsafe { self.word(at).read_volatile() }
    }

    /// `munmap` of a part, which then is address space without access: it stays the owner's to unmap.
    ///
    /// Aborts the process if another thread maps memory there between the two calls.
    ///
    /// # Errors
    /// `munmap`; `EFAULT` outside of the range.
    pub fn unmap_and_reserve(&self, at: usize, len: usize) -> Result<(), SyscallError> {
        let part = self.mapping.checked(at, len)?;
        // SAFETY: the range belongs to the owner, and no references exist into it except to atomics.
        let unmapped = unsafe { libc::munmap(part, len) };
        Errno::result(unmapped).call(|| format!("munmap of {len} bytes at {at}"))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: the call replaces no mapping.
        let reserved = unsafe { libc::mmap(part, len, libc::PROT_NONE, flags, -1, 0) };
        if reserved != part {
            std::process::abort();
        }
        Ok(())
    }

    /// The address of 8 bytes of the range, which starts at a page.
    #[inline]
    fn word(&self, at: usize) -> *mut u64 {
        assert!(at.is_multiple_of(8) && at < self.mapping.len(), "no 8 bytes at {at}");
        self.mapping.at(at).cast()
    }
}

impl Deref for BorrowedMapping<'_> {
    type Target = RawMapping;

    fn deref(&self) -> &RawMapping {
        &self.mapping
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;
    use crate::memfd;

    const PAGE: usize = 4096;

    #[test]
    fn owner_is_mapped_after_the_end_of_the_borrow() {
        let fd = memfd::create("borrowed", None).unwrap();
        memfd::resize(fd.as_fd(), 2 * PAGE as u64).unwrap();
        let owner = SharedMapping::shared(&fd, 0, 2 * PAGE, true).unwrap();
        let borrowed = BorrowedMapping::of(&owner);
        borrowed.store(PAGE, 7);
        assert_eq!((borrowed.load(PAGE), borrowed.read(PAGE)), (7, Ok(7)));
        borrowed.advise(PAGE, PAGE, libc::MADV_REMOVE).unwrap();
        assert_eq!(borrowed.advise(PAGE, 2 * PAGE, 0).unwrap_err().errno, Errno::EFAULT);
        assert!(std::panic::catch_unwind(|| BorrowedMapping::of(&owner).load(2 * PAGE)).is_err());
        // The end of the borrow unmaps nothing.
        let _ = borrowed;
        let mut byte = [1];
        assert!(owner.read_at(PAGE, &mut byte));
        assert_eq!(byte, [0]);
    }

    #[test]
    fn unmapped_part_is_reserved() {
        let fd = memfd::create("torn", None).unwrap();
        memfd::resize(fd.as_fd(), 2 * PAGE as u64).unwrap();
        let owner = SharedMapping::shared(&fd, 0, 2 * PAGE, true).unwrap();
        BorrowedMapping::of(&owner).unmap_and_reserve(PAGE, PAGE).unwrap();
        let maps = crate::maps::Maps::open(std::process::id()).unwrap();
        let torn = owner.as_ptr().addr() as u64 + PAGE as u64;
        let vma = maps.vma_at_or_after(torn, false).unwrap().unwrap();
        assert!(vma.range.start <= torn && !vma.shared && !vma.writable, "{vma:?}");
        assert!(owner.write_at(PAGE - 1, b"x") && !owner.write_at(2 * PAGE - 1, b"xx"));
    }
}
