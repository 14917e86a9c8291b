//! Events of writes through descriptors, for all tracked files: fanotify, which names the thread that wrote, or inotify.

use std::collections::HashMap;
use std::io::{self, PipeWriter};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use fdmap_proto::units::{to_u64, to_usize};
use fdmap_sys::SyscallError;
use fdmap_sys::fanotify::{Fanotify, FanotifyEvent, FileKey};
use fdmap_sys::inotify::{Inotify, InotifyEvent, WatchDescriptor};
use fdmap_sys::{fd, memfd};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::observation::{Modifiers, Thread};
use crate::log_limit::LogLimit;
use crate::scan::ScanCoalescer;

/// Threads that are remembered for one file. If there are more, their names are dropped.
const MAX_THREADS: usize = 4096;
/// Time between two reads of the events of all files.
const READ_INTERVAL: Duration = Duration::from_millis(50);
/// Events that are read before others get the lock.
const MAX_EVENTS_PER_READ: usize = 1024;
/// Time for which the events of a file are counted.
const FLOOD_INTERVAL: Duration = Duration::from_millis(100);
/// Events of one file in that time. With more, they are lost until the next observation of the file.
const MAX_EVENTS: u32 = 8192;
/// The same while more than [`MAX_PENDING`] events of all files are queued.
const MAX_EVENTS_OF_LONG_QUEUE: u32 = 512;
const MAX_PENDING: usize = 1 << 16;

static MUTED: LogLimit = LogLimit::new();

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

    fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
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

/// The event sources of all files. Events are read regularly, so that their number in the kernel stays small.
#[derive(Debug)]
pub(crate) struct ModifyEvents(Arc<Mutex<Watches>>);

#[derive(Debug)]
struct Watches {
    /// `None`: the service lacks CAP_SYS_ADMIN, or is not in the initial pid namespace, whose thread ids the trace has.
    fanotify: Option<Fanotify>,
    marked: HashMap<FileKey, Marked>,
    inotify: Inotify,
    watched: HashMap<WatchDescriptor, Arc<Signals>>,
    /// Events that were read since the start.
    fanotify_read: u64,
    inotify_read: u64,
    /// Since when the queue of fanotify is long.
    long_since: Option<Instant>,
    /// The thread that reads events ends when this is dropped. `None`: there is none.
    reader: Option<PipeWriter>,
}

/// A file with a mark.
#[derive(Debug)]
struct Marked {
    signals: Arc<Signals>,
    /// Its descriptor marks and unmarks the file.
    file: Weak<ScanCoalescer>,
    flood: Flood,
    /// The file has no mark, because of too many events.
    muted: bool,
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
        let inotify = Inotify::new()?;
        let watches = Watches {
            fanotify,
            marked,
            inotify,
            watched,
            fanotify_read: 0,
            inotify_read: 0,
            long_since: None,
            reader: None,
        };
        Ok(Self(Arc::new(Mutex::new(watches))))
    }

    /// Watches a file.
    ///
    /// # Errors
    /// `inotify_add_watch`.
    pub(crate) fn watch(&self, file: &Arc<ScanCoalescer>) -> Result<(Watch, Arc<Signals>), SyscallError> {
        let mut watches = lock(&self.0);
        self.start_reader(&mut watches);
        let (signals, fd) = (Arc::new(Signals::default()), file.source().fd.as_fd());
        // A file system without file handles cannot be marked.
        if let Some(Ok(key)) = watches.fanotify.as_ref().map(|group| group.mark(fd)) {
            let file = Arc::downgrade(file);
            let marked =
                Marked { signals: Arc::clone(&signals), file, flood: Flood::default(), muted: false };
            watches.marked.insert(key.clone(), marked);
            return Ok((Watch::Fanotify(key), signals));
        }
        let watch = watches.inotify.watch_modify(fd)?;
        watches.watched.insert(watch, Arc::clone(&signals));
        Ok((Watch::Inotify(watch), signals))
    }

    /// Ends the watch of the file of `fd`, unless the same file was adopted again meanwhile: then it has the same watch with other
    /// signals.
    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>, watch: &Watch, signals: &Arc<Signals>) {
        let mut watches = lock(&self.0);
        let is_current = |now: Option<&Arc<Signals>>| now.is_some_and(|now| Arc::ptr_eq(now, signals));
        // The kernel removes the watch of a deleted file itself.
        match watch {
            Watch::Fanotify(key) if is_current(watches.marked.get(key).map(|marked| &marked.signals)) => {
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

    /// Reads all events that are pending when the call begins, and adds them to the signals of their files.
    ///
    /// A queue is read in its order, and each part is read and added under the lock. So when this has read as many events as were
    /// pending, each of those was added, whichever thread has read it. Events that are queued meanwhile do not prolong the call.
    pub(crate) fn deliver(&self) {
        deliver(&self.0);
    }

    /// Marks the file of a watch again, if it had too many events. Its events were lost until now, which its signals report.
    pub(crate) fn resume(&self, watch: &Watch) {
        let Watch::Fanotify(key) = watch else { return };
        let watches = &mut *lock(&self.0);
        if let (Some(group), Some(marked)) = (&watches.fanotify, watches.marked.get_mut(key)) {
            marked.resume(group);
        }
    }

    fn start_reader(&self, watches: &mut Watches) {
        if watches.reader.is_some() {
            return;
        }
        let queues = [watches.fanotify.as_ref().map(Fanotify::as_fd), Some(watches.inotify.as_fd())];
        let queues = queues.into_iter().flatten().map(|queue| queue.try_clone_to_owned());
        let its = Arc::downgrade(&self.0);
        let started = queues.collect::<io::Result<Vec<_>>>().and_then(|mut polled| {
            let (ended, end) = io::pipe()?;
            polled.push(ended.into());
            let run = move || read_events(&its, &polled);
            std::thread::Builder::new().name("modify-events".to_owned()).spawn(run)?;
            Ok(end)
        });
        // Without a thread, the next file starts one.
        watches.reader = started.ok();
    }
}

/// Reads events until the service ends, when there are some. `polled`: the queues of events, and a pipe that ends with the service.
fn read_events(watches: &Weak<Mutex<Watches>>, polled: &[OwnedFd]) {
    loop {
        let mut polled: Vec<_> = polled.iter().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)).collect();
        // A failure was caused by a signal, and counts as no event.
        let ready = poll(&mut polled, PollTimeout::NONE).unwrap_or(0);
        let Some(watches) = watches.upgrade() else { return };
        if ready > 0 {
            deliver(&watches);
            drop(watches);
            // Equal events are merged meanwhile.
            std::thread::sleep(READ_INTERVAL);
        }
    }
}

/// Reads the events that are queued now, unless another thread reads them meanwhile.
fn deliver(watches: &Mutex<Watches>) {
    let (marked, watched) = {
        let watches = &mut *lock(watches);
        let marked = watches.fanotify.as_ref().map_or(Ok(0), Fanotify::queued);
        let watched = watches.inotify.queued();
        // Without a number, all that is queued is read.
        if marked.is_err() {
            watches.lose_marked();
        }
        if watched.is_err() {
            watches.lose_watched();
        }
        let until =
            |read: u64, queued: Result<usize, _>| read.saturating_add(queued.map_or(u64::MAX, to_u64));
        (until(watches.fanotify_read, marked), until(watches.inotify_read, watched))
    };
    // Others get the lock between two parts.
    while lock(watches).read_fanotify(marked) {}
    while lock(watches).read_inotify(watched) {}
}

/// The events to read next, if `read` were read and `until` are to be.
fn next_part(read: u64, until: u64) -> usize {
    to_usize(until.saturating_sub(read)).min(MAX_EVENTS_PER_READ)
}

fn lock(watches: &Mutex<Watches>) -> MutexGuard<'_, Watches> {
    // No code panics while it holds the lock.
    watches.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watches {
    /// Reads some of the first `until` events since the start. False if they are all read.
    fn read_fanotify(&mut self, until: u64) -> bool {
        let (Some(group), count @ 1..) = (&self.fanotify, next_part(self.fanotify_read, until)) else {
            return false;
        };
        let pending = to_usize(until.saturating_sub(self.fanotify_read));
        let now = Instant::now();
        let long_queue = (pending > MAX_PENDING).then(|| LongQueue {
            since: *self.long_since.get_or_insert(now),
            share: share_of_long_queue(self.marked.len()),
        });
        if long_queue.is_none() {
            self.long_since = None;
        }
        let mut events = Vec::new();
        let read = group.read(count, &mut events);
        let mut lost = read.is_err();
        for event in events {
            match event {
                FanotifyEvent::Modified { file, thread } => {
                    if let Some(marked) = self.marked.get_mut(&file) {
                        marked.signals.add(thread);
                        if marked.flood.exceeds(now, long_queue) {
                            marked.mute(group);
                        }
                    }
                }
                FanotifyEvent::Overflow => lost = true,
            }
        }
        if lost {
            self.lose_marked();
        }
        let read = read.unwrap_or(0);
        self.fanotify_read += to_u64(read);
        read > 0
    }

    fn read_inotify(&mut self, until: u64) -> bool {
        let count @ 1.. = next_part(self.inotify_read, until) else { return false };
        let mut events = Vec::new();
        let read = self.inotify.read(count, &mut events);
        let mut lost = read.is_err();
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
            self.lose_watched();
        }
        let read = read.unwrap_or(0);
        self.inotify_read += to_u64(read);
        read > 0
    }

    /// Events of any marked file may be lost.
    fn lose_marked(&self) {
        self.marked.values().for_each(|marked| marked.signals.lose());
    }

    /// The same of watched files.
    fn lose_watched(&self) {
        self.watched.values().for_each(|signals| signals.lose());
    }
}

impl Marked {
    /// Removes the mark of a file with too many events, until the next observation.
    fn mute(&mut self, group: &Fanotify) {
        let Some(file) = self.file.upgrade().filter(|_| !self.muted) else { return };
        if group.unmark(file.source().fd.as_fd()).is_ok() {
            self.muted = true;
            self.signals.lose();
            if let Some(omitted) = MUTED.permit() {
                let name = &*file.source().name;
                tracing::warn!(
                    name,
                    omitted,
                    "so many writes that their events are not read until the next checkpoint"
                );
            }
        }
    }

    /// The order matters: a write that ends after the mark is made raises an event, and all earlier ones are lost.
    fn resume(&mut self, group: &Fanotify) {
        if self.muted
            && let Some(file) = self.file.upgrade()
        {
            self.muted = group.mark(file.source().fd.as_fd()).is_err();
            self.flood = Flood::default();
            self.signals.lose();
        }
    }
}

/// Counts the events of one file.
#[derive(Debug, Default)]
struct Flood {
    /// When counting began.
    since: Option<Instant>,
    events: u32,
}

impl Flood {
    /// Counts an event, which was read at `now`. True if the file has too many events.
    ///
    /// An event is merged with one of the same file and thread that was not read, so a file has one for each thread and read. While
    /// the queue is long the kernel does not merge all.
    fn exceeds(&mut self, now: Instant, long_queue: Option<LongQueue>) -> bool {
        // The events of a long queue may be those of a long time: they count together.
        let counts_from = |since: Instant| {
            now.saturating_duration_since(since) < FLOOD_INTERVAL
                || long_queue.is_some_and(|queue| since >= queue.since)
        };
        if !self.since.is_some_and(counts_from) {
            *self = Self { since: Some(now), events: 0 };
        }
        self.events += 1;
        self.events > long_queue.map_or(MAX_EVENTS, |queue| queue.share)
    }
}

/// More than [`MAX_PENDING`] events are queued.
#[derive(Clone, Copy, Debug)]
struct LongQueue {
    since: Instant,
    /// A file has no more events than this before it counts as one of those that make the queue long.
    share: u32,
}

/// Events of one of `files` files in a long queue: so few that all files together do not make it long again before they are muted.
fn share_of_long_queue(files: usize) -> u32 {
    let share = u32::try_from(MAX_PENDING / files.max(1)).unwrap_or(u32::MAX);
    share.clamp(1, MAX_EVENTS_OF_LONG_QUEUE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_with_too_many_events_in_an_interval_is_a_flood() {
        let (mut flood, now) = (Flood::default(), Instant::now());
        let count = |flood: &mut Flood, now, queue| (1..).find(|_| flood.exceeds(now, queue)).unwrap_or(0);
        assert_eq!(count(&mut flood, now, None), MAX_EVENTS + 1);
        assert!(!flood.exceeds(now + FLOOD_INTERVAL, None), "each interval counts from 0");
        let next = now + 2 * FLOOD_INTERVAL;
        let long = |since, files| Some(LongQueue { since, share: share_of_long_queue(files) });
        assert_eq!(count(&mut flood, next, long(next, 1)), MAX_EVENTS_OF_LONG_QUEUE + 1);
        // Events of long ago do not count in a queue that is long now.
        let later = next + 100 * FLOOD_INTERVAL;
        assert_eq!(count(&mut flood, later, long(later, 1)), MAX_EVENTS_OF_LONG_QUEUE + 1);
        assert!(flood.exceeds(later + 100 * FLOOD_INTERVAL, long(later, 1)), "it has been long since");
    }

    #[test]
    fn flood_over_many_files_is_muted_before_the_queue_is_twice_as_long() {
        let start = Instant::now();
        for files in [1, 64, 1024, 16_384, 1 << 20] {
            let long = Some(LongQueue { since: start, share: share_of_long_queue(files) });
            let mut floods: Vec<Flood> = (0..files.min(2048)).map(|_| Flood::default()).collect();
            // Reads take long, so that each round is in an interval of its own.
            let mut rounds = 0;
            let exceeds = |flood: &mut Flood, rounds| flood.exceeds(start + rounds * FLOOD_INTERVAL, long);
            while floods.iter_mut().map(|flood| exceeds(flood, rounds)).filter(|exceeds| !exceeds).count() > 0
            {
                rounds += 1;
            }
            assert!(to_u64(files) * u64::from(rounds) <= to_u64(MAX_PENDING).max(to_u64(files)), "{files}");
        }
    }

    #[test]
    fn parts_end_with_the_events_that_were_pending() {
        assert_eq!(next_part(7, 7 + to_u64(MAX_EVENTS_PER_READ) + 10), MAX_EVENTS_PER_READ);
        assert_eq!([next_part(7, 17), next_part(17, 17), next_part(20, 17)], [10, 0, 0]);
    }
}
