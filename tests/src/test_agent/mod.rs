//! The test agent: a process that accesses files on request, as clients do. See `fdmap-test-agent`.

pub mod command;
pub mod operation;
mod service_file;
mod writes;

use std::path::Path;
use std::process::Command as Program;

use crate::cgroup::Cgroup;
use crate::line_process::LineProcess;
use crate::pattern::Pattern;
use crate::service::{Service, program};
use crate::{HarnessError, HarnessResult};

use command::{Command, FileCommand, FileOf, MemfdCommand, Reply, Span};
use operation::OperationCommand;

pub use command::{AgentMapping, MappingEnd};
pub use writes::Run;

/// The name of the program.
pub const PROGRAM: &str = "fdmap-test-agent";

/// A running agent, killed on drop.
#[derive(Debug)]
pub struct TestAgent {
    process: LineProcess,
}

impl TestAgent {
    /// Starts an agent, optionally in a cgroup.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start(cgroup: Option<&Cgroup>) -> HarnessResult<Self> {
        Self::start_by(Program::new(program(PROGRAM)?), cgroup)
    }

    /// Starts an agent by the given command, for example as another user.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start_by(command: Program, cgroup: Option<&Cgroup>) -> HarnessResult<Self> {
        Ok(Self { process: LineProcess::start(command, cgroup)? })
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends a command without waiting for the reply.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if the agent ended.
    pub fn send(&mut self, command: &Command) -> HarnessResult<()> {
        let line = serde_json::to_string(command).map_err(|error| HarnessError::Agent(error.to_string()))?;
        self.process.send(&line)
    }

    /// Waits for the reply to the command that was sent.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if the command failed or the agent ended.
    pub fn reply(&mut self) -> HarnessResult<Reply> {
        let line = self.process.receive()?;
        match serde_json::from_str(&line) {
            Ok(Reply::Failed(error)) => Err(HarnessError::Agent(error)),
            Ok(reply) => Ok(reply),
            Err(error) => Err(HarnessError::Agent(format!("{line:?}: {error}"))),
        }
    }

    /// Sends a command and waits for the reply.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if the command fails or the agent ended.
    pub fn call(&mut self, command: &Command) -> HarnessResult<Reply> {
        self.send(command)?;
        self.reply()
    }

    /// Like [`call`](Self::call), for a command that replies with a number.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn call_for_number(&mut self, command: &Command) -> HarnessResult<u64> {
        number(self.call(command)?)
    }

    /// Executes a command for the open file.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn file(&mut self, command: FileCommand) -> HarnessResult<Reply> {
        self.call(&Command::File(command))
    }

    /// Executes a command for the agent's memfd.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn memfd(&mut self, command: MemfdCommand) -> HarnessResult<Reply> {
        self.call(&Command::Memfd(command))
    }

    /// Executes a command for the file of the operations.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn operation(&mut self, command: OperationCommand) -> HarnessResult<Reply> {
        self.call(&Command::Operation(command))
    }

    /// Opens a file of a service and maps it for writing, in place of the previous one.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn open(&mut self, service: &Service, name: &str) -> HarnessResult<()> {
        self.open_in(service.folder(), name)
    }

    /// Like [`open`](Self::open), with the runtime directory of the service.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn open_in(&mut self, runtime_dir: &Path, name: &str) -> HarnessResult<()> {
        self.file(FileCommand::Open(FileOf::new(runtime_dir, name))).map(drop)
    }

    /// Writes the pages of a pattern among `pages` of the open file.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn fill(&mut self, pattern: Pattern, first: u64, end: u64) -> HarnessResult<()> {
        self.file(FileCommand::Fill { pattern, pages: Span { first, end } }).map(drop)
    }

    /// The number of pages of the open file whose content differs from the pattern.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn wrong_pages(&mut self, pattern: Pattern, first: u64, end: u64) -> HarnessResult<u64> {
        number(self.file(FileCommand::Verify { pattern, pages: Span { first, end } })?)
    }

    /// Reads one byte of each page of the open file.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn read(&mut self, first: u64, end: u64) -> HarnessResult<()> {
        self.file(FileCommand::Read(Span { first, end })).map(drop)
    }

    /// Minor and major page faults of the agent so far, by `/proc/PID/stat`. Does not wake the agent.
    ///
    /// # Errors
    /// [`HarnessError::File`]; [`HarnessError::Agent`] if the file is malformed.
    pub fn faults(&self) -> HarnessResult<(u64, u64)> {
        let stat = crate::host::read(format!("/proc/{}/stat", self.pid()))?;
        let fields: Vec<_> = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').collect();
        // Fields 10 and 12 of proc_pid_stat(5); the first one here is field 3.
        let field = |number: usize| fields.get(number - 3).and_then(|field| field.parse().ok());
        field(10).zip(field(12)).ok_or(HarnessError::Agent(stat))
    }

    /// Makes the agent return from `main`, and waits for its end.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if it does not exit with 0.
    pub fn finish(mut self) -> HarnessResult<()> {
        self.send(&Command::Return)?;
        self.process.wait()
    }

    /// Kills the agent as a crash would.
    ///
    /// # Errors
    /// [`HarnessError::Agent`]
    pub fn kill(self) -> HarnessResult<()> {
        self.process.kill()
    }
}

/// The number in a reply.
///
/// # Errors
/// [`HarnessError::Agent`] for any other reply.
pub fn number(reply: Reply) -> HarnessResult<u64> {
    match reply {
        Reply::Number(number) => Ok(number),
        other => Err(HarnessError::Agent(format!("{other:?}"))),
    }
}
