//! The event sources that all tracked files share: inotify, system call tracing and fork events.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fdmap_sys::SyscallError;
use fdmap_sys::inotify::{Inotify, InotifyEvent, WatchDescriptor};

use super::forks::Forks;
use super::trace::WriteTracer;
use crate::store::FdStore;

/// The inotify events of one file.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    modified: AtomicBool,
    lost: AtomicBool,
}

impl Signals {
    /// Returns the signals since the last call and clears them: (modified, lost).
    pub(crate) fn take(&self) -> (bool, bool) {
        (self.modified.swap(false, Ordering::SeqCst), self.lost.swap(false, Ordering::SeqCst))
    }

    /// Returns signals that were taken and not processed.
    pub(crate) fn put_back(&self, (modified, lost): (bool, bool)) {
        self.modified.fetch_or(modified, Ordering::SeqCst);
        self.lost.fetch_or(lost, Ordering::SeqCst);
    }
}

/// The event sources of a service. Tracing and the fork reader start when they are first needed.
#[derive(Debug)]
pub struct EventSources {
    inotify: Mutex<Watches>,
    forks: OnceLock<Option<Arc<Forks>>>,
    store: Option<FdStore>,
    traces_calls: bool,
    reads_forks: bool,
    trace: OnceLock<Option<WriteTracer>>,
}

#[derive(Debug)]
struct Watches {
    inotify: Inotify,
    files: HashMap<WatchDescriptor, Arc<Signals>>,
}

impl EventSources {
    /// - `store`: the descriptor store; with a store, forks are not observed.
    /// - `traces_calls`: trace system calls, if the kernel permits it.
    /// - `reads_forks`: start this program again as a reader of fork events.
    ///
    /// # Errors
    /// `inotify_init1`.
    pub fn new(store: Option<FdStore>, traces_calls: bool, reads_forks: bool) -> Result<Self, SyscallError> {
        let watches = Watches { inotify: Inotify::new()?, files: HashMap::new() };
        Ok(Self {
            inotify: Mutex::new(watches),
            forks: OnceLock::new(),
            store,
            traces_calls,
            reads_forks,
            trace: OnceLock::new(),
        })
    }

    /// Watches the file of `fd`.
    ///
    /// # Errors
    /// `inotify_add_watch`.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>) -> Result<(WatchDescriptor, Arc<Signals>), SyscallError> {
        let mut watches = self.lock();
        let watch = watches.inotify.watch_modify(fd)?;
        let signals = Arc::new(Signals::default());
        watches.files.insert(watch, Arc::clone(&signals));
        Ok((watch, signals))
    }

    /// Ends the watch, unless the same file was adopted again meanwhile: then it has the same watch with other signals.
    pub(crate) fn unwatch(&self, watch: WatchDescriptor, signals: &Arc<Signals>) {
        let mut watches = self.lock();
        if watches.files.get(&watch).is_some_and(|now| Arc::ptr_eq(now, signals)) {
            watches.files.remove(&watch);
            // The kernel removes the watch of a deleted file itself.
            let _ = watches.inotify.unwatch(watch);
        }
    }

    /// Reads all pending inotify events and sets the signals of their files.
    pub(crate) fn deliver(&self) {
        let mut watches = self.lock();
        let mut events = Vec::new();
        let failed = watches.inotify.drain(&mut events).is_err();
        if failed || events.iter().any(|event| matches!(event, InotifyEvent::Overflow)) {
            for signals in watches.files.values() {
                signals.lost.store(true, Ordering::SeqCst);
            }
        }
        for event in events {
            match event {
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

    /// The trace of system calls that write; `None`: disabled or unavailable.
    #[must_use]
    pub(crate) fn trace(&self) -> Option<&WriteTracer> {
        let start = || {
            if !self.traces_calls {
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

    /// The reader of fork events; `None`: disabled, unavailable, or the service has a descriptor store.
    #[must_use]
    pub(crate) fn forks(&self) -> Option<&Arc<Forks>> {
        let start = || {
            // A descriptor store does not read events. A process that forks while the service is not running would wait for the
            // next service.
            if self.store.is_some() || !self.reads_forks {
                return None;
            }
            let started = Forks::start();
            started
                .inspect_err(|error| {
                    tracing::warn!(error = fdmap_proto::error_chain(error), "forks are not observed");
                })
                .ok()
        };
        self.forks.get_or_init(start).as_ref()
    }

    /// The store that holds descriptors while the service is not running.
    #[must_use]
    pub const fn store(&self) -> Option<&FdStore> {
        self.store.as_ref()
    }

    fn lock(&self) -> MutexGuard<'_, Watches> {
        // No code panics while it holds the lock.
        self.inotify.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
