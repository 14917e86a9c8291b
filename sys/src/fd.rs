//! File descriptors: access mode, reopening, duplication, positioned reads and writes.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl, open};
use nix::libc;
use nix::sys::stat::{FileStat, Mode, fstat};
use nix::sys::uio::{pread, pwrite};

use crate::error::{CallContext, SyscallError};

/// Access mode of an open file description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// `O_PATH`: refers to a file, but allows neither reading nor writing.
    Path,
    /// `O_RDONLY`
    ReadOnly,
    /// `O_WRONLY`
    WriteOnly,
    /// `O_RDWR`
    ReadWrite,
}

/// Reads the access mode of `fd`.
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

/// Reopens the file of `fd` through `/proc/self/fd`. Writes through the new open file description raise `IN_MODIFY`; writes
/// through the description that `memfd_create` made do not.
///
/// # Errors
/// `open`: `EACCES` if the inode's mode forbids it, `EAGAIN` if the file has a lease, whose holder an open would wait for. Seals do
/// not prevent opening; they make writes fail.
pub fn reopen(fd: BorrowedFd<'_>, writable: bool) -> Result<OwnedFd, SyscallError> {
    reopen_with(fd, if writable { OFlag::O_RDWR } else { OFlag::O_RDONLY })
}

/// Reopens the file of `fd` read-only for a probe. Sets `O_NOATIME` if the caller owns the inode, so that mapping the file does
/// not change its access time.
///
/// # Errors
/// `open`.
pub fn reopen_for_probe(fd: BorrowedFd<'_>) -> Result<OwnedFd, SyscallError> {
    match reopen_with(fd, OFlag::O_RDONLY | OFlag::O_NOATIME) {
        Err(SyscallError { errno: Errno::EPERM, .. }) => reopen_with(fd, OFlag::O_RDONLY),
        other => other,
    }
}

fn reopen_with(fd: BorrowedFd<'_>, flags: OFlag) -> Result<OwnedFd, SyscallError> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let call = || format!("open of {path} with {flags:?}");
    // Any owner of a file may hold a lease, and an open waits for it, by default 45 s, unless it is non-blocking.
    let all = flags | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    let reopened = open(path.as_str(), all, Mode::empty()).call(call)?;
    fcntl(&reopened, FcntlArg::F_SETFL(flags)).call(call)?;
    Ok(reopened)
}

/// Checks whether the open file description accepts `O_DIRECT`: sets the flag and clears it again.
///
/// On shmem the result distinguishes descriptors made by `open`, which accept it (Linux 6.6) and raise inotify events, from
/// descriptors made by `memfd_create`, which do neither. No other call distinguishes them. If another thread or process
/// changes the file status flags between the two calls, its change is lost.
///
/// # Errors
/// `fcntl`.
pub fn supports_direct_io(fd: BorrowedFd<'_>) -> Result<bool, SyscallError> {
    let raw = fd.as_raw_fd();
    let bits = fcntl(fd, FcntlArg::F_GETFL).call(|| format!("fcntl(F_GETFL) of descriptor {raw}"))?;
    let flags = OFlag::from_bits_retain(bits);
    if flags.contains(OFlag::O_DIRECT) {
        return Ok(true);
    }
    match fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT)) {
        Err(Errno::EINVAL) => Ok(false),
        Err(errno) => Err(errno).call(|| format!("fcntl(F_SETFL) of descriptor {raw} with O_DIRECT")),
        Ok(_) => {
            fcntl(fd, FcntlArg::F_SETFL(flags)).call(|| format!("fcntl(F_SETFL) of descriptor {raw}"))?;
            Ok(true)
        }
    }
}

/// `fstat(2)`.
///
/// # Errors
/// `fstat`.
pub fn stat(fd: impl AsFd) -> Result<FileStat, SyscallError> {
    fstat(&fd).call(|| format!("fstat of descriptor {}", fd.as_fd().as_raw_fd()))
}

/// True if the file has a POSIX access ACL (acl(5)), so that the group bits of its mode are those of the ACL's mask.
///
/// # Errors
/// `fgetxattr`: `EBADF` if `fd` was opened with `O_PATH`.
pub fn has_access_acl(fd: BorrowedFd<'_>) -> Result<bool, SyscallError> {
    match rustix::fs::fgetxattr_query(fd, "system.posix_acl_access") {
        Ok(length) => Ok(length > 0),
        Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(Errno::from_raw(error.raw_os_error()))
            .call(|| format!("fgetxattr(system.posix_acl_access) of descriptor {}", fd.as_raw_fd())),
    }
}

/// Duplicates `fd`, close-on-exec.
///
/// # Errors
/// `fcntl(F_DUPFD_CLOEXEC)`.
pub fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd, SyscallError> {
    fd.try_clone_to_owned().call(|| format!("fcntl(F_DUPFD_CLOEXEC) of descriptor {}", fd.as_raw_fd()))
}

/// Fills `out` with the bytes at `offset`. Returns their number, which is smaller than `out` only at the end of the file.
///
/// # Errors
/// `pread`.
pub fn read_at(fd: BorrowedFd<'_>, offset: u64, out: &mut [u8]) -> Result<usize, SyscallError> {
    let wanted = out.len();
    let mut done = 0;
    while done < wanted {
        let at = offset.saturating_add(u64::try_from(done).unwrap_or(u64::MAX));
        let call = || format!("pread of {wanted} bytes at {offset} of descriptor {}", fd.as_raw_fd());
        let from = i64::try_from(at).map_err(|_| Errno::EOVERFLOW).call(call)?;
        match pread(fd, &mut out[done..], from) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno).call(call),
        }
    }
    Ok(done)
}

/// Writes all of `bytes` at `offset`.
///
/// # Errors
/// `pwrite`; `EIO` also if it writes 0 bytes.
pub fn write_at(fd: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> Result<(), SyscallError> {
    let wanted = bytes.len();
    let mut done = 0;
    while done < wanted {
        let at = offset.saturating_add(u64::try_from(done).unwrap_or(u64::MAX));
        let call = || format!("pwrite of {wanted} bytes at {offset} of descriptor {}", fd.as_raw_fd());
        let to = i64::try_from(at).map_err(|_| Errno::EOVERFLOW).call(call)?;
        match pwrite(fd, &bytes[done..], to) {
            Ok(0) => return Err(Errno::EIO).call(call),
            Ok(written) => done += written,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno).call(call),
        }
    }
    Ok(())
}

/// Locks the whole file for writing by a record lock of this process, which ends when the process closes any descriptor of the file.
/// Returns `false` if another process has locked it.
///
/// # Errors
/// `fcntl(F_SETLK)`.
pub fn try_lock(file: impl AsFd) -> Result<bool, SyscallError> {
    let call = || format!("fcntl(F_SETLK) of descriptor {}", file.as_fd().as_raw_fd());
    let short = |constant: libc::c_int| libc::c_short::try_from(constant).map_err(|_| Errno::EINVAL);
    let lock = libc::flock {
        l_type: short(libc::F_WRLCK).call(call)?,
        l_whence: short(libc::SEEK_SET).call(call)?,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    match fcntl(&file, FcntlArg::F_SETLK(&lock)) {
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        other => other.call(call).map(|_| true),
    }
}

/// Reads the target of `/proc/self/fd/N`, such as `/memfd:name (deleted)`.
///
/// # Errors
/// `readlink`.
pub fn link_target(fd: BorrowedFd<'_>) -> Result<String, SyscallError> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = nix::fcntl::readlink(path.as_str()).call(|| format!("readlink of {path}"))?;
    Ok(target.to_string_lossy().into_owned())
}

/// Duplicates descriptor `number`, which this process inherited, close-on-exec.
///
/// # Errors
/// `fcntl(F_DUPFD_CLOEXEC)`: `EBADF` if `number` is not open.
pub fn duplicate_inherited(number: RawFd) -> Result<OwnedFd, SyscallError> {
    // SAFETY: F_DUPFD_CLOEXEC takes integers, accesses no memory and fails if the descriptor is not open.
    let duplicate = unsafe { nix::libc::fcntl(number, nix::libc::F_DUPFD_CLOEXEC, 3) };
    let duplicate =
        Errno::result(duplicate).call(|| format!("fcntl(F_DUPFD_CLOEXEC) of descriptor {number}"))?;
    // SAFETY: fcntl just returned this descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(duplicate) })
}

/// Duplicates `fd` to the lowest free number that is at least `min_number`, close-on-exec.
///
/// # Errors
/// `fcntl(F_DUPFD_CLOEXEC)`: `EINVAL` if `min_number` exceeds `RLIMIT_NOFILE`.
pub fn duplicate_above(fd: BorrowedFd<'_>, min_number: RawFd) -> Result<OwnedFd, SyscallError> {
    let raw = fd.as_raw_fd();
    let call = || format!("fcntl(F_DUPFD_CLOEXEC, {min_number}) of descriptor {raw}");
    let number = fcntl(fd, FcntlArg::F_DUPFD_CLOEXEC(min_number)).call(call)?;
    // SAFETY: fcntl just returned this descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Takes ownership of descriptor `number`, which this process inherited: duplicates it close-on-exec and closes `number`.
///
/// # Errors
/// `fcntl(F_DUPFD_CLOEXEC)`: `EBADF` if `number` is not open.
pub fn take_inherited(number: RawFd) -> Result<OwnedFd, SyscallError> {
    let own = duplicate_inherited(number)?;
    // SAFETY: the parent process passed this number for the caller to take; nothing else in this process owns it.
    drop(unsafe { OwnedFd::from_raw_fd(number) });
    Ok(own)
}

/// Moves `fd` to descriptor `number` without close-on-exec, so that the next `exec` inherits it. A descriptor that is open
/// under `number` is closed.
///
/// # Errors
/// `dup2` or `fcntl(F_SETFD)`.
pub fn dup2_inheritable(fd: OwnedFd, number: RawFd) -> Result<RawFd, SyscallError> {
    let call = || format!("dup2 of descriptor {} to {number}", fd.as_raw_fd());
    if fd.as_raw_fd() == number {
        fcntl(&fd, FcntlArg::F_SETFD(FdFlag::empty())).call(call)?;
        return Ok(fd.into_raw_fd());
    }
    // SAFETY: dup2 takes integers and accesses no memory. If `number` is open, the exec that follows replaces its owner
    // together with the rest of this process.
    let placed = unsafe { nix::libc::dup2(fd.as_raw_fd(), number) };
    Errno::result(placed).call(call)
}

/// `ioctl(FIONREAD)`: bytes that are queued, or a multiple of queued events.
///
/// # Errors
/// `ioctl`.
pub(crate) fn queued_bytes(fd: BorrowedFd<'_>) -> Result<usize, SyscallError> {
    nix::ioctl_read_bad!(fionread, nix::libc::FIONREAD, nix::libc::c_int);
    let mut bytes = 0;
    // SAFETY: the kernel writes one int.
    let result = unsafe { fionread(fd.as_raw_fd(), &raw mut bytes) };
    let call = || format!("ioctl(FIONREAD) of descriptor {}", fd.as_raw_fd());
    result.call(call)?;
    // The kernel counts in an int, too.
    usize::try_from(bytes).map_err(|_| Errno::EOVERFLOW).call(call)
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[test]
    fn only_a_reopened_memfd_accepts_direct_io_and_its_flags_are_restored() {
        let created = memfd_create("created", MFdFlags::MFD_CLOEXEC).unwrap();
        let opened = reopen(created.as_fd(), true).unwrap();
        assert!(!supports_direct_io(created.as_fd()).unwrap());
        let before = fcntl(&opened, FcntlArg::F_GETFL).unwrap();
        if !supports_direct_io(opened.as_fd()).unwrap() {
            eprintln!("not run: shmem of this kernel does not support O_DIRECT");
        }
        assert_eq!(fcntl(&opened, FcntlArg::F_GETFL).unwrap(), before);
    }
}
