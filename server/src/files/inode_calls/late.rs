//! Helpers that have not answered in time, and the thread that receives their answers, ends idle helpers, and reaps all of them.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_sys::SyscallError;

use super::call::{Answer, InodeCall};
use super::process::{HelperProcess, Received};
use super::{Helpers, InodeCallError, State, UserHelpers, WhenLate};

/// Time between two looks at all helpers.
pub(super) const INTERVAL: Duration = Duration::from_millis(100);

/// Gets an answer; `None`: no caller needs it.
pub(super) type Completion = Option<WhenLate>;

/// A helper whose call was not answered in time.
pub(super) struct LateHelper {
    helper: HelperProcess,
    /// One for each answer to come.
    expected: VecDeque<Completion>,
}

/// A late call, with its result.
type Completed = (Completion, Result<(), InodeCallError>);

impl LateHelper {
    pub(super) fn new(helper: HelperProcess, expected: Vec<Completion>) -> Self {
        Self { helper, expected: expected.into() }
    }

    /// Calls that it has not answered.
    pub(super) fn calls(&self) -> usize {
        self.expected.len()
    }

    /// Sends a further call. After success, [`Self::expect`] has to follow.
    pub(super) fn send(&self, call: InodeCall, file: BorrowedFd<'_>) -> Result<(), SyscallError> {
        self.helper.send(call, Some(file))
    }

    /// `late` gets the answer to the call that was sent last.
    pub(super) fn expect(&mut self, late: WhenLate) {
        self.expected.push_back(Some(late));
    }

    /// Receives answers. True if no other one is to come.
    fn receive(&mut self, user: u32, completed: &mut Vec<Completed>) -> bool {
        while !self.expected.is_empty() {
            let result = match self.helper.receive() {
                Received::Nothing => return false,
                Received::Answer(Answer::Failed(error)) => Err(InodeCallError::Syscall(error)),
                Received::Answer(_) => Ok(()),
                Received::Ended => {
                    self.helper.note_ended(user);
                    let all = self.expected.drain(..);
                    completed.extend(all.map(|expected| (expected, Err(InodeCallError::Ended))));
                    return true;
                }
            };
            completed.extend(self.expected.pop_front().map(|expected| (expected, result)));
        }
        true
    }
}

impl fmt::Debug for LateHelper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LateHelper").field("helper", &self.helper).field("calls", &self.calls()).finish()
    }
}

impl UserHelpers {
    fn is_empty(&self) -> bool {
        self.idle.is_empty() && self.busy == 0 && self.late.is_empty()
    }

    /// Removes helpers that have answered, or are idle for long. Returns their processes.
    fn look(&mut self, user: u32, idle_timeout: Duration, completed: &mut Vec<Completed>) -> Vec<Child> {
        let late = self.late.extract_if(.., |late| late.receive(user, completed)).map(|late| late.helper);
        let is_old = |(helper, used): &mut (HelperProcess, Instant)| {
            // It sends nothing unasked.
            let has_ended = helper.is_ready(Duration::ZERO);
            if has_ended {
                helper.note_ended(user);
            }
            has_ended || used.elapsed() >= idle_timeout
        };
        let idle = self.idle.extract_if(.., is_old).map(|(helper, _)| helper);
        late.chain(idle).filter_map(HelperProcess::close).collect()
    }
}

impl Helpers {
    /// Starts the thread, unless it runs.
    pub(super) fn ensure_thread(self: &Arc<Self>, state: &mut State) {
        if !state.has_thread {
            // The thread ends, and the helpers with it, after the registry was dropped.
            let helpers = Arc::downgrade(self);
            let supervise = move || {
                while helpers.upgrade().is_some_and(|helpers| helpers.look()) {
                    std::thread::sleep(INTERVAL);
                }
            };
            // Without a thread, the start of the next helper tries again.
            state.has_thread =
                std::thread::Builder::new().name("inode calls".to_owned()).spawn(supervise).is_ok();
        }
    }

    /// Looks at all helpers once. False if there is none.
    fn look(&self) -> bool {
        let mut completed = Vec::new();
        let mut state = self.lock();
        let State { users, ended, has_thread } = &mut *state;
        for (user, of_user) in users.iter_mut() {
            ended.extend(of_user.look(*user, self.idle_timeout, &mut completed));
        }
        users.retain(|_, of_user| !of_user.is_empty());
        // An error means that it was reaped elsewhere.
        ended.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        *has_thread = !users.is_empty() || !ended.is_empty();
        let continues = *has_thread;
        drop(state);
        self.changed.notify_all();
        for (completion, result) in completed {
            if let Some(completion) = completion {
                completion(result);
            }
        }
        continues
    }
}
