//! Memory that a test maps, changes and unmaps by the very calls it is about.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use nix::unistd::{SysconfVar, sysconf};

use crate::address::AddressRange;
use crate::error::{CallContext as _, SyscallError};

/// Read and write.
const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

/// A range of addresses that belongs to its owner alone: no reference into it exists, and every method checks that it stays
/// inside. What is left of it is unmapped on drop. Access to memory with another protection, or past the end of a file, raises
/// `SIGSEGV` or `SIGBUS`, as for any mapping.
#[derive(Debug)]
pub struct RawMapping {
    start: usize,
    len: usize,
    /// Parts that were unmapped, as offsets; another mapping may be there now.
    holes: Vec<Range<usize>>,
}

impl RawMapping {
    /// Maps `len` bytes at `offset` of a file, shared, for reading and writing.
    ///
    /// # Errors
    /// `mmap`.
    pub fn shared(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self, SyscallError> {
        Self::map(Some((fd, offset)), len, READ_WRITE, MapFlags::MAP_SHARED)
    }

    /// Maps `len` bytes of private anonymous memory for reading and writing.
    ///
    /// # Errors
    /// `mmap`.
    pub fn anonymous(len: usize) -> Result<Self, SyscallError> {
        Self::map(None, len, READ_WRITE, MapFlags::MAP_PRIVATE)
    }

    /// Reserves `len` bytes of address space without access.
    ///
    /// # Errors
    /// `mmap`.
    pub fn reserve(len: usize) -> Result<Self, SyscallError> {
        Self::map(None, len, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE)
    }

    /// `mmap` of a file from an offset on, or of anonymous memory, at a free range.
    ///
    /// # Errors
    /// `mmap`; `EINVAL` for the flags `MAP_FIXED` and `MAP_FIXED_NOREPLACE`, for which [`Self::replace`] exists.
    pub fn map(
        file: Option<(BorrowedFd<'_>, u64)>,
        len: usize,
        protection: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self, SyscallError> {
        let what = || format!("mmap of {len} bytes of {file:?} with {protection:?} and {flags:?}");
        if flags.intersects(MapFlags::MAP_FIXED | MapFlags::MAP_FIXED_NOREPLACE) {
            return Err(Errno::EINVAL).call(what);
        }
        let at = map_at(None, file, len, protection, flags).call(what)?;
        Ok(Self { start: at.as_ptr().expose_provenance(), len, holes: Vec::new() })
    }

    /// Takes over a range.
    ///
    /// # Safety
    /// The range is mapped, and nothing else uses it.
    pub(super) unsafe fn from_raw(start: *mut c_void, len: usize) -> Self {
        Self { start: start.expose_provenance(), len, holes: Vec::new() }
    }

    /// The start and the length in bytes of the range, which the caller has to unmap.
    #[must_use]
    pub fn into_raw(self) -> (*mut c_void, usize) {
        let kept = std::mem::ManuallyDrop::new(self);
        (std::ptr::with_exposed_provenance_mut(kept.start), kept.len)
    }

    #[must_use]
    pub const fn address(&self) -> usize {
        self.start
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Always false: the kernel maps no empty range.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The addresses of `len` bytes at `at`.
    #[must_use]
    pub const fn range(&self, at: usize, len: usize) -> AddressRange {
        let start = (self.start + at) as u64;
        AddressRange { start, end: start + len as u64 }
    }

    /// The address `at` bytes into the range, or beyond it.
    #[must_use]
    pub const fn at(&self, at: usize) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.start + at)
    }

    /// The address of `len` bytes at `at`.
    ///
    /// # Errors
    /// `EFAULT` if the range does not contain them all any more.
    pub(super) fn checked(&self, at: usize, len: usize) -> Result<*mut c_void, SyscallError> {
        let end = at.checked_add(len).filter(|end| *end <= self.len);
        let inside = end.is_some_and(|end| !self.holes.iter().any(|hole| at < hole.end && hole.start < end));
        let what = || format!("access to {len} bytes at {at} of a mapping of {} bytes", self.len);
        inside.then(|| self.at(at).cast()).ok_or(Errno::EFAULT).call(what)
    }

    /// Reads one byte.
    ///
    /// # Errors
    /// `EFAULT` outside of the range.
    pub fn read(&self, at: usize) -> Result<u8, SyscallError> {
        let byte = self.checked(at, 1)?.cast::<u8>();
        // SAFETY: checked() proved that the byte belongs to this mapping, into which no reference exists.
        Ok(unsafe { byte.read_volatile() })
    }

    /// Stores one byte.
    ///
    /// # Errors
    /// `EFAULT` outside of the range.
    pub fn write(&self, at: usize, value: u8) -> Result<(), SyscallError> {
        let byte = self.checked(at, 1)?.cast::<u8>();
        // SAFETY: as in read().
        unsafe { byte.write_volatile(value) };
        Ok(())
    }

    /// Stores `bytes`.
    ///
    /// # Errors
    /// `EFAULT` outside of the range.
    pub fn write_all(&self, at: usize, bytes: &[u8]) -> Result<(), SyscallError> {
        let target = self.checked(at, bytes.len())?.cast::<u8>();
        // SAFETY: checked() proved that the target belongs to this mapping, into which no reference exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        Ok(())
    }

    /// `madvise` with any advice: it changes at most what this mapping contains.
    ///
    /// # Errors
    /// `madvise`; `EFAULT` outside of the range.
    pub fn advise(&self, at: usize, len: usize, advice: i32) -> Result<(), SyscallError> {
        // SAFETY: the range belongs to this mapping, into which no reference exists.
        let advised = unsafe { libc::madvise(self.checked(at, len)?, len, advice) };
        Errno::result(advised).map(drop).call(|| format!("madvise({advice}) of {len} bytes at {at}"))
    }

    /// `process_madvise` of parts of this mapping, given as offsets and lengths, by this process. Returns the number of bytes
    /// that were advised.
    ///
    /// # Errors
    /// `pidfd_open`, `process_madvise`; `EFAULT` outside of the range.
    pub fn process_advise(&self, parts: &[(usize, usize)], advice: i32) -> Result<usize, SyscallError> {
        let own = crate::pidfd::open(std::process::id())?;
        let vector = parts
            .iter()
            .map(|(at, len)| Ok(libc::iovec { iov_base: self.checked(*at, *len)?, iov_len: *len }))
            .collect::<Result<Vec<_>, SyscallError>>()?;
        let (number, own) = (libc::SYS_process_madvise, own.as_fd().as_raw_fd());
        // SAFETY: the vector outlives the call, and its parts belong to this mapping, into which no reference exists.
        let advised = unsafe { libc::syscall(number, own, vector.as_ptr(), vector.len(), advice, 0) };
        let advised = Errno::result(advised).call(|| format!("process_madvise({advice}) of {parts:?}"))?;
        Ok(usize::try_from(advised).unwrap_or(0))
    }

    /// `mprotect`.
    ///
    /// # Errors
    /// `mprotect`; `EFAULT` outside of the range.
    pub fn protect(&self, at: usize, len: usize, protection: ProtFlags) -> Result<(), SyscallError> {
        // SAFETY: the range belongs to this mapping, into which no reference exists.
        let done = unsafe { libc::mprotect(self.checked(at, len)?, len, protection.bits()) };
        Errno::result(done).map(drop).call(|| format!("mprotect({protection:?}) of {len} bytes at {at}"))
    }

    /// `munmap` of a part.
    ///
    /// # Errors
    /// `munmap`; `EINVAL` for a length that is not a multiple of the page size; `EFAULT` outside of the range.
    pub fn unmap(&mut self, at: usize, len: usize) -> Result<(), SyscallError> {
        let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|page| usize::try_from(page).ok());
        if !page.is_some_and(|page| len.is_multiple_of(page)) {
            return Err(Errno::EINVAL).call(|| format!("munmap of {len} bytes at {at}"));
        }
        // SAFETY: the range belongs to this mapping, into which no reference exists.
        let unmapped = unsafe { libc::munmap(self.checked(at, len)?, len) };
        Errno::result(unmapped).call(|| format!("munmap of {len} bytes at {at}"))?;
        self.holes.push(at..at + len);
        Ok(())
    }

    /// `mmap` with `MAP_FIXED` over a part: of a file from an offset on, or of anonymous memory.
    ///
    /// # Errors
    /// `mmap`; `EFAULT` outside of the range.
    pub fn replace(
        &self,
        at: usize,
        len: usize,
        file: Option<(BorrowedFd<'_>, u64)>,
        protection: ProtFlags,
    ) -> Result<(), SyscallError> {
        let kind = if file.is_some() { MapFlags::MAP_SHARED } else { MapFlags::MAP_PRIVATE };
        let place = self.checked(at, len)?.addr();
        map_at(NonZeroUsize::new(place), file, len, protection, kind | MapFlags::MAP_FIXED)
            .map(drop)
            .call(|| format!("mmap of {len} bytes of {file:?} at {at} of a mapping"))
    }

    /// `remap_file_pages` of `len` bytes at `at` to page `page` of the file.
    ///
    /// # Errors
    /// `remap_file_pages`; `EFAULT` outside of the range.
    pub fn remap_file_pages(&self, at: usize, len: usize, page: usize) -> Result<(), SyscallError> {
        let (number, place) = (libc::SYS_remap_file_pages, self.checked(at, len)?);
        // SAFETY: the range belongs to this mapping, into which no reference exists.
        let done = unsafe { libc::syscall(number, place, len, 0, page, 0) };
        Errno::result(done).map(drop).call(|| format!("remap_file_pages of {len} bytes to page {page}"))
    }

    /// Maps `len` bytes of the file that is mapped at `at` a second time: `mremap` with an old length of 0.
    ///
    /// # Errors
    /// `mremap`; `EFAULT` outside of the range.
    pub fn duplicate(&self, at: usize, len: usize) -> Result<Self, SyscallError> {
        remap(self.checked(at, 1)?, 0, len, libc::MREMAP_MAYMOVE)
    }

    /// Moves the pages to a new range and leaves this one mapped: `mremap` with `MREMAP_DONTUNMAP`.
    ///
    /// # Errors
    /// `mremap`; `EFAULT` if a part was unmapped.
    pub fn move_away(&self) -> Result<Self, SyscallError> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        remap(self.checked(0, self.len)?, self.len, self.len, flags)
    }

    /// Changes the length by `mremap`, at the same address or, if `may_move`, at another one.
    ///
    /// # Errors
    /// `mremap`; `EFAULT` if a part was unmapped.
    pub fn resize(self, len: usize, may_move: bool) -> Result<Self, SyscallError> {
        let flags = if may_move { libc::MREMAP_MAYMOVE } else { 0 };
        let resized = remap(self.checked(0, self.len)?, self.len, len, flags)?;
        let _ = self.into_raw();
        Ok(resized)
    }
}

impl Drop for RawMapping {
    fn drop(&mut self) {
        self.holes.sort_by_key(|hole| hole.start);
        let (mut from, end) = (0, self.len..self.len);
        for hole in self.holes.iter().chain([&end]) {
            if from < hole.start {
                let left: *mut c_void = std::ptr::with_exposed_provenance_mut(self.start + from);
                // SAFETY: this part was never unmapped, so it still belongs to this mapping, into which no reference exists.
                unsafe { libc::munmap(left, hole.start - from) };
            }
            from = from.max(hole.end);
        }
    }
}

/// `mmap`, at an address for `MAP_FIXED`, which must be in a range of the caller.
fn map_at(
    at: Option<NonZeroUsize>,
    file: Option<(BorrowedFd<'_>, u64)>,
    len: usize,
    protection: ProtFlags,
    flags: MapFlags,
) -> Result<NonNull<c_void>, Errno> {
    let length = NonZeroUsize::new(len).ok_or(Errno::EINVAL)?;
    match file {
        Some((fd, offset)) => {
            let offset = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW)?;
            // SAFETY: without MAP_FIXED the kernel picks a free range; with it, the callers own the range and have no reference
            // into it.
            unsafe { mmap(at, length, protection, flags, fd, offset) }
        }
        // SAFETY: as above.
        None => unsafe { mmap_anonymous(at, length, protection, flags) },
    }
}

/// `mremap` to a range that the kernel picks, or in place. The callers own the old range, and keep it only if the flags do.
fn remap(old: *mut c_void, old_len: usize, len: usize, flags: i32) -> Result<RawMapping, SyscallError> {
    // With MREMAP_DONTUNMAP the new address is a hint, which newer versions of glibc read from the arguments.
    let hint = std::ptr::null_mut::<c_void>();
    // SAFETY: the old range belongs to a mapping of the caller, into which no reference exists.
    let new = unsafe { libc::mremap(old, old_len, len, flags, hint) };
    if new == libc::MAP_FAILED {
        return Err(Errno::last()).call(|| format!("mremap of {old_len} bytes to {len} with {flags:#x}"));
    }
    // SAFETY: mremap returned this range, which belongs to the caller alone.
    Ok(unsafe { RawMapping::from_raw(new, len) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;

    const PAGE: usize = 4096;

    fn mapped(pages: usize) -> (std::os::fd::OwnedFd, RawMapping) {
        let fd = memfd::create("raw", None).unwrap();
        memfd::resize(fd.as_fd(), (pages * PAGE) as u64).unwrap();
        let mapping = RawMapping::shared(fd.as_fd(), 0, pages * PAGE).unwrap();
        (fd, mapping)
    }

    #[test]
    fn access_outside_of_the_range_and_to_unmapped_parts_is_refused() {
        let (_fd, mut mapping) = mapped(4);
        mapping.write(4 * PAGE - 1, 7).unwrap();
        assert_eq!(mapping.read(4 * PAGE - 1), Ok(7));
        assert_eq!(mapping.read(4 * PAGE).unwrap_err().errno, Errno::EFAULT);
        assert_eq!(mapping.write_all(4 * PAGE - 2, b"abc").unwrap_err().errno, Errno::EFAULT);
        assert_eq!(mapping.unmap(PAGE, 100).unwrap_err().errno, Errno::EINVAL);
        mapping.unmap(PAGE, PAGE).unwrap();
        assert_eq!(mapping.read(PAGE).unwrap_err().errno, Errno::EFAULT);
        assert_eq!(mapping.advise(0, 2 * PAGE, libc::MADV_DONTNEED).unwrap_err().errno, Errno::EFAULT);
        mapping.write(2 * PAGE, 1).unwrap();
    }

    #[test]
    fn drop_leaves_what_was_mapped_in_a_hole() {
        // Another thread of this test program may map its own memory there first.
        let again = (0..100).find_map(|_| {
            let (fd, mut mapping) = mapped(3);
            let hole = mapping.address() + PAGE;
            mapping.unmap(PAGE, PAGE).unwrap();
            let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED_NOREPLACE;
            let at = map_at(NonZeroUsize::new(hole), Some((fd.as_fd(), 0)), PAGE, READ_WRITE, flags).ok()?;
            // SAFETY: the range was mapped just now.
            Some(unsafe { RawMapping::from_raw(at.as_ptr(), PAGE) })
        });
        let again = again.unwrap();
        again.write(0, 9).unwrap();
        assert_eq!(again.read(0), Ok(9));
    }

    #[test]
    fn duplicate_and_resized_mapping_show_the_file() {
        let (_fd, mapping) = mapped(4);
        mapping.write(PAGE, 5).unwrap();
        let second = mapping.duplicate(PAGE, PAGE).unwrap();
        assert_eq!(second.read(0), Ok(5));
        let resized = mapping.resize(2 * PAGE, true).unwrap();
        assert_eq!((resized.len(), resized.read(PAGE)), (2 * PAGE, Ok(5)));
    }
}
