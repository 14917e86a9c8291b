//! userfaultfd: asynchronous write-protection, and the events of an address space that is tracked by it.
//!
//! Only one use is meant: ranges are registered for write-protection with [`Features::WP_ASYNC`], which the kernel resolves
//! by itself, so no page fault is ever delivered. Who enables event features must read the events at once: the process that
//! caused one waits for that, uninterruptibly.

use std::fmt;
use std::ops::BitOr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use bytemuck::{Pod, Zeroable};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::libc;

use crate::address::AddressRange;
use crate::error::{Call, SyscallError};

/// A userfaultfd. It belongs to the address space of the process that made it, whoever holds it. Tracking ends, without a
/// word, when the last descriptor of it is closed.
#[derive(Debug)]
pub struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// Of the calling process, non-blocking and close-on-exec; for faults of user mode only if no other is allowed.
    ///
    /// # Errors
    /// `userfaultfd`: `ENOSYS` if this kernel does not have it, `EPERM` if a security policy forbids it.
    pub fn create() -> Result<Self, SyscallError> {
        match Self::make(0) {
            Err(SyscallError { errno: Errno::EPERM, .. }) => Self::create_user_mode_only(),
            other => other,
        }
    }

    /// Of the calling process, for faults of user mode only, which needs no privilege. Asynchronous write-protection sees
    /// the kernel's writes nonetheless, since nothing is handed to user space.
    ///
    /// # Errors
    /// `userfaultfd`: `ENOSYS` if this kernel does not have it, `EINVAL` before Linux 5.11.
    pub fn create_user_mode_only() -> Result<Self, SyscallError> {
        Self::make(UFFD_USER_MODE_ONLY)
    }

    fn make(more: libc::c_int) -> Result<Self, SyscallError> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | more;
        // SAFETY: the call takes flags and touches no memory.
        let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let call = || format!("userfaultfd with flags {flags:#x}");
        let raw = i32::try_from(Errno::result(made).call(call)?).map_err(|_| Errno::EBADF).call(call)?;
        // SAFETY: the kernel just made this descriptor and nobody else knows of it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// One that somebody else made; it is made non-blocking, for all who share it.
    ///
    /// # Errors
    /// `EINVAL` if it is no userfaultfd; else `readlink` or `fcntl`.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, SyscallError> {
        let raw = fd.as_raw_fd();
        if crate::fd::link_target(fd.as_fd())? != "anon_inode:[userfaultfd]" {
            return Err(Errno::EINVAL).call(|| format!("taking descriptor {raw} for a userfaultfd"));
        }
        let bits = fcntl(&fd, FcntlArg::F_GETFL).call(|| format!("fcntl(F_GETFL) of descriptor {raw}"))?;
        let flags = OFlag::from_bits_truncate(bits) | OFlag::O_NONBLOCK;
        fcntl(&fd, FcntlArg::F_SETFL(flags)).call(|| format!("fcntl(F_SETFL) of descriptor {raw}"))?;
        Ok(Self(fd))
    }

    /// A second descriptor of the same.
    ///
    /// # Errors
    /// `fcntl(F_DUPFD_CLOEXEC)`.
    pub fn try_clone(&self) -> Result<Self, SyscallError> {
        let call = || format!("fcntl(F_DUPFD_CLOEXEC) of userfaultfd {}", self.raw());
        self.0.try_clone().call(call).map(Self)
    }

    /// `UFFDIO_API`: agrees on features; gives those that this kernel has. Comes before everything else, and once: it can be
    /// called again, with less, after it failed.
    ///
    /// # Errors
    /// `EINVAL` if this kernel lacks one of them or there was an agreement already, `EPERM` if
    /// [`Features::EVENT_FORK`] is wanted without `CAP_SYS_PTRACE`.
    pub fn api(&self, wanted: Features) -> Result<Features, SyscallError> {
        let mut argument = Api { api: UFFD_API, features: wanted.0, ioctls: 0 };
        // SAFETY: argument is laid out as the kernel's struct uffdio_api.
        unsafe { ioctls::uffdio_api(self.raw(), &raw mut argument) }
            .call(|| format!("UFFDIO_API of userfaultfd {} with features {wanted}", self.raw()))?;
        Ok(Features(argument.features))
    }

    /// `UFFDIO_REGISTER` for write-protection. Nothing is protected by it: see [`Self::write_protect`] and
    /// [`Pagemap::scan`](crate::pagemap::Pagemap::scan).
    ///
    /// # Errors
    /// `EBUSY` if a mapping in the range is registered with another userfaultfd; `EINVAL` if the range reaches the last page
    /// below 2^47 - 4096, or does not begin and end at pages (huge pages for hugetlb), has nothing mapped or a mapping of another kind than anonymous memory, shmem and
    /// hugetlb; `EPERM` if such a mapping is of a file that may not be written; `ESRCH` or `ENOMEM` if the address space is
    /// gone.
    pub fn register_wp(&self, range: AddressRange) -> Result<(), SyscallError> {
        let call = || format!("UFFDIO_REGISTER of {range} for write-protection, userfaultfd {}", self.raw());
        if !range.intersect(NEVER_REGISTERED).is_empty() {
            return Err(Errno::EINVAL).call(call);
        }
        let mut argument = Register { range: range.into(), mode: UFFDIO_REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: argument is laid out as the kernel's struct uffdio_register. A range of this process only gets slower to
        // write to: with asynchronous write-protection no access waits for us.
        unsafe { ioctls::uffdio_register(self.raw(), &raw mut argument) }.call(call)?;
        Ok(())
    }

    /// `UFFDIO_UNREGISTER`: ends tracking of the range, and its protection.
    ///
    /// # Errors
    /// `EINVAL` if the range does not begin and end at pages, has nothing mapped or a mapping of another kind; `ESRCH` or
    /// `ENOMEM` if the address space is gone.
    pub fn unregister(&self, range: AddressRange) -> Result<(), SyscallError> {
        let mut argument = Range::from(range);
        // SAFETY: argument is laid out as the kernel's struct uffdio_range.
        unsafe { ioctls::uffdio_unregister(self.raw(), &raw mut argument) }
            .call(|| format!("UFFDIO_UNREGISTER of {range}, userfaultfd {}", self.raw()))?;
        Ok(())
    }

    /// `UFFDIO_WRITEPROTECT`: protects the whole range, or ends the protection. Pages that do not exist are protected if
    /// [`Features::WP_UNPOPULATED`] was agreed on or the range is of shmem or hugetlb.
    ///
    /// # Errors
    /// `ENOENT` if a part of the range has no mapping registered for write-protection, `EAGAIN` while mappings are being
    /// changed by fork, mremap or the like (try again), `EINVAL`, `ESRCH` if the address space is gone.
    pub fn write_protect(&self, range: AddressRange, protect: bool) -> Result<(), SyscallError> {
        let mode = if protect { UFFDIO_WRITEPROTECT_MODE_WP } else { 0 };
        let mut argument = WriteProtect { range: range.into(), mode };
        // SAFETY: argument is laid out as the kernel's struct uffdio_writeprotect. As for registering.
        unsafe { ioctls::uffdio_writeprotect(self.raw(), &raw mut argument) }
            .call(|| format!("UFFDIO_WRITEPROTECT({mode}) of {range}, userfaultfd {}", self.raw()))?;
        Ok(())
    }

    /// False if the address space that it belongs to is gone. Changes nothing. Only after [`Self::api`].
    #[must_use]
    pub fn lives(&self) -> bool {
        // Nothing is registered there: ENOENT, if there is an address space.
        let refused = self.write_protect(NEVER_REGISTERED, false);
        // A 32-bit process has no such page, and does not say whether it lives.
        refused.is_err_and(|error| !matches!(error.errno, Errno::ESRCH | Errno::EINVAL))
    }

    /// The next event, or `None` if there is none yet. The process that caused it goes on as soon as it has been read.
    ///
    /// # Errors
    /// `read`; `EINVAL` before [`Self::api`]. `EMFILE` if there is no room for the descriptor of a fork: the event stays,
    /// and the process that forked waits.
    pub fn read_event(&self) -> Result<Option<Event>, SyscallError> {
        let call = || format!("read of an event from userfaultfd {}", self.raw());
        let mut message = Message::zeroed();
        let got = match nix::unistd::read(&self.0, bytemuck::bytes_of_mut(&mut message)) {
            Err(Errno::EAGAIN) => return Ok(None),
            other => other.call(call)?,
        };
        if got != size_of::<Message>() {
            return Err(Errno::EIO).call(call);
        }
        let [first, second, third] = message.arg;
        let range = AddressRange { start: first, end: second };
        Ok(Some(match message.event {
            UFFD_EVENT_FORK => {
                // struct { __u32 ufd; } at the beginning of the union.
                let [a, b, c, d, ..] = first.to_ne_bytes();
                let raw = i32::from_ne_bytes([a, b, c, d]);
                // SAFETY: the kernel made this descriptor for us while we read the event; nobody else knows of it.
                let child = unsafe { OwnedFd::from_raw_fd(raw) };
                // The flags are those with which the parent's was created, by whoever did it.
                fcntl(&child, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
                    .call(|| format!("fcntl(F_SETFD) of descriptor {raw}"))?;
                Event::Fork(Self::from_fd(child)?)
            }
            UFFD_EVENT_REMAP => Event::Remap { from: first, to: second, len: third },
            UFFD_EVENT_REMOVE => Event::Remove(range),
            UFFD_EVENT_UNMAP => Event::Unmap(range),
            other => Event::Other(other),
        }))
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

/// What happened to an address space.
#[derive(Debug)]
pub enum Event {
    /// It was forked. This is the child's userfaultfd, with the same features and the same ranges; which process that is, it
    /// does not say.
    Fork(Userfaultfd),
    /// `mremap`. The mapping may still be where it was: `MREMAP_DONTUNMAP` tells it alike, and `mremap` of length 0, which
    /// copies a mapping, is told with that length.
    Remap {
        /// Address at which it began.
        from: u64,
        /// Address at which the new one begins.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// Pages were dropped, by `MADV_DONTNEED` or `MADV_REMOVE`.
    Remove(AddressRange),
    /// The range is not mapped any more.
    Unmap(AddressRange),
    /// Something else; `UFFD_EVENT_*` of `linux/userfaultfd.h`. Never a page fault, if write-protection is asynchronous and
    /// nothing else was registered.
    Other(u8),
}

/// A set of `UFFD_FEATURE_*` of `linux/userfaultfd.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Features(pub u64);

impl Features {
    /// Forks are told, and children are tracked. Needs `CAP_SYS_PTRACE`.
    pub const EVENT_FORK: Self = Self(1 << 1);
    /// `mremap` is told, and what was moved stays tracked.
    pub const EVENT_REMAP: Self = Self(1 << 2);
    /// `MADV_DONTNEED` and `MADV_REMOVE` are told.
    pub const EVENT_REMOVE: Self = Self(1 << 3);
    /// `munmap` is told, after it happened.
    pub const EVENT_UNMAP: Self = Self(1 << 6);
    /// Shmem and hugetlb can be write-protected (5.19).
    pub const WP_HUGETLBFS_SHMEM: Self = Self(1 << 12);
    /// Anonymous pages that do not exist can be write-protected (6.4).
    pub const WP_UNPOPULATED: Self = Self(1 << 13);
    /// The kernel resolves write-protection faults by itself (6.7).
    pub const WP_ASYNC: Self = Self(1 << 15);

    /// True when all of `other` are in it.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The last page of an x86-64 address space: by it is asked whether there is one.
const NEVER_REGISTERED: AddressRange = AddressRange { start: (1 << 47) - 2 * 4096, end: (1 << 47) - 4096 };

// linux/userfaultfd.h
const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const UFFD_EVENT_FORK: u8 = 0x13;
const UFFD_EVENT_REMAP: u8 = 0x14;
const UFFD_EVENT_REMOVE: u8 = 0x15;
const UFFD_EVENT_UNMAP: u8 = 0x16;

/// `struct uffdio_api`
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

impl From<AddressRange> for Range {
    fn from(range: AddressRange) -> Self {
        Self { start: range.start, len: range.len() }
    }
}

/// `struct uffdio_register`
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`
#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// `struct uffd_msg`
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    arg: [u64; 3],
}

const _: () = assert!(size_of::<Api>() == 24);
const _: () = assert!(size_of::<Range>() == 16);
const _: () = assert!(size_of::<Register>() == 32);
const _: () = assert!(size_of::<WriteProtect>() == 24);
const _: () = assert!(size_of::<Message>() == 32);
const _: () = assert!(nix::request_code_readwrite!(0xaa, 0x3f, size_of::<Api>()) == 0xc018_aa3f);
const _: () = assert!(nix::request_code_readwrite!(0xaa, 0x00, size_of::<Register>()) == 0xc020_aa00);
// The header says _IOR, though the kernel reads it.
const _: () = assert!(nix::request_code_read!(0xaa, 0x01, size_of::<Range>()) == 0x8010_aa01);
const _: () = assert!(nix::request_code_readwrite!(0xaa, 0x06, size_of::<WriteProtect>()) == 0xc018_aa06);

#[allow(missing_docs)] // the macros leave no room for it
mod ioctls {
    nix::ioctl_readwrite!(uffdio_api, 0xaa, 0x3f, super::Api);
    nix::ioctl_readwrite!(uffdio_register, 0xaa, 0x00, super::Register);
    nix::ioctl_read!(uffdio_unregister, 0xaa, 0x01, super::Range);
    nix::ioctl_readwrite!(uffdio_writeprotect, 0xaa, 0x06, super::WriteProtect);
}

#[cfg(test)]
mod tests;
