//! The processes that the service starts: each is this program with other arguments.
//!
//! A process has all descriptors of the thread that starts it until it executes its program, and some moments longer. A BPF program
//! stays attached while any process has its link, and the last close of a client's descriptor can block. So threads that have a
//! descriptor table of their own (`CLOSE_RANGE_UNSHARE`) start all processes. They handle no signals: the handler of tokio writes to a
//! descriptor that these tables lack.

pub(crate) mod reaper;
pub(crate) mod search_process;
pub(crate) mod search_turns;
mod starters;

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fdmap_sys::Errno;
use fdmap_sys::capabilities::{self, Capabilities};
use starters::Starters;

use crate::watchdog::{Operation, Phase};

/// `None`: there are no threads, and the next start makes them.
static STARTERS: Mutex<Option<Arc<Starters<Program>>>> = Mutex::new(None);

/// Threads that start processes. More than one, because a start can hang: before Linux 6.9, a close of a socket can close descriptors of
/// others.
const THREADS: usize = 4;

/// Time for a start, including the wait for a free thread. A start takes some milliseconds.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// Makes the descriptor tables of the processes that start from now on. The service calls this after it gives up capabilities, and
/// before a client can connect.
///
/// # Errors
/// `socketpair`, clone of a thread, `close_range`.
pub(crate) fn prepare() -> io::Result<()> {
    let made = Starters::new(THREADS, run)?;
    *STARTERS.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(made));
    Ok(())
}

fn starters() -> io::Result<Arc<Starters<Program>>> {
    let mut starters = STARTERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(made) = &*starters {
        return Ok(Arc::clone(made));
    }
    Ok(Arc::clone(starters.insert(Arc::new(Starters::new(THREADS, run)?))))
}

/// This program with other arguments, without an environment. Standard input, output and error are `/dev/null` unless set.
#[derive(Debug)]
pub(crate) struct OwnProgram {
    arguments: Vec<OsString>,
    capabilities: Capabilities,
    /// Standard input, output and error.
    descriptors: [Option<OwnedFd>; 3],
}

impl OwnProgram {
    pub(crate) fn new(arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        let arguments = arguments.into_iter().map(Into::into).collect();
        Self { arguments, capabilities: Capabilities::empty(), descriptors: [None, None, None] }
    }

    pub(crate) fn stdin(mut self, descriptor: OwnedFd) -> Self {
        self.descriptors[0] = Some(descriptor);
        self
    }

    pub(crate) fn stdout(mut self, descriptor: OwnedFd) -> Self {
        self.descriptors[1] = Some(descriptor);
        self
    }

    pub(crate) fn stderr(mut self, descriptor: OwnedFd) -> Self {
        self.descriptors[2] = Some(descriptor);
        self
    }

    /// The process keeps these capabilities of the service, also if it is not of root: see [`capabilities::pass_on`].
    pub(crate) const fn capabilities(mut self, kept: Capabilities) -> Self {
        self.capabilities = kept;
        self
    }

    /// The same as [`Self::start_within`] some seconds.
    ///
    /// # Errors
    /// The same.
    pub(crate) fn start(self) -> io::Result<Child> {
        self.start_within(START_TIMEOUT)
    }

    /// Starts a process, and closes the descriptors here.
    ///
    /// # Errors
    /// Those of [`Command::spawn`], `sendmsg`, and of making a thread: `socketpair`, clone, `close_range`. `TimedOut` after `timeout`.
    /// `Other` if the thread has ended.
    pub(crate) fn start_within(self, timeout: Duration) -> io::Result<Child> {
        let _operation = Operation::begin_phase("start of a helper", None, Phase::HelperStart);
        let Self { arguments, capabilities, descriptors } = self;
        let has_descriptor = descriptors.each_ref().map(Option::is_some);
        let passed = descriptors.into_iter().flatten().collect();
        starters()?.start(Program { arguments, capabilities, has_descriptor }, passed, timeout)
    }
}

/// The arguments of a process to start. Its descriptors are passed separately.
#[derive(Debug)]
struct Program {
    arguments: Vec<OsString>,
    capabilities: Capabilities,
    /// There is a descriptor for standard input, output and error.
    has_descriptor: [bool; 3],
}

/// Starts a process in this thread, which stays its parent.
fn run(program: Program, descriptors: Vec<OwnedFd>) -> io::Result<Child> {
    let mut received = descriptors.into_iter();
    let [stdin, stdout, stderr] = program.has_descriptor.map(|has| has.then(|| received.next()));
    let stdio = |descriptor: Option<Option<OwnedFd>>| match descriptor {
        // The kernel discards descriptors for which the table has no room.
        Some(descriptor) => descriptor.map(Stdio::from).ok_or(Errno::EMFILE),
        None => Ok(Stdio::null()),
    };
    // /proc/self/exe is this program even if its file was replaced. A separate process group protects the process from signals of the
    // terminal, such as SIGTSTP.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("fdmapd")
        .args(program.arguments)
        .stdin(stdio(stdin)?)
        .stdout(stdio(stdout)?)
        .stderr(stdio(stderr)?)
        .env_clear()
        .current_dir("/")
        .process_group(0);
    capabilities::pass_on(program.capabilities)?;
    let started = command.spawn();
    // If this fails, the next job fails in the same way before it starts a process.
    let _ = capabilities::pass_on(Capabilities::empty());
    started
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::time::Instant;

    use nix::fcntl::{FcntlArg, OFlag, fcntl};

    use super::*;

    #[test]
    fn process_has_the_descriptors_that_are_passed() {
        let (mut out, theirs) = io::pipe().unwrap();
        let arguments = ["--exact", "no test has this name"];
        let mut child = OwnProgram::new(arguments).stdout(theirs.into()).start().unwrap();
        assert!(child.wait().unwrap().success());
        fcntl(&out, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        let (mut text, began) = (String::new(), Instant::now());
        // EAGAIN while another process or table has the other end, as one that another test starts has for a moment.
        while let Err(error) = out.read_to_string(&mut text) {
            assert!(began.elapsed() < Duration::from_secs(10), "{error}");
        }
        assert!(text.contains("running 0 tests"), "{text}");
    }
}
