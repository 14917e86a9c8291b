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
        let paused = Paused { method: self, since: Instant::now(), is_resumed: false };
        match self {
            Self::Commands { pause, .. } => run(pause)?,
            Self::ByCaller => {}
            Self::Cgroup(path) => freeze(path, true).map_err(failed("freezing", path))?,
        }
        Ok(paused)
    }

    fn resume(&self) -> Result<(), ImageError> {
        match self {
            Self::Commands { resume, .. } => resume.as_deref().map_or(Ok(()), run),
            Self::ByCaller => Ok(()),
            Self::Cgroup(path) => freeze(path, false).map_err(failed("thawing", path)),
        }
    }
}

impl Paused<'_> {
    /// Resumes the writers. Returns how long they were paused.
    pub(crate) fn resume(mut self) -> Result<Duration, ImageError> {
        self.is_resumed = true;
        self.method.resume()?;
        Ok(self.since.elapsed())
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
            let _ = self.method.resume();
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

/// Freezes or thaws a cgroup, and waits until that is done.
fn freeze(path: &Path, is_frozen: bool) -> io::Result<()> {
    let (file, wanted) = if path.join("cgroup.freeze").exists() {
        ("cgroup.freeze", if is_frozen { "1" } else { "0" })
    } else {
        ("freezer.state", if is_frozen { "FROZEN" } else { "THAWED" })
    };
    std::fs::write(path.join(file), wanted)?;
    let since = Instant::now();
    while !has_state(path, file, is_frozen)? {
        if since.elapsed() > FREEZE_TIMEOUT {
            return Err(io::Error::new(ErrorKind::TimedOut, format!("not done within {FREEZE_TIMEOUT:?}")));
        }
        std::thread::sleep(FREEZE_POLL_INTERVAL);
    }
    Ok(())
}

fn has_state(path: &Path, file: &str, is_frozen: bool) -> io::Result<bool> {
    if file == "freezer.state" {
        let state = std::fs::read_to_string(path.join(file))?;
        return Ok(state.trim() == if is_frozen { "FROZEN" } else { "THAWED" });
    }
    let events = std::fs::read_to_string(path.join("cgroup.events"))?;
    Ok(events.lines().any(|line| line == format!("frozen {}", u8::from(is_frozen))))
}
