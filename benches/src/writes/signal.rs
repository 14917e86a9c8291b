//! Write tracking without kernel support: memory is made read-only, and a `SIGSEGV` handler makes a page writable when it is written.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use fdmap_sys::SyscallError;
use fdmap_sys::error::CallContext as _;
use fdmap_tests::memory::Pages;
use fdmap_tests::tracked::PAGE;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::{BenchError, BenchResult};

/// Start address and length in bytes of the protected memory, in statics for the signal handler.
static START: AtomicUsize = AtomicUsize::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);
/// Number of pages written.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// Installs the handler until dropped. Only one can exist at a time.
pub struct Protection<'a> {
    pages: Pages<'a>,
    before: SigAction,
}

impl<'a> Protection<'a> {
    /// Installs the handler for `pages`, without protecting them.
    ///
    /// # Errors
    /// [`BenchError::Syscall`]
    pub fn of(pages: Pages<'a>) -> BenchResult<Self> {
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
    pub fn arm(&self) -> BenchResult<()> {
        WRITTEN.store(0, Ordering::Relaxed);
        // SAFETY: Pages are written only through raw pointers, and the handler lets each write continue.
        let protected =
            unsafe { libc::mprotect(self.pages.start().cast(), self.pages.len(), libc::PROT_READ) };
        fdmap_sys::Errno::result(protected)
            .call(|| format!("mprotect(PROT_READ) of {} bytes", self.pages.len()))?;
        Ok(())
    }

    /// Checks the number of pages written since they were protected.
    ///
    /// # Errors
    /// [`BenchError::Wrong`] if it differs from `pages`.
    pub fn expect(&self, pages: u64) -> BenchResult<()> {
        let written = WRITTEN.load(Ordering::Relaxed);
        if written == pages {
            return Ok(());
        }
        Err(BenchError::Wrong(format!("{written} of {pages} writes raised SIGSEGV")))
    }
}

impl Drop for Protection<'_> {
    fn drop(&mut self) {
        // No page is written any more; if one were, the process would die as without a handler.
        let _ = install(&self.before);
        LEN.store(0, Ordering::Relaxed);
    }
}

fn install(action: &SigAction) -> Result<SigAction, SyscallError> {
    // SAFETY: unprotect() only calls mprotect, a plain system call, and accesses atomics; a restored action came from the kernel.
    unsafe { sigaction(Signal::SIGSEGV, action) }.call(|| "sigaction(SIGSEGV)".to_owned())
}

extern "C" fn unprotect(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo_t to a handler with SA_SIGINFO.
    let info = unsafe { &*info };
    // SAFETY: the siginfo of SIGSEGV contains an address.
    let address = unsafe { info.si_addr() };
    let page = address.map_addr(|address| address & !(PAGE_BYTES - 1));
    let offset = page.addr().wrapping_sub(START.load(Ordering::Relaxed));
    if offset < LEN.load(Ordering::Relaxed) {
        WRITTEN.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the page lies in memory borrowed by Pages and was writable before.
        let result = unsafe { libc::mprotect(page, PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE) };
        if result == 0 {
            return;
        }
    }
    // An unrelated fault: it is raised again with the default action.
    // SAFETY: the default action runs no code.
    unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
}

/// The same as [`PAGE`].
const PAGE_BYTES: usize = 4096;
const _: () = assert!(fdmap_proto::units::to_u64(PAGE_BYTES) == PAGE);
