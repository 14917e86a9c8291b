//! Descriptors: how they were opened, and opening the same file anew.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl, open};
use nix::sys::stat::{FileStat, Mode, fchmod, fstat};
use nix::sys::uio::{pread, pwrite};
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
/// `open`: `EACCES` if the inode's mode forbids it. Seals do not stand in the way; they forbid the writes.
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

/// Whether the description takes `O_DIRECT`, found out by setting it for a moment.
///
/// Of shmem this tells descriptors that were opened, which take it (Linux 6.6), from those that `memfd_create` made itself,
/// which do not: nothing else does, and only the former report writes to inotify. A change of its flags that somebody else
/// makes in that moment is lost.
///
/// # Errors
/// `fcntl`.
pub fn takes_direct_io(fd: BorrowedFd<'_>) -> Result<bool, SyscallError> {
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

/// `fstat`.
///
/// # Errors
/// `fstat`.
pub fn stat(fd: impl AsFd) -> Result<FileStat, SyscallError> {
    fstat(&fd).call(|| format!("fstat of descriptor {}", fd.as_fd().as_raw_fd()))
}

/// When the inode was last changed, by the kernel's clock: seconds and nanoseconds. The clock stands still between ticks
/// before Linux 6.13; since then two changes differ if somebody looked in between.
///
/// # Errors
/// `fstat`.
pub fn change_time(fd: impl AsFd) -> Result<(i64, i64), SyscallError> {
    let stat = stat(fd)?;
    Ok((stat.st_ctime, stat.st_ctime_nsec))
}

/// An inode's owner, group and mode, as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    uid: Uid,
    gid: Gid,
    mode: Mode,
}

impl Ownership {
    /// From what [`Self::parts`] gave.
    #[must_use]
    pub const fn new(uid: u32, gid: u32, mode: u32) -> Self {
        let mode = Mode::from_bits_truncate(mode & 0o777);
        Self { uid: Uid::from_raw(uid), gid: Gid::from_raw(gid), mode }
    }

    /// User, group and permission bits.
    #[must_use]
    pub const fn parts(self) -> (u32, u32, u32) {
        (self.uid.as_raw(), self.gid.as_raw(), self.mode.bits())
    }
}

/// Makes the caller's effective user the inode's owner and takes reading and writing from everybody else, so that whoever
/// may open `/proc/PID/fd` cannot open the file anew. Executable bits go too, unless `F_SEAL_EXEC` keeps them.
///
/// # Errors
/// `fchown` or `fchmod`: `EPERM` if the caller neither owns the inode nor may change owners. The inode is as it was then.
pub fn take_inode(fd: BorrowedFd<'_>) -> Result<Ownership, SyscallError> {
    let (raw, stat) = (fd.as_raw_fd(), stat(fd)?);
    let mode = Mode::from_bits_truncate(stat.st_mode);
    let permissions = mode & (Mode::S_IRWXU | Mode::S_IRWXG | Mode::S_IRWXO);
    let before =
        Ownership { uid: Uid::from_raw(stat.st_uid), gid: Gid::from_raw(stat.st_gid), mode: permissions };
    if before.uid != Uid::effective() {
        fchown(fd, Some(Uid::effective()), Some(Gid::effective()))
            .call(|| format!("fchown of descriptor {raw}"))?;
    }
    let executable = Mode::S_IXUSR | Mode::S_IXGRP | Mode::S_IXOTH;
    let sealed = crate::memfd::seals(fd).unwrap_or(0) & F_SEAL_EXEC != 0;
    let kept = if sealed { mode & executable } else { Mode::empty() };
    let ours = Mode::S_IRUSR | Mode::S_IWUSR | kept;
    let taken = fchmod(fd, ours).call(|| format!("fchmod of descriptor {raw} to {:#o}", ours.bits()));
    if taken.is_err() {
        // There is nobody to tell of a second failure.
        let _ = give_back_inode(fd, before);
    }
    taken.map(|()| before)
}

/// Undoes [`take_inode`].
///
/// # Errors
/// `fchmod` or `fchown`.
pub fn give_back_inode(fd: BorrowedFd<'_>, before: Ownership) -> Result<(), SyscallError> {
    let (raw, Ownership { uid, gid, mode }) = (fd.as_raw_fd(), before);
    // The mode first: it is the owner's to set.
    fchmod(fd, mode).call(|| format!("fchmod of descriptor {raw} to {:#o}", mode.bits()))?;
    if uid != Uid::effective() {
        fchown(fd, Some(uid), Some(gid)).call(|| format!("fchown of descriptor {raw} to user {uid}"))?;
    }
    Ok(())
}

/// `linux/fcntl.h`: the executable bits cannot change.
const F_SEAL_EXEC: u32 = 0x20;

/// A second descriptor of the same description, close-on-exec.
///
/// # Errors
/// `fcntl(F_DUPFD_CLOEXEC)`.
pub fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd, SyscallError> {
    fd.try_clone_to_owned().call(|| format!("fcntl(F_DUPFD_CLOEXEC) of descriptor {}", fd.as_raw_fd()))
}

/// Reads bytes from `offset` on, as many as fit into `out`. Gives their number, which is less only at the end of the file.
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

/// Writes all bytes from `offset` on.
///
/// # Errors
/// `pwrite`; `EIO` also if it writes nothing.
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

/// Makes a descriptor that this process was started with our own, close-on-exec; that of the number it came with is closed.
///
/// # Errors
/// `fcntl(F_DUPFD_CLOEXEC)`: `EBADF` if there is none of that number.
pub fn take_inherited(number: RawFd) -> Result<OwnedFd, SyscallError> {
    let own = duplicate_inherited(number)?;
    // SAFETY: whoever started us passed it under this number, and what is passed so is the caller's to take: nothing else in this
    // process has it.
    drop(unsafe { OwnedFd::from_raw_fd(number) });
    Ok(own)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;

    fn mode_of(fd: &OwnedFd) -> u32 {
        stat(fd).unwrap().st_mode & 0o7777
    }

    #[test]
    fn inode_is_for_its_owner_alone_and_can_be_given_back() {
        let file = memfd::create("taken", None).unwrap();
        fchmod(&file, Mode::from_bits_truncate(0o754)).unwrap();
        let before = take_inode(file.as_fd()).unwrap();
        assert_eq!(mode_of(&file), 0o600);
        give_back_inode(file.as_fd(), before).unwrap();
        assert_eq!(mode_of(&file), 0o754);
    }

    #[test]
    fn opened_memfd_takes_direct_io_and_its_flags_stay() {
        let made = memfd::create("made", None).unwrap();
        let opened = reopen(made.as_fd(), true).unwrap();
        assert!(!takes_direct_io(made.as_fd()).unwrap());
        let before = fcntl(&opened, FcntlArg::F_GETFL).unwrap();
        if !takes_direct_io(opened.as_fd()).unwrap() {
            eprintln!("not run: shmem of this kernel takes no O_DIRECT");
        }
        assert_eq!(fcntl(&opened, FcntlArg::F_GETFL).unwrap(), before);
    }

    #[test]
    fn executable_bits_stay_where_a_seal_keeps_them() {
        let file = memfd::create("sealed", None).unwrap();
        fchmod(&file, Mode::from_bits_truncate(0o755)).unwrap();
        if memfd::add_seals(file.as_fd(), F_SEAL_EXEC).is_err() {
            eprintln!("not run: this kernel lacks F_SEAL_EXEC");
            return;
        }
        take_inode(file.as_fd()).unwrap();
        assert_eq!(mode_of(&file), 0o711);
        // The kernel has added the seals against writing by itself; opening it anew does not mind them.
        let again = reopen(file.as_fd(), true).unwrap();
        assert_eq!(nix::unistd::write(&again, b"x"), Err(Errno::EPERM));
    }
}
