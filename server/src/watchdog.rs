//! Logs operations of the core that take long, while they still run: operation, file, phase, and the process that they wait for.
//!
//! An operation runs on one thread, so its phases need no parameter: [`enter`] and [`wait_for`] apply to the innermost operation of
//! the calling thread, and do nothing outside one. A call that waits for its turn has no thread yet: [`queue`]. [`run`] logs each
//! of both once when it is slow. The end of each slow one is logged too, that of an operation with what it did and waited for longest.
//! The cost is two short locks per operation and one per phase.

mod list;
mod queue;

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::log_limit::LogLimit;
use list::{Entry, List, Listed};

pub(crate) use queue::queue;

/// Time between two searches for slow operations.
const INTERVAL: Duration = Duration::from_millis(250);

static OPERATIONS: List<Progress> = List::new();
static REPORTED: LogLimit = LogLimit::new();
static ENDED: LogLimit = LogLimit::new();

thread_local! {
    static CURRENT: RefCell<Option<Arc<Entry<Progress>>>> = const { RefCell::new(None) };
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
    listed: Listed<Progress>,
    outer: Option<Arc<Entry<Progress>>>,
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
    state: Mutex<State>,
}

#[derive(Clone, Copy)]
struct State {
    now: Step,
    /// The time of `now`.
    since: Instant,
    /// The longest step that has ended, and its time.
    longest: (Step, Duration),
}

/// The phase of an operation, and the process that it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    phase: Phase,
    pid: Option<u32>,
}

impl Operation {
    /// Begins an operation on a file. `file` is its name, unquoted.
    pub(crate) fn begin(operation: &'static str, file: &Arc<str>, phase: Phase) -> Self {
        let now = Step { phase, pid: None };
        let state = State { now, since: Instant::now(), longest: (now, Duration::ZERO) };
        let progress = Progress { operation, file: Arc::clone(file), state: Mutex::new(state) };
        let listed = OPERATIONS.add(progress);
        let outer = CURRENT.replace(Some(Arc::clone(&listed.entry)));
        Self { listed, outer, _not_send: PhantomData }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        CURRENT.set(self.outer.take());
        if let Some(after) = self.listed.slow()
            && let Some(omitted) = ENDED.permit()
        {
            let progress = &self.listed.entry.value;
            let Step { phase, pid } = progress.state().longest(Instant::now());
            let (operation, file) = (progress.operation, &progress.file);
            tracing::warn!(operation, ?file, %phase, pid, ?after, omitted, "a slow operation ended");
        }
    }
}

impl State {
    /// Begins another step, if it is another one.
    fn step(&mut self, next: Step, at: Instant) {
        if next != self.now {
            self.longest = (self.longest(at), self.longest.1.max(at.saturating_duration_since(self.since)));
            (self.now, self.since) = (next, at);
        }
    }

    /// The longest step until `at`.
    fn longest(&self, at: Instant) -> Step {
        let (step, time) = self.longest;
        if at.saturating_duration_since(self.since) >= time { self.now } else { step }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        change(|now| now.pid = self.outer);
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
    change(|now| now.phase = phase);
}

/// The operation of this thread makes calls that may wait for process `pid`: for the lock of its address space, or for its answer.
pub(crate) fn wait_for(pid: u32) -> Waiting {
    let outer = change(|now| now.pid.replace(pid)).flatten();
    Waiting { outer, _not_send: PhantomData }
}

/// The name of the file that the operation of this thread works on, unquoted.
pub(crate) fn file() -> Option<Arc<str>> {
    CURRENT.with_borrow(|current| current.as_ref().map(|entry| Arc::clone(&entry.value.file)))
}

fn change<T>(change: impl FnOnce(&mut Step) -> T) -> Option<T> {
    CURRENT.with_borrow(|current| {
        let mut state = current.as_ref()?.value.state();
        let mut next = state.now;
        let result = change(&mut next);
        state.step(next, Instant::now());
        Some(result)
    })
}

/// Logs slow operations for ever.
pub(crate) async fn run() {
    loop {
        tokio::time::sleep(INTERVAL).await;
        report();
        queue::report();
    }
}

/// Logs the oldest slow operation that was not logged yet. If several are slow, it is most likely the one that the others wait
/// for; they follow at the next calls.
fn report() {
    let slow = OPERATIONS.slow_since(Instant::now());
    let Some(oldest) = slow.first() else { return };
    if REPORTED.permit().is_none() {
        return;
    }
    oldest.set_reported();
    let Progress { operation, file, .. } = &oldest.value;
    let Step { phase, pid } = oldest.value.state().now;
    let (after, others) = (oldest.began.elapsed(), slow.len() - 1);
    tracing::warn!(operation, ?file, %phase, pid, ?after, others, "an operation is slow and still runs");
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
    use super::list::SLOW;
    use super::*;

    /// Phase and process of the slow operations on a file, oldest first.
    fn slow(file: &Arc<str>, now: Instant) -> Vec<(&'static str, Phase, Option<u32>)> {
        let slow = OPERATIONS.slow_since(now);
        let of_file = slow.iter().map(|entry| &entry.value).filter(|progress| progress.file == *file);
        let states = of_file.map(|progress| {
            let Step { phase, pid } = progress.state().now;
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
        let outermost = CURRENT.with_borrow(Clone::clone).unwrap();
        let inner = Operation::begin("Inner", &file, Phase::Journal);
        enter(Phase::Stamping);
        let expected = [("Outer", Phase::Harvest, None), ("Inner", Phase::Stamping, None)];
        assert_eq!(slow(&file, later()), expected);
        outermost.set_reported();
        assert_eq!(slow(&file, later()), expected[1..]);
        drop(inner);
        enter(Phase::Audit);
        assert_eq!(outermost.value.state().now.phase, Phase::Audit, "the outer operation is current again");
        assert_eq!(super::file(), Some(Arc::clone(&file)));
        drop(outer);
        assert_eq!(slow(&file, later()), []);
        // Outside an operation, nothing happens.
        assert_eq!(super::file(), None);
        enter(Phase::Lock);
        drop(wait_for(1));
    }

    #[test]
    fn longest_step_is_that_which_took_the_most_time() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let [lock, harvest, journal] =
            [(Phase::Lock, None), (Phase::Harvest, Some(7)), (Phase::Journal, None)]
                .map(|(phase, pid)| Step { phase, pid });
        let mut state = State { now: lock, since: began, longest: (lock, Duration::ZERO) };
        assert_eq!(state.longest(at(0)), lock);
        state.step(harvest, at(10));
        assert_eq!((state.longest(at(19)), state.longest(at(20))), (lock, harvest));
        state.step(harvest, at(25));
        state.step(journal, at(40));
        assert_eq!((state.longest(at(69)), state.longest(at(70))), (harvest, journal));
    }
}
