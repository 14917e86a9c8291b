//! Actors: processes of their own that map files and do to them what clients do, on command.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::cgroup::Cgroup;
use crate::cleanup::{Cleanup, CleanupGuard};
use crate::pattern::Pattern;
use crate::service::{Service, program};
use crate::{HarnessError, HarnessResult};

/// A running actor, killed on drop.
#[derive(Debug)]
pub struct Actor {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// Dropped after the child was waited for.
    _guard: CleanupGuard,
}

impl Actor {
    /// Starts one, in a cgroup if there is one for it.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start(cgroup: Option<&Cgroup>) -> HarnessResult<Self> {
        Self::start_program("fdmap-actor", cgroup)
    }

    /// Starts a writer: see [`crate::lost`].
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn writer(cgroup: Option<&Cgroup>) -> HarnessResult<Self> {
        Self::start_program("fdmap-writer", cgroup)
    }

    /// The same with another program that takes commands.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start_program(name: &str, cgroup: Option<&Cgroup>) -> HarnessResult<Self> {
        Self::start_command(Command::new(program(name)?), cgroup)
    }

    /// The same by a command of the caller's: as another user.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn start_command(mut command: Command, cgroup: Option<&Cgroup>) -> HarnessResult<Self> {
        let shown = format!("{command:?}");
        let failed = |said: String| HarnessError::Program { program: shown.clone(), said };
        // ^C is for the process that started it.
        let mut child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (commands, answers) = pipes.ok_or_else(|| failed("it has no pipes".to_owned()))?;
        let guard = CleanupGuard::new(Cleanup::process(child.id()))?;
        let actor = Self { child, commands, answers: BufReader::new(answers), _guard: guard };
        if let Some(cgroup) = cgroup {
            cgroup.add(actor.pid())?;
        }
        Ok(actor)
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it something to do, without waiting until it is done.
    ///
    /// # Errors
    /// [`HarnessError::Actor`] if it is gone.
    pub fn tell(&mut self, command: &str) -> HarnessResult<()> {
        writeln!(self.commands, "{command}").map_err(|error| HarnessError::Actor(error.to_string()))
    }

    /// Waits until it has done what it was told, and gives what it says.
    ///
    /// # Errors
    /// [`HarnessError::Actor`] if it could not.
    pub fn done(&mut self) -> HarnessResult<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(|error| HarnessError::Actor(error.to_string()))?;
        match line.trim_end().split_once(' ').unwrap_or((line.trim_end(), "")) {
            ("ok", said) => Ok(said.to_owned()),
            _ => Err(HarnessError::Actor(line)),
        }
    }

    /// Tells it something to do, waits, and gives what it says.
    ///
    /// # Errors
    /// [`HarnessError::Actor`]
    pub fn call(&mut self, command: &str) -> HarnessResult<String> {
        self.tell(command)?;
        self.done()
    }

    /// Maps a file of a service for reading and writing, in place of what it had mapped.
    ///
    /// # Errors
    /// [`HarnessError::Actor`]
    pub fn map(&mut self, service: &Service, name: &str) -> HarnessResult<()> {
        self.map_at(service.folder(), name)
    }

    /// The same, by the service's folder.
    ///
    /// # Errors
    /// [`HarnessError::Actor`]
    pub fn map_at(&mut self, folder: &Path, name: &str) -> HarnessResult<()> {
        self.call(&format!("map {} {name}", folder.display())).map(|_| ())
    }

    /// Writes the pages of a pattern, of those from `first` up to `end`.
    ///
    /// # Errors
    /// [`HarnessError::Actor`]
    pub fn fill(&mut self, pattern: Pattern, first: u64, end: u64) -> HarnessResult<()> {
        self.call(&format!("fill {} {} {first} {end}", pattern.seed, pattern.percent)).map(|_| ())
    }

    /// Tells a writer to come to its end, and waits for that.
    ///
    /// # Errors
    /// [`HarnessError::Actor`] if it ends badly.
    pub fn finish(mut self) -> HarnessResult<()> {
        self.tell("return")?;
        match self.child.wait() {
            Ok(status) if status.success() => Ok(()),
            other => Err(HarnessError::Actor(format!("{other:?}"))),
        }
    }

    /// Kills it, as a crash would.
    ///
    /// # Errors
    /// [`HarnessError::Actor`] if it is gone already.
    pub fn kill(mut self) -> HarnessResult<()> {
        self.child
            .kill()
            .and_then(|()| self.child.wait())
            .map_err(|error| HarnessError::Actor(error.to_string()))?;
        Ok(())
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
