//! The service's end of one receiver.

use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fdmap_sys::error::CallContext as _;
use fdmap_sys::{Errno, SyscallError, pidfd, scm};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::fdpass::receiver;
use crate::fdpass::wire::{BEGIN, Control, PongMessage};
use crate::own_program::OwnProgram;

/// Time between two looks whether sessions have ended.
const SESSION_INTERVAL: Duration = Duration::from_millis(10);

/// A running receiver. After the drop, the process ends by itself.
#[derive(Debug)]
pub(super) struct ReceiverProcess {
    pub(super) pid: u32,
    control: OwnedFd,
    child: Mutex<Child>,
    /// Cloned for each session.
    sessions: Arc<()>,
    /// True when its sessions get no more answers.
    abandoned: watch::Sender<bool>,
}

/// A client's session, through a receiver.
#[derive(Debug)]
pub(in crate::fdpass) struct ReceiverSession {
    pub(in crate::fdpass) socket: UnixStream,
    abandoned: watch::Receiver<bool>,
    /// Keeps the receiver from being idle.
    _session: Arc<()>,
}

impl ReceiverSession {
    /// Waits until the receiver is abandoned.
    pub(in crate::fdpass) async fn abandoned(&self) {
        wait_until_abandoned(self.abandoned.clone()).await;
    }
}

/// A connection of which a receiver keeps a descriptor, until this is dropped.
#[derive(Debug)]
pub(crate) struct Kept {
    /// The receiver notices the close.
    _leash: OwnedFd,
    abandoned: watch::Receiver<bool>,
    /// Keeps the receiver from being idle.
    _session: Arc<()>,
}

impl Kept {
    /// Waits until the receiver is abandoned, and may have closed its descriptor.
    pub(crate) fn abandoned(&self) -> impl Future<Output = ()> + Send + use<> {
        wait_until_abandoned(self.abandoned.clone())
    }
}

async fn wait_until_abandoned(mut abandoned: watch::Receiver<bool>) {
    // An error means that the receiver has ended.
    let _ = abandoned.wait_for(|abandoned| *abandoned).await;
}

/// The answer to a ping.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pong {
    /// None yet.
    Nothing,
    Received {
        blocked: bool,
        /// Descriptors that it had got before the ping, and is to close.
        unclosed: u32,
    },
    /// The process has ended.
    Ended,
}

impl ReceiverProcess {
    /// Starts a receiver for the clients of `user`, or for [`receiver::REFUSED`] connections.
    pub(super) fn start(user: impl Display) -> io::Result<Self> {
        let (control, theirs) = scm::socket_pair()?;
        // A pong has no descriptors. Older kernels lack the option.
        let _ = scm::pass_descriptors(&control, false);
        let arguments = [receiver::ARGUMENT, &user.to_string(), &std::process::id().to_string()];
        let child = OwnProgram::new(arguments).stdin(theirs).start()?;
        let (abandoned, _) = watch::channel(false);
        Ok(Self { pid: child.id(), control, child: Mutex::new(child), sessions: Arc::new(()), abandoned })
    }

    /// Passes the socket of a client to the receiver. Returns the session's socket, on which the receiver waits for [`BEGIN`].
    pub(super) fn pass(&self, client: BorrowedFd<'_>) -> Result<OwnedFd, SyscallError> {
        self.send(Control::Session, client)
    }

    /// Lets the receiver keep a descriptor of a connection until the result is dropped.
    pub(super) fn keep(&self, connection: BorrowedFd<'_>) -> Result<Kept, SyscallError> {
        let leash = self.send(Control::Keep, connection)?;
        let abandoned = self.abandoned.subscribe();
        Ok(Kept { _leash: leash, abandoned, _session: Arc::clone(&self.sessions) })
    }

    /// Lets the receiver close a connection. After success, the close of it here is not the last one.
    pub(super) fn close(&self, connection: BorrowedFd<'_>) -> Result<(), SyscallError> {
        scm::send(self.control.as_fd(), Control::Close.bytes(), &[connection])
    }

    /// Sends a socket, and one end of a new pair. Returns the other end.
    fn send(&self, control: Control, socket: BorrowedFd<'_>) -> Result<OwnedFd, SyscallError> {
        let (ours, theirs) = scm::socket_pair()?;
        scm::send(self.control.as_fd(), control.bytes(), &[socket, theirs.as_fd()])?;
        Ok(ours)
    }

    /// Begins a session, whose client's socket this process has closed.
    pub(super) fn begin(&self, socket: OwnedFd) -> Result<ReceiverSession, SyscallError> {
        scm::send(socket.as_fd(), BEGIN, &[])?;
        let socket =
            UnixStream::from_std(socket.into()).call(|| "epoll_ctl of a session socket".to_owned())?;
        Ok(ReceiverSession {
            socket,
            abandoned: self.abandoned.subscribe(),
            _session: Arc::clone(&self.sessions),
        })
    }

    pub(super) fn has_sessions(&self) -> bool {
        Arc::strong_count(&self.sessions) > 1
    }

    /// Sends a ping. Returns false if it was not sent.
    pub(super) fn ping(&self) -> bool {
        scm::send(self.control.as_fd(), Control::Ping.bytes(), &[]).is_ok()
    }

    pub(super) fn pong(&self) -> Pong {
        let mut message = [0; PongMessage::BYTES];
        match scm::receive(self.control.as_fd(), &mut message) {
            Ok(Some(packet)) => match PongMessage::decode(&message[..packet.len]) {
                Some(PongMessage { blocked, unclosed }) => Pong::Received { blocked, unclosed },
                None => Pong::Ended,
            },
            Err(error) if error.errno == Errno::EAGAIN => Pong::Nothing,
            Ok(None) | Err(_) => Pong::Ended,
        }
    }

    /// True if the process waits for a processor: it is slow, but nothing blocks it.
    pub(super) fn is_runnable(&self) -> bool {
        pidfd::state_of(self.pid) == Ok('R')
    }

    /// Ends the sessions for the service, and then kills the process: until then it has copies of descriptors of which the service does
    /// not make the last close.
    pub(super) async fn abandon(&self) {
        self.abandoned.send_replace(true);
        self.kill_without_sessions().await;
    }

    /// Kills the process when its sessions have ended.
    pub(super) async fn kill_without_sessions(&self) {
        while self.has_sessions() {
            sleep(SESSION_INTERVAL).await;
        }
        self.kill();
    }

    /// Kills the process, which may take forever to end.
    pub(super) fn kill(&self) {
        // Fails only if the process was reaped.
        let _ = self.child().kill();
    }

    /// Reaps the process if it has ended. `None` if it has not; its status is unknown if it was reaped otherwise.
    pub(super) fn reap(&self) -> Option<Option<ExitStatus>> {
        match self.child().try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => Some(Some(status)),
            Err(_) => Some(None),
        }
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
