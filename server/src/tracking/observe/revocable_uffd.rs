//! A userfaultfd that can be closed at any time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fdmap_sys::SyscallError;
use fdmap_sys::address::AddressRange;
use fdmap_sys::uffd::Userfaultfd;

/// A shared userfaultfd. When its fork events can no longer be read it is closed, so that no process waits for a reader. It is
/// used without the lock of the tracker, which may itself wait for such a process.
#[derive(Clone, Debug)]
pub(crate) struct RevocableUffd(Arc<Mutex<Option<Userfaultfd>>>);

impl RevocableUffd {
    pub(crate) fn new(userfaultfd: Userfaultfd) -> Self {
        Self(Arc::new(Mutex::new(Some(userfaultfd))))
    }

    /// Calls `work`, unless the userfaultfd was closed.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&Userfaultfd) -> T) -> Option<T> {
        self.lock().as_ref().map(work)
    }

    /// Unregisters `range`. After the close of the userfaultfd no range is registered.
    pub(crate) fn unregister(&self, range: AddressRange) -> Result<(), SyscallError> {
        self.with(|userfaultfd| userfaultfd.unregister(range)).unwrap_or(Ok(()))
    }

    /// True if the address space exists, and the userfaultfd was not closed.
    pub(crate) fn is_alive(&self) -> bool {
        self.with(Userfaultfd::address_space_exists).unwrap_or(false)
    }

    /// True if this is not the only reference.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(crate) fn close(&self) {
        let userfaultfd = self.lock().take();
        // Closed without the lock.
        drop(userfaultfd);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Userfaultfd>> {
        // No code panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
