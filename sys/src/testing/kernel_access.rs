//! Calls by which the kernel reads or writes memory, pins it or locks it.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::atomic::AtomicU64;

use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use nix::errno::Errno;
use nix::libc;

use super::raw_mapping::RawMapping;
use super::uring::next_result;
use crate::error::{CallContext as _, SyscallError};

impl RawMapping {
    /// Reads from a descriptor to `len` bytes at `at`: `pread` at an offset of the file, or `read`. Returns the number of bytes.
    ///
    /// # Errors
    /// `pread` or `read`; `EFAULT` outside of the range.
    pub fn read_from(
        &self,
        at: usize,
        len: usize,
        fd: BorrowedFd<'_>,
        offset: Option<u64>,
    ) -> Result<usize, SyscallError> {
        let (target, raw) = (self.checked(at, len)?, fd.as_raw_fd());
        let call = || format!("read of {len} bytes at {offset:?} of descriptor {raw}");
        let got = match offset {
            Some(offset) => {
                let offset = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW).call(call)?;
                // SAFETY: the target belongs to this mapping, into which no reference exists.
                unsafe { libc::pread(raw, target, len, offset) }
            }
            // SAFETY: as above.
            None => unsafe { libc::read(raw, target, len) },
        };
        Errno::result(got).and_then(|got| usize::try_from(got).map_err(|_| Errno::EOVERFLOW)).call(call)
    }

    /// `vmsplice` of `len` bytes at `at`: the write end of a pipe references their pages, from the read end they are written.
    /// Returns the number of bytes.
    ///
    /// # Errors
    /// `vmsplice`; `EFAULT` outside of the range.
    pub fn vmsplice(&self, at: usize, len: usize, pipe: BorrowedFd<'_>) -> Result<usize, SyscallError> {
        let part = libc::iovec { iov_base: self.checked(at, len)?, iov_len: len };
        // SAFETY: the vector outlives the call. Its range belongs to this mapping, into which no reference exists.
        let moved = unsafe { libc::vmsplice(pipe.as_raw_fd(), &raw const part, 1, 0) };
        Errno::result(moved)
            .and_then(|moved| usize::try_from(moved).map_err(|_| Errno::EOVERFLOW))
            .call(|| format!("vmsplice of {len} bytes at {at}"))
    }

    /// `futex(FUTEX_LOCK_PI)` of the word at `at`: the kernel stores the id of this thread there, once it is 0.
    ///
    /// # Errors
    /// `futex`; `EFAULT` outside of the range.
    pub fn lock_pi(&self, at: usize) -> Result<(), SyscallError> {
        let word = self.checked(at, 4)?;
        let none = std::ptr::null::<libc::timespec>();
        // SAFETY: the word belongs to this mapping, into which no reference exists.
        let locked = unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_LOCK_PI, 0, none) };
        Errno::result(locked).map(drop).call(|| format!("futex(FUTEX_LOCK_PI) at {at}"))
    }

    /// `mlock2(MLOCK_ONFAULT)` of the range.
    ///
    /// # Errors
    /// `mlock2`; `EFAULT` if a part was unmapped.
    pub fn lock_on_fault(&self) -> Result<(), SyscallError> {
        let len = self.len();
        // SAFETY: the range belongs to this mapping, whose content stays the same.
        let locked = unsafe { libc::mlock2(self.checked(0, len)?, len, libc::MLOCK_ONFAULT) };
        Errno::result(locked).map(drop).call(|| format!("mlock2(MLOCK_ONFAULT) of {len} bytes"))
    }

    /// The 8 bytes at `at`, which the kernel, other threads and other processes may access, too.
    ///
    /// # Errors
    /// `EFAULT` outside of the range; `EINVAL` if `at` is not a multiple of 8.
    pub fn atomic(&self, at: usize) -> Result<&AtomicU64, SyscallError> {
        let word = self.checked(at, 8)?.cast::<u64>();
        let aligned = if at.is_multiple_of(8) { Ok(()) } else { Err(Errno::EINVAL) };
        aligned.call(|| format!("access to 8 bytes at {at}"))?;
        // SAFETY: checked() proved that the word belongs to this mapping, which starts at a page. While self is borrowed, no method
        // unmaps it.
        Ok(unsafe { AtomicU64::from_ptr(word) })
    }
}

/// A range that is registered with an io_uring as its only buffer. The pages are pinned until a kernel worker releases them, a
/// moment after the drop; they need not stay mapped.
pub struct RegisteredBuffer {
    ring: IoUring,
    start: usize,
    len: u32,
}

impl RegisteredBuffer {
    /// Pins `len` bytes at `at` of a mapping.
    ///
    /// # Errors
    /// `io_uring_setup`, `io_uring_register`; `EFAULT` outside of the range.
    pub fn new(mapping: &RawMapping, at: usize, len: usize) -> Result<Self, SyscallError> {
        let call = || format!("io_uring_register of a buffer of {len} bytes at {at}");
        let size = u32::try_from(len).map_err(|_| Errno::EOVERFLOW).call(call)?;
        let start = mapping.checked(at, len)?;
        let ring = IoUring::new(2).call(call)?;
        let buffer = libc::iovec { iov_base: start, iov_len: len };
        // SAFETY: the range belongs to the mapping, into which no reference exists. After munmap the ring still has references to
        // the pages, and does not use their former addresses.
        unsafe { ring.submitter().register_buffers(&[buffer]) }.call(call)?;
        Ok(Self { ring, start: start.expose_provenance(), len: size })
    }

    /// Reads from the start of a file to the pages of the whole buffer (`IORING_OP_READ_FIXED`). Returns the number of bytes.
    ///
    /// # Errors
    /// `io_uring_enter`; the error of the request.
    pub fn fill(&mut self, file: BorrowedFd<'_>) -> Result<u32, SyscallError> {
        let call = || format!("read of {} bytes by io_uring to a registered buffer", self.len);
        let start = std::ptr::with_exposed_provenance_mut(self.start);
        let entry = opcode::ReadFixed::new(Fd(file.as_fd().as_raw_fd()), start, self.len, 0).build();
        // SAFETY: the target is the registered buffer, whose pages the ring pins.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| Errno::EBUSY).call(call)?;
        let result = next_result(&mut self.ring)?;
        u32::try_from(result).map_err(|_| Errno::from_raw(result.saturating_neg())).call(call)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::memfd;

    const PAGE: usize = 4096;

    #[test]
    fn kernel_writes_stay_in_the_range() {
        let fd = memfd::create("filled", None).unwrap();
        memfd::resize(fd.as_fd(), 2 * PAGE as u64).unwrap();
        let source = memfd::create("source", None).unwrap();
        nix::sys::uio::pwrite(&source, &[5; 2 * PAGE], 0).unwrap();
        let mapping = RawMapping::shared(fd.as_fd(), 0, 2 * PAGE).unwrap();
        assert_eq!(mapping.read_from(PAGE - 8, 8, source.as_fd(), Some(0)), Ok(8));
        assert_eq!(mapping.atomic(PAGE - 8).unwrap().load(Ordering::Relaxed), 0x0505_0505_0505_0505);
        let outside = mapping.read_from(PAGE, PAGE + 1, source.as_fd(), None);
        assert_eq!(outside.unwrap_err().errno, Errno::EFAULT);
        assert_eq!(mapping.atomic(4).unwrap_err().errno, Errno::EINVAL);
        assert_eq!(mapping.atomic(2 * PAGE).unwrap_err().errno, Errno::EFAULT);
        assert_eq!(RegisteredBuffer::new(&mapping, PAGE, 2 * PAGE).err().unwrap().errno, Errno::EFAULT);
    }

    #[test]
    fn registered_buffer_is_filled_after_munmap() {
        let fd = memfd::create("registered", None).unwrap();
        memfd::resize(fd.as_fd(), 2 * PAGE as u64).unwrap();
        let source = memfd::create("source", None).unwrap();
        nix::sys::uio::pwrite(&source, &[5; PAGE], 0).unwrap();
        let mapping = RawMapping::shared(fd.as_fd(), 0, 2 * PAGE).unwrap();
        let mut buffer = RegisteredBuffer::new(&mapping, PAGE, PAGE).unwrap();
        drop(mapping);
        assert_eq!(buffer.fill(source.as_fd()), Ok(4096));
        let again = RawMapping::shared(fd.as_fd(), 0, 2 * PAGE).unwrap();
        assert_eq!((again.read(PAGE - 1), again.read(PAGE)), (Ok(0), Ok(5)));
    }
}
