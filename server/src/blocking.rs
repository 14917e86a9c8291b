//! Calls that may block, outside of the async worker threads.
//!
//! A call waits without a thread until nothing that it needs is in use: the file whose generations it works on, which one call at a
//! time has, and a thread of its user. So a call that does not return costs one thread, however many wait behind it; and a call
//! that waits for a thread holds no file.
//!
//! Ends of files have threads of their own, of which those of one owner take a part: [`BlockingCalls::end_file`].

mod turns;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fdmap_proto::units::FileId;
use tokio::sync::oneshot;
use tokio::task::{JoinError, spawn_blocking};
use tonic::Code;

use crate::files::{Caller, FileError, Quota, QuotaPermit, Quotas};
use crate::status::GrpcCode;
use crate::watchdog;
use turns::{Needs, Thread, Threads, Turns};

/// Threads of all users but administrators together. tokio starts 512 at most.
const MAX_THREADS_OF_USERS: u32 = 256;
/// Threads that end files.
const MAX_ENDS: u32 = 16;
/// Those of them that end files of one owner: as many as it has inode helpers.
const MAX_ENDS_PER_OWNER: u32 = 4;

/// Runs calls that may block.
#[derive(Debug)]
pub struct BlockingCalls {
    /// Calls that wait or run.
    calls: Arc<Quota>,
    schedule: Arc<Schedule>,
}

/// A call in progress. It counts toward the calls of its user, and may use threads one after another.
#[derive(Debug)]
pub(crate) struct ThreadedCall {
    schedule: Arc<Schedule>,
    thread: Thread,
    permit: Arc<QuotaPermit>,
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

/// Starts calls when it is their turn.
#[derive(Debug)]
struct Schedule(Mutex<Turns<oneshot::Sender<Running>>>);

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
        let users = Threads::new(threads_per_user, MAX_THREADS_OF_USERS);
        let ends = Threads::new(MAX_ENDS_PER_OWNER, MAX_ENDS);
        Self {
            calls: quotas.quota("calls in progress", u64::from(calls_per_user)),
            schedule: Arc::new(Schedule(Mutex::new(Turns::new(users, ends)))),
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
        let needs = Needs { thread: thread_of(caller, &call), file };
        let running = self.schedule.start(needs).await;
        Ok(in_a_thread((call, running), work).await?)
    }

    /// Runs `work`, which ends a file of `owner`: of a subordinate user, its owner. It is not work of a user, so no quota counts it, and
    /// files of administrators wait as well.
    ///
    /// # Errors
    /// A panic of `work`.
    pub(crate) async fn end_file<T: Send + 'static>(
        &self,
        owner: u32,
        file: FileId,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let running = self.schedule.start(Needs { thread: Thread::End(owner), file: Some(file) }).await;
        in_a_thread(running, work).await
    }

    /// Begins a call of the caller. It counts as in progress until the result is dropped.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub(crate) fn begin(&self, caller: &Caller) -> Result<ThreadedCall, FileError> {
        let permit = self.calls.acquire(caller, 1)?;
        let thread = thread_of(caller, &permit);
        Ok(ThreadedCall { schedule: Arc::clone(&self.schedule), thread, permit: Arc::new(permit) })
    }
}

impl ThreadedCall {
    /// Resolves when the call may use a thread, until what it resolves to is dropped. The call is in progress until then, too. Threads of
    /// administrators are not counted.
    pub(crate) fn thread(&self) -> impl Future<Output = impl Send + use<>> + Send + use<> {
        let started = self.schedule.start(Needs { thread: self.thread, file: None });
        let permit = Arc::clone(&self.permit);
        async move { (permit, started.await) }
    }
}

fn thread_of(caller: &Caller, call: &QuotaPermit) -> Thread {
    if caller.admin { Thread::Unlimited } else { Thread::User(call.uid()) }
}

/// Runs `work` in a thread, which drops `running` at the end.
async fn in_a_thread<T: Send + 'static>(
    running: impl Send + 'static,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    let ran = spawn_blocking(move || {
        let _until_the_end = running;
        work()
    });
    ran.await
}

impl Schedule {
    /// Starts a call now, or when it can run.
    fn start(self: &Arc<Self>, needs: Needs) -> impl Future<Output = Option<Running>> + Send + use<> {
        let (start, started) = oneshot::channel();
        let start = self.lock().start(needs, start);
        let queued = start.is_none().then(|| watchdog::queue(needs.thread.user(), needs.file));
        self.grant(start.map(|start| (needs, start)));
        async move {
            let _queued = queued;
            // Fails only if the schedule is gone, which this call holds.
            started.await.ok()
        }
    }

    /// Ends a call, and starts those that can run now.
    fn end(self: &Arc<Self>, needs: Needs) {
        let mut turns = self.lock();
        turns.end(needs);
        turns.forget(oneshot::Sender::is_closed);
        let started: Vec<_> = std::iter::from_fn(|| turns.next()).collect();
        drop(turns);
        self.grant(started);
    }

    /// Lets calls begin. One that was canceled meanwhile ends.
    fn grant(self: &Arc<Self>, started: impl IntoIterator<Item = (Needs, oneshot::Sender<Running>)>) {
        for (needs, start) in started {
            let _ = start.send(Running { schedule: Arc::clone(self), needs });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Turns<oneshot::Sender<Running>>> {
        // No code panics with the lock held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.schedule.end(self.needs);
    }
}

#[cfg(test)]
mod tests;
