//! The write tracker of one file: its lock, and what readers see without it.
//!
//! ```text
//!      Track, Untrack, Detach: harvest between checkpoints
//!                 |  stamp pages with the open generation
//!                 v
//!   open g  --checkpoint-->  observe: was anything written?  --no-->  unchanged: g stays open
//!     ^                          | yes
//!     |                      harvest, classify, stamp
//!     |                          |
//!     +---- open g + 1 ----- commit: close g in the journal, publish
//! ```
//!
//! All of this happens under one lock. Readers use the last published [`View`] without the lock.

use std::sync::{Arc, Mutex, MutexGuard};

use arc_swap::ArcSwap;
use fdmap_proto::CheckpointEvent;
use fdmap_proto::tracking::Coverage;
use fdmap_proto::units::Generation;
use tokio::sync::broadcast;

use super::observe::Observer;
use super::observe::holder::patience;
use super::state::State;
use super::view::View;
use crate::watchdog::{Operation, Phase};

/// Checkpoint events that a slow subscriber can lag behind.
const MAX_EVENT_LAG: usize = 64;

pub struct Tracker {
    pub(super) observer: Observer,
    state: Mutex<State>,
    view: ArcSwap<View>,
    pub(super) checkpoints: broadcast::Sender<CheckpointEvent>,
}

impl Tracker {
    pub(super) fn new(observer: Observer, state: State) -> Arc<Self> {
        let view = view_of(&state);
        Arc::new(Self {
            observer,
            state: Mutex::new(state),
            view: ArcSwap::from_pointee(view),
            checkpoints: broadcast::Sender::new(MAX_EVENT_LAG),
        })
    }

    /// The closed generations.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        self.view.load_full()
    }

    /// The unit in which writes are observed, in base pages: 1, or the size of a hugetlb page.
    #[must_use]
    pub fn granularity(&self) -> u64 {
        self.observer.granularity_pages()
    }

    /// Coverage of the closed generations after `since`.
    #[must_use]
    pub fn coverage(&self, view: &View, since: Generation) -> Coverage {
        view.gaps.coverage(since, view.closed, view.tracked_mappings, self.granularity())
    }

    /// Subscribes to checkpoints that close a generation.
    #[must_use]
    pub fn watch(&self) -> broadcast::Receiver<CheckpointEvent> {
        self.checkpoints.subscribe()
    }

    /// Publishes the closed generations to readers.
    pub(super) fn publish(&self, state: &State) {
        self.view.store(Arc::new(view_of(state)));
    }

    /// Begins an operation that locks the state first. It is logged if it is slow.
    pub(super) fn begin(&self, operation: &'static str) -> Operation {
        patience::reset();
        Operation::begin(operation, self.observer.file_name(), Phase::Lock)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        if let Ok(state) = self.state.try_lock() {
            return state;
        }
        let file = Some(self.observer.file_name());
        let _operation = Operation::begin_phase("wait for a tracker", file, Phase::Lock);
        // After a panic, pages that were harvested and not stamped are in the journal's intent, which is read only by the next
        // process.
        self.state.lock().unwrap_or_else(|poisoned| {
            self.state.clear_poison();
            let mut state = poisoned.into_inner();
            self.interrupt(&mut state);
            state
        })
    }

    /// Written bits may have been cleared without a stamp: the next checkpoint relies on no signal.
    pub(super) fn interrupt(&self, state: &mut State) {
        self.observer.lose_signals();
        state.set_interrupted();
    }
}

fn view_of(state: &State) -> View {
    View {
        stamps: state.generations.stamps().clone(),
        closed: state.generations.closed(),
        gaps: state.generations.gaps().clone(),
        pages: state.baseline.pages,
        tracked_mappings: state.spaces.extent_count(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::SystemTime;

    use fdmap_proto::file::{Access, Backing, FileInfo, Lifetime, Origin, Rights, Seals};
    use fdmap_proto::tracking::{CoveragePolicy, Effect};
    use fdmap_proto::units::{FileId, PageRange, PageSize};
    use fdmap_sys::{fd, memfd};

    use super::*;
    use crate::probe::{Probe, SyscallsProbe};
    use crate::scan::{ScanCoalescer, ScanSource};
    use crate::tracking::{
        Charge, CursorUser, EventSources, StampMap, TrackerOptions, TrackingError, WRITER_SEALS,
    };

    /// The tracker of a file with one page of data, whose writers are sealed.
    fn tracker_of_sealed_file() -> Arc<Tracker> {
        let memfd = memfd::create("fdmap-test", None).unwrap();
        fd::write_at(memfd.as_fd(), 0, &[1; 4096]).unwrap();
        memfd::add_seals(memfd.as_fd(), WRITER_SEALS.bits()).unwrap();
        let stat = fd::stat(&memfd).unwrap();
        let file = FileInfo {
            id: FileId::new(1).unwrap(),
            name: "fdmap-test".to_owned(),
            size_bytes: 4096,
            pages: 1,
            backing: Backing::Shmem,
            seals: Seals::default(),
            access: Access::private(0, 0),
            device: stat.st_dev,
            inode: stat.st_ino,
            origin: Origin::Created,
            created: SystemTime::UNIX_EPOCH,
            allocated_bytes: 4096,
            caller_rights: Rights::ALL,
            owned_by_caller: true,
            lifetime: Lifetime::Kept,
            fence: None,
        };
        let source = ScanSource {
            name: "fdmap-test".into(),
            fd: fd::reopen(memfd.as_fd(), false).unwrap(),
            page_size: PageSize::new(4096).unwrap(),
            hugetlb_order: None,
        };
        let probe: Arc<dyn Probe> = Arc::new(SyscallsProbe);
        let options = TrackerOptions {
            scans: ScanCoalescer::new(source, Arc::clone(&probe)),
            probe,
            event_sources: Arc::new(EventSources::new(None, false, false).unwrap()),
            file,
            unnotified_descriptors: false,
            original_owner: None,
            stamp_charges: Arc::new(crate::tracking::stamp_budget::tests::Unlimited),
        };
        Tracker::create(options).unwrap()
    }

    #[test]
    fn checkpoint_after_a_panic_stamps_all_data_whatever_the_policy() {
        let tracker = tracker_of_sealed_file();
        tracker.set_coverage_policy(CoveragePolicy::Ignore).unwrap();
        tracker.checkpoint(true, None).unwrap();
        assert_eq!(tracker.checkpoint(true, None).unwrap().conservative_pages, 0, "no writer is left");
        let panicked: std::thread::Result<()> = catch_unwind(AssertUnwindSafe(|| {
            let _state = tracker.lock();
            panic!("planned panic");
        }));
        assert!(panicked.is_err());
        let checkpoint = tracker.checkpoint(false, None).unwrap();
        assert_eq!((checkpoint.unchanged, checkpoint.conservative_pages), (false, 1));
        assert!(!checkpoint.coverage.exact);
    }

    /// Pages that may be written in the generation that is open count, as for Changes.
    #[test]
    fn redirty_pages_are_counted() {
        let tracker = tracker_of_sealed_file();
        let closed = tracker.checkpoint(true, None).unwrap().generation;
        assert_eq!(tracker.count(closed).conservative, 0);
        {
            let mut state = tracker.lock();
            state.generations.stamp_next(&[PageRange::first(1)]).unwrap();
            tracker.publish(&state);
        }
        assert_eq!(tracker.count(closed).conservative, 1);
    }

    #[test]
    fn frozen_set_is_charged_once_for_what_it_holds() {
        let tracker = tracker_of_sealed_file();
        let me = CursorUser { uid: 1, admin: false };
        tracker.create_cursor("backup", Generation::NONE, me).unwrap();
        let charged = Arc::new(());
        let charge = |stamps: &StampMap| {
            // The checkpoint that begins has closed the generation with the page of data.
            assert_eq!(stamps.block_count(), 1);
            Ok(Arc::clone(&charged) as Charge)
        };
        let refuse = |_: &StampMap| Err(TrackingError::Limit("no more".to_owned()));
        assert!(tracker.begin_cursor("backup", me, false, refuse).is_err());
        let begun = tracker.begin_cursor("backup", me, false, charge).unwrap().0;
        assert_eq!(Arc::strong_count(&charged), 2);
        // A retry returns the same set, also where the user may have no more.
        assert_eq!(tracker.begin_cursor("backup", me, false, refuse).unwrap().0, begun);
        assert!(tracker.frozen("backup", me).unwrap().memory.is_some());
        tracker.abort_cursor("backup", me).unwrap();
        assert_eq!(Arc::strong_count(&charged), 1);
    }

    #[test]
    fn ignored_writer_is_reported_after_its_mapping_ended() {
        let tracker = tracker_of_sealed_file();
        tracker.checkpoint(true, None).unwrap();
        let pages = PageRange::first(1);
        tracker.lock().untracked.pages.push(pages);
        let reported = || {
            let coverage = tracker.file_coverage().unwrap().coverage;
            coverage.gaps.iter().any(|gap| gap.range == Some(pages) && gap.effect == Effect::Ignored)
        };
        assert!(!reported(), "its pages will be stamped");
        tracker.set_coverage_policy(CoveragePolicy::Ignore).unwrap();
        assert!(reported());
    }
}
