//! Ranges that are registered for missing pages: a thread that accesses an absent page sleeps until a program fills the page.
//!
//! No call here changes a page that exists. While the address space changes (fork, mremap, madvise), and while an event of it is not read,
//! the calls that fill pages fail with `EAGAIN`.

use nix::errno::Errno;
use nix::libc;

use super::{RESERVED_PAGE, UffdioRange, UffdioRegister, Userfaultfd, ioctls as basic};
use crate::address::AddressRange;
use crate::error::{CallContext, SyscallError};

impl Userfaultfd {
    /// `UFFDIO_REGISTER` for missing pages. Only accesses through these addresses wait: read(2) of a mapped file, and other mappings, find
    /// zero where a page is absent. After the last descriptor was closed, absent pages are zero pages.
    ///
    /// # Errors
    /// `EBUSY` if a mapping in the range is registered with another userfaultfd; `EINVAL` if the range is not aligned to pages (huge pages
    /// for hugetlb), maps nothing, or maps anything but anonymous memory, shmem and hugetlb; `EPERM` if a mapped file may not be written.
    pub fn register_missing(&self, range: AddressRange) -> Result<(), SyscallError> {
        let mut argument =
            UffdioRegister { range: range.into(), mode: UFFDIO_REGISTER_MODE_MISSING, ioctls: 0 };
        // SAFETY: `argument` has the layout of struct uffdio_register. No page changes: an access waits until the page is filled.
        unsafe { basic::uffdio_register(self.raw(), &raw mut argument) }
            .call(|| format!("UFFDIO_REGISTER of {range} for missing pages, userfaultfd {}", self.raw()))?;
        Ok(())
    }

    /// `UFFDIO_COPY`: fills absent pages from `to` on, and wakes the threads that wait for them. Returns the number of bytes that were
    /// filled: fewer than given if a page exists or the address space changes.
    ///
    /// # Errors
    /// `EEXIST` if the first page exists: threads that wait for it are not woken; `EAGAIN`; `ENOENT` if the range is not in one mapping, also
    /// if all of its mappings are registered, or if that is not registered; `ENOMEM`; `ESRCH` if the address space has ended.
    pub fn copy(&self, to: u64, content: &[u8]) -> Result<u64, SyscallError> {
        let len = content.len();
        let call = || format!("UFFDIO_COPY of {len} bytes to {to:#x}, userfaultfd {}", self.raw());
        let bytes = u64::try_from(len).map_err(|_| Errno::EINVAL).call(call)?;
        let source = u64::try_from(content.as_ptr().addr()).map_err(|_| Errno::EINVAL).call(call)?;
        let mut argument = UffdioCopy { dst: to, src: source, len: bytes, mode: 0, copy: 0 };
        // SAFETY: `argument` has the layout of struct uffdio_copy, and the kernel reads `len` bytes of `content`. It changes no page that
        // exists.
        let result = unsafe { ioctls::uffdio_copy(self.raw(), &raw mut argument) };
        filled(result, argument.copy).call(call)
    }

    /// `UFFDIO_ZEROPAGE`: fills absent pages with zeroes, and wakes the threads that wait for them. Not for hugetlb. Returns the number of
    /// bytes that were filled.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub fn zero(&self, range: AddressRange) -> Result<u64, SyscallError> {
        let mut argument = UffdioResult { range: range.into(), mode: 0, result: 0 };
        // SAFETY: `argument` has the layout of struct uffdio_zeropage. The kernel changes no page that exists.
        let result = unsafe { ioctls::uffdio_zeropage(self.raw(), &raw mut argument) };
        filled(result, argument.result)
            .call(|| format!("UFFDIO_ZEROPAGE of {range}, userfaultfd {}", self.raw()))
    }

    /// `UFFDIO_POISON`: each access to these absent pages raises `SIGBUS` from now on, through these addresses only. Wakes the threads that
    /// wait for them. Returns the number of bytes.
    ///
    /// # Errors
    /// As [`Self::copy`]; `EINVAL` if the range does not consist of whole hugetlb pages, and before Linux 6.6.
    pub fn poison(&self, range: AddressRange) -> Result<u64, SyscallError> {
        let mut argument = UffdioResult { range: range.into(), mode: 0, result: 0 };
        // SAFETY: `argument` has the layout of struct uffdio_poison. The kernel changes no page that exists.
        let result = unsafe { ioctls::uffdio_poison(self.raw(), &raw mut argument) };
        filled(result, argument.result)
            .call(|| format!("UFFDIO_POISON of {range}, userfaultfd {}", self.raw()))
    }

    /// True if this kernel has `UFFDIO_POISON` (Linux 6.6) for this address space. Valid only after [`Self::api`]; changes nothing.
    #[must_use]
    pub fn can_poison(&self) -> bool {
        // The page is never registered: ENOENT. A 32-bit process has no such page.
        !matches!(self.poison(RESERVED_PAGE), Err(SyscallError { errno: Errno::EINVAL, .. }))
    }

    /// `UFFDIO_WAKE`: the threads that wait for pages of the range try again.
    ///
    /// # Errors
    /// `EINVAL` if the range is not aligned to pages.
    pub fn wake(&self, range: AddressRange) -> Result<(), SyscallError> {
        let mut argument = UffdioRange::from(range);
        // SAFETY: `argument` has the layout of struct uffdio_range. The call changes no memory.
        unsafe { ioctls::uffdio_wake(self.raw(), &raw mut argument) }
            .call(|| format!("UFFDIO_WAKE of {range}, userfaultfd {}", self.raw()))?;
        Ok(())
    }

    /// True while the address space changes: a thread waits, or will wait, until an event is read. Valid only after [`Self::api`]; changes
    /// nothing.
    #[must_use]
    pub fn is_changing(&self) -> bool {
        // The kernel checks that before all else. The page is never registered.
        matches!(self.write_protect(RESERVED_PAGE, false), Err(SyscallError { errno: Errno::EAGAIN, .. }))
    }
}

/// The result of a call that fills pages: `count` is what the kernel stored, a number of bytes or a negative errno. A call that filled only a
/// part fails with `EAGAIN`.
fn filled(result: Result<libc::c_int, Errno>, count: i64) -> Result<u64, Errno> {
    match (result, u64::try_from(count)) {
        (_, Ok(bytes)) if bytes > 0 => Ok(bytes),
        (Err(errno), _) => Err(errno),
        (Ok(_), _) => Err(Errno::EIO),
    }
}

// linux/userfaultfd.h
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1 << 0;

/// `struct uffdio_copy`
#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

/// `struct uffdio_zeropage` and `struct uffdio_poison`
#[repr(C)]
struct UffdioResult {
    range: UffdioRange,
    mode: u64,
    result: i64,
}

const _: () = assert!(size_of::<UffdioCopy>() == 40);
const _: () = assert!(size_of::<UffdioResult>() == 32);
const _: () = assert!(nix::request_code_read!(0xaa, 0x02, size_of::<UffdioRange>()) == 0x8010_aa02);
const _: () = assert!(nix::request_code_readwrite!(0xaa, 0x03, size_of::<UffdioCopy>()) == 0xc028_aa03);
const _: () = assert!(nix::request_code_readwrite!(0xaa, 0x04, size_of::<UffdioResult>()) == 0xc020_aa04);
const _: () = assert!(nix::request_code_readwrite!(0xaa, 0x08, size_of::<UffdioResult>()) == 0xc020_aa08);

mod ioctls {
    // The header defines it with _IOR although the kernel reads the argument.
    nix::ioctl_read!(uffdio_wake, 0xaa, 0x02, super::UffdioRange);
    nix::ioctl_readwrite!(uffdio_copy, 0xaa, 0x03, super::UffdioCopy);
    nix::ioctl_readwrite!(uffdio_zeropage, 0xaa, 0x04, super::UffdioResult);
    nix::ioctl_readwrite!(uffdio_poison, 0xaa, 0x08, super::UffdioResult);
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::super::{UffdEvent, UffdFeatures};
    use super::*;
    use crate::mapping::SharedMapping;
    use crate::memfd;

    const PAGE: u64 = 4096;

    #[test]
    fn results_of_partial_and_failed_fills_are_distinguished() {
        for (result, count, expected) in [
            (Ok(0), 4096, Ok(4096)),
            (Err(Errno::EAGAIN), 4096, Ok(4096)),
            (Err(Errno::EAGAIN), 0, Err(Errno::EAGAIN)),
            (Err(Errno::EAGAIN), -11, Err(Errno::EAGAIN)),
            (Err(Errno::EEXIST), -17, Err(Errno::EEXIST)),
            (Ok(0), 0, Err(Errno::EIO)),
        ] {
            assert_eq!(filled(result, count), expected, "{result:?} {count}");
        }
    }

    #[test]
    fn absent_pages_are_filled_and_existing_ones_stay() {
        let fd = memfd::create("filled", None).unwrap();
        memfd::resize(fd.as_fd(), 8 * PAGE).unwrap();
        let mapping = SharedMapping::shared(&fd, 0, 8 * 4096, true).unwrap();
        let start = u64::try_from(mapping.as_ptr().addr()).unwrap();
        let at = |page: u64, pages: u64| AddressRange::at(start + page * PAGE, pages * PAGE).unwrap();
        crate::fd::write_at(fd.as_fd(), 2 * PAGE, b"written").unwrap();
        let uffd = Userfaultfd::create().unwrap();
        uffd.api(UffdFeatures::empty()).unwrap();
        uffd.register_missing(at(0, 8)).unwrap();
        assert!(!uffd.is_changing());
        assert_eq!(uffd.copy(start, &[7; 4 * 4096]).unwrap(), 2 * PAGE, "up to the page that exists");
        assert_eq!(uffd.copy(start + 2 * PAGE, &[7; 4096]).unwrap_err().errno, Errno::EEXIST);
        assert_eq!(uffd.zero(at(3, 1)).unwrap(), PAGE);
        let error = uffd.copy(start + 8 * PAGE, &[7; 4096]).unwrap_err();
        assert!(matches!(error.errno, Errno::ENOENT | Errno::EINVAL), "{error:?}");

        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 7];
            [0, 2, 3, 5].map(|page| {
                assert!(mapping.read_at(page * 4096, &mut bytes));
                bytes
            })
        });
        let fault = loop {
            if let Some(event) = uffd.read_event().unwrap() {
                break event;
            }
            std::thread::yield_now();
        };
        assert!(
            matches!(fault, UffdEvent::PageFault { address } if address & !(PAGE - 1) == start + 5 * PAGE)
        );
        uffd.copy(start + 5 * PAGE, &[9; 4096]).unwrap();
        assert_eq!(reader.join().unwrap(), [[7; 7], *b"written", [0; 7], [9; 7]]);
    }

    #[test]
    fn calls_fail_until_the_event_of_a_removal_is_read() {
        let fd = memfd::create("removed", None).unwrap();
        memfd::resize(fd.as_fd(), 4 * PAGE).unwrap();
        let mapping = SharedMapping::shared(&fd, 0, 4 * 4096, true).unwrap();
        let start = u64::try_from(mapping.as_ptr().addr()).unwrap();
        let range = AddressRange::at(start, 4 * PAGE).unwrap();
        let uffd = Userfaultfd::create().unwrap();
        uffd.api(UffdFeatures::EVENT_REMOVE).unwrap();
        uffd.register_missing(range).unwrap();
        let remover = std::thread::spawn(move || {
            let address = std::ptr::NonNull::new(mapping.as_ptr().cast()).unwrap();
            // SAFETY: only this thread uses the mapping.
            unsafe { nix::sys::mman::madvise(address, 4096, nix::sys::mman::MmapAdvise::MADV_DONTNEED) }
                .unwrap();
        });
        while !uffd.is_changing() {
            std::thread::yield_now();
        }
        assert_eq!(uffd.copy(start, &[7; 4096]).unwrap_err().errno, Errno::EAGAIN);
        let event = loop {
            if let Some(event) = uffd.read_event().unwrap() {
                break event;
            }
        };
        assert!(matches!(event, UffdEvent::Remove(removed) if removed.start == start));
        remover.join().unwrap();
        assert!(!uffd.is_changing());
    }

    #[test]
    fn access_to_a_poisoned_page_by_a_system_call_fails() {
        let fd = memfd::create("poisoned", None).unwrap();
        memfd::resize(fd.as_fd(), 2 * PAGE).unwrap();
        let mapping = SharedMapping::shared(&fd, 0, 2 * 4096, true).unwrap();
        let start = u64::try_from(mapping.as_ptr().addr()).unwrap();
        let range = AddressRange::at(start, 2 * PAGE).unwrap();
        let uffd = Userfaultfd::create().unwrap();
        uffd.api(UffdFeatures::empty()).unwrap();
        uffd.register_missing(range).unwrap();
        assert_eq!(uffd.poison(range).unwrap(), 2 * PAGE);
        uffd.unregister(range).unwrap();
        let (reader, writer) = nix::unistd::pipe().unwrap();
        // SAFETY: write only reads the mapping, and returns an error for the poisoned page.
        let bytes = unsafe { std::slice::from_raw_parts(mapping.as_ptr().cast_const(), 1) };
        assert_eq!(nix::unistd::write(&writer, bytes), Err(Errno::EFAULT));
        drop(reader);
    }
}
