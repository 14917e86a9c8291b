//! What all trackers share: signals of writes through descriptors, and the processes of this host.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::forks::Forks;
use super::loops;
use super::trace::WriteTracer;
use crate::store::FdStore;
use fdmap_sys::SyscallError;
use fdmap_sys::inotify::{Inotify, InotifyEvent, WatchDescriptor};

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
pub struct EventSources {
    inotify: Mutex<Watches>,
    forks: OnceLock<Option<Arc<Forks>>>,
    store: Option<FdStore>,
    traces: bool,
    reads_forks: bool,
    trace: OnceLock<Option<WriteTracer>>,
}

#[derive(Debug)]
struct Watches {
    inotify: Inotify,
    files: HashMap<WatchDescriptor, Arc<Signals>>,
}

impl EventSources {
    /// Watches nothing yet. With `store`, descriptors are kept there, and forks are not told. With `traces` system calls are traced where
    /// that works; with `reads_forks` this program is started again to read forks.
    ///
    /// # Errors
    /// `inotify_init1`.
    pub fn new(store: Option<FdStore>, traces: bool, reads_forks: bool) -> Result<Self, SyscallError> {
        let watches = Watches { inotify: Inotify::new()?, files: HashMap::new() };
        Ok(Self {
            inotify: Mutex::new(watches),
            forks: OnceLock::new(),
            store,
            traces,
            reads_forks,
            trace: OnceLock::new(),
        })
    }

    /// Signals of the file of `fd` from now on.
    ///
    /// # Errors
    /// `inotify_add_watch`.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> Result<(WatchDescriptor, Arc<Signals>), SyscallError> {
        let mut watches = self.lock();
        let watch = watches.inotify.watch_modify(fd)?;
        let signals = Arc::new(Signals::default());
        watches.files.insert(watch, Arc::clone(&signals));
        Ok((watch, signals))
    }

    /// No signals any more.
    pub fn unwatch(&self, watch: WatchDescriptor, signals: &Arc<Signals>) {
        let mut watches = self.lock();
        // The same file may have been adopted anew meanwhile, and has the same watch.
        if watches.files.get(&watch).is_some_and(|now| Arc::ptr_eq(now, signals)) {
            watches.files.remove(&watch);
            // The file may have gone, and the watch with it.
            let _ = watches.inotify.unwatch(watch);
        }
    }

    /// Hands out the signals that have come.
    pub fn deliver(&self) {
        let mut watches = self.lock();
        let mut seen = Vec::new();
        let failed = watches.inotify.drain(&mut seen).is_err();
        if failed || seen.iter().any(|seen| matches!(seen, InotifyEvent::Overflow)) {
            for signals in watches.files.values() {
                signals.lost.store(true, Ordering::SeqCst);
            }
        }
        for seen in seen {
            match seen {
                InotifyEvent::Modified(watch) => {
                    if let Some(signals) = watches.files.get(&watch) {
                        signals.modified.store(true, Ordering::SeqCst);
                    }
                }
                InotifyEvent::Ignored(watch) => {
                    watches.files.remove(&watch);
                }
                InotifyEvent::Overflow => {}
            }
        }
    }

    /// The trace of system calls that write, started when it is needed first; `None` if it cannot be, or shall not.
    #[must_use]
    pub fn trace(&self) -> Option<&WriteTracer> {
        let start = || {
            if !self.traces {
                return None;
            }
            let started = WriteTracer::start();
            started
                .inspect_err(|error| {
                    tracing::info!(reason = fdmap_proto::error_chain(error), "system calls are not traced");
                })
                .ok()
        };
        self.trace.get_or_init(start).as_ref()
    }

    /// Who reads forks, started when it is needed first; `None` if it cannot be, or descriptors are kept elsewhere.
    #[must_use]
    pub fn forks(&self) -> Option<&Arc<Forks>> {
        let start = || {
            // Whoever keeps descriptors while the service is away reads no events: who forks then would wait for the next one.
            if self.store.is_some() || !self.reads_forks {
                return None;
            }
            let started = Forks::start();
            started
                .inspect_err(|error| {
                    tracing::warn!(error = fdmap_proto::error_chain(error), "forks are not told")
                })
                .ok()
        };
        self.forks.get_or_init(start).as_ref()
    }

    /// Who keeps descriptors while the service is away.
    #[must_use]
    pub const fn store(&self) -> Option<&FdStore> {
        self.store.as_ref()
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
