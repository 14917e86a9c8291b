//! Calls that may block, outside of the async worker threads.
//!
//! A call waits for its turn without a thread: one call at a time works on the generations of a file, and the calls of one user have
//! a bounded number of threads. So a call that does not return costs one thread, however many wait behind it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinError, spawn_blocking};
use tonic::Code;

use crate::files::{Caller, FileError, Quota, Quotas, Turns};
use crate::status::GrpcCode;

/// Threads of all users but administrators together. tokio starts 512 at most.
const MAX_THREADS_OF_USERS: usize = 256;

/// Runs calls that may block.
#[derive(Debug)]
pub struct BlockingCalls {
    /// Calls that wait or run.
    calls: Arc<Quota>,
    threads_per_user: usize,
    /// The free threads of users with calls.
    by_user: Mutex<HashMap<u32, Weak<Semaphore>>>,
    of_users: Arc<Semaphore>,
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

impl BlockingCalls {
    /// `calls_per_user`: calls of one user that wait or run. `threads_per_user`: those of them that run.
    #[must_use]
    pub fn new(quotas: &Quotas, calls_per_user: u32, threads_per_user: u32) -> Self {
        Self {
            calls: quotas.quota("calls in progress", u64::from(calls_per_user)),
            threads_per_user: usize::try_from(threads_per_user).unwrap_or(usize::MAX),
            by_user: Mutex::default(),
            of_users: Arc::new(Semaphore::new(MAX_THREADS_OF_USERS)),
        }
    }

    /// Runs `work` for the caller, when it is the turn of its request. `turns`: those of the file whose generations it works on. If the
    /// returned future is dropped while the call waits, the work is not done. Calls of administrators wait for their turn only.
    ///
    /// # Errors
    /// [`BlockingError`]
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        caller: &Caller,
        turns: Option<&Turns>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, BlockingError> {
        let call = self.calls.acquire(caller, 1)?;
        let pools = if caller.admin {
            Vec::new()
        } else {
            vec![self.threads_of(call.uid()), Arc::clone(&self.of_users)]
        };
        let permits = loop {
            let turn = match turns {
                Some(turns) => Some(turns.wait().await),
                None => None,
            };
            if let Some(threads) = take_threads(&pools) {
                break (turn, threads);
            }
            // Whose turn it is must not wait for threads of one user. A thread without a turn would be one that other calls lack.
            drop(turn);
            for pool in &pools {
                drop(Arc::clone(pool).acquire_owned().await);
            }
        };
        let ran = spawn_blocking(move || {
            let _until_the_end = (call, permits);
            work()
        });
        Ok(ran.await?)
    }

    /// The free threads of a user.
    fn threads_of(&self, uid: u32) -> Arc<Semaphore> {
        // No code panics with the lock held.
        let mut users = self.by_user.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(threads) = users.get(&uid).and_then(Weak::upgrade) {
            return threads;
        }
        users.retain(|_, threads| threads.strong_count() > 0);
        let threads = Arc::new(Semaphore::new(self.threads_per_user));
        users.insert(uid, Arc::downgrade(&threads));
        threads
    }
}

/// One thread of each pool, if all have one.
fn take_threads(pools: &[Arc<Semaphore>]) -> Option<Vec<OwnedSemaphorePermit>> {
    pools.iter().map(|pool| Arc::clone(pool).try_acquire_owned().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Longer than any call of these tests takes.
    const LONG: Duration = Duration::from_secs(60);

    fn user(uid: u32) -> Caller {
        Caller { uid, gid: uid, groups: Vec::new(), admin: uid == 0 }
    }

    fn calls() -> Arc<BlockingCalls> {
        Arc::new(BlockingCalls::new(&Quotas::new(16), 601, 2))
    }

    /// Begins a call that does not return until the sender is dropped. When this function returns, the call waits or runs.
    async fn stuck(
        calls: &Arc<BlockingCalls>,
        uid: u32,
        turns: Option<&Turns>,
    ) -> (mpsc::Sender<()>, tokio::task::JoinHandle<bool>) {
        let (calls, turns, (release, released)) = (Arc::clone(calls), turns.cloned(), mpsc::channel());
        let caller = user(uid);
        let work = move || released.recv();
        let (polled, is_polled) = tokio::sync::oneshot::channel();
        let call = tokio::spawn(async move {
            // No other task of this thread runs before the call waits.
            polled.send(()).unwrap();
            calls.run(&caller, turns.as_ref(), work).await.is_ok()
        });
        is_polled.await.unwrap();
        (release, call)
    }

    #[tokio::test]
    async fn call_that_does_not_return_delays_no_other_user_and_no_other_file() {
        let (calls, held, other) = (calls(), Turns::default(), Turns::default());
        let (release, first) = stuck(&calls, 1, Some(&held)).await;
        let mut waiting = Vec::new();
        for _ in 0..599 {
            waiting.push(stuck(&calls, 1, Some(&held)).await);
        }
        for (uid, turns) in [(1, Some(&other)), (1, None), (2, Some(&other)), (2, None), (0, Some(&other))] {
            let caller = user(uid);
            let done = calls.run(&caller, turns, || 5);
            assert_eq!(tokio::time::timeout(LONG, done).await.unwrap().unwrap(), 5);
        }
        waiting.push(stuck(&calls, 1, Some(&held)).await);
        let refused = calls.run(&user(1), None, || 5).await;
        assert_eq!(refused.map_err(|error| error.code()), Err(Code::ResourceExhausted));
        drop(release);
        assert!(first.await.unwrap());
        for (release, call) in waiting {
            drop(release);
            assert!(call.await.unwrap());
        }
        assert_eq!(calls.run(&user(1), Some(&held), || 5).await.unwrap(), 5);
    }

    #[tokio::test]
    async fn calls_of_one_user_have_a_bounded_number_of_threads() {
        let calls = calls();
        let running = [stuck(&calls, 1, None).await, stuck(&calls, 1, None).await];
        let user = user(1);
        let mut third = Box::pin(calls.run(&user, None, || 5));
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut third).await.is_err());
        drop(running);
        assert_eq!(tokio::time::timeout(LONG, third).await.unwrap().unwrap(), 5);
        for uid in 10..20 {
            calls.run(&self::user(uid), None, || ()).await.unwrap();
        }
        assert!(calls.by_user.lock().unwrap().len() <= 2, "users without calls are forgotten");
    }

    /// Their threads are stuck in calls on files of their own.
    #[tokio::test]
    async fn user_without_a_free_thread_holds_no_turn() {
        let (calls, shared) = (calls(), Turns::default());
        let running = [stuck(&calls, 1, None).await, stuck(&calls, 1, None).await];
        let (release, waiting) = stuck(&calls, 1, Some(&shared)).await;
        drop(release);
        let caller = user(2);
        let done = calls.run(&caller, Some(&shared), || 5);
        assert_eq!(tokio::time::timeout(LONG, done).await.unwrap().unwrap(), 5);
        drop(running);
        assert!(tokio::time::timeout(LONG, waiting).await.unwrap().unwrap());
    }

    #[tokio::test]
    async fn all_users_but_administrators_share_a_bounded_number_of_threads() {
        let calls = calls();
        let taken = Arc::clone(&calls.of_users).acquire_many_owned(256).await.unwrap();
        let caller = user(1);
        let mut waiting = Box::pin(calls.run(&caller, None, || 5));
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut waiting).await.is_err());
        assert_eq!(calls.run(&user(0), None, || 5).await.unwrap(), 5);
        drop(taken);
        assert_eq!(tokio::time::timeout(LONG, waiting).await.unwrap().unwrap(), 5);
    }

    #[tokio::test]
    async fn canceled_call_that_waits_is_not_done() {
        let (calls, turns) = (calls(), Turns::default());
        let (release, first) = stuck(&calls, 1, Some(&turns)).await;
        let (done, was_done) = mpsc::channel();
        let caller = user(2);
        let canceled = calls.run(&caller, Some(&turns), move || done.send(()));
        assert!(tokio::time::timeout(Duration::from_millis(10), canceled).await.is_err());
        drop(release);
        assert!(first.await.unwrap());
        assert_eq!(calls.run(&caller, Some(&turns), || 5).await.unwrap(), 5);
        assert_eq!(was_done.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }

    #[tokio::test]
    async fn panic_gives_back_what_the_call_had() {
        let (calls, turns) = (calls(), Turns::default());
        let caller = user(1);
        for _ in 0..5 {
            let panicked = calls.run(&caller, Some(&turns), || panic!("on purpose"));
            let panicked = tokio::time::timeout(LONG, panicked).await.unwrap();
            assert_eq!(panicked.map(drop).map_err(|error| error.code()), Err(Code::Internal));
        }
        assert_eq!(
            tokio::time::timeout(LONG, calls.run(&caller, Some(&turns), || 5)).await.unwrap().unwrap(),
            5
        );
    }
}
