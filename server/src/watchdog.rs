//! Logs operations of the core that take long, while they still run: operation, file, phase, and the process that they wait for.
//!
//! An operation runs on one thread, so its phases need no parameter: [`enter`] and [`wait_for`] apply to the innermost operation of
//! the calling thread, and do nothing outside one. [`run`] logs each operation once when it is slow; its end is logged too. The
//! cost is two short locks per operation and one per phase.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::log_limit::LogLimit;

/// An operation that takes longer is slow.
const SLOW: Duration = Duration::from_secs(1);
/// Time between two searches for slow operations.
const INTERVAL: Duration = Duration::from_secs(1);

static IN_PROGRESS: Mutex<Vec<Arc<Progress>>> = Mutex::new(Vec::new());
static REPORTED: LogLimit = LogLimit::new();
static ENDED: LogLimit = LogLimit::new();

thread_local! {
    static CURRENT: RefCell<Option<Arc<Progress>>> = const { RefCell::new(None) };
}

/// What an operation does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waits for the lock of the file's tracker, which another operation holds.
    Lock,
    /// Reads signals and checks the tracked mappings.
    Observation,
    Harvest,
    /// Finds the processes that map the file.
    MapperWalk,
    /// Identifies mappers and children of tracked processes.
    Audit,
    /// Finds the pages that hold data or are pinned, and stamps pages.
    Stamping,
    Journal,
    /// Registers mappings by userfaultfd.
    Registration,
    /// Searches for calls that write to the file.
    CallSearch,
    /// Reads page states.
    PageStates,
    /// Takes or gives back the inode of a file, or changes its size or seals. Waits for a helper, and for its turn.
    Inode,
    /// Writes a shared snapshot.
    SharedSnapshot,
}

/// An operation in progress. Dropping it ends the operation.
pub(crate) struct Operation {
    progress: Arc<Progress>,
    outer: Option<Arc<Progress>>,
    /// Operations are values of one thread.
    _not_send: PhantomData<*const ()>,
}

/// The operation waits for a process until this is dropped.
pub(crate) struct Waiting {
    outer: Option<u32>,
    _not_send: PhantomData<*const ()>,
}

struct Progress {
    operation: &'static str,
    file: Arc<str>,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Clone, Copy)]
struct State {
    phase: Phase,
    pid: Option<u32>,
    /// The operation was logged as slow.
    reported: bool,
}

impl Operation {
    /// Begins an operation on a file. `file` is its name, unquoted.
    pub(crate) fn begin(operation: &'static str, file: &Arc<str>, phase: Phase) -> Self {
        let state = Mutex::new(State { phase, pid: None, reported: false });
        let progress = Arc::new(Progress { operation, file: Arc::clone(file), began: Instant::now(), state });
        in_progress().push(Arc::clone(&progress));
        let outer = CURRENT.replace(Some(Arc::clone(&progress)));
        Self { progress, outer, _not_send: PhantomData }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        CURRENT.set(self.outer.take());
        let progress = &self.progress;
        in_progress().retain(|other| !Arc::ptr_eq(other, progress));
        if progress.state().reported
            && let Some(omitted) = ENDED.permit()
        {
            let (operation, file, after) = (progress.operation, &progress.file, progress.began.elapsed());
            tracing::warn!(operation, ?file, ?after, omitted, "a slow operation ended");
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        change(|state| state.pid = self.outer);
    }
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics with the lock held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The operation of this thread begins its next phase.
pub(crate) fn enter(phase: Phase) {
    change(|state| state.phase = phase);
}

/// The operation of this thread makes calls that may wait for process `pid`: for the lock of its address space.
pub(crate) fn wait_for(pid: u32) -> Waiting {
    let outer = change(|state| state.pid.replace(pid)).flatten();
    Waiting { outer, _not_send: PhantomData }
}

/// The name of the file that the operation of this thread works on, unquoted.
pub(crate) fn file() -> Option<Arc<str>> {
    CURRENT.with_borrow(|current| current.as_ref().map(|progress| Arc::clone(&progress.file)))
}

fn change<T>(change: impl FnOnce(&mut State) -> T) -> Option<T> {
    CURRENT.with_borrow(|current| current.as_ref().map(|progress| change(&mut progress.state())))
}

/// Logs slow operations for ever.
pub(crate) async fn run() {
    loop {
        tokio::time::sleep(INTERVAL).await;
        report();
    }
}

/// Logs the oldest slow operation that was not logged yet. If several are slow, it is most likely the one that the others wait
/// for; they follow at the next calls.
fn report() {
    let slow = slow_since(Instant::now());
    let Some(oldest) = slow.first() else { return };
    if REPORTED.permit().is_none() {
        return;
    }
    let State { phase, pid, .. } = {
        let mut state = oldest.state();
        state.reported = true;
        *state
    };
    let (operation, file, after) = (oldest.operation, &oldest.file, oldest.began.elapsed());
    let others = slow.len() - 1;
    tracing::warn!(operation, ?file, %phase, pid, ?after, others, "an operation is slow and still runs");
}

/// The operations that are slow at `now` and were not reported, oldest first.
fn slow_since(now: Instant) -> Vec<Arc<Progress>> {
    let is_slow = |progress: &&Arc<Progress>| {
        now.saturating_duration_since(progress.began) >= SLOW && !progress.state().reported
    };
    let mut slow: Vec<_> = in_progress().iter().filter(is_slow).map(Arc::clone).collect();
    slow.sort_by_key(|progress| progress.began);
    slow
}

fn in_progress() -> MutexGuard<'static, Vec<Arc<Progress>>> {
    // No code panics with the lock held.
    IN_PROGRESS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Display for Phase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Lock => "lock",
            Self::Observation => "observation",
            Self::Harvest => "harvest",
            Self::MapperWalk => "mapper-walk",
            Self::Audit => "audit",
            Self::Stamping => "stamping",
            Self::Journal => "journal",
            Self::Registration => "registration",
            Self::CallSearch => "call-search",
            Self::PageStates => "page-states",
            Self::Inode => "inode",
            Self::SharedSnapshot => "shared-snapshot",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Phase and process of the slow operations on a file, oldest first.
    fn slow(file: &Arc<str>, now: Instant) -> Vec<(&'static str, Phase, Option<u32>)> {
        let of_file = |progress: &&Arc<Progress>| progress.file == *file;
        let slow = slow_since(now);
        let states = slow.iter().filter(of_file).map(|progress| {
            let State { phase, pid, .. } = *progress.state();
            (progress.operation, phase, pid)
        });
        states.collect()
    }

    #[test]
    fn slow_operation_is_listed_with_its_phase_and_process_until_it_is_reported() {
        let file: Arc<str> = "watched".into();
        let later = || Instant::now() + SLOW;
        let outer = Operation::begin("Outer", &file, Phase::Lock);
        assert_eq!(slow(&file, Instant::now()), []);
        assert_eq!(slow(&file, later()), [("Outer", Phase::Lock, None)]);
        enter(Phase::Harvest);
        {
            let _waiting = wait_for(7);
            drop(wait_for(8));
            assert_eq!(slow(&file, later()), [("Outer", Phase::Harvest, Some(7))]);
        }
        assert_eq!(slow(&file, later()), [("Outer", Phase::Harvest, None)]);
        let inner = Operation::begin("Inner", &file, Phase::Journal);
        enter(Phase::Stamping);
        let expected = [("Outer", Phase::Harvest, None), ("Inner", Phase::Stamping, None)];
        assert_eq!(slow(&file, later()), expected);
        outer.progress.state().reported = true;
        assert_eq!(slow(&file, later()), expected[1..]);
        drop(inner);
        enter(Phase::Audit);
        assert_eq!(outer.progress.state().phase, Phase::Audit, "the outer operation is current again");
        assert_eq!(super::file(), Some(Arc::clone(&file)));
        drop(outer);
        assert_eq!(slow(&file, later()), []);
        // Outside an operation, nothing happens.
        assert_eq!(super::file(), None);
        enter(Phase::Lock);
        drop(wait_for(1));
    }
}
