//! Calls that may block, outside of the async worker threads.
//!
//! A call waits without a thread until nothing that it needs is in use: the file whose generations it works on, which one call at a
//! time has, and a thread of its user. So a call that does not return costs one thread, however many wait behind it; and a call
//! that waits for a thread holds no file.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fdmap_proto::units::FileId;
use tokio::sync::oneshot;
use tokio::task::{JoinError, spawn_blocking};
use tonic::Code;

use crate::files::{Caller, FileError, Quota, Quotas};
use crate::status::GrpcCode;

/// Threads of all users but administrators together. tokio starts 512 at most.
const MAX_THREADS_OF_USERS: u32 = 256;

/// Runs calls that may block.
#[derive(Debug)]
pub struct BlockingCalls {
    /// Calls that wait or run.
    calls: Arc<Quota>,
    schedule: Arc<Schedule>,
}

/// The call was refused, or panicked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BlockingError {
    #[error(transparent)]
    Limit(#[from] FileError),
    #[error("the call ended without a result")]
    Panicked(#[from] JoinError),
}

impl GrpcCode for BlockingError {
    fn code(&self) -> Code {
        match self {
            Self::Limit(error) => error.code(),
            Self::Panicked(_) => Code::Internal,
        }
    }
}

/// Which calls run, and which wait.
#[derive(Debug)]
struct Schedule {
    threads_per_user: u32,
    threads_of_users: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Running calls by user, without those of administrators.
    by_user: HashMap<u32, u32>,
    /// Their number.
    of_users: u32,
    /// The files that running calls work on.
    files: HashSet<FileId>,
    /// In the order of their requests. None of them can run now.
    waiting: VecDeque<Waiter>,
}

/// What a call has while it runs.
#[derive(Clone, Copy, Debug)]
struct Needs {
    /// `None`: an administrator, whose threads are not counted.
    user: Option<u32>,
    file: Option<FileId>,
}

#[derive(Debug)]
struct Waiter {
    needs: Needs,
    start: oneshot::Sender<Running>,
}

/// The drop ends the call, and starts those that waited for what it had.
#[derive(Debug)]
struct Running {
    schedule: Arc<Schedule>,
    needs: Needs,
}

impl BlockingCalls {
    /// `calls_per_user`: calls of one user that wait or run. `threads_per_user`: those of them that run.
    #[must_use]
    pub fn new(quotas: &Quotas, calls_per_user: u32, threads_per_user: u32) -> Self {
        let threads_of_users = MAX_THREADS_OF_USERS;
        let schedule = Schedule { threads_per_user, threads_of_users, state: Mutex::default() };
        Self {
            calls: quotas.quota("calls in progress", u64::from(calls_per_user)),
            schedule: Arc::new(schedule),
        }
    }

    /// Runs `work` for the caller, as soon as it can run. `file`: whose generations it works on. If the returned future is dropped
    /// while the call waits, the work is not done. Calls of administrators wait for the file only.
    ///
    /// # Errors
    /// [`BlockingError`]
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        caller: &Caller,
        file: Option<FileId>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, BlockingError> {
        let call = self.calls.acquire(caller, 1)?;
        let user = (!caller.admin).then(|| call.uid());
        let started = self.schedule.start(Needs { user, file });
        // Fails only if the schedule is gone, which this call holds.
        let running = started.await.ok();
        let ran = spawn_blocking(move || {
            let _until_the_end = (call, running);
            work()
        });
        Ok(ran.await?)
    }
}

impl BlockingCalls {
    /// Resolves when the caller may use a thread, until the result is dropped. Threads of administrators are not counted.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub(crate) fn thread(
        &self,
        caller: &Caller,
    ) -> Result<impl Future<Output = impl Send + use<>> + Send + use<>, FileError> {
        let call = self.calls.acquire(caller, 1)?;
        let user = (!caller.admin).then(|| call.uid());
        let started = self.schedule.start(Needs { user, file: None });
        Ok(async move { (call, started.await.ok()) })
    }
}

impl Schedule {
    /// Starts a call now, or when it can run.
    fn start(self: &Arc<Self>, needs: Needs) -> oneshot::Receiver<Running> {
        let (start, started) = oneshot::channel();
        let mut state = self.lock();
        let waiter = Waiter { needs, start };
        if self.take(&mut state, needs) {
            drop(state);
            self.grant(vec![waiter]);
        } else {
            state.waiting.push_back(waiter);
        }
        started
    }

    /// Takes what a call needs, if nothing of it is in use.
    fn take(&self, state: &mut State, Needs { user, file }: Needs) -> bool {
        let of_user = |user| state.by_user.get(&user).copied().unwrap_or(0);
        let has_thread =
            |user| state.of_users < self.threads_of_users && of_user(user) < self.threads_per_user;
        if !user.is_none_or(has_thread) || file.is_some_and(|file| state.files.contains(&file)) {
            return false;
        }
        if let Some(user) = user {
            *state.by_user.entry(user).or_default() += 1;
            state.of_users += 1;
        }
        state.files.extend(file);
        true
    }

    /// Ends a call, and starts those that can run now.
    fn end(self: &Arc<Self>, Needs { user, file }: Needs) {
        let mut state = self.lock();
        if let Some(file) = file {
            state.files.remove(&file);
        }
        if let Some(user) = user {
            state.of_users -= 1;
            if let Some(running) = state.by_user.get_mut(&user) {
                *running -= 1;
            }
            state.by_user.retain(|_, running| *running > 0);
        }
        let mut started = Vec::new();
        for waiter in std::mem::take(&mut state.waiting) {
            if waiter.start.is_closed() {
                continue;
            }
            if self.take(&mut state, waiter.needs) {
                started.push(waiter);
            } else {
                state.waiting.push_back(waiter);
            }
        }
        drop(state);
        self.grant(started);
    }

    /// Lets calls begin. One that was canceled meanwhile ends.
    fn grant(self: &Arc<Self>, started: Vec<Waiter>) {
        for Waiter { needs, start } in started {
            let _ = start.send(Running { schedule: Arc::clone(self), needs });
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics with the lock held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.schedule.end(self.needs);
    }
}

#[cfg(test)]
mod tests;
