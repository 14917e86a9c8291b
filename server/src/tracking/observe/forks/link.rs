//! The service's end of the socket to one companion, and the companion's process.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, ExitStatus};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fdmap_sys::{SyscallError, scm};

use super::companion;
use crate::own_program::OwnProgram;
use crate::tracking::observe::ending;

/// A killed companion usually ends in this time.
const END_TIMEOUT: Duration = Duration::from_millis(500);
const END_INTERVAL: Duration = Duration::from_millis(1);

/// What starts a companion.
#[derive(Clone, Debug)]
pub(super) struct Program {
    /// Whose processes it serves.
    pub(super) user: u32,
    /// Of /proc/self/exe.
    pub(super) arguments: Vec<OsString>,
}

impl Program {
    /// The arguments for fdmapd. The second one is for `ps`.
    pub(super) fn own(user: u32) -> Self {
        Self { user, arguments: vec![companion::ARGUMENT.into(), user.to_string().into()] }
    }
}

/// Why no companion could be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Socket(#[from] SyscallError),
    #[error("starting /proc/self/exe {arguments:?}")]
    Process {
        arguments: Vec<OsString>,
        #[source]
        error: io::Error,
    },
    #[error("too many processes that serve user {0} do not end")]
    Ending(u32),
}

/// A running companion. Dropping this ends its process.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    /// `None`: it is reaped elsewhere.
    child: Mutex<Option<Child>>,
    user: u32,
    pub(super) pid: u32,
    pub(super) since: Instant,
}

impl Link {
    pub(super) fn start(program: &Program) -> Result<Self, StartError> {
        let Program { user, ref arguments } = *program;
        if !ending::may_start(user) {
            return Err(StartError::Ending(user));
        }
        let (socket, theirs) = scm::socket_pair()?;
        let started = OwnProgram::new(arguments).stdin(theirs).start();
        let child = started.map_err(|error| StartError::Process { arguments: arguments.clone(), error })?;
        let pid = child.id();
        Ok(Self { socket, child: Mutex::new(Some(child)), user, pid, since: Instant::now() })
    }

    /// Kills the process if it still runs, and reaps it. Returns `None` if it does not end at once: a call on a userfaultfd may wait
    /// for its process. It is reaped later then.
    pub(super) fn end(&self) -> io::Result<Option<ExitStatus>> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(process) = child.as_mut() else { return Ok(None) };
        // A stopped companion does not notice that the socket is closed, so kill it.
        process.kill()?;
        let killed = Instant::now();
        while killed.elapsed() < END_TIMEOUT {
            let status = process.try_wait()?;
            if status.is_some() {
                return Ok(status);
            }
            std::thread::sleep(END_INTERVAL);
        }
        if let Some(process) = child.take() {
            ending::add(self.user, process, None);
        }
        Ok(None)
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // A failure cannot be reported here.
        let _ = self.end();
    }
}
