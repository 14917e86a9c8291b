//! Memory mappings of files.

use std::num::NonZeroUsize;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use bytemuck::Pod;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap};

use crate::error::{Call, SyscallError};

/// `F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE`: the bytes of a file so sealed never change.
pub const SEALS_OF_A_CONSTANT: u32 = 0x2 | 0x4 | 0x8;

/// A `MAP_SHARED` mapping, unmapped on drop. Others may write to the memory at any time, so it is not lent out as a
/// slice.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// What is unmapped on drop: the mapping and what was reserved around it.
    whole: (NonNull<u8>, usize),
}

// SAFETY: the memory is owned until drop and is reached through raw copies only, which any thread may do.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method gives out a reference into the memory without the caller vouching for it.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes from `offset`, a multiple of the page size.
    ///
    /// # Errors
    /// `mmap`; `EINVAL` also for a length of 0.
    pub fn shared(fd: impl AsFd, offset: u64, len: usize, writable: bool) -> Result<Self, SyscallError> {
        let raw = fd.as_fd().as_raw_fd();
        let call = || format!("mmap of {len} bytes at {offset} of descriptor {raw}");
        let length = NonZeroUsize::new(len).ok_or(Errno::EINVAL).call(call)?;
        let offset = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW).call(call)?;
        let mut protection = ProtFlags::PROT_READ;
        if writable {
            protection |= ProtFlags::PROT_WRITE;
        }
        // SAFETY: without MAP_FIXED the kernel picks free addresses, so no other memory is touched.
        let start =
            unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED, &fd, offset) }.call(call)?;
        Ok(Self { start: start.cast(), len, whole: (start.cast(), len) })
    }

    /// Maps the first `len` bytes at an address that is a multiple of `align`, a power of two and at least the page
    /// size: huge pages need their mapping to begin at a multiple of their size.
    ///
    /// # Errors
    /// `mmap`; `EINVAL` also for a length of 0.
    pub fn shared_aligned(
        fd: impl AsFd,
        len: usize,
        align: usize,
        writable: bool,
    ) -> Result<Self, SyscallError> {
        let raw = fd.as_fd().as_raw_fd();
        let call = || format!("mmap of {len} bytes of descriptor {raw} at a multiple of {align}");
        let length = NonZeroUsize::new(len).ok_or(Errno::EINVAL).call(call)?;
        let room = len.checked_add(align).and_then(NonZeroUsize::new).ok_or(Errno::EINVAL).call(call)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: without MAP_FIXED the kernel picks free addresses, so no other memory is touched.
        let reserved = unsafe { mmap_anonymous(None, room, ProtFlags::PROT_NONE, flags) }.call(call)?;
        let mut mapping = Self { start: reserved.cast(), len, whole: (reserved.cast(), room.get()) };
        let start = mapping.as_ptr().addr().next_multiple_of(align);
        let mut protection = ProtFlags::PROT_READ;
        if writable {
            protection |= ProtFlags::PROT_WRITE;
        }
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: MAP_FIXED replaces a part of the range that was reserved just now and is nobody else's: start lies
        // less than align into it, and it is len + align long.
        let mapped =
            unsafe { mmap(NonZeroUsize::new(start), length, protection, flags, &fd, 0) }.call(call)?;
        mapping.start = mapped.cast();
        Ok(mapping)
    }

    /// Where it begins.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Never true: an empty mapping is refused.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes out. `false`, and nothing copied, if they do not all lie in the mapping.
    ///
    /// Touching a page past the end of the file raises `SIGBUS`, as for any mapping.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> bool {
        if !self.holds(offset, out.len()) {
            return false;
        }
        // SAFETY: holds() proved that the source lies in the mapping, which lives as long as self; the target
        // is a slice of this process that cannot overlap it.
        unsafe {
            std::ptr::copy_nonoverlapping(self.as_ptr().wrapping_add(offset), out.as_mut_ptr(), out.len());
        }
        true
    }

    /// Copies bytes in. `false`, and nothing copied, if they do not all fit. The mapping must be writable.
    ///
    /// Touching a page past the end of the file raises `SIGBUS`, as for any mapping.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> bool {
        if !self.holds(offset, bytes.len()) {
            return false;
        }
        // SAFETY: holds() proved that the target lies in the mapping, which lives as long as self; the source
        // is a slice of this process that cannot overlap it. No reference into the mapping exists.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr().wrapping_add(offset), bytes.len());
        }
        true
    }

    const fn holds(&self, offset: usize, len: usize) -> bool {
        match offset.checked_add(len) {
            Some(end) => end <= self.len,
            None => false,
        }
    }

    /// The memory as elements of `T`.
    ///
    /// # Safety
    /// While the slice lives nothing may write to the memory: no other thread or process, and not the kernel.
    ///
    /// # Panics
    /// If the elements do not lie in the mapping or `offset` is not aligned for `T`.
    #[must_use]
    pub unsafe fn slice_of<T: Pod>(&self, offset: usize, count: usize) -> &[T] {
        let start = self.start_of::<T>(offset, count);
        // SAFETY: in bounds and aligned (a mapping begins at a page) as start_of() asserts, any bytes are a T (Pod), and
        // the caller vouches that they do not change.
        unsafe { std::slice::from_raw_parts(start, count) }
    }

    /// `count` words of 32 bits from `offset` on, which others may read and write at the same time. For storing, the
    /// mapping must be writable.
    ///
    /// Touching a page past the end of the file raises `SIGBUS`, as for any mapping.
    ///
    /// # Panics
    /// If they do not lie in the mapping or `offset` is no multiple of 4.
    #[must_use]
    pub fn words(&self, offset: usize, count: usize) -> &[AtomicU32] {
        let start = self.start_of::<AtomicU32>(offset, count);
        // SAFETY: in bounds and aligned as start_of() asserts, for as long as self lives; any bytes are an AtomicU32,
        // and it may change at any time.
        unsafe { std::slice::from_raw_parts(start, count) }
    }

    /// The same with words of 64 bits.
    ///
    /// # Panics
    /// If they do not lie in the mapping or `offset` is no multiple of 8.
    #[must_use]
    pub fn long_words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        let start = self.start_of::<AtomicU64>(offset, count);
        // SAFETY: in bounds and aligned as start_of() asserts, for as long as self lives; any bytes are an AtomicU64,
        // and it may change at any time.
        unsafe { std::slice::from_raw_parts(start, count) }
    }

    /// Where `count` elements of `T` begin.
    fn start_of<T>(&self, offset: usize, count: usize) -> *const T {
        let bytes = count.saturating_mul(size_of::<T>());
        assert!(self.holds(offset, bytes), "{count} elements at {offset} of a mapping of {} bytes", self.len);
        assert!(offset.is_multiple_of(align_of::<T>()), "offset {offset} is not aligned");
        self.as_ptr().wrapping_add(offset).cast()
    }

    /// `mprotect` of the whole mapping to `PROT_READ`: once this is done nothing writes through it any more. Whoever tries, in
    /// any thread of this process, raises `SIGSEGV`; the kernel, on its behalf, fails with `EFAULT`.
    ///
    /// # Errors
    /// `mprotect`.
    pub fn forbid_writes(&self) -> Result<(), SyscallError> {
        // SAFETY: the range is this mapping, and no reference into it exists that could be written through: whoever has
        // the address from as_ptr() answers for what becomes of it.
        unsafe { mprotect(self.start.cast(), self.len, ProtFlags::PROT_READ) }
            .call(|| format!("mprotect(PROT_READ) of {} bytes", self.len))
    }

    /// `madvise` over the whole mapping.
    ///
    /// # Errors
    /// `madvise`.
    pub fn advise(&self, advice: Advice) -> Result<(), SyscallError> {
        let flag = match advice {
            Advice::HugePage => MmapAdvise::MADV_HUGEPAGE,
            Advice::PageOut => MmapAdvise::MADV_PAGEOUT,
        };
        // SAFETY: neither advice changes what the memory holds; the range is this mapping.
        unsafe { madvise(self.start.cast(), self.len, flag) }
            .call(|| format!("madvise({flag:?}) of {} bytes", self.len))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (start, len) = self.whole;
        // SAFETY: start and len are what mmap returned, and nobody refers to the memory any more. It can fail
        // for a bad range only, which this is not.
        let _ = unsafe { munmap(start.cast(), len) };
    }
}

/// What to advise the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// `MADV_HUGEPAGE`: use transparent huge pages.
    HugePage,
    /// `MADV_PAGEOUT`: push the pages out of memory.
    PageOut,
}

/// A read-only mapping of a file whose bytes can never change, lent out as a slice.
#[derive(Debug)]
pub struct ConstantBytes {
    mapping: Mapping,
}

impl ConstantBytes {
    /// Maps a whole file.
    ///
    /// # Errors
    /// `EPERM` if it is not sealed against shrinking, growing and writing; else `mmap` or `fstat`.
    pub fn map(fd: BorrowedFd<'_>) -> Result<Self, SyscallError> {
        let seals = crate::memfd::seals(fd)?;
        if seals & SEALS_OF_A_CONSTANT != SEALS_OF_A_CONSTANT {
            let call = format!("mapping descriptor {} as constant: its seals are {seals:#x}", fd.as_raw_fd());
            return Err(SyscallError { call, errno: Errno::EPERM });
        }
        let len = usize::try_from(crate::fd::stat(fd)?.st_size).unwrap_or(0);
        Ok(Self { mapping: Mapping::shared(fd, 0, len, false)? })
    }
}

impl Deref for ConstantBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the file is sealed against writing, and F_SEAL_WRITE is refused while a writable mapping
        // exists, so nothing can write to the memory any more; sealed against shrinking, it stays there.
        unsafe { self.mapping.slice_of(0, self.mapping.len) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::memfd;

    #[test]
    fn copies_stay_inside() {
        let fd = memfd::create("copies", None).unwrap();
        memfd::resize(fd.as_fd(), 4096).unwrap();
        let mapping = Mapping::shared(&fd, 0, 4096, true).unwrap();
        assert!(mapping.write_at(4090, b"123456"));
        assert!(!mapping.write_at(4091, b"123456"));
        assert!(!mapping.write_at(usize::MAX, b"1"));
        let mut out = [0; 6];
        assert!(mapping.read_at(4090, &mut out));
        assert_eq!(&out, b"123456");
        assert!(!mapping.read_at(4097, &mut []));
    }

    #[test]
    fn kernel_cannot_write_where_writes_are_forbidden() {
        let fd = memfd::create("forbidden", None).unwrap();
        memfd::resize(fd.as_fd(), 8192).unwrap();
        let mapping = Mapping::shared(&fd, 0, 8192, true).unwrap();
        assert!(mapping.write_at(5000, b"before"));
        mapping.forbid_writes().unwrap();
        // A write by the CPU would kill this process; one by the kernel tells.
        let zeros = std::fs::File::open("/dev/zero").unwrap();
        // SAFETY: read writes at most 6 bytes to memory that is this mapping, to which nobody holds a reference.
        let got =
            unsafe { nix::libc::read(zeros.as_raw_fd(), mapping.as_ptr().wrapping_add(5000).cast(), 6) };
        assert_eq!(Errno::result(got), Err(Errno::EFAULT));
        let mut out = [0; 6];
        assert!(mapping.read_at(5000, &mut out));
        assert_eq!(&out, b"before");
    }

    #[test]
    fn words_are_those_of_the_file() {
        let fd = memfd::create("words", None).unwrap();
        memfd::resize(fd.as_fd(), 4096).unwrap();
        let mapping = Mapping::shared(&fd, 0, 4096, true).unwrap();
        let other = Mapping::shared(&fd, 0, 4096, false).unwrap();
        mapping.words(4092, 1)[0].store(7, Ordering::Relaxed);
        mapping.long_words(8, 2)[1].store(u64::MAX, Ordering::Relaxed);
        assert_eq!(other.words(4088, 2)[1].load(Ordering::Relaxed), 7);
        assert_eq!(other.long_words(16, 1)[0].load(Ordering::Relaxed), u64::MAX);
        assert!(std::panic::catch_unwind(|| mapping.words(4092, 2).len()).is_err());
        assert!(std::panic::catch_unwind(|| mapping.long_words(4, 1).len()).is_err());
    }

    #[test]
    fn aligned_mapping_begins_at_a_multiple_and_holds_the_file() {
        let fd = memfd::create("aligned", None).unwrap();
        memfd::resize(fd.as_fd(), 5000).unwrap();
        for _ in 0..8 {
            let mapping = Mapping::shared_aligned(&fd, 5000, 2 << 20, true).unwrap();
            assert!(mapping.as_ptr().addr().is_multiple_of(2 << 20));
            assert!(mapping.write_at(4999, b"z") && !mapping.write_at(5000, b"z"));
        }
    }

    #[test]
    fn unsealed_file_is_not_constant() {
        let fd = memfd::create("constant", None).unwrap();
        memfd::resize(fd.as_fd(), 10).unwrap();
        assert_eq!(ConstantBytes::map(fd.as_fd()).unwrap_err().errno, Errno::EPERM);
        memfd::add_seals(fd.as_fd(), SEALS_OF_A_CONSTANT).unwrap();
        assert_eq!(&*ConstantBytes::map(fd.as_fd()).unwrap(), &[0; 10]);
    }
}
