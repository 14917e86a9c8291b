//! Cleanup of what this process created on the host: on drop, and by a helper process if this process is killed.
//!
//! The helper (`fdmap-cleanup`) receives a line for each thing that is created and each that is cleaned up. When its input
//! ends, it cleans up the rest: processes first, then the others, latest first. It has its own process group, so that ^C does
//! not reach it.

use fdmap_proto::error_chain;
use std::io::{BufRead, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;

use crate::built_programs::program;
use crate::host_io::{output, read, write};
use crate::swap_areas::areas;
use crate::{HarnessError, HarnessResult};

/// Timeout for the end of a process and for the removal of a cgroup.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

/// One cleanup action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cleanup {
    /// Kills a process. The start time distinguishes it from a later process with the same pid.
    Process {
        pid: u32,
        /// Start time in clock ticks since boot, as in /proc/PID/stat.
        start_time: u64,
    },
    /// Switches a swap area off.
    SwapOff(PathBuf),
    /// Removes a zram device.
    RemoveZram(u32),
    /// Detaches a loop device from its file.
    DetachLoop(PathBuf),
    /// Unmounts the file system that is mounted at a directory.
    Unmount(PathBuf),
    /// Removes a directory and its content.
    RemoveDir(PathBuf),
    /// Removes a cgroup with the cgroups in it.
    RemoveCgroup {
        /// The directory of the cgroup.
        path: PathBuf,
        /// The directory of the cgroup to which its processes move.
        home: PathBuf,
    },
    /// Restores a setting.
    Restore {
        /// The file of the setting.
        path: PathBuf,
        /// The previous content of the file.
        value: String,
    },
}

impl Cleanup {
    /// Kills a child of this process. Does nothing if the child has ended already.
    #[must_use]
    pub fn process(pid: u32) -> Self {
        Self::Process { pid, start_time: start_time_of(pid).unwrap_or(0) }
    }

    /// Performs the cleanup. A resource that no longer exists is not an error.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn perform(&self) -> HarnessResult<()> {
        match self {
            Self::Process { pid, start_time } => {
                let same = || start_time_of(*pid) == Some(*start_time);
                if let (true, Ok(number)) = (same(), i32::try_from(*pid)) {
                    // The process may have ended in the meantime.
                    let _ = kill(Pid::from_raw(number), Signal::SIGKILL);
                }
                until(|| !same(), || format!("process {pid} did not end"))
            }
            Self::SwapOff(path) if areas()?.iter().any(|area| area.path == *path) => {
                output("swapoff", &[&path.to_string_lossy()]).map(drop)
            }
            Self::SwapOff(_) => Ok(()),
            Self::RemoveZram(number) => {
                if !PathBuf::from(format!("/sys/block/zram{number}")).exists() {
                    return Ok(());
                }
                write(format!("/sys/block/zram{number}/reset"), "1")?;
                write("/sys/class/zram-control/hot_remove", &number.to_string())
            }
            Self::DetachLoop(device) => output("losetup", &["--detach", &device.to_string_lossy()]).map(drop),
            Self::Unmount(path) => {
                let mounts = read("/proc/self/mounts")?;
                let shown = path.to_string_lossy();
                if mounts.lines().any(|line| line.split(' ').nth(1) == Some(&*shown)) {
                    output("umount", &[&shown])?;
                }
                Ok(())
            }
            Self::RemoveDir(path) => match std::fs::remove_dir_all(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    Err(HarnessError::File { what: "removing", path: path.clone(), error })
                }
                _ => Ok(()),
            },
            Self::RemoveCgroup { path, home } => until(
                || remove_cgroup(path, home),
                || format!("the cgroup {} could not be removed", path.display()),
            ),
            Self::Restore { path, value } => write(path, value),
        }
    }

    /// The line that the helper parses.
    fn to_line(&self) -> String {
        match self {
            Self::Process { pid, start_time } => format!("process\t{pid}\t{start_time}"),
            Self::SwapOff(path) => format!("swap\t{}", path.display()),
            Self::RemoveZram(number) => format!("zram\t{number}"),
            Self::DetachLoop(path) => format!("loop\t{}", path.display()),
            Self::Unmount(path) => format!("mount\t{}", path.display()),
            Self::RemoveDir(path) => format!("folder\t{}", path.display()),
            Self::RemoveCgroup { path, home } => format!("cgroup\t{}\t{}", path.display(), home.display()),
            Self::Restore { path, value } => format!("setting\t{}\t{value}", path.display()),
        }
    }

    fn from_words(words: &[&str]) -> Option<Self> {
        Some(match words {
            ["process", pid, start_time] => {
                Self::Process { pid: pid.parse().ok()?, start_time: start_time.parse().ok()? }
            }
            ["swap", path] => Self::SwapOff(path.into()),
            ["zram", number] => Self::RemoveZram(number.parse().ok()?),
            ["loop", path] => Self::DetachLoop(path.into()),
            ["mount", path] => Self::Unmount(path.into()),
            ["folder", path] => Self::RemoveDir(path.into()),
            ["cgroup", path, home] => Self::RemoveCgroup { path: path.into(), home: home.into() },
            ["setting", path, value] => Self::Restore { path: path.into(), value: (*value).to_owned() },
            _ => return None,
        })
    }
}

/// Moves the processes of a cgroup, and of the cgroups in it, to `home`, and removes all these cgroups. Returns true if none is left.
fn remove_cgroup(path: &Path, home: &Path) -> bool {
    for child in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if child.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&child.path(), home);
        }
    }
    for pid in read(path.join("cgroup.procs")).unwrap_or_default().lines() {
        // A process that was killed just now may take a moment to leave.
        let _ = write(home.join("cgroup.procs"), pid);
    }
    let removed = std::fs::remove_dir(path);
    removed.is_ok() || removed.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// The start time of a process, or `None` if it has ended.
fn start_time_of(pid: u32) -> Option<u64> {
    let stat = read(format!("/proc/{pid}/stat")).ok()?;
    // The command name may contain any character. Field 3 follows its closing parenthesis; field 22 is the start
    // time.
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if *fields.first()? == "Z" { None } else { fields.get(19)?.parse().ok() }
}

fn until(mut done: impl FnMut() -> bool, failure: impl Fn() -> String) -> HarnessResult<()> {
    let begun = Instant::now();
    while !done() {
        if begun.elapsed() > CLEANUP_TIMEOUT {
            return Err(HarnessError::Program { program: "cleaning up".to_owned(), message: failure() });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// A cleanup that is performed on drop.
#[derive(Debug)]
pub struct CleanupGuard {
    number: u64,
    undo: Cleanup,
}

impl CleanupGuard {
    /// Registers the cleanup of something that was just created.
    ///
    /// # Errors
    /// [`HarnessError::Program`] if there is no helper. In that case the cleanup is performed immediately.
    pub fn new(undo: Cleanup) -> HarnessResult<Self> {
        match helper().add(&undo) {
            Ok(number) => Ok(Self { number, undo }),
            Err(error) => {
                undo.perform()?;
                Err(error)
            }
        }
    }
}

impl Drop for CleanupGuard {
    fn drop(&mut self) {
        // The lock is held to the end, so that the helper and this process never perform the same cleanup
        // concurrently.
        let mut helper = helper();
        if let Err(error) = self.undo.perform() {
            eprintln!("{:?} failed: {}", self.undo, error_chain(&error));
        }
        helper.remove(self.number);
    }
}

/// Performs all cleanups immediately, as after the death of this process. The caller must end the process afterwards.
fn clean_up_all() {
    let mut helper = helper();
    if let Some((mut child, input)) = helper.running.take() {
        drop(input);
        if let Err(error) = child.wait() {
            eprintln!("waiting for the cleanup helper failed: {error}");
        }
    }
    // Every guard that is dropped from now on waits here until the process ends.
    std::mem::forget(helper);
}

/// Makes SIGINT, SIGTERM and SIGHUP perform all cleanups and end this process. Call it before other threads exist.
///
/// # Errors
/// [`HarnessError::Program`] if the signals cannot be blocked.
pub fn on_interrupt() -> HarnessResult<()> {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
    let failed = |errno: nix::errno::Errno| HarnessError::Program {
        program: "blocking signals".to_owned(),
        message: errno.to_string(),
    };
    // Every later thread inherits this signal mask; children of std's Command do not.
    signals.thread_block().map_err(failed)?;
    std::thread::spawn(move || {
        if let Ok(signal) = signals.wait() {
            eprintln!("\n{signal}: cleaning up");
            clean_up_all();
            // The exit code by which a shell reports a signal.
            std::process::exit(128 + signal as i32);
        }
    });
    Ok(())
}

struct Helper {
    running: Option<(Child, ChildStdin)>,
    next: u64,
}

static HELPER: Mutex<Helper> = Mutex::new(Helper { running: None, next: 0 });

fn helper() -> MutexGuard<'static, Helper> {
    HELPER.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Helper {
    fn add(&mut self, undo: &Cleanup) -> HarnessResult<u64> {
        let path = program("fdmap-cleanup")?;
        let failed =
            |error: std::io::Error| HarnessError::File { what: "running", path: path.clone(), error };
        if self.running.is_none() {
            let mut command = Command::new(&path);
            let mut child = command
                .process_group(0)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .map_err(failed)?;
            let input = child.stdin.take().ok_or_else(|| HarnessError::Missing("a pipe".to_owned()))?;
            self.running = Some((child, input));
        }
        self.next += 1;
        if let Some((_, input)) = &mut self.running {
            writeln!(input, "{}\t{}", self.next, undo.to_line()).map_err(failed)?;
        }
        Ok(self.next)
    }

    fn remove(&mut self, number: u64) {
        if let Some((_, input)) = &mut self.running
            && let Err(error) = writeln!(input, "{number}")
        {
            eprintln!("the cleanup helper has ended: {error}");
        }
    }
}

/// The work of the helper: reads all lines, performs the remaining cleanups at the end, and returns the errors.
pub fn clean_up_after(input: impl BufRead) -> Vec<String> {
    let (mut left, mut errors) = (Vec::<(u64, Cleanup)>::new(), Vec::new());
    for line in input.lines().map_while(Result::ok) {
        let words: Vec<_> = line.split('\t').collect();
        let Some((number, words)) = words.split_first() else { continue };
        let Ok(number) = number.parse::<u64>() else {
            errors.push(format!("{line:?} is invalid"));
            continue;
        };
        match (words, Cleanup::from_words(words)) {
            ([], _) => left.retain(|(known, _)| *known != number),
            (_, Some(undo)) => left.push((number, undo)),
            (_, None) => errors.push(format!("{line:?} is invalid")),
        }
    }
    let (processes, others): (Vec<_>, Vec<_>) = left
        .into_iter()
        .rev()
        .map(|(_, undo)| undo)
        .partition(|undo| matches!(undo, Cleanup::Process { .. }));
    for undo in processes.iter().chain(&others) {
        if let Err(error) = undo.perform() {
            errors.push(format!("{undo:?}: {}", error_chain(&error)));
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cleanup_lines_round_trip() {
        let all = [
            Cleanup::Process { pid: 7, start_time: 8 },
            Cleanup::SwapOff("/dev/zram1".into()),
            Cleanup::RemoveZram(1),
            Cleanup::DetachLoop("/dev/loop0".into()),
            Cleanup::Unmount("/tmp/x".into()),
            Cleanup::RemoveDir("/tmp/a b".into()),
            Cleanup::RemoveCgroup { path: "/x/y".into(), home: "/x".into() },
            Cleanup::Restore { path: "/sys/x".into(), value: "never".to_owned() },
        ];
        for undo in all {
            let line = undo.to_line();
            assert_eq!(Cleanup::from_words(&line.split('\t').collect::<Vec<_>>()), Some(undo));
        }
        assert_eq!(Cleanup::from_words(&["zram", "x"]), None);
    }

    #[test]
    fn cleanups_run_latest_first_after_processes_are_killed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["kept", "inner"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Cleanup::process(child.id()).to_line();
        let remove = |name: &str| Cleanup::RemoveDir(path(name)).to_line();
        let restore = Cleanup::Restore { path: path("inner/setting"), value: "x".to_owned() }.to_line();
        let input = format!("1\t{}\n2\t{process}\n3\t{}\n4\t{restore}\n1\n", remove("kept"), remove("inner"));
        assert_eq!(clean_up_after(input.as_bytes()), Vec::<String>::new());
        assert!(path("kept").exists(), "its cleanup was cancelled");
        assert!(!path("inner").exists(), "the setting is restored before its directory is removed");
        assert!(!child.wait().unwrap().success(), "the process was killed");
        assert_eq!(clean_up_after(&b"nonsense\n"[..]).len(), 1);
    }

    #[test]
    fn process_that_reuses_a_pid_is_not_killed() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let Cleanup::Process { pid, start_time } = Cleanup::process(child.id()) else {
            panic!("not a process")
        };
        Cleanup::Process { pid, start_time: start_time - 1 }.perform().unwrap();
        assert!(child.try_wait().unwrap().is_none(), "the other process is still running");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
