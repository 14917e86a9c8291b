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
use super::state::State;
use super::view::View;

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

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
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
        self.observer.put_back_signals(true, true);
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
