//! Tracking as it was done without help of the kernel: the memory is made read-only, and a handler of `SIGSEGV` makes a page
//! writable when it is written.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use fdmap_sys::SyscallError;
use fdmap_sys::error::CallContext as _;
use fdmap_tests::memory::Pages;
use fdmap_tests::tracked::PAGE;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::{BenchError, Measured};

/// The memory that is protected: where it begins, and bytes. A handler knows nothing but what is static.
static START: AtomicUsize = AtomicUsize::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);
/// Pages that were written.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// The handler, until dropped. There can be one at a time.
pub struct Protection<'a> {
    pages: Pages<'a>,
    before: SigAction,
}

impl<'a> Protection<'a> {
    /// Makes the handler answer for these pages. They are not protected yet.
    ///
    /// # Errors
    /// [`BenchError::Syscall`]
    pub fn of(pages: Pages<'a>) -> Measured<Self> {
        START.store(pages.start().addr(), Ordering::Relaxed);
        LEN.store(pages.len(), Ordering::Relaxed);
        let action = SigAction::new(SigHandler::SigAction(unprotect), SaFlags::SA_SIGINFO, SigSet::empty());
        let before = install(&action)?;
        Ok(Self { pages, before })
    }

    /// Protects all pages.
    ///
    /// # Errors
    /// [`BenchError::Syscall`]
    pub fn arm(&self) -> Measured<()> {
        WRITTEN.store(0, Ordering::Relaxed);
        // SAFETY: Pages are written through raw pointers only, and whoever does that is let go on by the handler.
        let protected =
            unsafe { libc::mprotect(self.pages.start().cast(), self.pages.len(), libc::PROT_READ) };
        fdmap_sys::Errno::result(protected)
            .call(|| format!("mprotect(PROT_READ) of {} bytes", self.pages.len()))?;
        Ok(())
    }

    /// Pages that were written since they were protected.
    ///
    /// # Errors
    /// [`BenchError::Wrong`] if they are not as many as they should be.
    pub fn expect(&self, pages: u64) -> Measured<()> {
        let written = WRITTEN.load(Ordering::Relaxed);
        if written == pages {
            return Ok(());
        }
        Err(BenchError::Wrong(format!("{written} of {pages} writes raised SIGSEGV")))
    }
}

impl Drop for Protection<'_> {
    fn drop(&mut self) {
        // Nothing is written any more; should it be, the process dies as without a handler.
        let _ = install(&self.before);
        LEN.store(0, Ordering::Relaxed);
    }
}

fn install(action: &SigAction) -> Result<SigAction, SyscallError> {
    // SAFETY: unprotect() calls nothing but mprotect, which is a plain system call, and touches atomics; what was there before
    // came from the kernel.
    unsafe { sigaction(Signal::SIGSEGV, action) }.call(|| "sigaction(SIGSEGV)".to_owned())
}

extern "C" fn unprotect(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo_t to a handler with SA_SIGINFO.
    let info = unsafe { &*info };
    // SAFETY: it is of a SIGSEGV, which comes with an address.
    let address = unsafe { info.si_addr() };
    let page = address.map_addr(|address| address & !(PAGE_BYTES - 1));
    let offset = page.addr().wrapping_sub(START.load(Ordering::Relaxed));
    if offset < LEN.load(Ordering::Relaxed) {
        WRITTEN.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the page lies in memory that Pages have borrowed, and was writable before.
        let done = unsafe { libc::mprotect(page, PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE) };
        if done == 0 {
            return;
        }
    }
    // A fault of somebody else's: it comes again, and does what it does without a handler.
    // SAFETY: the default action runs no code.
    unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
}

/// The same as [`PAGE`].
const PAGE_BYTES: usize = 4096;
const _: () = assert!(fdmap_proto::units::to_u64(PAGE_BYTES) == PAGE);
