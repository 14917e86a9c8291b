//! Calls of the service's own processes. They take written bits, and are not counted as calls of others.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fdmap_sys::Errno;

/// Counts calls that may take written bits.
pub(crate) trait CallCounter: Debug + Send + Sync {
    /// The program by which a process excludes its calls: [`exclude_own_calls`].
    fn add_holder(&self) -> BorrowedFd<'_>;

    /// Counts the calls of the process again that was excluded with this name. Call it before the process is reaped.
    fn remove_holder(&self, name: u64);
}

/// Excludes the calls of a process from those that are counted, until it is dropped.
#[derive(Debug)]
pub(super) struct Exclusion {
    pub(super) counter: Arc<dyn CallCounter>,
    pub(super) name: u64,
}

impl Drop for Exclusion {
    fn drop(&mut self) {
        self.counter.remove_holder(self.name);
    }
}

/// Excludes the calls of this process. `program`: of [`CallCounter::add_holder`].
///
/// # Errors
/// `BPF_PROG_TEST_RUN`; `ENOSPC` if there are too many holders.
#[cfg(feature = "xarray")]
pub(super) fn exclude_own_calls(program: BorrowedFd<'_>, name: u64) -> Result<(), Errno> {
    match crate::bpf::run(program, &mut [name])? {
        0 => Ok(()),
        _ => Err(Errno::ENOSPC),
    }
}

/// Without BPF no calls are counted.
///
/// # Errors
/// Never.
#[cfg(not(feature = "xarray"))]
pub(super) const fn exclude_own_calls(_: BorrowedFd<'_>, _: u64) -> Result<(), Errno> {
    Ok(())
}
