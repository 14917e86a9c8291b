//! Shared memory mappings of files.

use std::num::NonZeroUsize;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use bytemuck::Pod;
use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap};

use crate::error::{CallContext, SyscallError};

/// `F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE`: the content of a file with these seals never changes.
pub const IMMUTABLE_SEALS: u32 = 0x2 | 0x4 | 0x8;

/// asm-generic/mman-common.h
const MADV_GUARD_INSTALL: libc::c_int = 102;

/// A `MAP_SHARED` mapping, unmapped on drop. Other processes may write to the memory at any time, so it is not exposed as a
/// slice.
#[derive(Debug)]
pub struct SharedMapping {
    start: NonNull<u8>,
    len: usize,
    /// The range to unmap on drop: the mapping and the address space reserved around it.
    reserved: (NonNull<u8>, usize),
}

// SAFETY: the mapping exists until drop and is accessed only through raw copies, which any thread may do.
unsafe impl Send for SharedMapping {}
// SAFETY: as above; no safe method returns a plain reference into the memory.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps `len` bytes at `offset`, a multiple of the page size.
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
        // SAFETY: without MAP_FIXED the kernel picks a free range, so no other mapping is affected.
        let start =
            unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED, &fd, offset) }.call(call)?;
        Ok(Self { start: start.cast(), len, reserved: (start.cast(), len) })
    }

    /// Maps the first `len` bytes at an address that is a multiple of `align`, a power of two and at least the page size. Huge
    /// pages need a mapping that is aligned to their size.
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
        let reserved_len =
            len.checked_add(align).and_then(NonZeroUsize::new).ok_or(Errno::EINVAL).call(call)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: without MAP_FIXED the kernel picks a free range, so no other mapping is affected.
        let reserved =
            unsafe { mmap_anonymous(None, reserved_len, ProtFlags::PROT_NONE, flags) }.call(call)?;
        let mut mapping =
            Self { start: reserved.cast(), len, reserved: (reserved.cast(), reserved_len.get()) };
        let start = mapping.as_ptr().addr().next_multiple_of(align);
        let mut protection = ProtFlags::PROT_READ;
        if writable {
            protection |= ProtFlags::PROT_WRITE;
        }
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: MAP_FIXED replaces part of the range reserved above, which nothing else uses: `start` lies less than `align`
        // bytes into it, and its length is len + align.
        let mapped =
            unsafe { mmap(NonZeroUsize::new(start), length, protection, flags, &fd, 0) }.call(call)?;
        mapping.start = mapped.cast();
        Ok(mapping)
    }

    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Always false: an empty mapping cannot be created.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Fills `out` with the bytes at `offset`. Returns `false` and copies nothing if they exceed the mapping.
    ///
    /// Access to a page past the end of the file raises `SIGBUS`, as for any mapping.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> bool {
        if !self.contains(offset, out.len()) {
            return false;
        }
        // SAFETY: contains() proved that the source lies in the mapping, which lives as long as self; the target is a Rust
        // slice, which cannot overlap it.
        unsafe {
            std::ptr::copy_nonoverlapping(self.as_ptr().wrapping_add(offset), out.as_mut_ptr(), out.len());
        }
        true
    }

    /// Writes `bytes` at `offset`. Returns `false` and copies nothing if they exceed the mapping. The mapping must be writable.
    ///
    /// Access to a page past the end of the file raises `SIGBUS`, as for any mapping.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> bool {
        if !self.contains(offset, bytes.len()) {
            return false;
        }
        // SAFETY: contains() proved that the target lies in the mapping, which lives as long as self; the source is a Rust
        // slice, which cannot overlap it. No reference into the mapping exists.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr().wrapping_add(offset), bytes.len());
        }
        true
    }

    const fn contains(&self, offset: usize, len: usize) -> bool {
        match offset.checked_add(len) {
            Some(end) => end <= self.len,
            None => false,
        }
    }

    /// Returns `count` elements of `T` at `offset` as a slice.
    ///
    /// # Safety
    /// While the slice lives, nothing may write to the memory: no thread, no process and not the kernel.
    ///
    /// # Panics
    /// If the elements exceed the mapping or `offset` is not aligned for `T`.
    #[must_use]
    pub unsafe fn slice_of<T: Pod>(&self, offset: usize, count: usize) -> &[T] {
        let start = self.element_ptr::<T>(offset, count);
        // SAFETY: element_ptr() asserts bounds and alignment (mappings are page-aligned), any bytes are a valid T (Pod), and
        // the caller guarantees that they do not change.
        unsafe { std::slice::from_raw_parts(start, count) }
    }

    /// Returns `count` atomic 32-bit integers at `offset`, which other threads and processes may access concurrently. Stores need a
    /// writable mapping.
    ///
    /// Access to a page past the end of the file raises `SIGBUS`, as for any mapping.
    ///
    /// # Panics
    /// If they exceed the mapping or `offset` is not a multiple of 4.
    #[must_use]
    pub fn atomic_u32s(&self, offset: usize, count: usize) -> &[AtomicU32] {
        let start = self.element_ptr::<AtomicU32>(offset, count);
        // SAFETY: element_ptr() asserts bounds and alignment, the mapping lives as long as self, and any bytes are a valid
        // AtomicU32, which may change at any time.
        unsafe { std::slice::from_raw_parts(start, count) }
    }

    /// Like [`Self::atomic_u32s`] with 64-bit integers.
    ///
    /// # Panics
    /// If they exceed the mapping or `offset` is not a multiple of 8.
    #[must_use]
    pub fn atomic_u64s(&self, offset: usize, count: usize) -> &[AtomicU64] {
        let start = self.element_ptr::<AtomicU64>(offset, count);
        // SAFETY: element_ptr() asserts bounds and alignment, the mapping lives as long as self, and any bytes are a valid
        // AtomicU64, which may change at any time.
        unsafe { std::slice::from_raw_parts(start, count) }
    }

    /// Checks bounds and alignment of `count` elements of `T` at `offset` and returns their address.
    fn element_ptr<T>(&self, offset: usize, count: usize) -> *const T {
        let bytes = count.saturating_mul(size_of::<T>());
        assert!(
            self.contains(offset, bytes),
            "{count} elements at {offset} of a mapping of {} bytes",
            self.len
        );
        assert!(offset.is_multiple_of(align_of::<T>()), "offset {offset} is not aligned");
        self.as_ptr().wrapping_add(offset).cast()
    }

    /// Changes the whole mapping to `PROT_READ` with `mprotect`. Afterwards a write through it raises `SIGSEGV` in any thread of this
    /// process, and a system call that writes to it fails with `EFAULT`.
    ///
    /// # Errors
    /// `mprotect`.
    pub fn protect_read_only(&self) -> Result<(), SyscallError> {
        // SAFETY: the range is this mapping, and no mutable reference into it exists; users of the address from as_ptr() are
        // responsible for their own accesses.
        unsafe { mprotect(self.start.cast(), self.len, ProtFlags::PROT_READ) }
            .call(|| format!("mprotect(PROT_READ) of {} bytes", self.len))
    }

    /// Applies `madvise` to the whole mapping.
    ///
    /// # Errors
    /// `madvise`.
    pub fn advise(&self, advice: Advice) -> Result<(), SyscallError> {
        let flag = match advice {
            Advice::HugePage => MmapAdvise::MADV_HUGEPAGE,
            Advice::PageOut => MmapAdvise::MADV_PAGEOUT,
            Advice::PopulateRead => MmapAdvise::MADV_POPULATE_READ,
            Advice::DontFork => MmapAdvise::MADV_DONTFORK,
            Advice::DoFork => MmapAdvise::MADV_DOFORK,
        };
        // SAFETY: no advice changes the content of the memory; the range is this mapping.
        unsafe { madvise(self.start.cast(), self.len, flag) }
            .call(|| format!("madvise({flag:?}) of {} bytes", self.len))
    }

    /// Installs a guard region over the whole mapping by `madvise(MADV_GUARD_INSTALL)`, and unmaps it.
    ///
    /// # Errors
    /// `madvise`: `EINVAL` if this kernel has no guard regions, or none in such files.
    pub fn guard(self) -> Result<(), SyscallError> {
        // SAFETY: the range is this mapping, which nothing uses any more.
        let guarded = unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, MADV_GUARD_INSTALL) };
        Errno::result(guarded).map(drop).call(|| format!("madvise(MADV_GUARD_INSTALL) of {} bytes", self.len))
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        let (start, len) = self.reserved;
        // SAFETY: mmap returned this range, and no reference into it outlives self. munmap of a valid range does not fail.
        let _ = unsafe { munmap(start.cast(), len) };
    }
}

/// Advice for [`SharedMapping::advise`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// `MADV_HUGEPAGE`: prefer transparent huge pages.
    HugePage,
    /// `MADV_PAGEOUT`: reclaim the pages now.
    PageOut,
    /// `MADV_POPULATE_READ` (Linux 5.14): fill the page tables, as reads would.
    PopulateRead,
    /// `MADV_DONTFORK`: children that are forked do not inherit the mapping.
    DontFork,
    /// `MADV_DOFORK`: they do.
    DoFork,
}

/// A read-only mapping of a whole file with [`IMMUTABLE_SEALS`]. Dereferences to the bytes of the file.
#[derive(Debug)]
pub struct SealedMapping {
    mapping: SharedMapping,
}

impl SealedMapping {
    /// Maps the whole file.
    ///
    /// # Errors
    /// `EPERM` if the file lacks one of [`IMMUTABLE_SEALS`]; else `mmap` or `fstat`.
    pub fn map(fd: BorrowedFd<'_>) -> Result<Self, SyscallError> {
        let seals = crate::memfd::seals(fd)?;
        if seals & IMMUTABLE_SEALS != IMMUTABLE_SEALS {
            let call = format!("mmap of immutable descriptor {} with seals {seals:#x}", fd.as_raw_fd());
            return Err(SyscallError { call, errno: Errno::EPERM });
        }
        let len = usize::try_from(crate::fd::stat(fd)?.st_size).unwrap_or(0);
        Ok(Self { mapping: SharedMapping::shared(fd, 0, len, false)? })
    }
}

impl Deref for SealedMapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the kernel refuses F_SEAL_WRITE while a writable mapping exists and refuses writes afterwards, so the memory
        // never changes; F_SEAL_SHRINK keeps it within the file.
        unsafe { self.mapping.slice_of(0, self.mapping.len) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::memfd;

    #[test]
    fn copy_beyond_the_mapping_is_refused() {
        let fd = memfd::create("copies", None).unwrap();
        memfd::resize(fd.as_fd(), 4096).unwrap();
        let mapping = SharedMapping::shared(&fd, 0, 4096, true).unwrap();
        assert!(mapping.write_at(4090, b"123456"));
        assert!(!mapping.write_at(4091, b"123456"));
        assert!(!mapping.write_at(usize::MAX, b"1"));
        let mut out = [0; 6];
        assert!(mapping.read_at(4090, &mut out));
        assert_eq!(&out, b"123456");
        assert!(!mapping.read_at(4097, &mut []));
    }

    #[test]
    fn kernel_write_to_a_read_only_mapping_fails() {
        let fd = memfd::create("forbidden", None).unwrap();
        memfd::resize(fd.as_fd(), 8192).unwrap();
        let mapping = SharedMapping::shared(&fd, 0, 8192, true).unwrap();
        assert!(mapping.write_at(5000, b"before"));
        mapping.protect_read_only().unwrap();
        // A store would kill this process; a write by the kernel returns an error.
        let zeros = std::fs::File::open("/dev/zero").unwrap();
        // SAFETY: read writes at most 6 bytes to this mapping, into which no reference exists.
        let got =
            unsafe { nix::libc::read(zeros.as_raw_fd(), mapping.as_ptr().wrapping_add(5000).cast(), 6) };
        assert_eq!(Errno::result(got), Err(Errno::EFAULT));
        let mut out = [0; 6];
        assert!(mapping.read_at(5000, &mut out));
        assert_eq!(&out, b"before");
    }

    #[test]
    fn atomics_access_the_content_of_the_file() {
        let fd = memfd::create("words", None).unwrap();
        memfd::resize(fd.as_fd(), 4096).unwrap();
        let mapping = SharedMapping::shared(&fd, 0, 4096, true).unwrap();
        let other = SharedMapping::shared(&fd, 0, 4096, false).unwrap();
        mapping.atomic_u32s(4092, 1)[0].store(7, Ordering::Relaxed);
        mapping.atomic_u64s(8, 2)[1].store(u64::MAX, Ordering::Relaxed);
        assert_eq!(other.atomic_u32s(4088, 2)[1].load(Ordering::Relaxed), 7);
        assert_eq!(other.atomic_u64s(16, 1)[0].load(Ordering::Relaxed), u64::MAX);
        assert!(std::panic::catch_unwind(|| mapping.atomic_u32s(4092, 2).len()).is_err());
        assert!(std::panic::catch_unwind(|| mapping.atomic_u64s(4, 1).len()).is_err());
    }

    #[test]
    fn aligned_mapping_starts_at_a_multiple_and_maps_the_file() {
        let fd = memfd::create("aligned", None).unwrap();
        memfd::resize(fd.as_fd(), 5000).unwrap();
        for _ in 0..8 {
            let mapping = SharedMapping::shared_aligned(&fd, 5000, 2 << 20, true).unwrap();
            assert!(mapping.as_ptr().addr().is_multiple_of(2 << 20));
            assert!(mapping.write_at(4999, b"z") && !mapping.write_at(5000, b"z"));
        }
    }

    #[test]
    fn unsealed_file_cannot_be_mapped_as_sealed() {
        let fd = memfd::create("constant", None).unwrap();
        memfd::resize(fd.as_fd(), 10).unwrap();
        assert_eq!(SealedMapping::map(fd.as_fd()).unwrap_err().errno, Errno::EPERM);
        memfd::add_seals(fd.as_fd(), IMMUTABLE_SEALS).unwrap();
        assert_eq!(&*SealedMapping::map(fd.as_fd()).unwrap(), &[0; 10]);
    }
}
