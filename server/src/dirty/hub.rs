//! What all trackers share: signals of writes through descriptors, and the processes of this host.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::loops;
use fdmap_sys::SyscallError;
use fdmap_sys::inotify::{Inotify, Seen, Watch};

/// Whether a file was modified, as far as inotify tells.
#[derive(Debug, Default)]
pub struct Signals {
    modified: AtomicBool,
    lost: AtomicBool,
}

impl Signals {
    /// What was signalled since this was asked last: (modified, lost).
    pub fn take(&self) -> (bool, bool) {
        (self.modified.swap(false, Ordering::SeqCst), self.lost.swap(false, Ordering::SeqCst))
    }

    /// Puts back what was taken and not dealt with.
    pub fn put_back(&self, (modified, lost): (bool, bool)) {
        self.modified.fetch_or(modified, Ordering::SeqCst);
        self.lost.fetch_or(lost, Ordering::SeqCst);
    }
}

/// What all trackers share.
#[derive(Debug)]
pub struct Hub {
    inotify: Mutex<Watches>,
}

#[derive(Debug)]
struct Watches {
    inotify: Inotify,
    files: HashMap<Watch, Arc<Signals>>,
}

impl Hub {
    /// Watches nothing yet.
    ///
    /// # Errors
    /// `inotify_init1`.
    pub fn new() -> Result<Self, SyscallError> {
        let watches = Watches { inotify: Inotify::new()?, files: HashMap::new() };
        Ok(Self { inotify: Mutex::new(watches) })
    }

    /// Signals of the file of `fd` from now on.
    ///
    /// # Errors
    /// `inotify_add_watch`.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> Result<(Watch, Arc<Signals>), SyscallError> {
        let mut watches = self.lock();
        let watch = watches.inotify.watch_modify(fd)?;
        let signals = Arc::new(Signals::default());
        watches.files.insert(watch, Arc::clone(&signals));
        Ok((watch, signals))
    }

    /// No signals any more.
    pub fn unwatch(&self, watch: Watch) {
        let mut watches = self.lock();
        if watches.files.remove(&watch).is_some() {
            // The file may have gone, and the watch with it.
            let _ = watches.inotify.unwatch(watch);
        }
    }

    /// Hands out the signals that have come.
    pub fn deliver(&self) {
        let mut watches = self.lock();
        let mut seen = Vec::new();
        let failed = watches.inotify.drain(&mut seen).is_err();
        if failed || seen.iter().any(|seen| matches!(seen, Seen::Overflow)) {
            for signals in watches.files.values() {
                signals.lost.store(true, Ordering::SeqCst);
            }
        }
        for seen in seen {
            match seen {
                Seen::Modified(watch) => {
                    if let Some(signals) = watches.files.get(&watch) {
                        signals.modified.store(true, Ordering::SeqCst);
                    }
                }
                Seen::Gone(watch) => {
                    watches.files.remove(&watch);
                }
                Seen::Overflow => {}
            }
        }
    }

    /// True if the system calls of all processes are traced.
    #[must_use]
    pub fn traces_calls(&self) -> bool {
        false
    }

    /// True if forks are told.
    #[must_use]
    pub fn tells_forks(&self) -> bool {
        false
    }

    /// True if a loop device has the file open: it writes through a descriptor of its own, and raises no signal.
    #[must_use]
    pub fn loop_device_on(&self, device: u64, inode: u64) -> bool {
        loops::any_on(device, inode)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Watches> {
        // Nothing panics while it is held.
        self.inotify.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
