//! Memory cgroups for tests, version 1 or 2.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cleanup::{Cleanup, CleanupGuard};
use crate::host::{read, root, write};
use crate::{HarnessError, HarnessResult};

/// A memory cgroup, removed on drop. Its remaining processes move to the cgroup of this process.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    home: PathBuf,
    version: Version,
    /// Dropped before the controller is disabled again.
    _made: CleanupGuard,
    _controller: Option<CleanupGuard>,
}

/// Enables the memory controller for the children of the root, with version 2. The guard disables it again, unless it
/// was enabled before or another cgroup still uses it.
fn enable_controller(version: Version, root: &Path) -> HarnessResult<Option<CleanupGuard>> {
    let control = root.join("cgroup.subtree_control");
    if version == Version::One || read(&control)?.split_whitespace().any(|name| name == "memory") {
        return Ok(None);
    }
    write(&control, "+memory")?;
    CleanupGuard::new(Cleanup::Restore { path: control, value: "-memory".to_owned() }).map(Some)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// The file with the memory limit.
    const fn limit(self) -> &'static str {
        match self {
            Self::One => "memory.limit_in_bytes",
            Self::Two => "memory.max",
        }
    }

    /// The file with the memory in use.
    const fn usage(self) -> &'static str {
        match self {
            Self::One => "memory.usage_in_bytes",
            Self::Two => "memory.current",
        }
    }
}

/// Finds the memory controller: its version, the root of its tree and the cgroup of this process. Pure.
fn find_controller(mounts: &str, own: &str) -> Option<(Version, PathBuf, PathBuf)> {
    let place = |controller: &str| {
        own.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            controllers.split(',').any(|name| name == controller).then_some(path.trim_start_matches('/'))
        })
    };
    let mounted = |kind: &str, option: Option<&str>| {
        mounts.lines().find_map(|line| {
            let fields: Vec<_> = line.split(' ').collect();
            let [_, target, fs, options, ..] = fields.as_slice() else { return None };
            let fits = *fs == kind && option.is_none_or(|wanted| options.split(',').any(|one| one == wanted));
            fits.then(|| PathBuf::from(target))
        })
    };
    if let (Some(target), Some(place)) = (mounted("cgroup", Some("memory")), place("memory")) {
        let home = target.join(place);
        return Some((Version::One, target, home));
    }
    let target = mounted("cgroup2", None)?;
    let home = target.join(place("")?);
    Some((Version::Two, target, home))
}

impl Cgroup {
    /// A cgroup with a memory limit of `bytes`, not counting swap.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] without root or without the memory controller.
    pub fn with_limit(bytes: u64) -> HarnessResult<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        root()?;
        let missing = || HarnessError::Missing("a memory cgroup controller".to_owned());
        let (version, target, home) =
            find_controller(&read("/proc/self/mounts")?, &read("/proc/self/cgroup")?).ok_or_else(missing)?;
        if version == Version::Two
            && !read(target.join("cgroup.controllers"))?.split_whitespace().any(|name| name == "memory")
        {
            return Err(missing());
        }
        let controller = enable_controller(version, &target)?;
        let name = format!("fdmap-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = target.join(name);
        std::fs::create_dir(&path).map_err(|error| HarnessError::File {
            what: "making",
            path: path.clone(),
            error,
        })?;
        let made = CleanupGuard::new(Cleanup::RemoveCgroup { path: path.clone(), home: home.clone() })?;
        let cgroup = Self { path, home, version, _made: made, _controller: controller };
        cgroup.limit(bytes)?;
        Ok(cgroup)
    }

    /// Changes the limit; the kernel reclaims what exceeds it.
    ///
    /// # Errors
    /// [`HarnessError::File`]
    pub fn limit(&self, bytes: u64) -> HarnessResult<()> {
        write(self.path.join(self.version.limit()), &bytes.to_string())
    }

    /// Makes the kernel reclaim down to `bytes`, as far as it can. Version 1: lowers the limit, and sets it to `limit` (bytes)
    /// again. Version 2: lowers memory.high and resets it; the limit is unchanged. Kills no process.
    ///
    /// # Errors
    /// [`HarnessError::File`] if the limit cannot be set.
    pub fn reclaim_to(&self, bytes: u64, limit: u64) -> HarnessResult<()> {
        match self.version {
            Version::One => {
                // EBUSY if not enough could be reclaimed.
                let _ = self.limit(bytes);
                self.limit(limit)
            }
            Version::Two => {
                let high = self.path.join("memory.high");
                write(&high, &bytes.to_string())?;
                write(high, "max")
            }
        }
    }

    /// Moves a process into the cgroup.
    ///
    /// # Errors
    /// [`HarnessError::File`]
    pub fn add(&self, pid: u32) -> HarnessResult<()> {
        write(self.path.join("cgroup.procs"), &pid.to_string())
    }

    /// Moves a process back to the cgroup of this process. Its charged memory stays charged here.
    ///
    /// # Errors
    /// [`HarnessError::File`]
    pub fn give_back(&self, pid: u32) -> HarnessResult<()> {
        write(self.home.join("cgroup.procs"), &pid.to_string())
    }

    /// Memory in use in bytes.
    ///
    /// # Errors
    /// [`HarnessError::File`]
    pub fn usage(&self) -> HarnessResult<u64> {
        let text = read(self.path.join(self.version.usage()))?;
        text.trim().parse().map_err(|_| HarnessError::Missing(format!("a number in {text:?}")))
    }

    /// A counter of `memory.stat`.
    ///
    /// # Errors
    /// [`HarnessError::Missing`] if there is no such counter.
    pub fn stat(&self, name: &str) -> HarnessResult<u64> {
        let text = read(self.path.join("memory.stat"))?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.ok_or_else(|| HarnessError::Missing(format!("{name} in memory.stat")))
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Creates a cgroup with a freezer, version 1 or 2. Removed when the guard is dropped.
///
/// # Errors
/// [`HarnessError::Missing`] if the host has none; [`HarnessError::File`].
pub fn freezer() -> HarnessResult<(PathBuf, CleanupGuard)> {
    let homes = ["/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(PathBuf::from);
    let home = homes.into_iter().find(|path| path.join("cgroup.procs").exists());
    let home = home.ok_or_else(|| HarnessError::Missing("a cgroup freezer".to_owned()))?;
    let path = home.join(format!("fdmap-freezer-{}", std::process::id()));
    let failed = |error| HarnessError::File { what: "creating", path: path.clone(), error };
    std::fs::create_dir(&path).map_err(failed)?;
    let guard = CleanupGuard::new(Cleanup::RemoveCgroup { path: path.clone(), home })?;
    Ok((path, guard))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_controller_of_version_1_is_found_among_others() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
            cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
            cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
            cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let own = "4:memory:/shell/7\n1:cpu:/\n0::/elsewhere\n";
        let (version, root, home) = find_controller(mounts, own).unwrap();
        assert_eq!(version, Version::One);
        assert_eq!(root, Path::new("/sys/fs/cgroup/memory"));
        assert_eq!(home, Path::new("/sys/fs/cgroup/memory/shell/7"));
    }

    #[test]
    fn version_2_is_found_where_version_1_is_not() {
        let mounts = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        let (version, root, home) = find_controller(mounts, "0::/user.slice/x.scope\n").unwrap();
        assert_eq!(version, Version::Two);
        assert_eq!(root, Path::new("/sys/fs/cgroup"));
        assert_eq!(home, Path::new("/sys/fs/cgroup/user.slice/x.scope"));
        assert!(find_controller("proc /proc proc rw 0 0\n", "0::/\n").is_none());
    }
}
