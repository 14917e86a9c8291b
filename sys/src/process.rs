//! What a program that has just begun sets up for itself.

use std::ffi::CStr;
use std::os::fd::RawFd;

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};

use crate::error::{Call, SyscallError};

/// Lets every signal through to this thread and ignores these.
///
/// # Errors
/// `pthread_sigmask`, or `signal`: `EINVAL` for those that cannot be ignored.
pub fn ignore_signals(ignored: &[Signal]) -> Result<(), SyscallError> {
    SigSet::empty().thread_set_mask().call(|| "pthread_sigmask to an empty set".to_owned())?;
    for one in ignored {
        // SAFETY: SIG_IGN runs no code of ours, and whatever handler was there is of no use to who asks for this.
        unsafe { signal(*one, SigHandler::SigIgn) }.call(|| format!("signal({one}, SIG_IGN)"))?;
    }
    Ok(())
}

/// What `ps` calls this thread; for the first one, the process. The kernel keeps 15 bytes.
///
/// # Errors
/// `prctl(PR_SET_NAME)`.
pub fn set_name(name: &CStr) -> Result<(), SyscallError> {
    prctl::set_name(name).call(|| format!("prctl(PR_SET_NAME) to {name:?}"))
}

/// Closes every descriptor from `first` on. For a program that has just begun and has opened nothing yet: it closes what
/// it was started with and does not know of.
///
/// # Errors
/// `close_range`: `ENOSYS` before Linux 5.9.
pub fn close_from(first: RawFd) -> Result<(), SyscallError> {
    let call = || format!("close_range from descriptor {first}");
    let number = libc::c_uint::try_from(first).map_err(|_| Errno::EBADF).call(call)?;
    // SAFETY: the call takes integers and touches no memory. The caller vouches that nobody here owns these descriptors.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, number, libc::c_uint::MAX, 0) };
    Errno::result(closed).call(call).map(drop)
}
