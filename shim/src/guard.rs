//! When the shim may do its own work: in the process that it was loaded in or a fork of it, not within itself, and with
//! signals and cancellation held off meanwhile.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, Ordering};

use nix::errno::Errno;
use nix::libc;

/// The process that the shim works in; 0 while it does not work at all.
static PROCESS: AtomicI32 = AtomicI32::new(0);

thread_local! {
    /// This thread is within the shim. Needs neither initialization nor destruction, so it can be read anywhere.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
}

const PTHREAD_CANCEL_DISABLE: libc::c_int = 1;

/// This thread is within the shim: interposed functions do just what they always did.
///
/// On drop errno, signals and cancellation are as they were.
#[derive(Debug)]
pub struct Inside {
    errno: i32,
    signals: libc::sigset_t,
    cancel: libc::c_int,
}

/// From here on the shim works in this process.
pub fn begin() {
    // SAFETY: getpid only gives a number.
    PROCESS.store(unsafe { libc::getpid() }, Ordering::Relaxed);
}

/// True in the process that the shim works in. False in one that was made by vfork or clone, whose memory may be its
/// parent's.
pub fn is_here() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    // SAFETY: getpid only gives a number.
    process != 0 && unsafe { libc::getpid() } == process
}

/// `None` if this thread is within the shim already; in a process that was made by vfork or clone, whose memory may be its
/// parent's; and where the shim does not work.
pub fn enter() -> Option<Inside> {
    // First: a process that was made by clone may have our thread's variables for its own.
    if !is_here() || INSIDE.replace(true) {
        return None;
    }
    let errno = Errno::last_raw();
    let mut signals = MaybeUninit::uninit();
    let mut held = MaybeUninit::uninit();
    // SAFETY: sigfillset initializes the set.
    unsafe { libc::sigfillset(held.as_mut_ptr()) };
    // A filter of system calls may send SIGSYS: where that is blocked it ends the process.
    for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS] {
        // SAFETY: the set was initialized, and these are signals.
        unsafe { libc::sigdelset(held.as_mut_ptr(), fault) };
    }
    // SAFETY: the first set is initialized, the second has room for the old mask, which it gets.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, held.as_ptr(), signals.as_mut_ptr()) };
    let mut cancel = 0;
    // SAFETY: the old state is written to an integer of ours.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut cancel) };
    // SAFETY: pthread_sigmask has initialized it: it fails for an operation that there is not only.
    let signals = unsafe { signals.assume_init() };
    Some(Inside { errno, signals, cancel })
}

impl Drop for Inside {
    fn drop(&mut self) {
        let mut old = 0;
        // SAFETY: the state is one that was got from it; the old one goes to an integer of ours.
        unsafe { pthread_setcancelstate(self.cancel, &raw mut old) };
        INSIDE.set(false);
        // SAFETY: the set is what the mask was; the old one is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.signals, std::ptr::null_mut()) };
        Errno::set_raw(self.errno);
    }
}

/// Does work of the shim if it may: `None` if not, or if it failed in a way that nobody thought of. The program goes on
/// either way.
pub fn work<T>(work: impl FnOnce(&Inside) -> Option<T>) -> Option<T> {
    let inside = enter()?;
    catch_unwind(AssertUnwindSafe(|| work(&inside))).ok().flatten()
}
