//! Validation of `/proc/PID` file descriptors received from other processes.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::statfs::{PROC_SUPER_MAGIC, fstatfs};

use crate::error::{CallContext, SyscallError};
use crate::fd::{OpenMode, link_target, open_mode};

/// Checks that `fd` is `/proc/PID/name` of some process and is open for reading. The process remains unknown: the pid in the
/// link target belongs to the pid namespace of that /proc mount. Only a file with that name is asked for its file system, which
/// another one than /proc may never answer.
///
/// # Errors
/// `EBADF` if `fd` is not readable, `EINVAL` if it refers to another file; else `fcntl`, `fstatfs` or `readlink`.
pub fn check(fd: BorrowedFd<'_>, name: &str) -> Result<(), SyscallError> {
    let raw = fd.as_raw_fd();
    let call = || format!("check that descriptor {raw} is /proc/PID/{name}");
    if matches!(open_mode(fd)?, OpenMode::Path | OpenMode::WriteOnly) {
        return Err(Errno::EBADF).call(call);
    }
    let link = link_target(fd)?;
    // The directory of an exited process is deleted.
    let path = link.strip_suffix(" (deleted)").unwrap_or(&link);
    if path.rsplit_once('/').is_none_or(|(_, last)| last != name) {
        return Err(Errno::EINVAL).call(call);
    }
    let fs = fstatfs(fd).call(|| format!("fstatfs of descriptor {raw}"))?;
    if fs.filesystem_type() == PROC_SUPER_MAGIC { Ok(()) } else { Err(Errno::EINVAL).call(call) }
}
