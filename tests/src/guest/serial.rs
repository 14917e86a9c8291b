//! The serial line to the program of a guest: QEMU connects its standard input and output to the second serial port.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::host::read;
use crate::{HarnessError, HarnessResult};

/// Far longer than a guest takes to boot or to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// A QEMU and the line to its guest. Killed on drop.
#[derive(Debug)]
pub struct SerialLine {
    child: Child,
    commands: ChildStdin,
    answers: Receiver<String>,
    console: PathBuf,
}

impl SerialLine {
    /// Connects to a child whose standard input and output are pipes. `console` is the file with the guest's log.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if the child has no pipes.
    pub fn to(mut child: Child, console: PathBuf) -> HarnessResult<Self> {
        let no_pipes = || HarnessError::Agent("QEMU has no pipes".to_owned());
        let (commands, answers) = child.stdin.take().zip(child.stdout.take()).ok_or_else(no_pipes)?;
        Ok(Self { child, commands, answers: lines(answers), console })
    }

    /// The process of QEMU.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the answer to the last command.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] with the end of the guest's log if the command failed.
    pub fn done(&self) -> HarnessResult<String> {
        let line = self.answers.recv_timeout(ANSWER_TIMEOUT).unwrap_or_else(|error| error.to_string());
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("ok", answer) => Ok(answer.to_owned()),
            _ => Err(HarnessError::Agent(format!("{line}; the end of its log:\n{}", self.log()))),
        }
    }

    /// Sends a command and waits for the answer.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn call(&mut self, command: &str) -> HarnessResult<String> {
        writeln!(self.commands, "{command}").map_err(|error| HarnessError::Agent(error.to_string()))?;
        self.done()
    }

    /// The end of the log of the guest's kernel.
    fn log(&self) -> String {
        let text = read(&self.console).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for SerialLine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads lines in a thread, so that waiting for a line can have a timeout. The thread ends with the input.
fn lines(from: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if sender.send(line.trim_end().to_owned()).is_err() {
                break;
            }
        }
    });
    receiver
}
