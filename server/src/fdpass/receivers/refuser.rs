//! The refuser: a receiver that closes connections with descriptors in their queue, which no receiver of a user has. Only where the
//! kernel passes descriptors on any unix socket (before Linux 6.16).
//!
//! It also keeps the listening sockets: the last close of one closes what is in the queues of the connections that were never accepted.
//! The service never kills it. It ends after the service, so that it closes last.
//!
//! A close that is blocked delays the later ones of the process, and no client: each connection was shut down before, or a receiver
//! serves it. When [`MAX_UNCLOSED`] of them wait, another process gets the next ones.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fdmap_proto::error_chain;
use tokio::net::UnixStream;
use tokio::time::sleep;

use super::process::{Kept, Pong, ReceiverProcess};
use crate::fdpass::receiver::REFUSED;
use crate::incidents::{self, Incident};
use crate::log_limit::LogLimit;

/// Interval of the checks whether the refuser has ended, and of attempts to pass what it did not get.
const INTERVAL: Duration = Duration::from_millis(500);
/// Connections that a process gets while it cannot close them: fewer than the descriptors that it may have.
const MAX_UNCLOSED: usize = 1 << 14;
/// Processes that have so many. Only clients of users with as many descriptors in queues of sockets reach that, or that block each process
/// and then open as many sessions.
const MAX_FULL: usize = 8;

static WAITING: LogLimit = LogLimit::new();
static FULL: LogLimit = LogLimit::new();

/// The service's side of the refuser.
#[derive(Debug)]
pub(crate) struct Refuser {
    /// Descriptors of the listening sockets, for the next process.
    listeners: Vec<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// `None`: it could not be started.
    process: Option<Process>,
    /// Had [`MAX_UNCLOSED`] connections.
    full: Vec<Process>,
    /// Have not been reaped.
    ended: Vec<Process>,
    /// Connections that no process has got.
    waiting: Vec<UnixStream>,
}

#[derive(Debug)]
struct Process {
    receiver: ReceiverProcess,
    _listeners: Vec<Kept>,
    /// It has not answered the last ping.
    asked: bool,
    /// Connections that it has got since it last reported that it could close.
    unclosed: usize,
}

impl Refuser {
    /// Starts the process, and a task that replaces it if it ends.
    pub(crate) fn start(listeners: Vec<OwnedFd>) -> Arc<Self> {
        let refuser = Arc::new(Self { listeners, state: Mutex::default() });
        refuser.start_process();
        let supervised = Arc::downgrade(&refuser);
        tokio::spawn(async move {
            loop {
                sleep(INTERVAL).await;
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
        if let Some(omitted) = WAITING.permit() {
            tracing::warn!(count, omitted, "refused connections stay open: no process closes them yet");
        }
    }

    /// Replaces the process if it has ended or is full, and passes what it did not get.
    fn look(&self) {
        if self.lock().needs_process() {
            self.start_process();
        }
        let mut state = self.lock();
        let waiting = std::mem::take(&mut state.waiting);
        let left = waiting.into_iter().filter(|connection| !state.pass(connection.as_fd())).collect();
        state.waiting = left;
    }

    /// Without the lock, which connections wait for that end.
    fn start_process(&self) {
        let started = ReceiverProcess::start(REFUSED).and_then(|receiver| {
            let kept = self.listeners.iter().map(|listener| receiver.keep(listener.as_fd()));
            let (kept, failed): (Vec<_>, Vec<_>) = kept.partition(Result::is_ok);
            let kept = kept.into_iter().flatten().collect();
            let process = Process { receiver, _listeners: kept, asked: false, unclosed: 0 };
            let Some(Err(error)) = failed.into_iter().next() else { return Ok(process) };
            // Without the end of a leash: then it would shut down the socket.
            process.receiver.kill();
            self.lock().ended.push(process);
            Err(io::Error::from(error))
        });
        match started {
            Ok(process) => self.lock().process = Some(process),
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

impl State {
    /// Passes a connection to the process. False if it cannot take it. Else the caller closes the connection before it releases the
    /// lock, so that the process makes the last close.
    fn pass(&mut self, connection: BorrowedFd<'_>) -> bool {
        let Some(process) = self.process.as_mut().filter(|process| process.unclosed < MAX_UNCLOSED) else {
            return false;
        };
        let is_passed = process.receiver.close(connection).is_ok();
        process.unclosed += usize::from(is_passed);
        is_passed
    }

    /// Looks at all processes. True if another one is to be started.
    fn needs_process(&mut self) -> bool {
        self.ended.retain(|ended| ended.receiver.reap().is_none());
        let ended = self.full.extract_if(.., |process| process.has_ended());
        self.ended.extend(ended);
        let Some(mut process) = self.process.take() else { return true };
        if process.has_ended() {
            self.ended.push(process);
            return true;
        }
        let is_full = process.unclosed >= MAX_UNCLOSED;
        // One of the full ones may have closed what it had.
        let next = self.full.iter().position(|full| full.unclosed < MAX_UNCLOSED).filter(|_| is_full);
        if let Some(next) = next {
            std::mem::swap(&mut process, &mut self.full[next]);
        }
        let needs_other = is_full && next.is_none() && self.full.len() < MAX_FULL;
        if needs_other {
            process.log_full();
            self.full.push(process);
        } else {
            self.process = Some(process);
        }
        needs_other
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
                "a process cannot close refused connections: another one gets the next"
            );
        }
    }

    /// Receives an answer, and asks again. True if the process has ended.
    fn has_ended(&mut self) -> bool {
        match self.receiver.pong() {
            Pong::Nothing => {}
            Pong::Received { blocked } => {
                self.asked = false;
                if !blocked {
                    self.unclosed = 0;
                }
            }
            Pong::Ended => return true,
        }
        if !self.asked {
            self.asked = self.receiver.ping();
        }
        false
    }
}
