//! The first half of a checkpoint: what the signals say, before any mark is taken.

use std::time::Instant;

use fdmap_proto::units::PageRange;

use fdmap_sys::memfd::FileOrigin;
use fdmap_sys::pidfd;

use super::evidence::{IdleEvidence, TracedCalls, idle};
use super::state::{Marks, State};
use super::tracker::Tracker;
use super::{TrackingError, calls};

/// What was found before the harvest.
#[derive(Debug)]
pub struct Look {
    /// The inode. What changes it from here on belongs to the next generation, or to both.
    pub marks: Marks,
    /// IN_MODIFY was seen since the last look.
    pub modified: bool,
    /// Signals were lost since.
    pub lost: bool,
    /// Writable shared VMAs of the file, as the kernel counts them.
    pub writable: Option<u64>,
    /// Every tracked mapping is where it was, in so many VMAs.
    pub standing: Option<u64>,
    /// A child that was not told of has ended.
    pub lost_children: bool,
    /// Forks are not told, and processes were started on this host.
    pub processes_started: bool,
    /// What traced calls wrote or are writing.
    pub calls: Option<Calls>,
    /// When.
    pub now: Instant,
}

/// What traced calls came to.
#[derive(Clone, Debug)]
pub struct Calls {
    /// What they leave open.
    pub left_open: TracedCalls,
    /// Pages that were written by calls that have ended.
    pub ended: Vec<PageRange>,
    /// Pages that may have been: it is not known what the calls did.
    pub vague: Vec<PageRange>,
    /// Pages that calls under way may be writing.
    pub in_flight: Vec<PageRange>,
    /// The file was mapped by somebody.
    pub mapped: bool,
}

impl Calls {
    /// Nothing was written by any.
    pub const fn are_none(&self) -> bool {
        self.ended.is_empty() && self.vague.is_empty() && self.in_flight.is_empty() && !self.left_open.lost
    }
}

impl Look {
    /// Writable mappings may have come and gone since the last look. A closed file has none to come; mapping a file changes
    /// its atime, unless the descriptor says O_NOATIME, which takes the owner's rights, or the mount takes no note of it.
    pub fn mappings_came(&self, state: &State, reach: FileOrigin) -> bool {
        if self.marks.closed && state.marks.closed {
            return false;
        }
        let read = self.marks.atime != state.marks.atime;
        let traced = self.calls.as_ref().filter(|calls| !calls.left_open.lost).map(|calls| calls.mapped);
        match (reach, traced) {
            (FileOrigin::Memfd | FileOrigin::Mounted, Some(mapped)) => mapped,
            (FileOrigin::Memfd, None) => read,
            // shmat is not traced.
            (FileOrigin::KernelMount, mapped) => mapped.unwrap_or(false) || read,
            (FileOrigin::Mounted, None) => true,
        }
    }

    /// All writable mappings that there are are tracked ones that stand.
    pub fn all_tracked(&self) -> bool {
        self.writable.is_some() && self.writable == self.standing
    }

    /// The inode changed since the last harvest.
    pub fn ctime_changed(&self, state: &State) -> bool {
        self.marks.ctime != state.marks.ctime
    }
}

impl Tracker {
    pub(super) fn look(&self, state: &mut State) -> Result<Look, TrackingError> {
        let now = Instant::now();
        // In this order: a write that ended before has its signal in by now, and one that begins later changes the ctime
        // again, which is read first.
        let marks = self.marks()?;
        let calls = self.take_calls(state, now);
        self.event_sources.deliver();
        let (modified, lost) = self.signals.take();
        let started = pidfd::last_pid().ok();
        let processes_started = started.is_none() || started != state.last_pid;
        state.last_pid = started;
        if processes_started {
            self.wait_for_forks(state);
        }
        self.hear_of_forks(state);
        let lost_children =
            state.observed.iter_mut().fold(false, |lost, observed| observed.lost_a_child() | lost);
        let unseen_forks = state.observed.iter().any(|observed| observed.forks.is_none());
        let processes_started = unseen_forks && processes_started;
        let standing = self.standing(state);
        let writable = self.writable_now();
        Ok(Look { marks, modified, lost, writable, standing, lost_children, processes_started, calls, now })
    }

    fn take_calls(&self, state: &mut State, now: Instant) -> Option<Calls> {
        let (trace, file) = (self.event_sources.trace()?, self.followed?);
        Some(calls::take(trace, file, &mut state.others, self.mapped.page_size, now))
    }

    /// VMAs of tracked mappings, if all of them stand.
    pub(super) fn standing(&self, state: &State) -> Option<u64> {
        let stands = |observed: &super::observed::Observed| observed.stands(self.mapped).unwrap_or(false);
        state.observed.iter().all(stands).then(|| state.pieces())
    }

    pub(super) fn is_idle(&self, state: &State, look: &Look) -> bool {
        let traced_writes = look.calls.as_ref().is_some_and(|calls| !calls.are_none());
        let idle = idle(&IdleEvidence {
            hugetlb: self.scans.source().hugetlb_order.is_some(),
            silent: self.silent && !(look.marks.closed && state.marks.closed),
            ctime_changed: look.ctime_changed(state),
            modified: look.modified || look.lost,
            silent_write_pending: state.marks.silent_write_pending(look.now),
            traced_writes,
            pinned_pages: !state.sticky.is_empty(),
            untracked_mappings: !look.all_tracked()
                || !state.untracked.is_empty()
                || !state.children.is_empty()
                || look.lost_children
                || look.processes_started
                || look.mappings_came(state, self.reach),
            mappings_stand: look.standing.is_some(),
            same_size: look.marks.pages == state.marks.pages,
            stamped_since: state.stamped,
        });
        // A file without any generation has to have one.
        idle && !state.open.previous().is_none()
    }
}
