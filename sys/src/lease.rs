//! File leases, for one question: does anybody else have this file open or mapped?

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc;

use crate::error::{Call, SyscallError};

/// True if `fd` is the only open description of its file: a write lease is granted to nobody else. Mappings count as
/// open. The lease is given back at once.
///
/// # Errors
/// `fcntl(F_SETLEASE)`: `EINVAL` where the file system has no leases, `EACCES` if the caller does not own the file.
pub fn is_sole_opener(fd: BorrowedFd<'_>) -> Result<bool, SyscallError> {
    let raw = fd.as_raw_fd();
    let call = || format!("fcntl(F_SETLEASE) of descriptor {raw}");
    // SAFETY: F_SETLEASE takes an integer and touches no memory of ours.
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
    use crate::mapping::Mapping;
    use crate::{fd, memfd};

    #[test]
    fn others_descriptors_and_mappings_are_seen() {
        let created = memfd::create("lease", None).unwrap();
        memfd::resize(created.as_fd(), 4096).unwrap();
        let ours = fd::reopen(created.as_fd(), false).unwrap();
        drop(created);
        assert_eq!(is_sole_opener(ours.as_fd()), Ok(true));
        let theirs = fd::reopen(ours.as_fd(), false).unwrap();
        assert_eq!(is_sole_opener(ours.as_fd()), Ok(false));
        let mapping = Mapping::shared(&theirs, 0, 4096, false).unwrap();
        drop(theirs);
        assert_eq!(is_sole_opener(ours.as_fd()), Ok(false), "a mapping is enough");
        drop(mapping);
        assert_eq!(is_sole_opener(ours.as_fd()), Ok(true));
    }
}
