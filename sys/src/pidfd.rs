//! Processes: whether one has exited, and who is whose child.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::LazyLock;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::error::{CallContext, SyscallError};

/// A process, which keeps its meaning when the pid is used again.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

/// The process that has this pid now.
///
/// # Errors
/// `pidfd_open`: `ESRCH` if there is none, `EINVAL` for 0 or if it is a thread and not a process (`ENOENT` in newer kernels).
pub fn open(pid: u32) -> Result<PidFd, SyscallError> {
    let call = || format!("pidfd_open of {pid}");
    let number = libc::pid_t::try_from(pid).map_err(|_| Errno::EINVAL).call(call)?;
    // SAFETY: the call takes integers and touches no memory.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
    let raw = i32::try_from(Errno::result(opened).call(call)?).map_err(|_| Errno::EBADF).call(call)?;
    // SAFETY: the kernel just made this descriptor (close-on-exec, as all pidfds) and nobody else knows of it.
    Ok(PidFd(unsafe { OwnedFd::from_raw_fd(raw) }))
}

impl PidFd {
    /// True when the process has exited, all its threads included. Becoming another program by exec is no exit.
    ///
    /// # Errors
    /// `poll`.
    pub fn exited(&self) -> Result<bool, SyscallError> {
        let mut polled = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        loop {
            match poll(&mut polled, PollTimeout::ZERO) {
                Err(Errno::EINTR) => {}
                other => {
                    let ready = other.call(|| format!("poll of pidfd {}", self.0.as_raw_fd()))?;
                    return Ok(ready > 0);
                }
            }
        }
    }
}

impl PidFd {
    /// A descriptor of our own for one of the process: of the same description, flags and offset shared.
    ///
    /// # Errors
    /// `pidfd_getfd`: `EPERM` without the right to trace the process, `EBADF` if it has none of that number, `ESRCH` if it has
    /// exited.
    pub fn descriptor(&self, number: RawFd) -> Result<OwnedFd, SyscallError> {
        let call = || format!("pidfd_getfd of descriptor {number} by pidfd {}", self.0.as_raw_fd());
        // SAFETY: the call takes integers and touches no memory.
        let got = unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.0.as_raw_fd(), number, 0) };
        let raw = i32::try_from(Errno::result(got).call(call)?).map_err(|_| Errno::EBADF).call(call)?;
        // SAFETY: the kernel just made this descriptor (close-on-exec) and nobody else knows of it.
        Ok(unsafe { OwnedFd::from_raw_fd(raw) })
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Faults, minor and major, of the process's children that have ended and were waited for, and of those that these had waited
/// for: the number changes with each child that is waited for.
///
/// # Errors
/// As [`parent_of`].
pub fn faults_of_reaped_children(pid: u32) -> Result<u64, SyscallError> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read(&path).call(|| format!("read of {path}"))?;
    child_faults_in_stat(&stat).ok_or(Errno::EIO).call(|| format!("looking for faults of children in {path}"))
}

/// `cminflt` and `cmajflt` of `/proc/PID/stat`, together.
fn child_faults_in_stat(stat: &[u8]) -> Option<u64> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let text = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
    // The state is the third of all fields, and the first one here.
    let mut fields = text.split_ascii_whitespace().skip(8);
    let minor: u64 = fields.next()?.parse().ok()?;
    let major: u64 = fields.nth(1)?.parse().ok()?;
    Some(minor.wrapping_add(major))
}

/// The pid that was given out last in this pid namespace: unchanged, no process or thread was started.
///
/// # Errors
/// `read` of `/proc/loadavg`; `EOPNOTSUPP` outside of the host's pid namespace, where there are others that it says nothing of.
pub fn last_pid() -> Result<u32, SyscallError> {
    const PATH: &str = "/proc/loadavg";
    static SEES_ALL: LazyLock<bool> = LazyLock::new(|| {
        let own = fs::read_link("/proc/self/ns/pid");
        // PROC_PID_INIT_INO of linux/proc_ns.h
        own.is_ok_and(|own| own.as_os_str() == "pid:[4026531836]")
    });
    if !*SEES_ALL {
        return Err(Errno::EOPNOTSUPP)
            .call(|| "telling the last pid in a pid namespace of our own".to_owned());
    }
    let text = fs::read_to_string(PATH).call(|| format!("read of {PATH}"))?;
    let last = text.split_ascii_whitespace().last().and_then(|pid| pid.parse().ok());
    last.ok_or(Errno::EIO).call(|| format!("looking for the last pid in {PATH}"))
}

/// The user to whom the kernel gives `/proc/PID`: that of the process, or root where it cannot be dumped.
///
/// # Errors
/// `stat`: `ENOENT` if there is no such process.
pub fn owner(pid: u32) -> Result<u32, SyscallError> {
    let path = format!("/proc/{pid}");
    let found = fs::metadata(&path).call(|| format!("stat of {path}"))?;
    Ok(found.uid())
}

/// The parent's pid; 0 if it lies outside of our pid namespace.
///
/// # Errors
/// `read` of `/proc/PID/stat`: `ENOENT` or `ESRCH` if there is no such process.
pub fn parent_of(pid: u32) -> Result<u32, SyscallError> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read(&path).call(|| format!("read of {path}"))?;
    parent_in_stat(&stat).ok_or(Errno::EIO).call(|| format!("looking for the parent in {path}"))
}

/// The field after the state. The name of the program stands before, in parentheses, and may hold any byte.
fn parent_in_stat(stat: &[u8]) -> Option<u32> {
    let end_of_name = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&stat[end_of_name + 1..]).ok()?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The pids of a process's children. Children that are born or die meanwhile may be missing, and dying ones may hide others:
/// the kernel promises the list only for processes that stand still.
///
/// # Errors
/// `ENOENT` or `ESRCH` if there is no such process; else `read` of what is in `/proc`.
pub fn children_of(pid: u32) -> Result<Vec<u32>, SyscallError> {
    let path = format!("/proc/{pid}/task");
    let mut children = Vec::new();
    let tasks = fs::read_dir(&path).call(|| format!("open of {path}"))?;
    for task in tasks {
        let task = task.call(|| format!("readdir of {path}"))?.path();
        let list = match fs::read_to_string(task.join("children")) {
            // This thread may have ended. Or the kernel was built without CONFIG_PROC_CHILDREN.
            Err(error) if error.kind() == ErrorKind::NotFound && task.exists() => {
                return children_by_parents(pid);
            }
            Err(error) if is_gone(&error) => continue,
            other => other.call(|| format!("read of {}", task.join("children").display()))?,
        };
        children.extend(list.split_ascii_whitespace().filter_map(|word| word.parse::<u32>().ok()));
    }
    children.sort_unstable();
    children.dedup();
    Ok(children)
}

fn children_by_parents(pid: u32) -> Result<Vec<u32>, SyscallError> {
    let mut children = Vec::new();
    for candidate in all_processes()? {
        match parent_of(candidate) {
            Ok(parent) if parent == pid => children.push(candidate),
            Ok(_) | Err(SyscallError { errno: Errno::ENOENT | Errno::ESRCH, .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(children)
}

fn is_gone(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// The pids of all processes that `/proc` shows, in rising order: those of our pid namespace, and if it is mounted with
/// `hidepid` only those that we may see.
///
/// # Errors
/// `open` or `readdir` of `/proc`.
pub fn all_processes() -> Result<Vec<u32>, SyscallError> {
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc").call(|| "open of /proc".to_owned())? {
        let name = entry.call(|| "readdir of /proc".to_owned())?.file_name();
        all.extend(name.to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    all.sort_unstable();
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A shell that waits for one child, until its input ends.
    fn family() -> (Child, u32) {
        let shell = Command::new("sh").args(["-c", "cat; true"]).stdin(Stdio::piped()).spawn().unwrap();
        let mut children = vec![];
        while children.is_empty() {
            children = children_of(shell.id()).unwrap();
        }
        (shell, children[0])
    }

    #[test]
    fn child_that_was_waited_for_leaves_its_faults_behind() {
        let stat = b"7 (a ) b) S 1 7 7 0 -1 0 100 20 3 4 5 6";
        assert_eq!(child_faults_in_stat(stat), Some(24));
        assert_eq!(child_faults_in_stat(b"7 (a) S 1"), None);
        let before = faults_of_reaped_children(std::process::id()).unwrap();
        let last = last_pid().unwrap();
        assert!(Command::new("true").status().unwrap().success());
        assert_ne!(faults_of_reaped_children(std::process::id()).unwrap(), before);
        assert_ne!(last_pid().unwrap(), last);
    }

    #[test]
    fn exit_is_seen_and_relations_are_told() {
        let (mut shell, child) = family();
        let parent = shell.id();
        let pidfd = open(parent).unwrap();
        assert_eq!(pidfd.exited(), Ok(false));
        assert_eq!(parent_of(parent), Ok(std::process::id()));
        assert_eq!(parent_of(child), Ok(parent));
        assert_eq!(children_by_parents(parent), Ok(vec![child]));
        let all = all_processes().unwrap();
        assert!(all.contains(&child) && all.contains(&parent) && all.is_sorted());

        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert_eq!(pidfd.exited(), Ok(true));
        assert_eq!(parent_of(parent).unwrap_err().errno, Errno::ENOENT);
        assert_eq!(children_of(parent).unwrap_err().errno, Errno::ENOENT);
        assert_eq!(open(parent).unwrap_err().errno, Errno::ESRCH);
    }

    #[test]
    fn parent_is_found_behind_any_name() {
        assert_eq!(parent_in_stat(b"7 (cat) S 12 7 7"), Some(12));
        assert_eq!(parent_in_stat(b"7 (a) R 1 (b \xff) S 12 7 7"), Some(12));
        assert_eq!(parent_in_stat(b"7 (cat"), None);
    }
}
