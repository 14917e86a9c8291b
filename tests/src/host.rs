//! What a test needs of its host, and what happens where that is missing.

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use nix::fcntl::{Flock, FlockArg};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::cleanup::{Cleanup, CleanupGuard};
use crate::{HarnessError, HarnessResult};

/// Puts pages that wait in a processor's batch on the LRU lists that they belong to. Otherwise that happens whenever somebody
/// happens to do it, and looks as if a page had moved.
///
/// # Errors
/// [`HarnessError::Syscall`]
pub fn settle_lru_lists() -> HarnessResult<()> {
    let failed = |call: &'static str| {
        move |errno| HarnessError::Syscall(fdmap_sys::SyscallError { call: call.to_owned(), errno })
    };
    let own = Pid::from_raw(0);
    let all = sched_getaffinity(own).map_err(failed("sched_getaffinity"))?;
    for cpu in (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or(false)) {
        let mut one = CpuSet::new();
        one.set(cpu).map_err(failed("CPU_SET"))?;
        sched_setaffinity(own, &one).map_err(failed("sched_setaffinity"))?;
        // Sealing a file against writing empties the batches of the processor that does it: mm/memfd.c, memfd_tag_pins().
        let file = fdmap_sys::memfd::create("settle", None)?;
        fdmap_sys::memfd::add_seals(std::os::fd::AsFd::as_fd(&file), fdmap_sys::mapping::IMMUTABLE_SEALS)?;
    }
    sched_setaffinity(own, &all).map_err(failed("sched_setaffinity"))
}

/// Root.
///
/// # Errors
/// [`HarnessError::Missing`] for anybody else.
pub fn root() -> HarnessResult<()> {
    if nix::unistd::geteuid().is_root() { Ok(()) } else { Err(HarnessError::Missing("root".to_owned())) }
}

/// The host for one test at a time: memory, swap and huge pages are shared by all, and a neighbour would spoil the counts.
/// Held until dropped, over all processes.
#[derive(Debug)]
pub struct HostLock {
    _lock: Flock<File>,
}

impl HostLock {
    /// Waits until nobody else has the host.
    ///
    /// # Errors
    /// If the lock's file cannot be opened.
    pub fn acquire() -> HarnessResult<Self> {
        // The folder itself is locked: there is no file to leave behind.
        let path = std::env::temp_dir();
        let file = File::open(&path);
        let file = file.map_err(|error| HarnessError::File { what: "opening", path: path.clone(), error })?;
        let lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| HarnessError::File {
            what: "locking",
            path,
            error: errno.into(),
        })?;
        Ok(Self { _lock: lock })
    }
}

/// A new folder for temporary files, removed when its guard is dropped.
///
/// # Errors
/// [`HarnessError::File`]
pub fn temp_dir(prefix: &str) -> HarnessResult<(PathBuf, CleanupGuard)> {
    let failed =
        |error| HarnessError::File { what: "making", path: std::env::temp_dir().join(prefix), error };
    let folder = tempfile::Builder::new().prefix(prefix).tempdir().map_err(failed)?.keep();
    let guard = CleanupGuard::new(Cleanup::RemoveDir(folder.clone()))?;
    Ok((folder, guard))
}

/// Reads a file of /proc or /sys.
///
/// # Errors
/// [`HarnessError::File`]
pub fn read(path: impl Into<PathBuf>) -> HarnessResult<String> {
    let path = path.into();
    std::fs::read_to_string(&path).map_err(|error| HarnessError::File { what: "reading", path, error })
}

/// Writes a file of /proc or /sys.
///
/// # Errors
/// [`HarnessError::File`]
pub fn write(path: impl Into<PathBuf>, text: &str) -> HarnessResult<()> {
    let path = path.into();
    std::fs::write(&path, text).map_err(|error| HarnessError::File { what: "writing", path, error })
}

/// Runs a program and gives what it printed.
///
/// # Errors
/// [`HarnessError::Missing`] if it is not installed, [`HarnessError::Program`] if it fails.
pub fn output(program: &str, arguments: &[&str]) -> HarnessResult<String> {
    let shown = format!("{program} {}", arguments.join(" "));
    // mkswap and its like are not on everybody's path. ^C does not reach them: what has begun is finished.
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let output = match Command::new(program).args(arguments).env("PATH", path).process_group(0).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(HarnessError::Missing(format!("the program {program}")));
        }
        other => other
            .map_err(|error| HarnessError::Program { program: shown.clone(), said: error.to_string() })?,
    };
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(HarnessError::Program { program: shown, said: format!("{}: {said}", output.status) })
}

/// A counter of /proc/vmstat.
///
/// # Errors
/// [`HarnessError::Missing`] if this kernel does not have it.
pub fn vmstat(name: &str) -> HarnessResult<u64> {
    let text = read("/proc/vmstat")?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    value.ok_or_else(|| HarnessError::Missing(format!("{name} in /proc/vmstat")))
}
