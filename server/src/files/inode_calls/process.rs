//! The service's end of one helper.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

use fdmap_sys::error::CallContext as _;
use fdmap_sys::{Errno, SyscallError, pidfd, scm};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::call::{Answer, InodeCall, MAX_ANSWER_BYTES};
use super::helper;
use crate::incidents::{self, Incident};
use crate::log_limit::LogLimit;
use crate::own_program::OwnProgram;
use crate::tracking::holder::Worker;

/// How long a helper may sleep in a call before the service stops to wait for it. One that runs is waited for.
const SLEEP_TIMEOUT: Duration = Duration::from_millis(500);
/// Time between two looks at the state of a helper that has not answered.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Time for a helper to start.
const READY_TIMEOUT: Duration = Duration::from_secs(5);

/// A running helper. It ends after the drop, when it has made all calls that were sent to it.
#[derive(Debug)]
pub(super) struct HelperProcess {
    socket: OwnedFd,
    /// `None`: a thread of this process.
    child: Option<Child>,
}

/// What a helper has sent.
#[derive(Debug)]
pub(super) enum Received {
    Nothing,
    Answer(Answer),
    /// The helper has ended.
    Ended,
}

impl HelperProcess {
    /// Starts a helper for files of `user`, and waits until it is ready.
    ///
    /// # Errors
    /// `socketpair`, `fork`, `execve` of this program, `capset`; `ETIMEDOUT` if it does not become ready.
    pub(super) fn start(worker: Worker, user: u32) -> Result<Self, SyscallError> {
        let (socket, theirs) = scm::socket_pair()?;
        // The service receives no descriptors. Older kernels lack the option.
        let _ = scm::pass_descriptors(&socket, false);
        let child = match worker {
            Worker::Process => Some(start_process(user, theirs)?),
            Worker::Thread => {
                let run = move || helper::run(theirs.as_fd());
                let started = std::thread::Builder::new().name("inode helper".to_owned()).spawn(run);
                started.call(|| "clone of a thread".to_owned())?;
                None
            }
        };
        let helper = Self { socket, child };
        let ready = || format!("start of the inode helper of user {user}");
        helper.is_ready(READY_TIMEOUT);
        let error = match helper.receive() {
            Received::Answer(Answer::Done) => return Ok(helper),
            Received::Nothing => Errno::ETIMEDOUT,
            Received::Answer(_) | Received::Ended => Errno::EPIPE,
        };
        helper.note_ended(user);
        helper.kill();
        Err(error).call(ready)
    }

    /// A helper at the other end of `socket`, which a test plays.
    #[cfg(test)]
    pub(super) const fn of_socket(socket: OwnedFd) -> Self {
        Self { socket, child: None }
    }

    /// Sends a call. The helper makes it after those that were sent before.
    ///
    /// # Errors
    /// `sendmsg`: `EPIPE` if the helper has ended, `EAGAIN` if too many calls wait. The call is not made.
    pub(super) fn send(&self, call: InodeCall, file: Option<BorrowedFd<'_>>) -> Result<(), SyscallError> {
        scm::send(self.socket.as_fd(), &call.encode(), file.as_slice())
    }

    /// Waits for the answer. False if the helper has slept for [`SLEEP_TIMEOUT`]: it then waits for another process.
    pub(super) fn wait(&self) -> bool {
        let (mut slept, mut looked) = (Duration::ZERO, Instant::now());
        while !self.is_ready(LOOK_INTERVAL) {
            let passed = looked.elapsed();
            looked = Instant::now();
            if !self.runs() {
                slept += passed;
            }
            if slept >= SLEEP_TIMEOUT {
                return self.is_ready(Duration::ZERO);
            }
        }
        true
    }

    /// Receives an answer, if there is one.
    pub(super) fn receive(&self) -> Received {
        let mut message = [0; MAX_ANSWER_BYTES];
        match scm::receive(self.socket.as_fd(), &mut message) {
            Ok(Some(packet)) => {
                Answer::decode(&message[..packet.len]).map_or(Received::Ended, Received::Answer)
            }
            Err(SyscallError { errno: Errno::EAGAIN, .. }) => Received::Nothing,
            Ok(None) | Err(_) => Received::Ended,
        }
    }

    /// True if an answer has arrived, or the helper has ended, within `timeout`.
    pub(super) fn is_ready(&self, timeout: Duration) -> bool {
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        let mut polled = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        // A failure was caused by a signal, and counts as no answer.
        poll(&mut polled, timeout).is_ok_and(|ready| ready > 0)
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Closes the socket, after which the helper ends. Returns the process, which is to be reaped.
    pub(super) fn close(self) -> Option<Child> {
        self.child
    }

    /// True if the helper runs, or waits for a processor.
    fn runs(&self) -> bool {
        self.pid().is_some_and(|pid| pidfd::state_of(pid) == Ok('R'))
    }

    /// Counts and logs that it ended, or does not answer as it should, and gets no other call.
    pub(super) fn note_ended(&self, user: u32) {
        static ENDED: LogLimit = LogLimit::new();
        incidents::count(Incident::InodeHelperEnded);
        if let Some(omitted) = ENDED.permit() {
            tracing::warn!(user, pid = self.pid(), omitted, "a process that makes calls on inodes ended");
        }
    }

    fn kill(mut self) {
        if let Some(mut child) = self.child.take() {
            // Fails only if the process was reaped.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start_process(user: u32, socket: OwnedFd) -> Result<Child, SyscallError> {
    let program = OwnProgram::new([helper::ARGUMENT, &user.to_string()]);
    let started = program.stdin(socket).capabilities(helper::CAPABILITIES).start();
    started.call(|| format!("execve of /proc/self/exe {} {user}", helper::ARGUMENT))
}
