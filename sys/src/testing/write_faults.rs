//! Write tracking without kernel support: memory is made read-only, and a `SIGSEGV` handler makes a page writable when it is
//! written.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::error::{CallContext as _, SyscallError};

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Start address and length in bytes of the memory, in statics for the signal handler. The length is 0 while there is none.
static START: AtomicUsize = AtomicUsize::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);
/// Number of pages written.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// Counts the pages of a range that are written. The handler is installed until this is dropped, which makes the range writable.
#[derive(Debug)]
pub struct WriteFaults {
    start: usize,
    len: usize,
    before: SigAction,
}

impl WriteFaults {
    /// Installs the handler for the range, without protecting it.
    ///
    /// # Safety
    /// The range consists of whole small pages and stays mapped, by a mapping that may be written, until this is dropped. No
    /// reference into it exists.
    ///
    /// # Errors
    /// `sigaction`; `EBUSY` while another value exists.
    pub unsafe fn install(start: *mut u8, len: usize) -> Result<Self, SyscallError> {
        LEN.compare_exchange(0, len, Ordering::Relaxed, Ordering::Relaxed)
            .map_err(|_| Errno::EBUSY)
            .call(|| "installing a second SIGSEGV handler".to_owned())?;
        let start = start.expose_provenance();
        START.store(start, Ordering::Relaxed);
        let action = SigAction::new(SigHandler::SigAction(unprotect), SaFlags::SA_SIGINFO, SigSet::empty());
        match handle(&action) {
            Ok(before) => Ok(Self { start, len, before }),
            Err(error) => {
                LEN.store(0, Ordering::Relaxed);
                Err(error)
            }
        }
    }

    /// Protects all pages, and counts from 0.
    ///
    /// # Errors
    /// `mprotect`.
    pub fn arm(&self) -> Result<(), SyscallError> {
        WRITTEN.store(0, Ordering::Relaxed);
        self.protect(libc::PROT_READ)
    }

    /// The number of pages that were written since they were protected.
    #[must_use]
    pub fn written(&self) -> u64 {
        WRITTEN.load(Ordering::Relaxed)
    }

    fn protect(&self, protection: i32) -> Result<(), SyscallError> {
        let start = std::ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: no reference into the range exists, and the handler lets each write continue.
        let protected = unsafe { libc::mprotect(start, self.len, protection) };
        Errno::result(protected).map(drop).call(|| format!("mprotect({protection}) of {} bytes", self.len))
    }
}

impl Drop for WriteFaults {
    fn drop(&mut self) {
        let _ = self.protect(libc::PROT_READ | libc::PROT_WRITE);
        let _ = handle(&self.before);
        LEN.store(0, Ordering::Relaxed);
    }
}

fn handle(action: &SigAction) -> Result<SigAction, SyscallError> {
    // SAFETY: unprotect() only calls mprotect, a plain system call, and accesses atomics; a restored action came from the kernel.
    unsafe { sigaction(Signal::SIGSEGV, action) }.call(|| "sigaction(SIGSEGV)".to_owned())
}

extern "C" fn unprotect(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo_t to a handler with SA_SIGINFO.
    let info = unsafe { &*info };
    // SAFETY: the siginfo of SIGSEGV contains an address.
    let address = unsafe { info.si_addr() };
    let page = address.map_addr(|address| address & !(PAGE - 1));
    let offset = page.addr().wrapping_sub(START.load(Ordering::Relaxed));
    if offset < LEN.load(Ordering::Relaxed) {
        WRITTEN.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the page lies in the range of install(), which may be written.
        let result = unsafe { libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_WRITE) };
        if result == 0 {
            return;
        }
    }
    // An unrelated fault: it is raised again with the default action.
    // SAFETY: the default action runs no code.
    unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::raw_mapping::RawMapping;

    #[test]
    fn each_written_page_counts_once() {
        let memory = RawMapping::anonymous(3 * PAGE).unwrap();
        // SAFETY: the mapping is dropped after the faults, and hands out no references.
        let faults = unsafe { WriteFaults::install(memory.at(0), memory.len()) }.unwrap();
        // SAFETY: the call fails, because another value exists.
        let second = unsafe { WriteFaults::install(memory.at(0), memory.len()) };
        assert_eq!(second.unwrap_err().errno, Errno::EBUSY);
        for written in [[0, 5], [PAGE, 2 * PAGE]] {
            faults.arm().unwrap();
            assert_eq!((memory.read(0).is_ok(), faults.written()), (true, 0), "a read does not count");
            written.into_iter().for_each(|at| memory.write(at, 1).unwrap());
            assert_eq!(faults.written(), if written[1] < PAGE { 1 } else { 2 });
        }
        faults.arm().unwrap();
        drop(faults);
        memory.write(0, 2).unwrap();
    }
}
