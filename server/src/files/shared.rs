//! Shared snapshots that clients hold: their memory is the service's, so it is counted until they let go of it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use fdmap_sys::lease;

use super::quota::Share;
use super::{Caller, FileError, Quota};

/// The shared snapshots that were handed out and are still open or mapped somewhere.
#[derive(Debug)]
pub struct SharedSnapshots {
    quota: Arc<Quota>,
    out: Mutex<Vec<Handed>>,
}

#[derive(Debug)]
struct Handed {
    /// A description of our own, to ask whether there are others.
    fd: OwnedFd,
    _share: Share,
}

impl SharedSnapshots {
    /// At most `most` bytes for each user.
    #[must_use]
    pub fn new(most: u64) -> Self {
        Self { quota: Quota::new("bytes of shared snapshots", most), out: Mutex::default() }
    }

    /// Takes room for a snapshot of `bytes`.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn reserve(&self, caller: &Caller, bytes: u64) -> Result<Share, FileError> {
        self.sweep();
        self.quota.take(caller, bytes)
    }

    /// A snapshot is handed out: `fd` is a description of our own, opened before that.
    pub fn handed(&self, fd: OwnedFd, share: Share) {
        self.out.lock().unwrap_or_else(PoisonError::into_inner).push(Handed { fd, _share: share });
    }

    /// Forgets those that nobody holds any more.
    pub fn sweep(&self) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        // Where leases do not work nothing can be said, and nothing is counted.
        out.retain(|handed| matches!(lease::is_sole_opener(handed.fd.as_fd()), Ok(false)));
    }
}

#[cfg(test)]
mod tests {
    use fdmap_sys::{fd, memfd};

    use super::*;

    #[test]
    fn bytes_count_until_the_client_lets_go() {
        let shared = SharedSnapshots::new(1000);
        let caller = Caller::new(7, 7, Vec::new(), 1);
        let share = shared.reserve(&caller, 800).unwrap();
        let made = memfd::create("shared-snapshot", None).unwrap();
        let (ours, theirs) =
            (fd::reopen(made.as_fd(), false).unwrap(), fd::reopen(made.as_fd(), false).unwrap());
        drop(made);
        shared.handed(ours, share);
        assert!(matches!(shared.reserve(&caller, 300), Err(FileError::Limit { .. })));
        drop(theirs);
        shared.reserve(&caller, 300).unwrap();
    }
}
