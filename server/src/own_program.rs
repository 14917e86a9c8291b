//! The processes that the service starts: each is this program with other arguments.
//!
//! A process has all descriptors of the thread that starts it until it executes its program, and some moments longer. A BPF program
//! stays attached while any process has its link, and the last close of a client's descriptor can block. So one thread, which has a
//! descriptor table of its own (`CLOSE_RANGE_UNSHARE`), starts all processes. It handles no signals: the handler of tokio writes to a
//! descriptor that this table lacks.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use fdmap_sys::capabilities::{self, Capabilities};
use fdmap_sys::process::{self, SignalsBlocked};
use fdmap_sys::{Errno, scm};

/// `None`: there is no thread, and the next start makes one.
static STARTER: Mutex<Option<Starter>> = Mutex::new(None);

/// Makes the descriptor table of the processes that start from now on. The service calls this after it gives up capabilities, and before
/// a client can connect.
///
/// # Errors
/// `socketpair`, clone of a thread, `close_range`.
pub(crate) fn prepare() -> io::Result<()> {
    let starter = Starter::new()?;
    *STARTER.lock().unwrap_or_else(PoisonError::into_inner) = Some(starter);
    Ok(())
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

    /// Starts a process, and closes the descriptors here.
    ///
    /// # Errors
    /// As [`Command::spawn`], and of `socketpair`, `sendmsg` and `recvmsg`.
    pub(crate) fn start(self) -> io::Result<Child> {
        let mut starter = STARTER.lock().unwrap_or_else(PoisonError::into_inner);
        if starter.is_none() {
            *starter = Some(Starter::new()?);
        }
        let Some(running) = &*starter else { return Err(ended()) };
        let started = running.start(self);
        if started.is_none() {
            *starter = None;
        }
        started.unwrap_or_else(|| Err(ended()))
    }
}

fn ended() -> io::Error {
    io::Error::other("the thread that starts processes has ended")
}

/// A process that the thread is to start. The descriptors are in the queue of the socket.
struct Job {
    arguments: Vec<OsString>,
    capabilities: Capabilities,
    /// There is a descriptor for standard input, output and error.
    has_descriptor: [bool; 3],
}

/// The bytes of a packet that passes descriptors to the thread.
const PACKET: &[u8] = b"start";

/// The thread that starts processes. It ends when this is dropped.
#[derive(Debug)]
struct Starter {
    jobs: Sender<Job>,
    /// The other end is in the descriptor table of the thread.
    socket: OwnedFd,
    started: Receiver<io::Result<Child>>,
}

impl Starter {
    fn new() -> io::Result<Self> {
        let (socket, theirs) = scm::socket_pair()?;
        let number = theirs.as_raw_fd();
        let (jobs, received) = channel();
        let (replies, started) = channel();
        let (ready, is_ready) = channel();
        let run = move || {
            let _blocked = SignalsBlocked::new();
            let separated = process::separate_descriptors(theirs.as_fd());
            // `theirs` is now the descriptor of that number in the table of this thread.
            let is_separate = separated.is_ok();
            if ready.send(separated).is_err() || !is_separate {
                return;
            }
            while let Ok(job) = received.recv() {
                // A packet that stayed in the queue would be that of the next job.
                let Ok(Some(packet)) = scm::receive(theirs.as_fd(), &mut [0; PACKET.len()]) else { return };
                if replies.send(run(job, packet.descriptors)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("starter".to_owned()).spawn(run)?;
        is_ready.recv().map_err(|_| ended())??;
        // Closes it in the table of the other threads.
        nix::unistd::close(number)?;
        Ok(Self { jobs, socket, started })
    }

    /// `None` if the thread has ended.
    fn start(&self, program: OwnProgram) -> Option<io::Result<Child>> {
        let OwnProgram { arguments, capabilities, descriptors } = program;
        let has_descriptor = descriptors.each_ref().map(Option::is_some);
        let passed: Vec<_> = descriptors.iter().flatten().map(OwnedFd::as_fd).collect();
        if let Err(error) = scm::send(self.socket.as_fd(), PACKET, &passed) {
            return Some(Err(error.into()));
        }
        // The packet has copies.
        drop(descriptors);
        self.jobs.send(Job { arguments, capabilities, has_descriptor }).ok()?;
        self.started.recv().ok()
    }
}

/// Starts a process in this thread, which stays its parent.
fn run(job: Job, descriptors: Vec<OwnedFd>) -> io::Result<Child> {
    let mut received = descriptors.into_iter();
    let [stdin, stdout, stderr] = job.has_descriptor.map(|has| has.then(|| received.next()));
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
        .args(job.arguments)
        .stdin(stdio(stdin)?)
        .stdout(stdio(stdout)?)
        .stderr(stdio(stderr)?)
        .env_clear()
        .current_dir("/")
        .process_group(0);
    capabilities::pass_on(job.capabilities)?;
    let started = command.spawn();
    // If this fails, the next job fails in the same way before it starts a process.
    let _ = capabilities::pass_on(Capabilities::empty());
    started
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::path::{Path, PathBuf};
    use std::time::{Duration, Instant};

    use fdmap_sys::memfd;
    use nix::fcntl::{FcntlArg, OFlag, fcntl};

    use super::*;

    /// Targets of the descriptors of threads with the name `starter`. `None`: there is no such thread.
    fn targets_of_starters() -> Option<Vec<PathBuf>> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
        let is_starter =
            |task: &PathBuf| std::fs::read(task.join("comm")).is_ok_and(|name| name == b"starter\n");
        let starters: Vec<_> = tasks.filter(is_starter).collect();
        let descriptors = starters.iter().flat_map(|task| std::fs::read_dir(task.join("fd"))).flatten();
        let targets = descriptors.flatten().flat_map(|fd| std::fs::read_link(fd.path())).collect();
        (!starters.is_empty()).then_some(targets)
    }

    #[test]
    fn descriptors_of_this_process_are_in_no_table_of_processes_that_start() {
        let _marker = memfd::create("marker", None).unwrap();
        let starter = Starter::new().unwrap();
        let is_marker = |target: &PathBuf| target == Path::new("/memfd:marker (deleted)");
        let began = Instant::now();
        // Another test may start a thread, which has all descriptors at first.
        while targets_of_starters().expect("a thread").iter().any(is_marker) {
            assert!(
                began.elapsed() < Duration::from_secs(10),
                "a thread has the descriptors of this process"
            );
        }
        drop(starter);
    }

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
