//! Descriptors: how they were opened, and opening the same file anew.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl, open};
use nix::sys::stat::{FileStat, Mode, fchmod, fstat};
use nix::unistd::{Gid, Uid, fchown};

use crate::error::{Call, SyscallError};

/// How a descriptor was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// `O_PATH`: it stands for a file and cannot be used for one.
    Path,
    /// `O_RDONLY`
    ReadOnly,
    /// `O_WRONLY`
    WriteOnly,
    /// `O_RDWR`
    ReadWrite,
}

/// How `fd` was opened.
///
/// # Errors
/// `fcntl(F_GETFL)`.
pub fn open_mode(fd: BorrowedFd<'_>) -> Result<OpenMode, SyscallError> {
    let bits =
        fcntl(fd, FcntlArg::F_GETFL).call(|| format!("fcntl(F_GETFL) of descriptor {}", fd.as_raw_fd()))?;
    let flags = OFlag::from_bits_truncate(bits);
    if flags.contains(OFlag::O_PATH) {
        return Ok(OpenMode::Path);
    }
    Ok(match flags & OFlag::O_ACCMODE {
        OFlag::O_RDONLY => OpenMode::ReadOnly,
        OFlag::O_WRONLY => OpenMode::WriteOnly,
        _ => OpenMode::ReadWrite,
    })
}

/// Opens the file of `fd` anew, through `/proc/self/fd`: a description of its own, which reports writes to inotify
/// where the one of `memfd_create` does not.
///
/// # Errors
/// `open`: `EACCES` if the inode's mode forbids it, `EPERM` if its seals do.
pub fn reopen(fd: BorrowedFd<'_>, writable: bool) -> Result<OwnedFd, SyscallError> {
    open_anew(fd, if writable { OFlag::O_RDWR } else { OFlag::O_RDONLY })
}

/// Opens the file of `fd` anew for the service's own looks: read-only, and `O_NOATIME` where the caller owns the
/// inode, so that mapping it leaves no trace in its access time.
///
/// # Errors
/// `open`.
pub fn reopen_for_probe(fd: BorrowedFd<'_>) -> Result<OwnedFd, SyscallError> {
    match open_anew(fd, OFlag::O_RDONLY | OFlag::O_NOATIME) {
        Err(SyscallError { errno: Errno::EPERM, .. }) => open_anew(fd, OFlag::O_RDONLY),
        other => other,
    }
}

fn open_anew(fd: BorrowedFd<'_>, flags: OFlag) -> Result<OwnedFd, SyscallError> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    open(path.as_str(), flags | OFlag::O_CLOEXEC, Mode::empty())
        .call(|| format!("open of {path} with {flags:?}"))
}

/// `fstat`.
///
/// # Errors
/// `fstat`.
pub fn stat(fd: impl AsFd) -> Result<FileStat, SyscallError> {
    fstat(&fd).call(|| format!("fstat of descriptor {}", fd.as_fd().as_raw_fd()))
}

/// Makes the caller's effective user the inode's owner and takes every right from everybody else, so that whoever
/// may open `/proc/PID/fd` cannot open the file anew.
///
/// # Errors
/// `fchown` or `fchmod`: `EPERM` if the caller neither owns the inode nor may change owners.
pub fn take_inode(fd: BorrowedFd<'_>) -> Result<(), SyscallError> {
    let raw = fd.as_raw_fd();
    if stat(fd)?.st_uid != Uid::effective().as_raw() {
        fchown(fd, Some(Uid::effective()), Some(Gid::effective()))
            .call(|| format!("fchown of descriptor {raw}"))?;
    }
    fchmod(fd, Mode::S_IRUSR | Mode::S_IWUSR).call(|| format!("fchmod of descriptor {raw} to 0600"))
}

/// What `/proc/self/fd` shows for it, such as `/memfd:name (deleted)`.
///
/// # Errors
/// `readlink`.
pub fn link_target(fd: BorrowedFd<'_>) -> Result<String, SyscallError> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = nix::fcntl::readlink(path.as_str()).call(|| format!("readlink of {path}"))?;
    Ok(target.to_string_lossy().into_owned())
}

/// A descriptor of our own for one that this process was started with.
///
/// # Errors
/// `fcntl(F_DUPFD_CLOEXEC)`: `EBADF` if there is none of that number.
pub fn duplicate_inherited(number: RawFd) -> Result<OwnedFd, SyscallError> {
    // SAFETY: F_DUPFD_CLOEXEC takes integers, touches no memory and fails for a number that is no descriptor.
    let duplicate = unsafe { nix::libc::fcntl(number, nix::libc::F_DUPFD_CLOEXEC, 3) };
    let duplicate =
        Errno::result(duplicate).call(|| format!("fcntl(F_DUPFD_CLOEXEC) of descriptor {number}"))?;
    // SAFETY: fcntl just made this descriptor and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(duplicate) })
}

/// Makes `fd` the descriptor `number`, kept over `exec`, for a program that is to be run in our place; what had that
/// number before is closed.
///
/// # Errors
/// `dup2` or `fcntl(F_SETFD)`.
pub fn place_for_exec(fd: OwnedFd, number: RawFd) -> Result<RawFd, SyscallError> {
    let call = || format!("dup2 of descriptor {} to {number}", fd.as_raw_fd());
    if fd.as_raw_fd() == number {
        fcntl(&fd, FcntlArg::F_SETFD(FdFlag::empty())).call(call)?;
        return Ok(fd.into_raw_fd());
    }
    // SAFETY: dup2 takes integers and touches no memory. Should a descriptor of that number be in use here, its owner
    // is about to be replaced by exec with all the rest of this process.
    let placed = unsafe { nix::libc::dup2(fd.as_raw_fd(), number) };
    Errno::result(placed).call(call)
}
