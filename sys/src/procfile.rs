//! Descriptors of files of `/proc` that others opened.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::statfs::{PROC_SUPER_MAGIC, fstatfs};

use crate::error::{Call, SyscallError};
use crate::fd::{OpenMode, link_target, open_mode};

/// Checks that `fd` is `/proc/PID/name` of some process, opened for reading. Which process it is, it does not tell: the
/// name that a link shows is that of the pid namespace that the mount of /proc belongs to.
///
/// # Errors
/// `EBADF` if it cannot be read through, `EINVAL` if it is another file; else `fcntl`, `fstatfs` or `readlink`.
pub(crate) fn check(fd: BorrowedFd<'_>, name: &str) -> Result<(), SyscallError> {
    let raw = fd.as_raw_fd();
    let call = || format!("taking descriptor {raw} for a /proc/PID/{name}");
    if matches!(open_mode(fd)?, OpenMode::Path | OpenMode::WriteOnly) {
        return Err(Errno::EBADF).call(call);
    }
    let fs = fstatfs(fd).call(|| format!("fstatfs of descriptor {raw}"))?;
    if fs.filesystem_type() != PROC_SUPER_MAGIC {
        return Err(Errno::EINVAL).call(call);
    }
    let link = link_target(fd)?;
    // A process that is gone takes its folder along.
    let path = link.strip_suffix(" (deleted)").unwrap_or(&link);
    let fits = path.rsplit_once('/').is_some_and(|(_, last)| last == name);
    if fits { Ok(()) } else { Err(Errno::EINVAL).call(call) }
}
