//! Logs operations of the core that take long, while they still run: operation, file, phase, and the process that they wait for.
//!
//! An operation runs on one thread, so its phases need no parameter: [`enter`] and [`wait_for`] apply to the operation of the calling
//! thread, and do nothing outside one. An operation that begins within another one is a part of it: the log names the innermost.
//! A call that waits for its turn has no thread yet: [`queue()`]. [`run`] logs each of both once when it is slow. The end of each slow
//! one is logged too, that of an operation with its longest step. The cost is two short locks per operation and one per phase.

mod list;
mod queue;

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::field::debug;

use crate::log_limit::LogLimit;
use list::{Entry, List, Listed};

pub(crate) use queue::{Queued, queue};

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
    /// Starts a helper.
    HelperStart,
    /// Computes an answer, or changes what the service keeps.
    Computation,
}

/// An operation in progress. Dropping it ends the operation.
pub(crate) struct Operation {
    nesting: Nesting,
    /// Operations are values of one thread.
    _not_send: PhantomData<*const ()>,
}

enum Nesting {
    Outermost(Listed<Progress>),
    /// Within another one, which continues with this step.
    Inner(Step),
}

/// The operation waits for a process until this is dropped.
pub(crate) struct Waiting {
    outer: Option<u32>,
    _not_send: PhantomData<*const ()>,
}

struct Progress(Mutex<State>);

struct State {
    now: Step,
    /// The time of `now`.
    since: Instant,
    /// The longest step that has ended, and its time.
    longest: (Step, Duration),
}

/// Operation, file and phase, and the process that the operation waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    operation: &'static str,
    /// The name of the file, unquoted.
    file: Option<Arc<str>>,
    phase: Phase,
    pid: Option<u32>,
}

impl Operation {
    /// Begins an operation on a file. `file` is its name, unquoted.
    pub(crate) fn begin(operation: &'static str, file: &Arc<str>, phase: Phase) -> Self {
        Self::begin_step(Step { operation, file: Some(Arc::clone(file)), phase, pid: None })
    }

    /// Begins an operation that is on no file, or on one whose name is not known yet.
    pub(crate) fn begin_without_file(operation: &'static str, phase: Phase) -> Self {
        Self::begin_step(Step { operation, file: None, phase, pid: None })
    }

    /// Begins `phase` of the thread's current operation. If there is none, begins `operation` on `file`. Lasts until the result is dropped.
    pub(crate) fn begin_phase(operation: &'static str, file: Option<&Arc<str>>, phase: Phase) -> Self {
        let now = CURRENT.with_borrow(|current| Some(current.as_ref()?.value.state().now.clone()));
        let now = now.unwrap_or_else(|| Step { operation, file: file.cloned(), phase, pid: None });
        Self::begin_step(Step { phase, ..now })
    }

    fn begin_step(step: Step) -> Self {
        let now = Instant::now();
        let nesting = CURRENT.with_borrow_mut(|current| match current {
            Some(outer) => Nesting::Inner(outer.value.state().step(step, now)),
            None => {
                let state = State { now: step.clone(), since: now, longest: (step, Duration::ZERO) };
                let listed = OPERATIONS.add(Progress(Mutex::new(state)));
                *current = Some(Arc::clone(&listed.entry));
                Nesting::Outermost(listed)
            }
        });
        Self { nesting, _not_send: PhantomData }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let listed = match &self.nesting {
            Nesting::Inner(outer) => {
                let _ = change(|now| *now = outer.clone());
                return;
            }
            Nesting::Outermost(listed) => listed,
        };
        CURRENT.set(None);
        if let Some(after) = listed.slow()
            && let Some(omitted) = ENDED.permit()
        {
            let step = listed.entry.value.state().longest(Instant::now()).clone();
            let Step { operation, file, phase, pid } = step;
            let file = file.as_deref().map(debug);
            tracing::warn!(operation, file, %phase, pid, ?after, omitted, "a slow operation ended");
        }
    }
}

impl State {
    /// Begins another step, if it is another one. Returns the step before.
    fn step(&mut self, next: Step, at: Instant) -> Step {
        if next == self.now {
            return next;
        }
        let time = at.saturating_duration_since(self.since);
        self.since = at;
        let before = std::mem::replace(&mut self.now, next);
        if time >= self.longest.1 {
            self.longest = (before.clone(), time);
        }
        before
    }

    /// The longest step until `at`.
    fn longest(&self, at: Instant) -> &Step {
        let (step, time) = &self.longest;
        if at.saturating_duration_since(self.since) >= *time { &self.now } else { step }
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
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
    CURRENT.with_borrow(|current| current.as_ref()?.value.state().now.file.clone())
}

fn change<T>(change: impl FnOnce(&mut Step) -> T) -> Option<T> {
    CURRENT.with_borrow(|current| {
        let mut state = current.as_ref()?.value.state();
        let mut next = state.now.clone();
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
    let Step { operation, file, phase, pid } = oldest.value.state().now.clone();
    let file = file.as_deref().map(debug);
    let (after, others) = (oldest.began.elapsed(), slow.len() - 1);
    tracing::warn!(operation, file, %phase, pid, ?after, others, "an operation is slow and still runs");
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
            Self::HelperStart => "helper-start",
            Self::Computation => "computation",
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
        let steps = slow.iter().map(|entry| entry.value.state().now.clone());
        let of_file = steps.filter(|step| step.file.as_ref() == Some(file));
        of_file.map(|Step { operation, phase, pid, .. }| (operation, phase, pid)).collect()
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
        assert_eq!(slow(&file, later()), [("Inner", Phase::Stamping, None)], "the log names the innermost");
        let helper = Operation::begin_phase("start of a helper", None, Phase::HelperStart);
        assert_eq!(slow(&file, later()), [("Inner", Phase::HelperStart, None)]);
        drop(helper);
        assert_eq!(slow(&file, later()), [("Inner", Phase::Stamping, None)]);
        drop(inner);
        assert_eq!(slow(&file, later()), [("Outer", Phase::Harvest, None)]);
        outermost.set_reported();
        enter(Phase::Audit);
        assert_eq!(slow(&file, later()), []);
        assert_eq!(outermost.value.state().now.phase, Phase::Audit, "the outer operation is current again");
        assert_eq!(super::file(), Some(Arc::clone(&file)));
        drop(outer);
        assert_eq!(slow(&file, later()), []);
        // Outside an operation, nothing happens.
        assert_eq!(super::file(), None);
        enter(Phase::Lock);
        drop(wait_for(1));
        let start = Operation::begin_phase("start of a helper", None, Phase::HelperStart);
        let Nesting::Outermost(listed) = &start.nesting else { panic!("it is a part of no other one") };
        let expected =
            Step { operation: "start of a helper", file: None, phase: Phase::HelperStart, pid: None };
        assert_eq!(listed.entry.value.state().now, expected);
    }

    #[test]
    fn longest_step_is_that_which_took_the_most_time() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let [lock, harvest, journal] =
            [(Phase::Lock, None), (Phase::Harvest, Some(7)), (Phase::Journal, None)]
                .map(|(phase, pid)| Step { operation: "Checkpoint", file: None, phase, pid });
        let mut state = State { now: lock.clone(), since: began, longest: (lock.clone(), Duration::ZERO) };
        assert_eq!(state.longest(at(0)), &lock);
        assert_eq!(state.step(harvest.clone(), at(10)), lock);
        assert_eq!((state.longest(at(19)), state.longest(at(20))), (&lock, &harvest));
        state.step(harvest.clone(), at(25));
        assert_eq!(state.step(journal.clone(), at(40)), harvest);
        assert_eq!((state.longest(at(69)), state.longest(at(70))), (&harvest, &journal));
    }
}
