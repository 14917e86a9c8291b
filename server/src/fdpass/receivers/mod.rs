//! The service's side of the receivers: one process per user, started with the first connection and ended when it is idle.
//!
//! ```text
//!             first connection                no sessions for IDLE_TIMEOUT, or the process ended
//!   (none) -------------------> current ----------------------------------------------------> killed, reaped
//!                                 |  |
//!                  close blocked  |  |  no answer
//!                                 v  v
//!                                blocked --sessions ended, no answer--> killed, reaped when it ends
//! ```
//!
//! The next connection of the user of a blocked receiver starts another one, up to [`MAX_BLOCKED_PER_USER`]. Nothing here waits for
//! the end of a process: a process that a foreign object blocks may have none.

mod connection;
mod process;
mod refuser;

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fdmap_sys::{Errno, SyscallError};
use tokio::time::sleep;

use crate::incidents::{self, Incident};
use crate::log_limit::LogLimit;
use crate::service::Shutdown;
use process::{Pong, ReceiverProcess};

pub(crate) use connection::Connection;
pub(crate) use process::Kept;
pub(super) use process::ReceiverSession;
pub(crate) use refuser::Refuser;

/// Interval of pings, and of the checks whether a receiver has sessions, or has ended.
const PING_INTERVAL: Duration = Duration::from_millis(500);
/// A receiver that does not answer a ping in this time is replaced, unless it only waits for a processor.
const PONG_TIMEOUT: Duration = Duration::from_secs(1);
/// It is abandoned, with its sessions, if it does not answer in this time. Memory that is swapped in takes less.
const ABANDON_TIMEOUT: Duration = Duration::from_secs(5);
/// A receiver without sessions ends after this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Receivers of one user that are blocked. Further connections of the user are refused while there are so many.
const MAX_BLOCKED_PER_USER: usize = 4;
/// Those of all users but root together.
const MAX_BLOCKED_OF_USERS: usize = 16 * MAX_BLOCKED_PER_USER;

static BLOCKED: LogLimit = LogLimit::new();
static ENDED: LogLimit = LogLimit::new();
static KILLED: LogLimit = LogLimit::new();

/// A receiver cannot get a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiverError {
    #[error("user {0} has {MAX_BLOCKED_PER_USER} receivers that are blocked by descriptors it passed")]
    TooManyBlocked(u32),
    #[error(
        "all users together have {MAX_BLOCKED_OF_USERS} receivers that are blocked by descriptors they passed"
    )]
    TooManyOfAll,
    #[error("starting /proc/self/exe as the receiver of user {0}")]
    Start(u32, #[source] io::Error),
    #[error("passing the connection to the receiver of user {0}")]
    Pass(u32, #[source] SyscallError),
}

/// The receivers of all users.
#[derive(Debug)]
pub(crate) struct Receivers {
    users: Mutex<HashMap<u32, Arc<UserReceivers>>>,
    /// Blocked receivers of all users but root.
    blocked_of_users: Arc<AtomicUsize>,
    shutdown: Shutdown,
}

#[derive(Debug)]
struct UserReceivers {
    user: u32,
    /// Gets the next connection.
    current: tokio::sync::Mutex<Option<Arc<ReceiverProcess>>>,
    blocked: AtomicUsize,
    blocked_of_users: Arc<AtomicUsize>,
}

/// Why a receiver ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It has no sessions.
    Idle,
    /// It does not answer for [`ABANDON_TIMEOUT`].
    Unanswered,
    /// It was not asked to.
    Unasked,
}

/// Counts a receiver as blocked until it is reaped.
struct BlockedReceiver(Arc<UserReceivers>);

impl Receivers {
    pub(crate) fn new(shutdown: Shutdown) -> Arc<Self> {
        Arc::new(Self { users: Mutex::default(), blocked_of_users: Arc::default(), shutdown })
    }

    /// Begins a session of a client of `user` through a receiver, which gets the client's socket.
    ///
    /// No descriptor can arrive on `client` before the receiver gets `BEGIN` (where the kernel has `SO_PASSRIGHTS`), and by then it
    /// is closed here: so this process closes none with it, even if the receiver ends at any moment.
    pub(super) async fn session(
        self: &Arc<Self>,
        user: u32,
        client: Connection,
    ) -> Result<ReceiverSession, ReceiverError> {
        let (process, socket) =
            self.with_receiver(user, |process| process.pass(client.socket().as_fd())).await?;
        client.close_copy();
        process.begin(socket).map_err(|error| ReceiverError::Pass(user, error))
    }

    /// Lets a receiver of `user` keep a descriptor of a connection.
    pub(crate) async fn keep(
        self: &Arc<Self>,
        user: u32,
        connection: &Connection,
    ) -> Result<Kept, ReceiverError> {
        let kept = self.with_receiver(user, |process| process.keep(connection.socket().as_fd())).await;
        kept.map(|(_, kept)| kept)
    }

    /// Passes something to the receiver that gets the next connection of `user`.
    async fn with_receiver<T>(
        self: &Arc<Self>,
        user: u32,
        pass: impl Fn(&ReceiverProcess) -> Result<T, SyscallError>,
    ) -> Result<(Arc<ReceiverProcess>, T), ReceiverError> {
        let of_user = self.of_user(user);
        let mut current = of_user.current.lock().await;
        loop {
            let (process, is_new) = match current.as_ref() {
                Some(process) => (Arc::clone(process), false),
                None => {
                    of_user.check_blocked()?;
                    (Arc::clone(current.insert(self.start(&of_user).await?)), true)
                }
            };
            match pass(&process) {
                // The process has ended, which its supervisor will notice.
                Err(error) if !is_new && matches!(error.errno, Errno::EPIPE | Errno::ECONNRESET) => {
                    *current = None;
                }
                passed => {
                    let passed = passed.map_err(|error| ReceiverError::Pass(user, error))?;
                    return Ok((process, passed));
                }
            }
        }
    }

    async fn start(
        self: &Arc<Self>,
        of_user: &Arc<UserReceivers>,
    ) -> Result<Arc<ReceiverProcess>, ReceiverError> {
        let user = of_user.user;
        let started = tokio::task::spawn_blocking(move || ReceiverProcess::start(user)).await;
        let started = started.map_err(io::Error::other).and_then(|started| started);
        let process = Arc::new(started.map_err(|error| ReceiverError::Start(user, error))?);
        let (receivers, of_user, supervised) = (Arc::clone(self), Arc::clone(of_user), Arc::clone(&process));
        tokio::spawn(async move {
            tokio::select! {
                () = of_user.supervise(&supervised) => receivers.forget(&of_user),
                () = receivers.shutdown.clone().wait() => supervised.kill_without_sessions().await,
            }
        });
        Ok(process)
    }

    fn of_user(&self, user: u32) -> Arc<UserReceivers> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || UserReceivers {
            user,
            current: tokio::sync::Mutex::default(),
            blocked: 0.into(),
            blocked_of_users: Arc::clone(&self.blocked_of_users),
        };
        Arc::clone(users.entry(user).or_insert_with(|| Arc::new(new())))
    }

    /// Forgets a user without connections and receivers.
    fn forget(&self, of_user: &Arc<UserReceivers>) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        // The map and the caller: no session begins, and no other receiver is supervised.
        if Arc::strong_count(of_user) == 2
            && of_user.current.try_lock().is_ok_and(|current| current.is_none())
        {
            users.remove(&of_user.user);
        }
    }
}

impl UserReceivers {
    /// Fails if the user, or all users but root together, have as many blocked receivers as permitted.
    fn check_blocked(&self) -> Result<(), ReceiverError> {
        if self.blocked.load(Ordering::Relaxed) >= MAX_BLOCKED_PER_USER {
            return Err(ReceiverError::TooManyBlocked(self.user));
        }
        if self.user != 0 && self.blocked_of_users.load(Ordering::Relaxed) >= MAX_BLOCKED_OF_USERS {
            return Err(ReceiverError::TooManyOfAll);
        }
        Ok(())
    }

    /// Watches a receiver until it has ended and is reaped.
    async fn supervise(self: &Arc<Self>, process: &Arc<ReceiverProcess>) {
        let (mut blocked, end) = self.watch(process).await;
        self.replace(process).await;
        process.abandon().await;
        let killed = Instant::now();
        let status = loop {
            if let Some(status) = process.reap() {
                break status;
            }
            if blocked.is_none() && killed.elapsed() >= PONG_TIMEOUT {
                blocked = Some(self.count_blocked(process, "does not end"));
            }
            sleep(PING_INTERVAL).await;
        };
        let (incident, limit, reason) = match end {
            End::Idle => return,
            End::Unanswered => {
                (Incident::ReceiverKilled, &KILLED, "was killed, with its sessions: it did not answer")
            }
            End::Unasked => (Incident::ReceiverEnded, &ENDED, "ended"),
        };
        incidents::count(incident);
        if let Some(omitted) = limit.permit() {
            let status = status.map(tracing::field::display);
            let (user, pid) = (self.user, process.pid);
            tracing::warn!(user, pid, status, omitted, "a receiver of descriptors {reason}");
        }
    }

    /// Returns when the process is to be killed, or has ended.
    async fn watch(self: &Arc<Self>, process: &Arc<ReceiverProcess>) -> (Option<BlockedReceiver>, End) {
        let mut blocked = None;
        let mut replaced = false;
        let mut pinged: Option<Instant> = None;
        let mut used = Instant::now();
        loop {
            // Before the answer is received: a process that has just answered sleeps.
            let is_runnable = process.is_runnable();
            let reason = match process.pong() {
                Pong::Nothing => pinged
                    .is_some_and(|pinged| pinged.elapsed() >= PONG_TIMEOUT && !is_runnable)
                    .then_some("does not answer"),
                Pong::Received { blocked: false, .. } => {
                    (pinged, blocked) = (None, None);
                    None
                }
                Pong::Received { blocked: true, .. } => {
                    pinged = None;
                    Some("cannot close a descriptor")
                }
                Pong::Ended => return (blocked, End::Unasked),
            };
            if let Some(reason) = reason
                && blocked.is_none()
            {
                blocked = Some(self.count_blocked(process, reason));
                replaced = true;
                self.replace(process).await;
            }
            if blocked.is_some() && pinged.is_some_and(|pinged| pinged.elapsed() >= ABANDON_TIMEOUT) {
                return (blocked, End::Unanswered);
            }
            if pinged.is_none() && process.ping() {
                pinged = Some(Instant::now());
            }
            if process.has_sessions() {
                used = Instant::now();
            } else if (replaced && self.replace_idle(process).await)
                || (used.elapsed() >= IDLE_TIMEOUT && self.replace_idle(process).await)
            {
                return (blocked, End::Idle);
            }
            sleep(PING_INTERVAL).await;
        }
    }

    /// Gives the next connections to another receiver.
    async fn replace(&self, process: &Arc<ReceiverProcess>) {
        let mut current = self.current.lock().await;
        if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, process)) {
            *current = None;
        }
    }

    /// The same, unless a session has begun meanwhile.
    async fn replace_idle(&self, process: &Arc<ReceiverProcess>) -> bool {
        let mut current = self.current.lock().await;
        // References of the supervisor and of `current`; a session that begins has one more.
        let is_idle = !process.has_sessions() && Arc::strong_count(process) <= 2;
        if is_idle && current.as_ref().is_some_and(|current| Arc::ptr_eq(current, process)) {
            *current = None;
        }
        is_idle
    }

    fn count_blocked(self: &Arc<Self>, process: &ReceiverProcess, reason: &str) -> BlockedReceiver {
        incidents::count(Incident::ReceiverReplaced);
        let count = self.blocked.fetch_add(1, Ordering::Relaxed) + 1;
        if self.user != 0 {
            self.blocked_of_users.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(omitted) = BLOCKED.permit() {
            let (user, pid) = (self.user, process.pid);
            tracing::warn!(
                user,
                pid,
                count,
                omitted,
                "a receiver of descriptors {reason}: another one replaces it"
            );
        }
        BlockedReceiver(Arc::clone(self))
    }
}

impl Drop for BlockedReceiver {
    fn drop(&mut self) {
        self.0.blocked.fetch_sub(1, Ordering::Relaxed);
        if self.0.user != 0 {
            self.0.blocked_of_users.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocked_receivers_of_users_are_limited() {
        let of_all = Arc::new(AtomicUsize::new(0));
        let of_user = |user, blocked: usize, blocked_of_users: usize| {
            of_all.store(blocked_of_users, Ordering::Relaxed);
            let (current, blocked_of_users) = (tokio::sync::Mutex::default(), Arc::clone(&of_all));
            UserReceivers { user, current, blocked: blocked.into(), blocked_of_users }.check_blocked()
        };
        assert!(of_user(1234, MAX_BLOCKED_PER_USER - 1, MAX_BLOCKED_OF_USERS - 1).is_ok());
        assert!(matches!(of_user(1234, MAX_BLOCKED_PER_USER, 0), Err(ReceiverError::TooManyBlocked(1234))));
        assert!(matches!(of_user(1234, 0, MAX_BLOCKED_OF_USERS), Err(ReceiverError::TooManyOfAll)));
        assert!(of_user(0, MAX_BLOCKED_PER_USER - 1, MAX_BLOCKED_OF_USERS).is_ok());
        assert!(matches!(of_user(0, MAX_BLOCKED_PER_USER, 0), Err(ReceiverError::TooManyBlocked(0))));
    }
}
