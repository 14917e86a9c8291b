//! The service's end of the socket to one companion, and the companion's process.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use fdmap_sys::{SyscallError, scm};

use super::companion;

/// Arguments of /proc/self/exe that start a companion.
#[derive(Clone, Debug)]
pub(super) struct Program(pub(super) Vec<OsString>);

impl Program {
    /// The arguments for fdmapd.
    pub(super) fn own() -> Self {
        Self(vec![companion::ARGUMENT.into()])
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
}

/// A running companion. Dropping this ends its process.
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
        // /proc/self/exe is this program even if its file was replaced. A separate process group protects the companion
        // from signals of the terminal, such as SIGTSTP.
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

    /// Kills the process if it still runs, and reaps it.
    pub(super) fn end(&self) -> io::Result<ExitStatus> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        // A stopped companion does not notice that the socket is closed, so kill it.
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
        // A failure cannot be reported here.
        let _ = self.end();
    }
}
