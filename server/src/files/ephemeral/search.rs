//! The search for users in `/proc`, in a child process: reading the maps of a process waits for the lock of its address space, which
//! that process may hold for ever. The child is killed if it does not end in time. Then every file counts as used.
//!
//! The child writes lines: `process PID` before it reads a process, at the end `file DEVICE INODE` for each file in use, and `end`.

use std::collections::BTreeSet;
use std::io::{self, PipeReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

use fdmap_proto::error_chain;
use fdmap_sys::capabilities::Capabilities;
use fdmap_sys::{Errno, process};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::users::{Inode, inodes_in_use};
use crate::confinement::{self, ConfinementError};
use crate::incidents::{self, Incident};
use crate::own_program::OwnProgram;
use crate::store::FdStore;

/// First argument of `fdmapd` that starts the child. The others are the pid of the service, and the pid of the process that holds
/// the stored descriptors, or 0.
pub const ARGUMENT: &str = "user-search";

/// A search takes some 0.1 ms for each process.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Wait for the end of a child that was killed.
const KILL_TIMEOUT: Duration = Duration::from_millis(500);

/// Searches one after the other.
#[derive(Debug, Default)]
pub(super) struct Search {
    /// A child that was killed and has not ended yet. There is no other one until it does.
    killed: Option<Child>,
    /// The process for which the last search waited, which the log names.
    blocked_by: Option<u32>,
}

/// What a child has written.
#[derive(Debug, Default, PartialEq, Eq)]
struct Output {
    /// The process that it read last.
    process: Option<u32>,
    inodes: BTreeSet<Inode>,
    complete: bool,
}

impl Search {
    /// The inodes that a process other than the service has open or mapped. `None` if the search found out nothing.
    pub(super) fn inodes_in_use(&mut self) -> Option<BTreeSet<Inode>> {
        if let Some(child) = &mut self.killed {
            // An error means that it was reaped.
            if matches!(child.try_wait(), Ok(None)) {
                return None;
            }
            self.killed = None;
        }
        let (child, out) = match start() {
            Ok(started) => started,
            Err(error) => {
                tracing::warn!(%error, "cannot start a search for users of ephemeral files");
                return None;
            }
        };
        let text = read_until(out, Instant::now() + SEARCH_TIMEOUT);
        let Output { process, inodes, complete } = parse(&text);
        if complete {
            self.blocked_by = None;
        } else {
            incidents::count(Incident::SearchLate);
            if self.blocked_by != process {
                tracing::warn!(
                    pid = process,
                    "ephemeral files stay: the search for their users did not end, and read this process last"
                );
                self.blocked_by = process;
            }
        }
        self.end(child);
        complete.then_some(inodes)
    }

    /// Kills the child, and waits a moment for its end.
    fn end(&mut self, mut child: Child) {
        // Fails only for a process that has ended.
        let _ = child.kill();
        let began = Instant::now();
        while began.elapsed() < KILL_TIMEOUT {
            if !matches!(child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.killed = Some(child);
    }
}

fn start() -> io::Result<(Child, PipeReader)> {
    // The parent process holds the stored descriptors of every file, so its descriptors do not count. Without a store, the
    // parent counts as any process: it may be a shell that started the service in the background and then executed the
    // program that creates files.
    let store = FdStore::from_env(&[]).map_or(0, |_| std::os::unix::process::parent_id());
    let (out, theirs) = io::pipe()?;
    let arguments = [ARGUMENT, &std::process::id().to_string(), &store.to_string()];
    let stderr = io::stderr().as_fd().try_clone_to_owned()?;
    let child = OwnProgram::new(arguments).stdout(theirs.into()).stderr(stderr).start()?;
    Ok((child, out))
}

/// Reads until the end of the output or the deadline.
fn read_until(mut out: PipeReader, deadline: Instant) -> String {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        let mut fds = [PollFd::new(out.as_fd(), PollFlags::POLLIN)];
        // The timeout is in whole milliseconds.
        let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, timeout) {
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => {}
            Err(_) => break,
        }
        match out.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(read) => bytes.extend_from_slice(&buffer[..read]),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Pure.
fn parse(text: &str) -> Output {
    let mut output = Output::default();
    for line in text.lines() {
        match *line.split(' ').collect::<Vec<_>>() {
            ["process", pid] => output.process = pid.parse().ok(),
            ["file", device, inode] => {
                output.inodes.extend(device.parse().ok().zip(inode.parse().ok()));
            }
            ["end"] => output.complete = true,
            _ => {}
        }
    }
    output
}

fn prepare(service: u32) -> Result<(), ConfinementError> {
    // To read what other users have open and mapped.
    confinement::enter_proc_reader(Capabilities::DAC_READ_SEARCH | Capabilities::SYS_PTRACE)?;
    // The service starts it with all signals blocked.
    process::ignore_signals(&[])?;
    process::terminate_with_parent(service)?;
    Ok(process::set_name(c"fdmapd-search")?)
}

/// Runs the search in this process.
#[must_use]
pub fn main() -> ExitCode {
    let numbers: Vec<u32> = std::env::args().skip(2).filter_map(|text| text.parse().ok()).collect();
    let [service, store] = *numbers else {
        eprintln!("fdmapd: {ARGUMENT} is internal: it needs the pids of fdmapd and of its store");
        return ExitCode::FAILURE;
    };
    if let Err(error) = prepare(service) {
        eprintln!("fdmapd: {}", error_chain(&error));
        return ExitCode::FAILURE;
    }
    let mut out = io::stdout().lock();
    // The service notices if a write fails.
    let found = inodes_in_use(&[service, std::process::id()], store, |pid| {
        let _ = writeln!(out, "process {pid}").and_then(|()| out.flush());
    });
    let Some(found) = found else { return ExitCode::FAILURE };
    let mut text: String = found.iter().map(|(device, inode)| format!("file {device} {inode}\n")).collect();
    text.push_str("end\n");
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_output_names_the_process_that_was_read_last() {
        let complete = "process 1\nprocess 20\nfile 1 1029\nfile 26 7\nend\n";
        let inodes = BTreeSet::from([(1, 1029), (26, 7)]);
        assert_eq!(parse(complete), Output { process: Some(20), inodes, complete: true });
        assert_eq!(parse("process 1\nprocess 20\n"), Output { process: Some(20), ..Output::default() });
        assert_eq!(parse(""), Output::default());
        assert!(!parse("process 1\nfile 1 5\nen").complete);
    }

    #[test]
    fn reading_ends_at_the_deadline() {
        let (out, mut writer) = io::pipe().unwrap();
        writer.write_all(b"process 7\n").unwrap();
        let began = Instant::now();
        let text = read_until(out, began + Duration::from_millis(100));
        assert_eq!(text, "process 7\n");
        assert!((Duration::from_millis(100)..Duration::from_secs(30)).contains(&began.elapsed()));
    }

    #[test]
    fn child_that_does_not_end_is_killed() {
        let sleeper = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = sleeper.id();
        let mut search = Search::default();
        search.end(sleeper);
        // On a host under load, its end may take longer than `end` waits.
        if let Some(mut killed) = search.killed {
            let status = killed.wait().unwrap();
            assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
        }
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
