//! Pauses and resumes the writers: by commands, or by a cgroup's freezer.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::super::error::ImageError;
use super::super::progress::Control;

/// Longest time that the kernel gets to freeze a cgroup.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(10);
const FREEZE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How writers are paused.
///
/// What the commands print goes to standard error: standard output has the report.
#[derive(Clone, Debug)]
pub enum PauseMethod {
    /// Shell commands. `pause` returns when no write is in progress, direct I/O and DMA included.
    Commands { pause: String, resume: Option<String> },
    /// The caller has paused the writers, and resumes them.
    ByCaller,
    /// The freezer of a cgroup, version 1 or 2. Direct I/O that its processes have begun may still end.
    Cgroup(PathBuf),
}

/// Writers that are paused. They are resumed on drop.
#[must_use]
#[derive(Debug)]
pub(crate) struct Paused<'a> {
    method: &'a PauseMethod,
    since: Instant,
    /// Or they are left paused.
    is_resumed: bool,
}

impl PauseMethod {
    /// Pauses the writers. After an error they run.
    pub(crate) fn pause(&self, control: &Control) -> Result<Paused<'_>, ImageError> {
        control.check()?;
        if let Self::Cgroup(path) = self
            && is_frozen_itself(path).map_err(failed("freezing", path))?
        {
            // Who froze it may thaw it at any time.
            let error = io::Error::new(
                ErrorKind::ResourceBusy,
                "it is frozen already, by the user or another program",
            );
            return Err(failed("freezing", path)(error));
        }
        let paused = Paused { method: self, since: Instant::now(), is_resumed: false };
        match self {
            Self::Commands { pause, .. } => run(pause)?,
            Self::ByCaller => {}
            Self::Cgroup(path) => freeze(path).map_err(failed("freezing", path))?,
        }
        Ok(paused)
    }
}

impl Paused<'_> {
    /// Resumes the writers. Returns how long they were paused.
    pub(crate) fn resume(mut self) -> Result<Duration, ImageError> {
        self.is_resumed = true;
        self.resume_writers()?;
        Ok(self.since.elapsed())
    }

    fn resume_writers(&self) -> Result<(), ImageError> {
        match self.method {
            PauseMethod::Commands { resume, .. } => resume.as_deref().map_or(Ok(()), run),
            PauseMethod::Cgroup(path) => thaw(path).map_err(failed("thawing", path)),
            PauseMethod::ByCaller => Ok(()),
        }
    }

    /// Fails if another process has thawed the cgroup.
    #[cfg(feature = "migration")]
    pub(crate) fn check(&self) -> Result<(), ImageError> {
        let PauseMethod::Cgroup(path) = self.method else { return Ok(()) };
        match is_frozen(path) {
            Ok(true) => Ok(()),
            Ok(false) => Err(failed("pausing by", path)(io::Error::other("another process thawed it"))),
            Err(error) => Err(failed("reading the state of", path)(error)),
        }
    }

    /// Leaves the writers paused. Returns how long they have been.
    pub(crate) fn leave(mut self) -> Duration {
        self.is_resumed = true;
        self.since.elapsed()
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        if !self.is_resumed {
            // The error that ends the dump is reported.
            let _ = self.resume_writers();
        }
    }
}

fn failed(operation: &str, path: &Path) -> impl FnOnce(io::Error) -> ImageError + use<> {
    let what = format!("{operation} cgroup {}", path.display());
    move |error| ImageError::Pause { what, error }
}

fn run(command: &str) -> Result<(), ImageError> {
    let failed = |error| ImageError::Pause { what: format!("running {command:?}"), error };
    let stderr = io::stderr().as_fd().try_clone_to_owned().map_err(failed)?;
    let status = Command::new("/bin/sh").args(["-c", command]).stdout(stderr).status().map_err(failed)?;
    if status.success() { Ok(()) } else { Err(failed(io::Error::other(status.to_string()))) }
}

/// True for a cgroup of version 2.
fn is_version_2(path: &Path) -> bool {
    path.join("cgroup.freeze").exists()
}

/// Freezes a cgroup, and waits until that is done.
fn freeze(path: &Path) -> io::Result<()> {
    let (file, frozen) =
        if is_version_2(path) { ("cgroup.freeze", "1") } else { ("freezer.state", "FROZEN") };
    std::fs::write(path.join(file), frozen)?;
    let since = Instant::now();
    while !is_frozen(path)? {
        if since.elapsed() > FREEZE_TIMEOUT {
            return Err(io::Error::new(ErrorKind::TimedOut, format!("not done within {FREEZE_TIMEOUT:?}")));
        }
        std::thread::sleep(FREEZE_POLL_INTERVAL);
    }
    Ok(())
}

fn thaw(path: &Path) -> io::Result<()> {
    let (file, thawed) =
        if is_version_2(path) { ("cgroup.freeze", "0") } else { ("freezer.state", "THAWED") };
    std::fs::write(path.join(file), thawed)
}

/// True if all processes of the cgroup are frozen.
fn is_frozen(path: &Path) -> io::Result<bool> {
    if is_version_2(path) {
        let events = std::fs::read_to_string(path.join("cgroup.events"))?;
        return Ok(events.lines().any(|line| line == "frozen 1"));
    }
    Ok(std::fs::read_to_string(path.join("freezer.state"))?.trim() == "FROZEN")
}

/// True if the cgroup, not only one above it, is to be frozen.
fn is_frozen_itself(path: &Path) -> io::Result<bool> {
    let file = if is_version_2(path) { "cgroup.freeze" } else { "freezer.self_freezing" };
    Ok(std::fs::read_to_string(path.join(file))?.trim() == "1")
}
