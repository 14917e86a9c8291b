//! One file's generations.
//!
//! ```text
//!            Track, Untrack, traced and unseen writes
//!                 |  stamp pages with the open generation
//!                 v
//!   open g  --checkpoint-->  look: is anything to be found?  --no-->  unchanged: g stays open
//!     ^                          |yes
//!     |                      collect: harvest page tables, judge the rest, stamp
//!     |                          |
//!     +---- g + 1 opens ------ close g: journal, publish, tell
//! ```
//!
//! All of it happens under one lock. Readers take what was published last, without it.

use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use fdmap_proto::file::FileInfo;
use fdmap_proto::tracking::Coverage;
use fdmap_proto::units::{Generation, PageRange};
use fdmap_sys::inotify::WatchDescriptor;
use fdmap_sys::memfd::FileOrigin;
use fdmap_sys::{fd, memfd};
use tokio::sync::broadcast;

use super::TrackingError;
use super::calls::Others;
use super::coverage::GapLog;
use super::event_sources::{EventSources, Signals};
use super::forked::Forked;
use super::journal::CheckpointReply;
use super::observed::{Mapped, Observed};
use super::record::Record;
use super::stamps::{Counts, StampMap};
use super::state::{Marks, State};
use super::trace::FollowedId;
use crate::probe::Probe;
use crate::scan::ScanCoalescer;
use crate::store::StoredFd;

/// Checkpoints that a slow watcher may lag behind.
const WATCH_LAG: usize = 64;

/// One file's generations.
pub struct Tracker {
    pub(super) scans: Arc<ScanCoalescer>,
    pub(super) probe: Arc<dyn Probe>,
    pub(super) event_sources: Arc<EventSources>,
    pub(super) mapped: Mapped,
    /// There may be descriptors whose writes raise no signal.
    pub(super) silent: bool,
    /// How others come to map it.
    pub(super) reach: FileOrigin,
    watch: WatchDescriptor,
    pub(super) signals: Arc<Signals>,
    pub(super) forked: Arc<Forked>,
    /// Its writes by system calls are traced.
    pub(super) followed: Option<FollowedId>,
    state: Mutex<State>,
    view: ArcSwap<View>,
    made: broadcast::Sender<CheckpointEvent>,
}

/// What readers see: all closed generations.
#[derive(Clone, Debug)]
pub struct View {
    /// When each page was written.
    pub stamps: StampMap,
    /// The last closed generation; 0 is none.
    pub closed: Generation,
    /// What they rest on.
    pub gaps: GapLog,
    /// The file's size when it was closed.
    pub pages: u64,
    /// Mappings that were tracked then.
    pub tracked: u64,
}

/// A checkpoint that closed a generation.
#[derive(Clone, Debug)]
pub struct CheckpointEvent {
    /// Which.
    pub generation: Generation,
    /// Pages in it.
    pub counts: Counts,
    /// When.
    pub time: SystemTime,
    /// Since the one before.
    pub since_last: Option<Duration>,
}

/// What a checkpoint came to.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The last closed generation.
    pub generation: Generation,
    /// It was closed before already, and nothing was written since.
    pub unchanged: bool,
    /// Pages in it, if it was closed now.
    pub counts: Counts,
    /// What it rests on.
    pub coverage: Coverage,
    /// How long it took.
    pub duration: Duration,
    /// When.
    pub time: SystemTime,
}

impl Tracker {
    pub(super) fn assemble(parts: Parts, mut state: State) -> Arc<Self> {
        let Parts { scans, probe, event_sources, mapped, silent, reach, watch, signals } = parts;
        let followed = event_sources.trace().and_then(|trace| {
            let followed = trace.follow(scans.source().fd.as_fd());
            followed
                .inspect_err(|error| {
                    tracing::warn!(error = fdmap_proto::error_chain(error), "tracing the writes to a file");
                })
                .ok()
        });
        if let Some(trace) = event_sources.trace().filter(|_| followed.is_some()) {
            state.others = Others::begin(trace.rangeless_writes());
        }
        let closed = state.open.previous();
        let view = View {
            stamps: state.stamps.clone(),
            closed,
            gaps: state.gaps.clone(),
            pages: state.marks.pages,
            tracked: state.pieces(),
        };
        Arc::new(Self {
            scans,
            probe,
            event_sources,
            mapped,
            silent,
            reach,
            watch,
            signals,
            forked: Arc::default(),
            followed,
            state: Mutex::new(state),
            view: ArcSwap::from_pointee(view),
            made: broadcast::Sender::new(WATCH_LAG),
        })
    }

    /// Closes the open generation, unless nothing was written in it. Takes as long as a look at all mappings does.
    ///
    /// # Errors
    /// [`TrackingError`]; then nothing is closed, and what was found by then is in the open generation.
    pub fn checkpoint(&self, exact: bool, request: Option<u64>) -> Result<Checkpoint, TrackingError> {
        let began = Instant::now();
        let mut state = self.lock();
        if let Some(answer) = request.and_then(|request| state.hot.reply_to(request)) {
            return Ok(self.answer(&state, answer.generation, answer.unchanged, began));
        }
        let look = self.look(&mut state)?;
        let unchanged = !exact && self.is_idle(&state, &look);
        if !unchanged {
            self.collect(&mut state, &look)?;
            self.close_generation(&mut state, request)?;
        } else if let Some(request) = request {
            let generation = state.open.previous();
            state.hot.add_reply(CheckpointReply { idempotency_key: request, generation, unchanged });
            state.save();
        }
        let closed = state.open.previous();
        Ok(self.answer(&state, closed, unchanged, began))
    }

    /// From the one store on that publishes the hot data the generation is closed, and its request answered.
    fn close_generation(&self, state: &mut State, request: Option<u64>) -> Result<(), TrackingError> {
        let closing = state.open;
        let next = closing.next().ok_or(TrackingError::NoMoreGenerations)?;
        let gaps = std::mem::take(&mut state.open_gaps);
        state.gaps.add(closing, gaps);
        state.open = next;
        state.stamped = false;
        if let Some(request) = request {
            state.hot.add_reply(CheckpointReply {
                idempotency_key: request,
                generation: closing,
                unchanged: false,
            });
        }
        state.save();
        let since_last = state.since_last();
        let made = CheckpointEvent {
            generation: closing,
            counts: state.stamps.count(closing.previous(), Some(closing), all_pages()),
            time: SystemTime::now(),
            since_last,
        };
        state.last_made = Some((Instant::now(), made.time));
        self.publish(state);
        // Nobody may be watching.
        let _ = self.made.send(made);
        Ok(())
    }

    /// Writes what changes seldom into the journal.
    pub(super) fn save_record(&self, state: &mut State) -> Result<(), TrackingError> {
        // Before they are named.
        self.keep_descriptors(state);
        let record = Record {
            file: state.file.clone(),
            before: state.before,
            policy: state.policy,
            cursors: state.cursors.all(),
            // Without their descriptors nobody could go on with them.
            observed: match self.event_sources.store() {
                Some(_) => state.observed.iter().map(Observed::record).collect(),
                None => Vec::new(),
            },
        };
        Ok(state.journal.write_record(&record.encode())?)
    }

    /// Has the descriptors of tracked mappings kept, and of those that are tracked no more no longer.
    pub(super) fn keep_descriptors(&self, state: &mut State) {
        let Some(store) = self.event_sources.store() else { return };
        let file = state.file.id;
        for observed in &state.observed {
            if state.kept.insert(observed.key) {
                observed
                    .userfaultfd
                    .with(|uffd| store.add(file, StoredFd::Userfaultfd(observed.key), uffd.as_fd()));
                store.add(file, StoredFd::Pagemap(observed.key), observed.pagemap.as_fd());
                store.add(file, StoredFd::Maps(observed.key), observed.maps.as_fd());
            }
        }
        state.kept.retain(|key| {
            let tracked = state.observed.iter().any(|observed| observed.key == *key);
            if !tracked {
                for kept in [StoredFd::Userfaultfd(*key), StoredFd::Pagemap(*key), StoredFd::Maps(*key)] {
                    store.remove(file, kept);
                }
            }
            tracked
        });
    }

    /// Has nothing kept any more: the file was deleted.
    pub fn drop_stored_descriptors(&self) {
        let Some(store) = self.event_sources.store() else { return };
        let mut state = self.lock();
        for key in std::mem::take(&mut state.kept) {
            for kept in [StoredFd::Userfaultfd(key), StoredFd::Pagemap(key), StoredFd::Maps(key)] {
                store.remove(state.file.id, kept);
            }
        }
        store.remove(state.file.id, StoredFd::Journal);
    }

    /// Who may do what with the file has changed.
    ///
    /// # Errors
    /// [`TrackingError::Journal`]
    pub fn update_file_info(&self, file: FileInfo) -> Result<(), TrackingError> {
        let mut state = self.lock();
        state.file = file;
        self.save_record(&mut state)
    }

    /// Shows readers what there is.
    pub(super) fn publish(&self, state: &State) {
        self.view.store(Arc::new(View {
            stamps: state.stamps.clone(),
            closed: state.open.previous(),
            gaps: state.gaps.clone(),
            pages: state.marks.pages,
            tracked: state.pieces(),
        }));
    }

    fn answer(&self, state: &State, generation: Generation, unchanged: bool, began: Instant) -> Checkpoint {
        let since = generation.previous();
        let counts = if unchanged {
            Counts::default()
        } else {
            state.stamps.count(since, Some(generation), all_pages())
        };
        let since = if unchanged { generation } else { since };
        let coverage = state.gaps.coverage(since, generation, state.pieces(), self.granularity());
        Checkpoint {
            generation,
            unchanged,
            counts,
            coverage,
            duration: began.elapsed(),
            time: SystemTime::now(),
        }
    }

    /// The inode as it is now.
    pub(super) fn marks(&self) -> Result<Marks, TrackingError> {
        let source = self.scans.source();
        let stat = fd::stat(&source.fd)?;
        let seals = memfd::seals(std::os::fd::AsFd::as_fd(&source.fd))?;
        let pages = source.page_size.pages_in(u64::try_from(stat.st_size).unwrap_or(0));
        Ok(Marks::new(&stat, pages, super::close::writers_sealed(seals)))
    }

    /// Writable mappings, as the kernel counts them; `None` if that cannot be told.
    pub(super) fn writable_now(&self) -> Option<u64> {
        let source = self.scans.source();
        self.probe.writable_mappings(std::os::fd::AsFd::as_fd(&source.fd)).unwrap_or_else(|error| {
            tracing::warn!(
                error = fdmap_proto::error_chain(&error),
                "counting the writable mappings of a file"
            );
            None
        })
    }

    /// Pages that writes are told apart by.
    #[must_use]
    pub fn granularity(&self) -> u64 {
        self.scans.source().hugetlb_order.map_or(1, |order| 1 << order)
    }

    /// What closed generations hold.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        self.view.load_full()
    }

    /// What generations after `since` rest on, by a view.
    #[must_use]
    pub fn coverage(&self, view: &View, since: Generation) -> Coverage {
        view.gaps.coverage(since, view.closed, view.tracked, self.granularity())
    }

    /// Checkpoints from now on.
    #[must_use]
    pub fn watch(&self) -> broadcast::Receiver<CheckpointEvent> {
        self.made.subscribe()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic half way leaves what was stamped by then, and the page tables as they are: pages that were taken and not
        // stamped are in the journal's intent, but nobody reads it while this process lives. So the next one is told.
        self.state.lock().unwrap_or_else(|poisoned| {
            self.signals.put_back((true, true));
            self.state.clear_poison();
            let mut state = poisoned.into_inner();
            state.untracked.unknown = true;
            state
        })
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        self.forked.end();
        self.event_sources.unwatch(self.watch, &self.signals);
        if let (Some(trace), Some(file)) = (self.event_sources.trace(), self.followed) {
            trace.unfollow(file);
        }
    }
}

/// What a tracker is made of.
pub(super) struct Parts {
    pub(super) scans: Arc<ScanCoalescer>,
    pub(super) probe: Arc<dyn Probe>,
    pub(super) event_sources: Arc<EventSources>,
    pub(super) mapped: Mapped,
    pub(super) silent: bool,
    pub(super) reach: FileOrigin,
    pub(super) watch: WatchDescriptor,
    pub(super) signals: Arc<Signals>,
}

/// All that a file can have.
pub(super) const fn all_pages() -> PageRange {
    PageRange::first(u64::MAX)
}
