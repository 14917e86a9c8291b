//! Events of writes through descriptors, for all tracked files: fanotify, which names the thread that wrote, or inotify.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fdmap_sys::SyscallError;
use fdmap_sys::fanotify::{Fanotify, FanotifyEvent, FileKey};
use fdmap_sys::inotify::{Inotify, InotifyEvent, WatchDescriptor};
use fdmap_sys::{fd, memfd};

use super::observation::{Modifiers, Thread};

/// Threads that are remembered for one file. If there are more, their names are dropped.
const MAX_THREADS: usize = 4096;
/// Inode of the initial pid namespace: PROC_PID_INIT_INO of `linux/proc_ns.h`.
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// The events of one file.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    modifiers: Mutex<Modifiers>,
    lost: AtomicBool,
}

impl Signals {
    /// Returns the events since the last call and clears them: writers, and whether events were lost.
    pub(crate) fn take(&self) -> (Modifiers, bool) {
        (std::mem::take(&mut *self.modifiers()), self.lost.swap(false, Ordering::SeqCst))
    }

    /// Returns events that were taken and not processed.
    pub(crate) fn put_back(&self, modifiers: Modifiers, lost: bool) {
        let mut now = self.modifiers();
        now.unnamed |= modifiers.unnamed;
        now.threads.extend(modifiers.threads);
        self.lost.fetch_or(lost, Ordering::SeqCst);
    }

    fn add(&self, thread: Thread) {
        let mut modifiers = self.modifiers();
        // The kernel reports 0 for a thread of another pid namespace.
        if thread == 0 || modifiers.threads.len() >= MAX_THREADS {
            modifiers.unnamed = true;
        } else {
            modifiers.threads.insert(thread);
        }
    }

    fn modifiers(&self) -> MutexGuard<'_, Modifiers> {
        // No code panics while it holds the lock.
        self.modifiers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tries to receive events of writes that name the thread by an id that the trace of system calls has.
///
/// # Errors
/// Why not.
pub fn try_writer_threads() -> Result<(), String> {
    let namespace = std::fs::metadata("/proc/self/ns/pid")
        .map_err(|error| format!("reading the pid namespace in /proc/self/ns/pid: {error}"))?;
    if namespace.ino() != INITIAL_PID_NAMESPACE {
        return Err("fdmapd is not in the initial pid namespace".to_owned());
    }
    let seen = || -> Result<Vec<FanotifyEvent>, SyscallError> {
        let group = Fanotify::new()?;
        let made = memfd::create("fdmap-trial", None)?;
        group.mark(made.as_fd())?;
        fd::write_at(fd::reopen(made.as_fd(), true)?.as_fd(), 0, b"fdmap")?;
        let mut events = Vec::new();
        group.drain(&mut events)?;
        Ok(events)
    };
    let own = nix::unistd::gettid().as_raw().cast_unsigned();
    match seen().map_err(|error| fdmap_proto::error_chain(&error))?.as_slice() {
        [FanotifyEvent::Modified { thread, .. }] if *thread == own => Ok(()),
        other => Err(format!("fanotify reports a write of thread {own} to a memfd as {other:?}")),
    }
}

/// The watch of one file.
#[derive(Clone, Debug)]
pub(crate) enum Watch {
    Fanotify(FileKey),
    Inotify(WatchDescriptor),
}

/// The event sources of all files.
#[derive(Debug)]
pub(crate) struct ModifyEvents(Mutex<Watches>);

#[derive(Debug)]
struct Watches {
    /// `None`: the service lacks CAP_SYS_ADMIN, or is not in the initial pid namespace, whose thread ids the trace has.
    fanotify: Option<Fanotify>,
    marked: HashMap<FileKey, Arc<Signals>>,
    inotify: Inotify,
    watched: HashMap<WatchDescriptor, Arc<Signals>>,
}

impl ModifyEvents {
    /// # Errors
    /// `inotify_init1`.
    pub(crate) fn new() -> Result<Self, SyscallError> {
        let fanotify = try_writer_threads()
            .and_then(|()| Fanotify::new().map_err(|error| fdmap_proto::error_chain(&error)))
            .inspect_err(|reason| {
                tracing::info!(reason, "threads that write through descriptors are not named");
            })
            .ok();
        let (marked, watched) = (HashMap::new(), HashMap::new());
        Ok(Self(Mutex::new(Watches { fanotify, marked, inotify: Inotify::new()?, watched })))
    }

    /// Watches the file of `fd`.
    ///
    /// # Errors
    /// `inotify_add_watch`.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>) -> Result<(Watch, Arc<Signals>), SyscallError> {
        let mut watches = self.lock();
        let signals = Arc::new(Signals::default());
        // A file system without file handles cannot be marked.
        if let Some(Ok(key)) = watches.fanotify.as_ref().map(|group| group.mark(fd)) {
            watches.marked.insert(key.clone(), Arc::clone(&signals));
            return Ok((Watch::Fanotify(key), signals));
        }
        let watch = watches.inotify.watch_modify(fd)?;
        watches.watched.insert(watch, Arc::clone(&signals));
        Ok((Watch::Inotify(watch), signals))
    }

    /// Ends the watch of the file of `fd`, unless the same file was adopted again meanwhile: then it has the same watch with other
    /// signals.
    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>, watch: &Watch, signals: &Arc<Signals>) {
        let mut watches = self.lock();
        let is_current = |now: Option<&Arc<Signals>>| now.is_some_and(|now| Arc::ptr_eq(now, signals));
        // The kernel removes the watch of a deleted file itself.
        match watch {
            Watch::Fanotify(key) if is_current(watches.marked.get(key)) => {
                watches.marked.remove(key);
                let _ = watches.fanotify.as_ref().map(|group| group.unmark(fd));
            }
            Watch::Inotify(watch) if is_current(watches.watched.get(watch)) => {
                watches.watched.remove(watch);
                let _ = watches.inotify.unwatch(*watch);
            }
            _ => {}
        }
    }

    /// Reads all pending events and adds them to the signals of their files.
    pub(crate) fn deliver(&self) {
        let watches = &mut *self.lock();
        watches.read_fanotify();
        watches.read_inotify();
    }

    fn lock(&self) -> MutexGuard<'_, Watches> {
        // No code panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watches {
    fn read_fanotify(&self) {
        let Some(group) = &self.fanotify else { return };
        let mut events = Vec::new();
        let mut lost = group.drain(&mut events).is_err();
        for event in events {
            match event {
                FanotifyEvent::Modified { file, thread } => {
                    if let Some(signals) = self.marked.get(&file) {
                        signals.add(thread);
                    }
                }
                FanotifyEvent::Overflow => lost = true,
            }
        }
        if lost {
            self.marked.values().for_each(|signals| signals.lost.store(true, Ordering::SeqCst));
        }
    }

    fn read_inotify(&mut self) {
        let mut events = Vec::new();
        let mut lost = self.inotify.drain(&mut events).is_err();
        for event in events {
            match event {
                InotifyEvent::Modified(watch) => {
                    if let Some(signals) = self.watched.get(&watch) {
                        signals.modifiers().unnamed = true;
                    }
                }
                InotifyEvent::Ignored(watch) => {
                    self.watched.remove(&watch);
                }
                InotifyEvent::Overflow => lost = true,
            }
        }
        if lost {
            self.watched.values().for_each(|signals| signals.lost.store(true, Ordering::SeqCst));
        }
    }
}
