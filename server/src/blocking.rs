//! Calls that may block, outside of the async worker threads.
//!
//! A call waits without a thread until all that it needs is free: a thread of its user, and, if it works on the generations of a file
//! or scans it, its turn. One call at a time has each of these two turns of a file. So a call that does not return costs one thread,
//! however many wait behind it; and a call that waits for a thread has no turn.
//!
//! Ends of files, and closes of descriptors, have threads of their own, of which those of one owner take a part: [`BlockingCalls::end`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fdmap_proto::units::FileId;
use tokio::sync::oneshot;
use tokio::task::{JoinError, spawn_blocking};
use tonic::Code;

use crate::files::{Caller, FileError, Quota, QuotaPermit, Quotas, ServiceFile};
use crate::status::GrpcCode;
use crate::turns::{FileUse, Needs, Thread, Threads, Turns};
use crate::watchdog::{self, Phase};

/// Threads of all users but administrators together. tokio starts 512 at most.
const MAX_THREADS_OF_USERS: u32 = 256;
/// Threads that end files and close descriptors.
const MAX_ENDS: u32 = 16;
/// Those of them that work for one owner: as many as it has inode helpers.
const MAX_ENDS_PER_OWNER: u32 = 4;

/// Runs calls that may block.
#[derive(Clone, Debug)]
pub struct BlockingCalls {
    /// Calls that wait or run.
    calls: Arc<Quota>,
    schedule: Arc<Schedule>,
}

/// A call in progress that may scan a file. It counts toward the calls of its user.
#[derive(Debug)]
pub(crate) struct ScanCall {
    schedule: Arc<Schedule>,
    needs: Needs,
    permit: QuotaPermit,
}

/// Operation and file of a call, for the log, and the turn that it waits for.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    operation: &'static str,
    /// The name of the file, unquoted.
    name: Option<Arc<str>>,
    turn: Option<FileUse>,
    continues: bool,
}

impl Call {
    /// A call about no file, or one that names its file itself.
    pub(crate) const fn new(operation: &'static str) -> Self {
        Self { operation, name: None, turn: None, continues: false }
    }

    /// A call about a file.
    pub(crate) fn about(operation: &'static str, file: &ServiceFile) -> Self {
        Self { name: Some(Arc::clone(&file.scans().source().name)), ..Self::new(operation) }
    }

    /// The rest of a call about a file, which holds page states meanwhile. It comes before calls of its user that begin.
    pub(crate) fn rest(operation: &'static str, file: &ServiceFile) -> Self {
        Self { continues: true, ..Self::about(operation, file) }
    }

    /// A call that works on the generations of a file.
    pub(crate) fn on(operation: &'static str, file: &ServiceFile) -> Self {
        Self { turn: Some(FileUse::Generations(file.id())), ..Self::about(operation, file) }
    }

    const fn needs(&self, thread: Thread) -> Needs {
        Needs { thread, turn: self.turn, continues: self.continues }
    }

    fn begin(&self) -> watchdog::Operation {
        match &self.name {
            Some(name) => watchdog::Operation::begin(self.operation, name, Phase::Computation),
            None => watchdog::Operation::begin_without_file(self.operation, Phase::Computation),
        }
    }
}

/// A call that waits, or has started since.
struct Queued {
    schedule: Arc<Schedule>,
    number: u64,
    _logged: watchdog::Queued,
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

    /// Runs `work` for the caller, as soon as it can run. If the returned future is dropped while the call waits, the work is not done.
    /// Calls of administrators wait for their turn only.
    ///
    /// # Errors
    /// [`BlockingError`]
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        caller: &Caller,
        call: Call,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, BlockingError> {
        let permit = self.calls.acquire(caller, 1)?;
        let needs = call.needs(thread_of(caller, &permit));
        let running = self.schedule.start(needs).await;
        Ok(in_a_thread((permit, running), call, work).await?)
    }

    /// Runs `work`, which ends a file of `owner`, or closes a descriptor that it passed: of a subordinate user, its owner. It is not work
    /// of a user, so no quota counts it, and that of administrators waits as well.
    ///
    /// # Errors
    /// A panic of `work`.
    pub(crate) async fn end<T: Send + 'static>(
        &self,
        owner: u32,
        call: Call,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let running = self.schedule.start(call.needs(Thread::End(owner))).await;
        in_a_thread(running, call, work).await
    }

    /// Begins a call of the caller that may scan a file. It counts as in progress until the result is dropped.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub(crate) fn begin_scan(&self, caller: &Caller, file: FileId) -> Result<ScanCall, FileError> {
        let permit = self.calls.acquire(caller, 1)?;
        let turn = Some(FileUse::Scan(file));
        let needs = Needs { thread: thread_of(caller, &permit), turn, continues: false };
        Ok(ScanCall { schedule: Arc::clone(&self.schedule), needs, permit })
    }
}

impl ScanCall {
    /// Resolves when the call may scan the file in a thread, until what it resolves to is dropped. The call is in progress until then,
    /// too. Threads of administrators are not counted.
    pub(crate) async fn turn(self) -> impl Send + use<> {
        (self.schedule.start(self.needs).await, self.permit)
    }
}

fn thread_of(caller: &Caller, call: &QuotaPermit) -> Thread {
    if caller.admin { Thread::Unlimited } else { Thread::User(call.uid()) }
}

/// Runs `work` in a thread, which drops `running` at the end.
async fn in_a_thread<T: Send + 'static>(
    running: impl Send + 'static,
    call: Call,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    let ran = spawn_blocking(move || {
        let _until_the_end = running;
        let _operation = call.begin();
        work()
    });
    ran.await
}

impl Schedule {
    /// Starts a call now, or when it can run. If the returned future is dropped meanwhile, the call no longer waits.
    fn start(self: &Arc<Self>, needs: Needs) -> impl Future<Output = Option<Running>> + Send + use<> {
        let (start, started) = oneshot::channel();
        let result = self.lock().start(needs, start);
        let queued = match result {
            Ok(start) => {
                self.grant([(needs, start)]);
                None
            }
            Err(number) => {
                let logged = watchdog::queue(needs.thread.user(), needs.turn.map(FileUse::file));
                Some(Queued { schedule: Arc::clone(self), number, _logged: logged })
            }
        };
        async move {
            let _queued = queued;
            // Fails only if the schedule is gone, which this call holds.
            started.await.ok()
        }
    }

    /// Ends a call, and starts those that can run now.
    fn end(self: &Arc<Self>, needs: Needs) {
        let started = self.lock().end(needs);
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

impl Drop for Queued {
    fn drop(&mut self) {
        self.schedule.lock().cancel(self.number);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.schedule.end(self.needs);
    }
}

#[cfg(test)]
mod tests;
