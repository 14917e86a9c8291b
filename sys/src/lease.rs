//! File leases, used to check whether another open file description or a mapping of a file exists.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc;

use crate::error::{CallContext, SyscallError};

/// Checks whether `fd` is the only reference to its file: the kernel grants a write lease only if no other open file description
/// and no mapping exists. The lease is released at once.
///
/// # Errors
/// `fcntl(F_SETLEASE)`: `EINVAL` if the file system does not support leases, `EACCES` if the caller does not own the file.
pub fn is_sole_opener(fd: BorrowedFd<'_>) -> Result<bool, SyscallError> {
    let raw = fd.as_raw_fd();
    let call = || format!("fcntl(F_SETLEASE) of descriptor {raw}");
    // SAFETY: F_SETLEASE takes an integer and accesses no memory.
    let granted = unsafe { libc::fcntl(raw, libc::F_SETLEASE, libc::F_WRLCK) };
    match Errno::result(granted) {
        Err(Errno::EAGAIN) => return Ok(false),
        other => other.call(call)?,
    };
    // SAFETY: as above.
    let returned = unsafe { libc::fcntl(raw, libc::F_SETLEASE, libc::F_UNLCK) };
    Errno::result(returned).call(call)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::mapping::SharedMapping;
    use crate::{fd, memfd};

    #[test]
    fn other_descriptor_or_mapping_denies_sole_ownership() {
        let created = memfd::create("lease", None).unwrap();
        memfd::resize(created.as_fd(), 4096).unwrap();
        let tested = fd::reopen(created.as_fd(), false).unwrap();
        drop(created);
        assert_eq!(is_sole_opener(tested.as_fd()), Ok(true));
        let other = fd::reopen(tested.as_fd(), false).unwrap();
        assert_eq!(is_sole_opener(tested.as_fd()), Ok(false));
        let mapping = SharedMapping::shared(&other, 0, 4096, false).unwrap();
        drop(other);
        assert_eq!(is_sole_opener(tested.as_fd()), Ok(false), "a mapping counts as a reference");
        drop(mapping);
        assert_eq!(is_sole_opener(tested.as_fd()), Ok(true));
    }
}
