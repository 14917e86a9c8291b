//! Attributes of the calling process and thread: files in `/proc/self`, signals, name, priority, parent, inherited descriptors.

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, signal};

use crate::error::{CallContext, SyscallError};

/// Opens `/proc/self/NAME` for reading. `None` if the process may not inspect itself, as one that is not dumpable.
///
/// # Errors
/// `open`, other than `EACCES`, `EPERM` and `ENOENT`.
pub fn open_own(name: &str) -> Result<Option<File>, SyscallError> {
    let path = format!("/proc/self/{name}");
    match File::open(&path).call(|| format!("open of {path}")) {
        Ok(file) => Ok(Some(file)),
        Err(SyscallError { errno: Errno::EACCES | Errno::EPERM | Errno::ENOENT, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Unblocks all signals in the calling thread and ignores `ignored` in the process.
///
/// # Errors
/// `pthread_sigmask`; `signal`: `EINVAL` for a signal that cannot be ignored.
pub fn ignore_signals(ignored: &[Signal]) -> Result<(), SyscallError> {
    SigSet::empty().thread_set_mask().call(|| "pthread_sigmask to an empty set".to_owned())?;
    for one in ignored {
        // SAFETY: SIG_IGN runs no code of this process; the caller gives up any handler that was installed.
        unsafe { signal(*one, SigHandler::SigIgn) }.call(|| format!("signal({one}, SIG_IGN)"))?;
    }
    Ok(())
}

/// Blocks all signals to the calling thread, and to threads that it starts, while it lives.
#[derive(Debug)]
pub struct SignalsBlocked(SigSet);

impl SignalsBlocked {
    #[must_use]
    #[allow(clippy::new_without_default)] // a default value with such an effect would surprise
    pub fn new() -> Self {
        Self(SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK).unwrap_or_else(|_| SigSet::empty()))
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // Cannot fail: the mask was in effect before.
        let _ = self.0.thread_set_mask();
    }
}

/// Serves allocations of up to 32 MiB from heaps that grow, instead of mappings that realloc(3) moves by mremap(2). While another thread
/// changes the address space, a tracer cannot determine the file of a mremap, so that it concerns all files. Has an effect with glibc only.
pub fn allocate_without_mremap() {
    #[cfg(target_env = "gnu")]
    {
        /// The largest threshold that glibc accepts.
        const MAX_THRESHOLD_BYTES: libc::c_int = 32 << 20;
        // SAFETY: mallopt changes settings of the allocator, at any time. It returns 0 for a value that it does not accept.
        let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAX_THRESHOLD_BYTES) };
    }
}

/// Sets the name of the calling thread, which `ps` shows; for the main thread, that of the process. The kernel keeps
/// 15 bytes.
///
/// # Errors
/// `prctl(PR_SET_NAME)`.
pub fn set_name(name: &CStr) -> Result<(), SyscallError> {
    prctl::set_name(name).call(|| format!("prctl(PR_SET_NAME) to {name:?}"))
}

/// Makes the calling process untraceable for processes without privileges: `PR_SET_DUMPABLE`.
///
/// # Errors
/// `prctl`.
pub fn set_undumpable() -> Result<(), SyscallError> {
    prctl::set_dumpable(false).call(|| "prctl(PR_SET_DUMPABLE, 0)".to_owned())
}

/// Returns free memory of the heap to the kernel, where the allocator is glibc's, which keeps what threads that ended had freed.
pub fn trim_heap() {
    // SAFETY: the call takes an integer, and changes no memory that is allocated.
    #[cfg(target_env = "gnu")]
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Gives the calling thread exact timers (1 ns timer slack) and, where permitted, nice -20. Best effort: without the rights
/// the thread only runs later.
pub fn raise_priority() {
    let _ = prctl::set_timerslack(1);
    // SAFETY: the call takes integers and touches no memory. On Linux, 0 names the calling thread only.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
}

/// Makes the kernel send SIGTERM to the calling process when its parent exits. `parent` is the pid of the parent that the
/// caller expects.
///
/// # Errors
/// `ESRCH` if `parent` has exited already; `prctl(PR_SET_PDEATHSIG)`.
pub fn terminate_with_parent(parent: u32) -> Result<(), SyscallError> {
    prctl::set_pdeathsig(Signal::SIGTERM).call(|| "prctl(PR_SET_PDEATHSIG) to SIGTERM".to_owned())?;
    if u32::try_from(nix::unistd::getppid().as_raw()) != Ok(parent) {
        return Err(Errno::ESRCH).call(|| format!("getppid: parent process {parent} has exited"));
    }
    Ok(())
}

/// Closes every descriptor from `first` on. For a program that has opened nothing yet: it closes inherited descriptors.
///
/// # Errors
/// `close_range`: `ENOSYS` before Linux 5.9.
pub fn close_from(first: RawFd) -> Result<(), SyscallError> {
    let call = || format!("close_range from descriptor {first}");
    let first = libc::c_uint::try_from(first).map_err(|_| Errno::EBADF).call(call)?;
    close_range(first, libc::c_uint::MAX, 0)
}

/// Gives the calling thread, and threads that it starts later, a descriptor table of their own, with `kept` and standard input, output
/// and error only. The table of the other threads stays as it is, so the thread must own no other descriptor.
///
/// # Errors
/// `close_range`: `ENOSYS` before Linux 5.9.
pub fn separate_descriptors(kept: BorrowedFd<'_>) -> Result<(), SyscallError> {
    let kept = kept.as_raw_fd().cast_unsigned();
    close_range(kept + 1, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    if kept > 3 { close_range(3, kept - 1, 0) } else { Ok(()) }
}

fn close_range(first: libc::c_uint, last: libc::c_uint, flags: libc::c_uint) -> Result<(), SyscallError> {
    // SAFETY: the call takes integers and touches no memory. The callers of this module's functions guarantee that no object owns one
    // of these descriptors in this table.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    Errno::result(closed).call(|| format!("close_range of descriptors {first} to {last}")).map(drop)
}

/// The start of the vDSO: `AT_SYSINFO_EHDR` of `/proc/PID/auxv`, which has pairs of a type and a value.
#[must_use]
pub fn vdso_address(pid: u32) -> Option<u64> {
    let auxv = std::fs::read(format!("/proc/{pid}/auxv")).ok()?;
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
    let entry = auxv.chunks_exact(16).find(|entry| word(&entry[..8]) == libc::AT_SYSINFO_EHDR)?;
    Some(word(&entry[8..]))
}
