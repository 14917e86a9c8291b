//! Descriptors and the process id, read without allocation so that interposed functions can call it in a signal handler.

use std::os::fd::{FromRawFd as _, OwnedFd};

use nix::libc;

/// Process id of the calling process.
pub fn own_pid() -> i32 {
    // SAFETY: getpid accesses no memory and cannot fail.
    unsafe { libc::getpid() }
}

/// `fstat` of a descriptor; `None` on error.
pub fn stat(fd: i32) -> Option<libc::stat> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: on success fstat initializes the struct.
    let result = unsafe { libc::fstat(fd, stat.as_mut_ptr()) };
    // SAFETY: fstat succeeded, so the struct is initialized.
    (result == 0).then(|| unsafe { stat.assume_init() })
}

/// `st_dev` and `st_ino` of a descriptor.
pub fn device_and_inode(fd: i32) -> Option<(u64, u64)> {
    stat(fd).map(|stat| (stat.st_dev, stat.st_ino))
}

/// `st_ino` of a descriptor.
pub fn inode_of(fd: i32) -> Option<u64> {
    stat(fd).map(|stat| stat.st_ino)
}

/// Checks whether a descriptor can be a memfd: a regular file without a link. Needs no lock.
pub fn may_be_memfd(fd: i32) -> bool {
    stat(fd).is_some_and(|stat| stat.st_nlink == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFREG)
}

/// File status flags (`F_GETFL`); negative on error.
pub fn status_flags(fd: i32) -> libc::c_int {
    // SAFETY: F_GETFL takes no argument and accesses no memory.
    unsafe { libc::fcntl(fd, libc::F_GETFL) }
}

/// Duplicates a descriptor, close-on-exec, to a number above the standard streams.
pub fn duplicate(fd: i32) -> Option<OwnedFd> {
    // SAFETY: F_DUPFD_CLOEXEC takes integers, accesses no memory and fails if the descriptor is not open.
    let duplicate = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    // SAFETY: fcntl just returned this descriptor, so nothing else owns it.
    (duplicate >= 0).then(|| unsafe { OwnedFd::from_raw_fd(duplicate) })
}

/// Reads the target of `/proc/self/fd/N` into `buffer`; `None` if the buffer is too small.
pub fn link_target(fd: i32, buffer: &mut [u8]) -> Option<&[u8]> {
    use std::io::Write as _;
    let mut path = [0_u8; 32];
    write!(&mut path[..31], "/proc/self/fd/{fd}").ok()?;
    // SAFETY: the last byte of the path is never written, so it stays zero-terminated; readlink writes at most the length of
    // the buffer.
    let len = unsafe { libc::readlink(path.as_ptr().cast(), buffer.as_mut_ptr().cast(), buffer.len()) };
    let len = usize::try_from(len).ok().filter(|len| *len < buffer.len())?;
    Some(&buffer[..len])
}
