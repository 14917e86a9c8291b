//! What a program that has just begun sets up for itself.

use std::ffi::CStr;
use std::os::fd::RawFd;

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};

use crate::error::{CallContext, SyscallError};

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

/// Has the calling thread run as soon as it can: sleep no longer than it says, and before others where that is allowed.
pub fn hurry() {
    // Nobody needs it: without these rights, or these calls, it takes a little longer.
    let _ = prctl::set_timerslack(1);
    // SAFETY: the call takes integers and touches no memory. Of Linux it is the calling thread alone that 0 stands for.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
}

/// Has the kernel send the calling process SIGTERM when its parent ends, which must be `parent`.
///
/// # Errors
/// `ESRCH` if that has ended already; else `prctl(PR_SET_PDEATHSIG)`.
pub fn end_with(parent: u32) -> Result<(), SyscallError> {
    prctl::set_pdeathsig(Signal::SIGTERM).call(|| "prctl(PR_SET_PDEATHSIG) to SIGTERM".to_owned())?;
    if u32::try_from(nix::unistd::getppid().as_raw()) != Ok(parent) {
        return Err(Errno::ESRCH).call(|| format!("looking for parent process {parent}"));
    }
    Ok(())
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

/// True if one of these signals was sent to this thread or its process and waits, since it is blocked.
#[must_use]
pub fn is_pending(signals: &[Signal]) -> bool {
    let mut pending = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the kernel writes the set, which lives until after the call, and nothing else.
    if unsafe { libc::sigpending(pending.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: sigpending has just written it.
    let pending = unsafe { pending.assume_init() };
    // SAFETY: and the kernel knows signals only that there are.
    let pending = unsafe { SigSet::from_sigset_t_unchecked(pending) };
    signals.iter().any(|signal| pending.contains(*signal))
}
