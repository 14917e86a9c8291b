//! Actors: processes of their own that map files and do to them what clients do, on command.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::cgroup::Cgroup;
use crate::pattern::Pattern;
use crate::service::{Service, program};
use crate::undo::{Guard, Undo};
use crate::{Bed, BedError};

/// A running actor, killed on drop.
#[derive(Debug)]
pub struct Actor {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// Dropped after the child was waited for.
    _guard: Guard,
}

impl Actor {
    /// Starts one, in a cgroup if there is one for it.
    ///
    /// # Errors
    /// [`BedError`]
    pub fn start(cgroup: Option<&Cgroup>) -> Bed<Self> {
        Self::start_program("fdmap-actor", cgroup)
    }

    /// Starts a writer: see [`crate::lost`].
    ///
    /// # Errors
    /// [`BedError`]
    pub fn writer(cgroup: Option<&Cgroup>) -> Bed<Self> {
        Self::start_program("fdmap-writer", cgroup)
    }

    /// The same with another program that takes commands.
    ///
    /// # Errors
    /// [`BedError`]
    pub fn start_program(name: &str, cgroup: Option<&Cgroup>) -> Bed<Self> {
        Self::start_command(Command::new(program(name)?), cgroup)
    }

    /// The same by a command of the caller's: as another user.
    ///
    /// # Errors
    /// [`BedError`]
    pub fn start_command(mut command: Command, cgroup: Option<&Cgroup>) -> Bed<Self> {
        let shown = format!("{command:?}");
        let failed = |said: String| BedError::Program { program: shown.clone(), said };
        // ^C is for the process that started it.
        let mut child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (commands, answers) = pipes.ok_or_else(|| failed("it has no pipes".to_owned()))?;
        let guard = Guard::new(Undo::process(child.id()))?;
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
    /// [`BedError::Actor`] if it is gone.
    pub fn tell(&mut self, command: &str) -> Bed<()> {
        writeln!(self.commands, "{command}").map_err(|error| BedError::Actor(error.to_string()))
    }

    /// Waits until it has done what it was told, and gives what it says.
    ///
    /// # Errors
    /// [`BedError::Actor`] if it could not.
    pub fn done(&mut self) -> Bed<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(|error| BedError::Actor(error.to_string()))?;
        match line.trim_end().split_once(' ').unwrap_or((line.trim_end(), "")) {
            ("ok", said) => Ok(said.to_owned()),
            _ => Err(BedError::Actor(line)),
        }
    }

    /// Tells it something to do, waits, and gives what it says.
    ///
    /// # Errors
    /// [`BedError::Actor`]
    pub fn call(&mut self, command: &str) -> Bed<String> {
        self.tell(command)?;
        self.done()
    }

    /// Maps a file of a service for reading and writing, in place of what it had mapped.
    ///
    /// # Errors
    /// [`BedError::Actor`]
    pub fn map(&mut self, service: &Service, name: &str) -> Bed<()> {
        self.map_at(service.folder(), name)
    }

    /// The same, by the service's folder.
    ///
    /// # Errors
    /// [`BedError::Actor`]
    pub fn map_at(&mut self, folder: &Path, name: &str) -> Bed<()> {
        self.call(&format!("map {} {name}", folder.display())).map(|_| ())
    }

    /// Writes the pages of a pattern, of those from `first` up to `end`.
    ///
    /// # Errors
    /// [`BedError::Actor`]
    pub fn fill(&mut self, pattern: Pattern, first: u64, end: u64) -> Bed<()> {
        self.call(&format!("fill {} {} {first} {end}", pattern.seed, pattern.percent)).map(|_| ())
    }

    /// Tells a writer to come to its end, and waits for that.
    ///
    /// # Errors
    /// [`BedError::Actor`] if it ends badly.
    pub fn finish(mut self) -> Bed<()> {
        self.tell("return")?;
        match self.child.wait() {
            Ok(status) if status.success() => Ok(()),
            other => Err(BedError::Actor(format!("{other:?}"))),
        }
    }

    /// Kills it, as a crash would.
    ///
    /// # Errors
    /// [`BedError::Actor`] if it is gone already.
    pub fn kill(mut self) -> Bed<()> {
        self.child
            .kill()
            .and_then(|()| self.child.wait())
            .map_err(|error| BedError::Actor(error.to_string()))?;
        Ok(())
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
