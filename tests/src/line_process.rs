//! A process that reads commands from its standard input, one per line, and answers each with one line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::cgroup::Cgroup;
use crate::cleanup::{Cleanup, CleanupGuard};
use crate::{HarnessError, HarnessResult};

/// A running process, killed on drop.
#[derive(Debug)]
pub struct LineProcess {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// Dropped after the child was waited for.
    _guard: CleanupGuard,
}

impl LineProcess {
    /// Starts a program, optionally in a cgroup.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start(mut command: Command, cgroup: Option<&Cgroup>) -> HarnessResult<Self> {
        let shown = format!("{command:?}");
        let failed = |message: String| HarnessError::Program { program: shown.clone(), message };
        // ^C interrupts only the test, which ends this process.
        let mut child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (commands, answers) = pipes.ok_or_else(|| failed("no pipes".to_owned()))?;
        let guard = CleanupGuard::new(Cleanup::process(child.id()))?;
        let process = Self { child, commands, answers: BufReader::new(answers), _guard: guard };
        if let Some(cgroup) = cgroup {
            cgroup.add(process.pid())?;
        }
        Ok(process)
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line without waiting for the answer.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if the process ended.
    pub fn send(&mut self, line: &str) -> HarnessResult<()> {
        writeln!(self.commands, "{line}").map_err(|error| HarnessError::Agent(error.to_string()))
    }

    /// Waits for the next line.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if the process ended.
    pub fn receive(&mut self) -> HarnessResult<String> {
        let mut line = String::new();
        let read =
            self.answers.read_line(&mut line).map_err(|error| HarnessError::Agent(error.to_string()))?;
        if read == 0 {
            return Err(HarnessError::Agent("the process closed its output".to_owned()));
        }
        Ok(line.trim_end().to_owned())
    }

    /// Sends a command and waits for its answer: the rest of a line that begins with `ok`.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] with any other line.
    pub fn call(&mut self, command: &str) -> HarnessResult<String> {
        self.send(command)?;
        let line = self.receive()?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("ok", answer) => Ok(answer.to_owned()),
            _ => Err(HarnessError::Agent(line)),
        }
    }

    /// Waits until the process exits.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if it does not exit with 0.
    pub fn wait(mut self) -> HarnessResult<()> {
        match self.child.wait() {
            Ok(status) if status.success() => Ok(()),
            other => Err(HarnessError::Agent(format!("{other:?}"))),
        }
    }

    /// Kills the process as a crash would.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if it cannot be waited for.
    pub fn kill(mut self) -> HarnessResult<()> {
        self.child
            .kill()
            .and_then(|()| self.child.wait())
            .map_err(|error| HarnessError::Agent(error.to_string()))?;
        Ok(())
    }
}

impl Drop for LineProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
