//! A program that blocks in a system call and reports whether anything disturbed it: `tests/programs/blocked_syscall.c`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::cleanup::{Cleanup, CleanupGuard};
use crate::{HarnessError, HarnessResult};

const STATE_TIMEOUT: Duration = Duration::from_secs(20);

/// A running instance, killed on drop.
#[derive(Debug)]
pub struct BlockedSyscall {
    child: Child,
    commands: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    _process: CleanupGuard,
}

/// The result of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct CallResult {
    /// The return value, or `-errno`.
    pub value: i64,
    /// Duration of the call.
    pub milliseconds: f64,
    /// `intact`, or the register that changed.
    pub registers: String,
    /// The socket's receive timeout after the call, milliseconds; -1 without a socket.
    pub socket_timeout: i64,
}

impl BlockedSyscall {
    /// Starts the program by a command, which may change its user or its environment.
    pub fn start(mut command: Command) -> HarnessResult<Self> {
        let program = format!("{command:?}");
        let failed = |error: std::io::Error| HarnessError::Program { program, message: error.to_string() };
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let process = CleanupGuard::new(Cleanup::process(child.id()))?;
        let commands = child.stdin.take();
        let output = child.stdout.take().map(BufReader::new);
        let output = output.ok_or_else(|| HarnessError::Agent("no standard output".to_owned()))?;
        let mut started = Self { child, commands, output, _process: process };
        started.expect("ready")?;
        Ok(started)
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Writes to the standard input of the program.
    pub fn send(&mut self, text: &str) -> HarnessResult<()> {
        let sent = self.commands.as_mut().map_or(Ok(()), |commands| commands.write_all(text.as_bytes()));
        sent.map_err(|error| HarnessError::Agent(error.to_string()))
    }

    /// Reads a line, which must start with `prefix`. Returns the rest. The end of the output is an error.
    pub fn expect(&mut self, prefix: &str) -> HarnessResult<String> {
        let mut line = String::new();
        let read =
            self.output.read_line(&mut line).map_err(|error| HarnessError::Agent(error.to_string()))?;
        if read == 0 {
            return Err(HarnessError::Agent(format!("process {} closed its output", self.pid())));
        }
        match line.trim_end().strip_prefix(prefix) {
            Some(rest) => Ok(rest.to_owned()),
            None => Err(HarnessError::Agent(line)),
        }
    }

    /// Makes the program enter a call, and waits until it sleeps in the call (or spins). A negative time means no
    /// timeout.
    pub fn block(&mut self, call: &str, milliseconds: i64) -> HarnessResult<()> {
        self.send(&format!("block {call} {milliseconds}\n"))?;
        self.expect("blocks")?;
        if call != "spin" {
            self.wait_for_state('S')?;
        }
        Ok(())
    }

    /// Waits until `/proc/PID/stat` shows this state of the main thread, for at most [`STATE_TIMEOUT`].
    pub fn wait_for_state(&self, state: char) -> HarnessResult<()> {
        let path = format!("/proc/{}/stat", self.pid());
        let shown = format!(") {state} ");
        let began = Instant::now();
        loop {
            let stat = std::fs::read_to_string(&path);
            if stat.as_ref().is_ok_and(|stat| stat.contains(&shown)) {
                return Ok(());
            }
            if began.elapsed() > STATE_TIMEOUT {
                let pid = self.pid();
                let message =
                    format!("process {pid} is not in state {state} after {STATE_TIMEOUT:?}: {stat:?}");
                return Err(HarnessError::Agent(message));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the end of the call.
    pub fn result(&mut self) -> HarnessResult<CallResult> {
        let line = self.expect("done ")?;
        let mut words = line.split(' ');
        let mut parse = || {
            Some(CallResult {
                value: words.next()?.parse().ok()?,
                milliseconds: words.next()?.parse().ok()?,
                registers: words.next()?.to_owned(),
                socket_timeout: words.next()?.parse().ok()?,
            })
        };
        parse().ok_or(HarnessError::Agent(line))
    }

    /// Starts a second thread, which waits in pause(2).
    pub fn start_thread(&mut self) -> HarnessResult<()> {
        self.send("thread\n")?;
        self.expect("started").map(drop)
    }

    /// Creates an io_uring with IORING_SETUP_SQPOLL, whose SQ poll thread belongs to the process.
    pub fn start_sqpoll_thread(&mut self) -> HarnessResult<()> {
        self.send("poller\n")?;
        self.expect("started").map(drop)
    }

    /// The signal mask, the disposition of SIGTRAP and the descriptors of the program, as text.
    pub fn state(&mut self) -> HarnessResult<String> {
        self.send("state\n")?;
        self.expect("state")
    }

    /// Makes the program write to a page.
    pub fn write(&mut self, page: u64) -> HarnessResult<()> {
        self.send(&format!("write {page}\n"))?;
        self.expect("written").map(drop)
    }
}

impl Drop for BlockedSyscall {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
