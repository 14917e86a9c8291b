//! Requirements of tests on their host.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use fdmap_sys::pidfd::{all_processes, parent_of};
use nix::fcntl::{Flock, FlockArg};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

pub use crate::host_io::{output, read, write};

use crate::cleanup::{Cleanup, CleanupGuard};
use crate::{HarnessError, HarnessResult};

/// How long a service may take to start, also in a guest without KVM on a busy host.
pub const SERVICE_START_TIMEOUT: Duration = Duration::from_secs(120);

/// Drains the per-CPU batches of pages to the LRU lists. Otherwise the kernel drains them at an arbitrary later time,
/// and pages appear to move.
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

/// Requires root.
///
/// # Errors
/// [`HarnessError::Missing`] for any other user.
pub fn root() -> HarnessResult<()> {
    if nix::unistd::geteuid().is_root() { Ok(()) } else { Err(HarnessError::Missing("root".to_owned())) }
}

/// The children of a process, in ascending order. Those that are created or exit during the call may be missing.
///
/// # Errors
/// [`HarnessError::Syscall`]
pub fn children_of(pid: u32) -> HarnessResult<Vec<u32>> {
    let mut children = all_processes()?;
    children.retain(|one| parent_of(*one) == Ok(pid));
    Ok(children)
}

/// A lock on the host, shared by all processes, held until dropped. Tests that count memory, swap or huge pages take
/// it, because concurrent tests would change the counts.
#[derive(Debug)]
pub struct HostLock {
    _lock: Flock<File>,
}

impl HostLock {
    /// Waits until no other test has locked the host.
    ///
    /// # Errors
    /// [`HarnessError::File`] if the lock file cannot be opened.
    pub fn acquire() -> HarnessResult<Self> {
        // The directory itself is locked, so that no lock file is left behind.
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

/// A new temporary directory, removed when its guard is dropped.
///
/// # Errors
/// [`HarnessError::File`]
pub fn temp_dir(prefix: &str) -> HarnessResult<(PathBuf, CleanupGuard)> {
    let failed =
        |error| HarnessError::File { what: "creating", path: std::env::temp_dir().join(prefix), error };
    let folder = tempfile::Builder::new().prefix(prefix).tempdir().map_err(failed)?.keep();
    let guard = CleanupGuard::new(Cleanup::RemoveDir(folder.clone()))?;
    Ok((folder, guard))
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
