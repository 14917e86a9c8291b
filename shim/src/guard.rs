//! The guard around the shim's own work. Work runs only in the process that loaded the library or a fork of it, never recursively,
//! and with signals blocked and thread cancellation disabled.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, Ordering};

use nix::errno::Errno;
use nix::libc;

/// Process id of the process in which the shim is enabled; 0 before it is enabled.
static PROCESS: AtomicI32 = AtomicI32::new(0);

thread_local! {
    /// This thread runs code of the shim. The variable needs neither initialization nor destruction, so it can be read in a
    /// signal handler.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
}

const PTHREAD_CANCEL_DISABLE: libc::c_int = 1;

/// While it exists, this thread runs code of the shim, and interposed functions called by this thread bypass the shim.
///
/// Dropping it restores errno, the signal mask and the cancellation state.
#[derive(Debug)]
pub struct Guard {
    errno: i32,
    signals: libc::sigset_t,
    cancel: libc::c_int,
}

/// Enables the shim in the calling process.
pub fn initialize() {
    // SAFETY: getpid accesses no memory and cannot fail.
    PROCESS.store(unsafe { libc::getpid() }, Ordering::Relaxed);
}

/// Checks whether the shim is enabled in the calling process. Returns false in a child made by vfork or clone, which may share the
/// parent's memory.
pub fn is_enabled() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    // SAFETY: getpid accesses no memory and cannot fail.
    process != 0 && unsafe { libc::getpid() } == process
}

/// Returns `None` if this thread already runs code of the shim or [`is_enabled`] is false.
fn enter() -> Option<Guard> {
    // is_enabled() first: a child made by clone may share this thread's thread-local variables.
    if !is_enabled() || INSIDE.replace(true) {
        return None;
    }
    let errno = Errno::last_raw();
    let mut signals = MaybeUninit::uninit();
    let mut blocked = MaybeUninit::uninit();
    // SAFETY: sigfillset initializes the set.
    unsafe { libc::sigfillset(blocked.as_mut_ptr()) };
    // A seccomp filter may raise SIGSYS, which kills the process if it is blocked.
    for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS] {
        // SAFETY: the set is initialized and the signal number is valid.
        unsafe { libc::sigdelset(blocked.as_mut_ptr(), fault) };
    }
    // SAFETY: the first set is initialized; pthread_sigmask writes the old mask to the second.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), signals.as_mut_ptr()) };
    let mut cancel = 0;
    // SAFETY: the call writes the old state to a local integer.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut cancel) };
    // SAFETY: pthread_sigmask initialized the set: it fails only for an invalid operation.
    let signals = unsafe { signals.assume_init() };
    Some(Guard { errno, signals, cancel })
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut old = 0;
        // SAFETY: the state is one that the call returned; it writes the old state to a local integer.
        unsafe { pthread_setcancelstate(self.cancel, &raw mut old) };
        INSIDE.set(false);
        // SAFETY: the set holds the previous mask; the pointer for the old mask may be null.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.signals, std::ptr::null_mut()) };
        Errno::set_raw(self.errno);
    }
}

/// Runs work of the shim under a [`Guard`]. Returns `None` if the shim may not run here or if the work panics; the program
/// continues in either case.
pub fn run<T>(work: impl FnOnce(&Guard) -> Option<T>) -> Option<T> {
    let guard = enter()?;
    catch_unwind(AssertUnwindSafe(|| work(&guard))).ok().flatten()
}
