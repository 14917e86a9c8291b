//! The service's end of one companion.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use fdmap_sys::{SyscallError, scm};

use super::companion;

/// What is run as the companion.
#[derive(Clone, Debug)]
pub(super) struct Program(pub(super) Vec<OsString>);

impl Program {
    /// This very program, also if its file was replaced meanwhile.
    pub(super) fn own() -> Self {
        Self(vec![companion::ARGUMENT.into()])
    }
}

/// Why there is no companion.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No socket for it.
    #[error(transparent)]
    Socket(#[from] SyscallError),
    /// No process.
    #[error("starting /proc/self/exe {arguments:?}")]
    Process {
        /// With what arguments.
        arguments: Vec<OsString>,
        /// Why not.
        #[source]
        error: io::Error,
    },
}

/// A companion: its process, which ends with this, and the socket to it.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    child: Mutex<Child>,
    pub(super) pid: u32,
    pub(super) since: Instant,
}

impl Link {
    pub(super) fn start(program: &Program) -> Result<Self, StartError> {
        let (socket, theirs) = scm::socket_pair()?;
        // A group of its own: what a terminal sends to ours, such as SIGTSTP, must not stop it.
        let started = Command::new("/proc/self/exe")
            .args(&program.0)
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/")
            .process_group(0)
            .spawn();
        let child = started.map_err(|error| StartError::Process { arguments: program.0.clone(), error })?;
        let pid = child.id();
        Ok(Self { socket, child: Mutex::new(child), pid, since: Instant::now() })
    }

    /// Ends the process if it has not ended yet, and leaves no zombie; gives how it ended.
    pub(super) fn end(&self) -> io::Result<ExitStatus> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        // It would end by itself when the socket is closed, unless somebody has stopped it.
        child.kill()?;
        child.wait()
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // There is nobody to tell of a failure.
        let _ = self.end();
    }
}
