//! The refuser: a receiver that closes connections with descriptors in their queue, which no receiver of a user has. Only where the
//! kernel passes descriptors on any unix socket (before Linux 6.16).
//!
//! It also keeps the listening sockets: the last close of one closes what is in the queues of the connections that were never accepted.
//! The service never kills it. It ends after the service, so that it closes last.
//!
//! A close that is blocked delays the later ones of the process, and no client: each connection was shut down before, or a receiver
//! serves it. When [`MAX_UNCLOSED`] of them wait, another process gets the next ones, as [`rota`] decides: one without room for a
//! descriptor would close it in the thread that receives.

mod rota;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fdmap_proto::error_chain;
use nix::sys::resource::{Resource, getrlimit};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::process::{Kept, Pong, ReceiverProcess};
use crate::fdpass::receiver::REFUSED;
use crate::incidents::{self, Incident};
use crate::log_limit::LogLimit;
use rota::{Heard, Rota, Vacancy};

/// Interval of the checks whether the refuser has ended, and of attempts to pass what it did not get.
const INTERVAL: Duration = Duration::from_millis(500);
/// Time until the next attempt if a process did not get a connection.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Connections that a process may have. Fewer where it may have fewer descriptors.
const MAX_UNCLOSED: usize = 1 << 14;
/// Processes that have so many. Only clients of users with as many descriptors in queues of sockets reach that, or that block each process
/// and then open as many sessions.
const MAX_FULL: usize = 8;

static WAITING: LogLimit = LogLimit::new();
static FULL: LogLimit = LogLimit::new();
static ENDED: LogLimit = LogLimit::new();

/// The service's side of the refuser.
#[derive(Debug)]
pub(crate) struct Refuser {
    /// Descriptors of the listening sockets, for the next process.
    listeners: Vec<OwnedFd>,
    state: Mutex<State>,
    /// Connections wait.
    stuck: Arc<Notify>,
}

#[derive(Debug)]
struct State {
    processes: Rota<Process>,
    /// Connections that no process has got.
    waiting: Vec<UnixStream>,
}

#[derive(Debug)]
struct Process {
    receiver: ReceiverProcess,
    _listeners: Vec<Kept>,
    /// It has not answered the last ping.
    awaited: bool,
}

impl Refuser {
    /// Starts the process, and a task that replaces it if it ends.
    pub(crate) fn start(listeners: Vec<OwnedFd>) -> Arc<Self> {
        let state = State { processes: Rota::new(max_unclosed(), MAX_FULL), waiting: Vec::new() };
        let stuck = Arc::new(Notify::new());
        let refuser = Arc::new(Self { listeners, state: Mutex::new(state), stuck: Arc::clone(&stuck) });
        refuser.start_process();
        let supervised = Arc::downgrade(&refuser);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = sleep(INTERVAL) => {}
                    () = stuck.notified() => sleep(RETRY_INTERVAL).await,
                }
                let Some(refuser) = supervised.upgrade() else { return };
                // The start of a process takes some milliseconds. An error means that it panicked.
                let _ = tokio::task::spawn_blocking(move || refuser.look()).await;
            }
        });
        refuser
    }

    /// Closes a connection. If that is the last close of it, a process makes it.
    pub(super) fn close(&self, connection: UnixStream) {
        let mut state = self.lock();
        if state.pass(connection.as_fd()) {
            // With the lock: the process closes it at the next message.
            drop(connection);
            return;
        }
        state.waiting.push(connection);
        let count = state.waiting.len();
        drop(state);
        self.stuck.notify_one();
        if let Some(omitted) = WAITING.permit() {
            tracing::warn!(count, omitted, "refused connections stay open: no process closes them yet");
        }
    }

    /// Replaces the process if it has ended or is full, and passes what it did not get.
    fn look(&self) {
        let is_vacant = match self.lock().processes.look(Process::ask, Process::is_reaped) {
            None => false,
            Some(Vacancy::Ended) => true,
            Some(Vacancy::Full(process)) => {
                process.log_full();
                true
            }
        };
        if is_vacant {
            self.start_process();
        }
        let mut state = self.lock();
        let waiting = std::mem::take(&mut state.waiting);
        let left = waiting.into_iter().filter(|connection| !state.pass(connection.as_fd())).collect();
        state.waiting = left;
        if !state.waiting.is_empty() && state.processes.has_room() {
            // The socket of the process is full.
            self.stuck.notify_one();
        }
    }

    /// Without the lock, which connections wait for that end.
    fn start_process(&self) {
        let started = ReceiverProcess::start(REFUSED).and_then(|receiver| {
            let kept = self.listeners.iter().map(|listener| receiver.keep(listener.as_fd()));
            let (kept, failed): (Vec<_>, Vec<_>) = kept.partition(Result::is_ok);
            let kept = kept.into_iter().flatten().collect();
            let process = Process { receiver, _listeners: kept, awaited: false };
            let Some(Err(error)) = failed.into_iter().next() else { return Ok(process) };
            // Without the end of a leash: then it would shut down the socket.
            process.receiver.kill();
            self.lock().processes.add_ended(process);
            Err(io::Error::from(error))
        });
        match started {
            Ok(process) => self.lock().processes.add(process),
            Err(error) => {
                if let Some(omitted) = WAITING.permit() {
                    let error = error_chain(&error);
                    tracing::warn!(
                        error,
                        omitted,
                        "cannot start the process that closes refused connections"
                    );
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics with the lock held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Leaves room for other descriptors. Processes have the limit of the service.
fn max_unclosed() -> usize {
    let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
    usize::try_from(descriptors - descriptors / 8).unwrap_or(MAX_UNCLOSED).clamp(1, MAX_UNCLOSED)
}

impl State {
    /// Passes a connection to the process. False if it cannot take it. Else the caller closes the connection before it releases the
    /// lock, so that the process makes the last close.
    fn pass(&mut self, connection: BorrowedFd<'_>) -> bool {
        self.processes.pass(|process| process.receiver.close(connection).is_ok())
    }
}

impl Process {
    fn log_full(&self) {
        incidents::count(Incident::RefuserFull);
        if let Some(omitted) = FULL.permit() {
            let pid = self.receiver.pid;
            tracing::warn!(
                pid,
                omitted,
                "a process has many refused connections to close: another one gets the next"
            );
        }
    }

    fn log_ended(&self) {
        incidents::count(Incident::RefuserEnded);
        if let Some(omitted) = ENDED.permit() {
            tracing::warn!(
                pid = self.receiver.pid,
                omitted,
                "a process that closes refused connections ended: another one replaces it"
            );
        }
    }

    /// Receives an answer, and asks again.
    fn ask(&mut self) -> Heard {
        let pong = self.receiver.pong();
        if matches!(pong, Pong::Ended) {
            self.log_ended();
        }
        self.awaited &= matches!(pong, Pong::Nothing);
        let asked = !self.awaited && !matches!(pong, Pong::Ended) && self.receiver.ping();
        self.awaited |= asked;
        Heard { pong, asked }
    }

    fn is_reaped(&self) -> bool {
        self.receiver.reap().is_some()
    }
}
