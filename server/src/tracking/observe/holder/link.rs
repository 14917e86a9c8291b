//! The service's end of the control socket of one holder, and the holder's process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::error_chain;
use fdmap_sys::error::CallContext as _;
use fdmap_sys::{Errno, SyscallError, pidfd, scm};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::ending;
use super::super::own_calls::{CallCounter, Exclusion};
use super::lane::Lane;
use super::process;
use super::wire::Control;
use crate::own_program::OwnProgram;
use crate::random::random_id;

/// A holder that does not receive a message in this time is replaced.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether a process or a thread does the work of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worker {
    /// This program, started again.
    Process,
    /// A thread of this process, for trials and tests.
    Thread,
}

/// A running holder. Dropping it ends the holder once its descriptors are closed.
#[derive(Debug)]
pub(super) struct Link {
    control: OwnedFd,
    user: u32,
    pid: u32,
    worker: Worker,
    /// `None`: a thread of this process, or a process that [`ending`] reaps.
    child: Option<Child>,
    /// Of the calls of the process.
    exclusion: Option<Exclusion>,
    /// It was asked to end, and has not answered since.
    retired: bool,
}

impl Link {
    /// Starts the holder of `user`. `counter`: does not count its calls.
    ///
    /// # Errors
    /// `socketpair`, `fork`, `execve` of this program; `sendmsg`.
    pub(super) fn start(
        worker: Worker,
        user: u32,
        counter: Option<Arc<dyn CallCounter>>,
    ) -> Result<Self, SyscallError> {
        let (control, theirs) = scm::socket_pair()?;
        if worker == Worker::Thread {
            let run = move || {
                process::run(theirs.as_fd());
            };
            let started = std::thread::Builder::new().name("holder".to_owned()).spawn(run);
            started.call(|| "clone of a thread".to_owned())?;
            return Ok(Self {
                control,
                user,
                pid: std::process::id(),
                worker,
                child: None,
                exclusion: None,
                retired: false,
            });
        }
        // The service receives nothing on this socket. Older kernels lack the option.
        let _ = scm::pass_descriptors(&control, false);
        let arguments = [process::ARGUMENT, &user.to_string(), &std::process::id().to_string()];
        let child = OwnProgram::new(arguments)
            .stdin(theirs)
            .start()
            .call(|| format!("execve of /proc/self/exe {} {user}", process::ARGUMENT))?;
        let pid = child.id();
        let mut link =
            Self { control, user, pid, worker, child: Some(child), exclusion: None, retired: false };
        if let Some(counter) = counter {
            let name = random_id(Some);
            link.exclusion = Some(Exclusion { counter: Arc::clone(&counter), name });
            link.send(Control::Exclude(name), &[counter.add_holder()])?;
        }
        Ok(link)
    }

    pub(super) const fn pid(&self) -> u32 {
        self.pid
    }

    /// Keeps the link to a holder that received [`Control::Quit`]. The holder ends when its userfaultfds are closed, unless it gets another
    /// message before. `None`: the holder is a thread.
    pub(super) fn retire(mut self) -> Option<Self> {
        if self.worker == Worker::Thread {
            return None;
        }
        self.reap_when_ended();
        self.retired = true;
        Some(self)
    }

    /// Passes the child to [`ending`]. A link that was retired before has already passed it.
    fn reap_when_ended(&mut self) {
        if let Some(child) = self.child.take() {
            ending::add(self.user, child, self.exclusion.take());
        }
    }

    /// True if the end of the holder is no incident: it was asked to end.
    pub(super) const fn is_retired(&self) -> bool {
        self.retired
    }

    /// True if the holder has closed its end.
    pub(super) fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(self.control.as_fd(), PollFlags::empty())];
        poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Opens a lane. `None`: the holder can start no thread for it.
    ///
    /// # Errors
    /// `socketpair`; `EPIPE` if the holder has ended, `ETIMEDOUT` if it does not answer.
    pub(super) fn open_lane(&mut self) -> Result<Option<Lane>, SyscallError> {
        let (lane, theirs) = UnixStream::pair().call(|| "socketpair(AF_UNIX, SOCK_STREAM)".to_owned())?;
        self.send(Control::Lane, &[theirs.as_fd()])?;
        drop(theirs);
        let lane = Lane::new(lane, self.pid())?;
        // It had not ended when it read this message.
        if std::mem::take(&mut self.retired)
            && let Some((child, exclusion)) = ending::take(self.pid)
        {
            (self.child, self.exclusion) = (Some(child), exclusion);
        }
        Ok(lane)
    }

    /// Sends a message. Waits while the queue of the holder is full.
    ///
    /// # Errors
    /// `sendmsg`: `EPIPE` if the holder has ended, `EAGAIN` if its queue is full all the time.
    pub(super) fn send(&self, message: Control, fds: &[BorrowedFd<'_>]) -> Result<(), SyscallError> {
        match self.send_now(message, fds) {
            Err(SyscallError { errno: Errno::EAGAIN, .. }) => {
                let timeout = PollTimeout::try_from(SEND_TIMEOUT).unwrap_or(PollTimeout::MAX);
                // After a failure the message is sent again in any case.
                let _ = poll(&mut [PollFd::new(self.control.as_fd(), PollFlags::POLLOUT)], timeout);
                self.send_now(message, fds)
            }
            sent => sent,
        }
    }

    /// Sends a message without waiting.
    ///
    /// # Errors
    /// `sendmsg`: `EPIPE` if the holder has ended, `EAGAIN` if its queue is full.
    pub(super) fn send_now(&self, message: Control, fds: &[BorrowedFd<'_>]) -> Result<(), SyscallError> {
        message.send(self.control.as_fd(), fds)
    }

    /// True if the process is stopped, or ended.
    pub(super) fn is_stopped(&self) -> bool {
        pidfd::state_of(self.pid).is_ok_and(|state| matches!(state, 'T' | 't' | 'Z' | 'X'))
    }

    /// Kills the process. It ends when nothing blocks it.
    pub(super) fn kill(&mut self) {
        match &mut self.child {
            // Fails only if the process was reaped.
            Some(child) => drop(child.kill()),
            None if self.worker == Worker::Process => ending::kill(self.pid),
            None => {}
        }
        self.reap_when_ended();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The holder closes its descriptors, which may block it, and then ends. After a failure it ends with the service.
        if let Err(error) = self.send_now(Control::Quit, &[]) {
            tracing::debug!(error = error_chain(&error), "a holder of userfaultfds has no message to end");
        }
        self.reap_when_ended();
    }
}
