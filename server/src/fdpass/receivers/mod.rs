//! The service's side of the receivers: one process per user, started with the first connection and ended when it is idle.
//!
//! ```text
//!             first connection            no sessions for the idle timeout, or the process ended
//!   (none) -------------------> current ----------------------------------------------------> killed, reaped
//!                                 |  ^
//!       close blocked, no answer  |  |  closes and answers again, and no other one is available
//!                                 v  |
//!                                blocked --sessions ended, no answer--> killed, reaped when it ends
//! ```
//!
//! The next connection of the user of a blocked receiver gets another one, which is started if none is available, up to
//! [`MAX_RECEIVERS_PER_USER`]: see [`roster`]. Nothing here waits for the end of a process: a process that a foreign object blocks may
//! have none.

mod connection;
mod process;
mod refuser;
mod roster;

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::AtomicUsize;
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
use roster::{Full, MAX_BLOCKED_OF_USERS, MAX_RECEIVERS_PER_USER, Roster};

/// Interval of pings, and of the checks whether a receiver has sessions, or has ended.
const PING_INTERVAL: Duration = Duration::from_millis(500);
/// A receiver that does not answer a ping in this time is replaced, unless it only waits for a processor.
const PONG_TIMEOUT: Duration = Duration::from_secs(1);
/// It is abandoned, with its sessions, if it does not answer in this time. Memory that is swapped in takes less.
const ABANDON_TIMEOUT: Duration = Duration::from_secs(5);

static BLOCKED: LogLimit = LogLimit::new();
static ENDED: LogLimit = LogLimit::new();
static KILLED: LogLimit = LogLimit::new();

/// A receiver cannot get a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiverError {
    #[error(
        "user {0} has {MAX_RECEIVERS_PER_USER} receivers, which are blocked by descriptors it passed or are ending"
    )]
    TooManyBlocked(u32),
    #[error(
        "all users but root together have {MAX_BLOCKED_OF_USERS} receivers that are blocked by descriptors they passed"
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
    /// A receiver without sessions ends after this time.
    idle_timeout: Duration,
    /// Number of receivers of all users but root that are blocked, or are not reaped 1 s after they were killed.
    blocked_of_users: Arc<AtomicUsize>,
    shutdown: Shutdown,
}

#[derive(Debug)]
struct UserReceivers {
    user: u32,
    idle_timeout: Duration,
    /// Locked while a receiver starts.
    roster: tokio::sync::Mutex<Roster<ReceiverProcess>>,
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

impl Receivers {
    pub(crate) fn new(idle_timeout: Duration, shutdown: Shutdown) -> Arc<Self> {
        Arc::new(Self { users: Mutex::default(), idle_timeout, blocked_of_users: Arc::default(), shutdown })
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
        let mut roster = of_user.roster.lock().await;
        loop {
            let (process, is_new) = match roster.current() {
                Some(process) => (Arc::clone(process), false),
                None => {
                    roster.check().map_err(|full| ReceiverError::of(full, user))?;
                    let process = self.start(&of_user).await?;
                    roster.add(Arc::clone(&process));
                    (process, true)
                }
            };
            match pass(&process) {
                // The process has ended, which its supervisor will notice.
                Err(error) if !is_new && matches!(error.errno, Errno::EPIPE | Errno::ECONNRESET) => {
                    roster.end(&process);
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
        let new = || {
            let of_users = (user != 0).then(|| Arc::clone(&self.blocked_of_users));
            UserReceivers {
                user,
                idle_timeout: self.idle_timeout,
                roster: tokio::sync::Mutex::new(Roster::new(of_users)),
            }
        };
        Arc::clone(users.entry(user).or_insert_with(|| Arc::new(new())))
    }

    /// Forgets a user without connections and receivers.
    fn forget(&self, of_user: &Arc<UserReceivers>) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        // The map and the caller: no session begins, and no other receiver is supervised.
        if Arc::strong_count(of_user) == 2
            && of_user.roster.try_lock().is_ok_and(|roster| roster.running() == 0)
        {
            users.remove(&of_user.user);
        }
    }
}

impl ReceiverError {
    const fn of(full: Full, user: u32) -> Self {
        match full {
            Full::User => Self::TooManyBlocked(user),
            Full::AllUsers => Self::TooManyOfAll,
        }
    }
}

impl UserReceivers {
    /// Watches a receiver until it has ended and is reaped.
    async fn supervise(&self, process: &Arc<ReceiverProcess>) {
        let (mut is_blocked, end) = self.watch(process).await;
        if !is_blocked {
            self.roster.lock().await.end(process);
        }
        process.abandon().await;
        let killed = Instant::now();
        let status = loop {
            if let Some(status) = process.reap() {
                break status;
            }
            if !is_blocked && killed.elapsed() >= PONG_TIMEOUT {
                is_blocked = true;
                self.replace(process, "does not end").await;
            }
            sleep(PING_INTERVAL).await;
        };
        self.roster.lock().await.reaped(process);
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

    /// Returns when the process is to be killed, or has ended: whether it is blocked, and why.
    async fn watch(&self, process: &Arc<ReceiverProcess>) -> (bool, End) {
        let mut is_blocked = false;
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
                    pinged = None;
                    if std::mem::take(&mut is_blocked) {
                        self.roster.lock().await.restore(process);
                    }
                    None
                }
                Pong::Received { blocked: true, .. } => {
                    pinged = None;
                    Some("cannot close a descriptor")
                }
                Pong::Ended => return (is_blocked, End::Unasked),
            };
            if let Some(reason) = reason
                && !is_blocked
            {
                is_blocked = true;
                self.replace(process, reason).await;
            }
            if is_blocked && pinged.is_some_and(|pinged| pinged.elapsed() >= ABANDON_TIMEOUT) {
                return (is_blocked, End::Unanswered);
            }
            if pinged.is_none() && process.ping() {
                pinged = Some(Instant::now());
            }
            if process.has_sessions() {
                used = Instant::now();
            } else if self.end_idle(process, is_blocked, used).await {
                return (is_blocked, End::Idle);
            }
            sleep(PING_INTERVAL).await;
        }
    }

    /// Gives the next connections to another receiver.
    async fn replace(&self, process: &Arc<ReceiverProcess>, reason: &str) {
        let mut roster = self.roster.lock().await;
        roster.block(process);
        incidents::count(Incident::ReceiverReplaced);
        if let Some(omitted) = BLOCKED.permit() {
            let (user, pid, receivers) = (self.user, process.pid, roster.running());
            tracing::warn!(
                user,
                pid,
                receivers,
                omitted,
                "a receiver of descriptors {reason}: another one replaces it"
            );
        }
    }

    /// True if a receiver without sessions is to end, and gets no connections from now on: it is idle since `used`, it is blocked, or
    /// another one gets the next connection.
    async fn end_idle(&self, process: &Arc<ReceiverProcess>, is_blocked: bool, used: Instant) -> bool {
        let mut roster = self.roster.lock().await;
        let is_available = roster.is_available(process);
        // References of the supervisor and of the roster; a session that begins has one more.
        let references = 1 + usize::from(is_available);
        let is_idle = !process.has_sessions() && Arc::strong_count(process) <= references;
        // One that has ended is not available either, and is to be reported.
        let is_spare = is_blocked || (is_available && !roster.is_current(process));
        let ends = is_idle && (is_spare || used.elapsed() >= self.idle_timeout);
        if ends && !is_blocked {
            roster.end(process);
        }
        ends
    }
}
