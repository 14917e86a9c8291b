//! Owner, group and mode of a memfd's inode: taking them over from another process and restoring them.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{Gid, Uid, fchown};

use crate::error::{CallContext, SyscallError};
use crate::{fd, memfd};

/// `F_SEAL_EXEC` of `linux/fcntl.h`: the executable bits cannot change.
const F_SEAL_EXEC: u32 = 0x20;

/// Owner, group and permission bits of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    uid: Uid,
    gid: Gid,
    mode: Mode,
}

impl Ownership {
    /// The inverse of [`Self::parts`].
    #[must_use]
    pub const fn new(uid: u32, gid: u32, mode: u32) -> Self {
        let mode = Mode::from_bits_truncate(mode & 0o777);
        Self { uid: Uid::from_raw(uid), gid: Gid::from_raw(gid), mode }
    }

    /// User id, group id and permission bits.
    #[must_use]
    pub const fn parts(self) -> (u32, u32, u32) {
        (self.uid.as_raw(), self.gid.as_raw(), self.mode.bits())
    }
}

/// Makes the caller's effective user the owner of the inode and sets its mode to 0600, so that no other user can reopen the
/// file through `/proc/PID/fd`. `F_SEAL_EXEC` keeps the executable bits; without it they are cleared too. Returns the
/// ownership before the call.
///
/// # Errors
/// `fchown` or `fchmod`: `EPERM` if the caller neither owns the inode nor has `CAP_CHOWN`. The inode is unchanged then.
pub fn take(fd: BorrowedFd<'_>) -> Result<Ownership, SyscallError> {
    let (raw, stat) = (fd.as_raw_fd(), fd::stat(fd)?);
    let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
    if uid != Uid::effective() {
        fchown(fd, Some(Uid::effective()), Some(Gid::effective()))
            .call(|| format!("fchown of descriptor {raw}"))?;
    }
    // fchown may have waited for the lock of the inode, and until then the owner could change the mode.
    let mode = Mode::from_bits_truncate(fd::stat(fd)?.st_mode);
    let permissions = mode & (Mode::S_IRWXU | Mode::S_IRWXG | Mode::S_IRWXO);
    let before = Ownership { uid, gid, mode: permissions };
    let executable = Mode::S_IXUSR | Mode::S_IXGRP | Mode::S_IXOTH;
    let sealed = memfd::seals(fd).unwrap_or(0) & F_SEAL_EXEC != 0;
    let immutable = if sealed { mode & executable } else { Mode::empty() };
    let private = Mode::S_IRUSR | Mode::S_IWUSR | immutable;
    let changed = fchmod(fd, private).call(|| format!("fchmod of descriptor {raw} to {:#o}", private.bits()));
    if changed.is_err() {
        // The caller gets the error of fchmod; a second one would add nothing.
        let _ = restore(fd, before);
    }
    changed.map(|()| before)
}

/// Undoes [`take`].
///
/// # Errors
/// `fchmod` or `fchown`.
pub fn restore(fd: BorrowedFd<'_>, before: Ownership) -> Result<(), SyscallError> {
    let (raw, Ownership { uid, gid, mode }) = (fd.as_raw_fd(), before);
    // The mode first: after fchown the caller may not be allowed to change it.
    fchmod(fd, mode).call(|| format!("fchmod of descriptor {raw} to {:#o}", mode.bits()))?;
    if uid != Uid::effective() {
        fchown(fd, Some(uid), Some(gid)).call(|| format!("fchown of descriptor {raw} to user {uid}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use nix::errno::Errno;

    use super::*;

    fn mode_of(fd: &OwnedFd) -> u32 {
        fd::stat(fd).unwrap().st_mode & 0o7777
    }

    #[test]
    fn taken_inode_is_private_to_its_owner_and_can_be_restored() {
        let file = memfd::create("taken", None).unwrap();
        fchmod(&file, Mode::from_bits_truncate(0o754)).unwrap();
        let before = take(file.as_fd()).unwrap();
        assert_eq!(mode_of(&file), 0o600);
        restore(file.as_fd(), before).unwrap();
        assert_eq!(mode_of(&file), 0o754);
    }

    #[test]
    fn exec_seal_keeps_the_executable_bits() {
        let file = memfd::create("sealed", None).unwrap();
        fchmod(&file, Mode::from_bits_truncate(0o755)).unwrap();
        if memfd::add_seals(file.as_fd(), F_SEAL_EXEC).is_err() {
            eprintln!("not run: this kernel lacks F_SEAL_EXEC");
            return;
        }
        take(file.as_fd()).unwrap();
        assert_eq!(mode_of(&file), 0o711);
        // With F_SEAL_EXEC the kernel also adds the seals against writing; open(O_RDWR) still succeeds.
        let reopened = fd::reopen(file.as_fd(), true).unwrap();
        assert_eq!(nix::unistd::write(&reopened, b"x"), Err(Errno::EPERM));
    }
}
