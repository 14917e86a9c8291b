//! userfaultfd: asynchronous write protection of address ranges, absent pages that a program fills, and events of the address space.
//!
//! This wrapper supports two uses. Write tracking registers ranges for write protection with [`UffdFeatures::WP_ASYNC`]: the kernel then
//! resolves write-protection faults itself and never delivers a page fault. Lazy restore registers ranges for missing pages and fills them:
//! see `fill.rs`. A caller that enables event features must read events at once: the process that causes an event sleeps uninterruptibly
//! until the event is read.

mod fill;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use bitflags::bitflags;
use bytemuck::{Pod, Zeroable};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::libc;

use crate::address::AddressRange;
use crate::error::{CallContext, SyscallError};

/// The requirement of write tracking, for messages to users of older kernels.
pub const WRITE_TRACKING_NEEDS: &str =
    "write tracking needs Linux 6.7 or later (UFFD_FEATURE_WP_ASYNC and PAGEMAP_SCAN)";

/// Checks that this kernel can track writes. If this process may not try it, it passes the check.
///
/// # Errors
/// [`WRITE_TRACKING_NEEDS`]
pub fn require_wp_async() -> Result<(), &'static str> {
    match Userfaultfd::supports_wp_async() {
        Ok(false) => Err(WRITE_TRACKING_NEEDS),
        Ok(true) | Err(_) => Ok(()),
    }
}

/// Checks whether `fd` is a userfaultfd. No file has a path like its link, and no file system is asked.
///
/// # Errors
/// `readlink`.
pub fn is_userfaultfd(fd: BorrowedFd<'_>) -> Result<bool, SyscallError> {
    Ok(crate::fd::link_target(fd)? == "anon_inode:[userfaultfd]")
}

/// A userfaultfd. It belongs to the address space of the process that created it, no matter which process holds the
/// descriptor. When the last descriptor is closed, tracking ends without notice.
#[derive(Debug)]
pub struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// Creates a userfaultfd of the calling process, non-blocking and close-on-exec. Falls back to
    /// [`Self::create_user_mode_only`] if the caller lacks the privilege for faults in kernel mode.
    ///
    /// # Errors
    /// `userfaultfd`: `ENOSYS` if this kernel lacks it, `EPERM` if a security policy forbids it.
    pub fn create() -> Result<Self, SyscallError> {
        match Self::create_with(0) {
            Err(SyscallError { errno: Errno::EPERM, .. }) => Self::create_user_mode_only(),
            other => other,
        }
    }

    /// Creates a userfaultfd with `UFFD_USER_MODE_ONLY`, which needs no privilege. Asynchronous write protection still
    /// observes writes by the kernel, because it delivers no fault to user space.
    ///
    /// # Errors
    /// `userfaultfd`: `ENOSYS` if this kernel lacks it, `EINVAL` before Linux 5.11.
    pub fn create_user_mode_only() -> Result<Self, SyscallError> {
        Self::create_with(UFFD_USER_MODE_ONLY)
    }

    /// True if this kernel can write-protect asynchronously, which write tracking requires. Creates a userfaultfd of the
    /// calling process and closes it.
    ///
    /// # Errors
    /// `userfaultfd`, and `UFFDIO_API` except `EINVAL`.
    pub fn supports_wp_async() -> Result<bool, SyscallError> {
        match Self::create()?.api(UffdFeatures::WP_ASYNC) {
            Ok(_) => Ok(true),
            Err(SyscallError { errno: Errno::EINVAL, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn create_with(mode: libc::c_int) -> Result<Self, SyscallError> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | mode;
        // SAFETY: the call takes integers and accesses no memory.
        let created = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let call = || format!("userfaultfd with flags {flags:#x}");
        let raw = i32::try_from(Errno::result(created).call(call)?).map_err(|_| Errno::EBADF).call(call)?;
        // SAFETY: the kernel just returned this descriptor, so nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// Wraps a userfaultfd created by another process and sets `O_NONBLOCK`, which affects every process that shares the open
    /// file description.
    ///
    /// # Errors
    /// `EINVAL` if `fd` is not a userfaultfd; else `readlink` or `fcntl`.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, SyscallError> {
        let raw = fd.as_raw_fd();
        if !is_userfaultfd(fd.as_fd())? {
            return Err(Errno::EINVAL).call(|| format!("check that descriptor {raw} is a userfaultfd"));
        }
        let own = Self(fd);
        own.set_nonblocking()?;
        Ok(own)
    }

    /// Sets `O_NONBLOCK`, which affects every process that shares the open file description. Without it, poll(2) reports `POLLERR` at
    /// once instead of events.
    ///
    /// # Errors
    /// `fcntl`.
    pub fn set_nonblocking(&self) -> Result<(), SyscallError> {
        let call = |name: &str| format!("fcntl({name}) of descriptor {}", self.raw());
        let bits = fcntl(&self.0, FcntlArg::F_GETFL).call(|| call("F_GETFL"))?;
        let flags = OFlag::from_bits_truncate(bits) | OFlag::O_NONBLOCK;
        fcntl(&self.0, FcntlArg::F_SETFL(flags)).call(|| call("F_SETFL"))?;
        Ok(())
    }

    /// Wraps a descriptor for which [`is_userfaultfd`] returned true.
    #[must_use]
    pub const fn of_checked(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// `fcntl(F_DUPFD_CLOEXEC)`.
    pub fn try_clone(&self) -> Result<Self, SyscallError> {
        let call = || format!("fcntl(F_DUPFD_CLOEXEC) of userfaultfd {}", self.raw());
        self.0.try_clone().call(call).map(Self)
    }

    /// `UFFDIO_API`: enables `features` and returns all features that this kernel supports. Must succeed exactly once before
    /// any other operation; after a failure it can be retried with fewer features.
    ///
    /// # Errors
    /// `EINVAL` if this kernel lacks a feature or the call has already succeeded, `EPERM` for [`UffdFeatures::EVENT_FORK`]
    /// without `CAP_SYS_PTRACE`.
    pub fn api(&self, features: UffdFeatures) -> Result<UffdFeatures, SyscallError> {
        let mut argument = UffdioApi { api: UFFD_API, features: features.bits(), ioctls: 0 };
        // SAFETY: `argument` has the layout of struct uffdio_api.
        unsafe { ioctls::uffdio_api(self.raw(), &raw mut argument) }
            .call(|| format!("UFFDIO_API of userfaultfd {} with features {features}", self.raw()))?;
        Ok(UffdFeatures::from_bits_retain(argument.features))
    }

    /// `UFFDIO_REGISTER` for write protection. Registration alone protects no page: see [`Self::write_protect`] and
    /// [`Pagemap::scan`](crate::pagemap::Pagemap::scan).
    ///
    /// # Errors
    /// `EBUSY` if a mapping in the range is registered with another userfaultfd; `EINVAL` if the range contains the last page
    /// below 2^47 - 4096, is not aligned to pages (huge pages for hugetlb), maps nothing, or maps anything but anonymous
    /// memory, shmem and hugetlb; `EPERM` if a mapped file may not be written; `ESRCH` or `ENOMEM` if the address space has
    /// ended.
    pub fn register_wp(&self, range: AddressRange) -> Result<(), SyscallError> {
        let call = || format!("UFFDIO_REGISTER of {range} for write protection, userfaultfd {}", self.raw());
        if !range.intersect(RESERVED_PAGE).is_empty() {
            return Err(Errno::EINVAL).call(call);
        }
        let mut argument = UffdioRegister { range: range.into(), mode: UFFDIO_REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: `argument` has the layout of struct uffdio_register. With asynchronous write protection no access to a range
        // of this process ever blocks on user space.
        unsafe { ioctls::uffdio_register(self.raw(), &raw mut argument) }.call(call)?;
        Ok(())
    }

    /// `UFFDIO_UNREGISTER`: ends tracking of the range and removes its write protection.
    ///
    /// # Errors
    /// `EINVAL` if the range is not page-aligned, maps nothing or maps memory of another kind; `ESRCH` or `ENOMEM` if the
    /// address space has ended.
    pub fn unregister(&self, range: AddressRange) -> Result<(), SyscallError> {
        let mut argument = UffdioRange::from(range);
        // SAFETY: `argument` has the layout of struct uffdio_range.
        unsafe { ioctls::uffdio_unregister(self.raw(), &raw mut argument) }
            .call(|| format!("UFFDIO_UNREGISTER of {range}, userfaultfd {}", self.raw()))?;
        Ok(())
    }

    /// `UFFDIO_WRITEPROTECT`: write-protects the whole range, or removes the protection. Unpopulated pages are included on
    /// shmem and hugetlb, and on anonymous memory if [`UffdFeatures::WP_UNPOPULATED`] is enabled.
    ///
    /// # Errors
    /// `ENOENT` if a part of the range is not mapped and registered for write protection, `EAGAIN` while fork, mremap and the
    /// like change mappings (retry), `EINVAL`, `ESRCH` if the address space has ended.
    pub fn write_protect(&self, range: AddressRange, protect: bool) -> Result<(), SyscallError> {
        let mode = if protect { UFFDIO_WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = UffdioWriteprotect { range: range.into(), mode };
        // SAFETY: `argument` has the layout of struct uffdio_writeprotect; for access to the range see register_wp.
        unsafe { ioctls::uffdio_writeprotect(self.raw(), &raw mut argument) }
            .call(|| format!("UFFDIO_WRITEPROTECT({mode}) of {range}, userfaultfd {}", self.raw()))?;
        Ok(())
    }

    /// Checks whether the address space of the userfaultfd still exists; `None`: unknown, as for a 32-bit process. Valid only after
    /// [`Self::api`]; changes nothing.
    #[must_use]
    pub fn address_space_exists(&self) -> Option<bool> {
        // The page is never registered: ENOENT if the address space exists.
        match self.write_protect(RESERVED_PAGE, false) {
            // A 32-bit process has no such page.
            Ok(()) | Err(SyscallError { errno: Errno::EINVAL, .. }) => None,
            Err(SyscallError { errno, .. }) => Some(errno != Errno::ESRCH),
        }
    }

    /// Reads the next event; `None` if none is queued. The process that caused the event continues as soon as it is read.
    ///
    /// The call does not wait, even if another process cleared `O_NONBLOCK`, which all share who have the open file description.
    /// Before Linux 6.10 the kernel cannot be asked for that; the flag is then set again before each read.
    ///
    /// # Errors
    /// `read`; `EINVAL` before [`Self::api`]; `EMFILE` if the process cannot open the descriptor of a fork event: the event
    /// stays queued and the forking process keeps waiting.
    pub fn read_event(&self) -> Result<Option<UffdEvent>, SyscallError> {
        let call = || format!("read of an event from userfaultfd {}", self.raw());
        let mut message = UffdMsg::zeroed();
        let got = loop {
            match self.read_now(bytemuck::bytes_of_mut(&mut message)) {
                Err(Errno::EAGAIN) => return Ok(None),
                // The kernel looks for signals first.
                Err(Errno::EINTR) => {}
                other => break other.call(call)?,
            }
        };
        if got != size_of::<UffdMsg>() {
            return Err(Errno::EIO).call(call);
        }
        let [first, second, third] = message.arg;
        let range = AddressRange { start: first, end: second };
        Ok(Some(match message.event {
            UFFD_EVENT_FORK => {
                // The union begins with struct { __u32 ufd; }.
                let [a, b, c, d, ..] = first.to_ne_bytes();
                let raw = i32::from_ne_bytes([a, b, c, d]);
                // SAFETY: the kernel installed this descriptor during the read, so nothing else owns it.
                let child = unsafe { OwnedFd::from_raw_fd(raw) };
                // The child's descriptor has the flags that the parent's creator chose.
                fcntl(&child, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
                    .call(|| format!("fcntl(F_SETFD) of descriptor {raw}"))?;
                UffdEvent::Fork(Self::from_fd(child)?)
            }
            UFFD_EVENT_REMAP => UffdEvent::Remap { from: first, to: second, len: third },
            UFFD_EVENT_PAGEFAULT if first & UFFD_PAGEFAULT_FLAG_WP != 0 => {
                UffdEvent::WriteProtectFault { address: second }
            }
            UFFD_EVENT_PAGEFAULT => UffdEvent::PageFault { address: second },
            UFFD_EVENT_REMOVE => UffdEvent::Remove(range),
            UFFD_EVENT_UNMAP => UffdEvent::Unmap(range),
            other => UffdEvent::Other(other),
        }))
    }

    /// `read` without waiting: `EAGAIN` instead.
    fn read_now(&self, out: &mut [u8]) -> Result<usize, Errno> {
        let part = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
        // SAFETY: the kernel writes at most `iov_len` bytes to `out`. An offset of -1 stands for the file position.
        let read = unsafe { libc::preadv2(self.raw(), &raw const part, 1, -1, libc::RWF_NOWAIT) };
        match Errno::result(read) {
            Err(Errno::EOPNOTSUPP) => {
                let bits = fcntl(&self.0, FcntlArg::F_GETFL)?;
                let flags = OFlag::from_bits_truncate(bits) | OFlag::O_NONBLOCK;
                fcntl(&self.0, FcntlArg::F_SETFL(flags))?;
                nix::unistd::read(&self.0, out)
            }
            read => read.map(isize::cast_unsigned),
        }
    }

    fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Userfaultfd> for OwnedFd {
    fn from(uffd: Userfaultfd) -> Self {
        uffd.0
    }
}

/// An event of an address space.
#[derive(Debug)]
pub enum UffdEvent {
    /// `fork`. Holds the child's userfaultfd, with the same features and registered ranges. The event does not identify the
    /// child process.
    Fork(Userfaultfd),
    /// `mremap`. The old mapping may still exist: `MREMAP_DONTUNMAP` raises the same event, and `mremap` with old length 0, which
    /// copies the mapping, raises it with `len` 0.
    Remap {
        /// Old start address.
        from: u64,
        /// New start address.
        to: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A thread accessed an absent page of a range that is registered for missing pages. It sleeps until the page is filled.
    PageFault {
        /// Address in the page.
        address: u64,
    },
    /// A thread wrote to a write-protected page. It sleeps until the protection is removed.
    WriteProtectFault {
        /// Address in the page.
        address: u64,
    },
    /// `MADV_DONTNEED` or `MADV_REMOVE` drops the pages of the range.
    Remove(AddressRange),
    /// The range was unmapped.
    Unmap(AddressRange),
    /// Another `UFFD_EVENT_*` of `linux/userfaultfd.h`.
    Other(u8),
}

bitflags! {
    /// A set of `UFFD_FEATURE_*` bits of `linux/userfaultfd.h`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct UffdFeatures: u64 {
        /// Forks raise an event, and children are tracked. Needs `CAP_SYS_PTRACE`.
        const EVENT_FORK = 1 << 1;
        /// `mremap` raises an event, and moved mappings stay registered.
        const EVENT_REMAP = 1 << 2;
        /// `MADV_DONTNEED` and `MADV_REMOVE` raise an event.
        const EVENT_REMOVE = 1 << 3;
        /// `munmap` raises an event after the range is unmapped.
        const EVENT_UNMAP = 1 << 6;
        /// Shmem and hugetlb can be write-protected (Linux 5.19).
        const WP_HUGETLBFS_SHMEM = 1 << 12;
        /// Unpopulated anonymous pages can be write-protected (Linux 6.4).
        const WP_UNPOPULATED = 1 << 13;
        /// The kernel resolves write-protection faults itself (Linux 6.7).
        const WP_ASYNC = 1 << 15;
        // A kernel may support features that are not listed here.
        const _ = !0;
    }
}

impl fmt::Display for UffdFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.bits())
    }
}

/// The last usable page of an x86-64 address space. [`Userfaultfd::register_wp`] refuses it, so that
/// [`Userfaultfd::address_space_exists`] can probe it.
const RESERVED_PAGE: AddressRange = AddressRange { start: (1 << 47) - 2 * 4096, end: (1 << 47) - 4096 };

// linux/userfaultfd.h
const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const UFFD_PAGEFAULT_FLAG_WP: u64 = 1 << 1;
const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
const UFFD_EVENT_FORK: u8 = 0x13;
const UFFD_EVENT_REMAP: u8 = 0x14;
const UFFD_EVENT_REMOVE: u8 = 0x15;
const UFFD_EVENT_UNMAP: u8 = 0x16;

/// `struct uffdio_api`
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`
#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

impl From<AddressRange> for UffdioRange {
    fn from(range: AddressRange) -> Self {
        Self { start: range.start, len: range.len() }
    }
}

/// `struct uffdio_register`
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`
#[repr(C)]
struct UffdioWriteprotect {
    range: UffdioRange,
    mode: u64,
}

/// `struct uffd_msg`
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct UffdMsg {
    event: u8,
    reserved: [u8; 7],
    arg: [u64; 3],
}

const _: () = assert!(size_of::<UffdioApi>() == 24);
const _: () = assert!(size_of::<UffdioRange>() == 16);
const _: () = assert!(size_of::<UffdioRegister>() == 32);
const _: () = assert!(size_of::<UffdioWriteprotect>() == 24);
const _: () = assert!(size_of::<UffdMsg>() == 32);
const _: () = assert!(nix::request_code_readwrite!(0xaa, 0x3f, size_of::<UffdioApi>()) == 0xc018_aa3f);
const _: () = assert!(nix::request_code_readwrite!(0xaa, 0x00, size_of::<UffdioRegister>()) == 0xc020_aa00);
// The header defines it with _IOR although the kernel reads the argument.
const _: () = assert!(nix::request_code_read!(0xaa, 0x01, size_of::<UffdioRange>()) == 0x8010_aa01);
const _: () =
    assert!(nix::request_code_readwrite!(0xaa, 0x06, size_of::<UffdioWriteprotect>()) == 0xc018_aa06);

mod ioctls {
    nix::ioctl_readwrite!(uffdio_api, 0xaa, 0x3f, super::UffdioApi);
    nix::ioctl_readwrite!(uffdio_register, 0xaa, 0x00, super::UffdioRegister);
    nix::ioctl_read!(uffdio_unregister, 0xaa, 0x01, super::UffdioRange);
    nix::ioctl_readwrite!(uffdio_writeprotect, 0xaa, 0x06, super::UffdioWriteprotect);
}

#[cfg(test)]
mod tests;
