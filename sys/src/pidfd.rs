//! pidfds, and the relations of processes: exit, parent, owner.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::{fs, io};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::error::{CallContext, SyscallError};

/// A reference to a process that stays valid when the pid is reused.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

/// Refers to the process that has this pid now.
///
/// # Errors
/// `pidfd_open`: `ESRCH` if there is no such process, `EINVAL` for 0 or the id of a thread that is not a process (`ENOENT` in
/// newer kernels).
pub fn open(pid: u32) -> Result<PidFd, SyscallError> {
    let call = || format!("pidfd_open of {pid}");
    let number = libc::pid_t::try_from(pid).map_err(|_| Errno::EINVAL).call(call)?;
    // SAFETY: the call takes integers and touches no memory.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
    let raw = i32::try_from(Errno::result(opened).call(call)?).map_err(|_| Errno::EBADF).call(call)?;
    // SAFETY: the kernel returned this new descriptor (close-on-exec, as all pidfds), and nothing else owns it.
    Ok(PidFd(unsafe { OwnedFd::from_raw_fd(raw) }))
}

/// `struct pidfd_info` of linux/pidfd.h, in its first version.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Info {
    mask: u64,
    cgroup: u64,
    pid: u32,
    tgid: u32,
    parent: u32,
    real_uid: u32,
    real_gid: u32,
    effective_uid: u32,
    effective_gid: u32,
    saved_uid: u32,
    saved_gid: u32,
    file_system_uid: u32,
    file_system_gid: u32,
    exit_code: i32,
}

// PIDFS_IOCTL_MAGIC and PIDFD_GET_INFO.
nix::ioctl_readwrite!(pidfd_get_info, 0xff, 11, Info);

impl PidFd {
    /// `None` before Linux 6.13, which has no `PIDFD_GET_INFO`, and for a process whose parent is in no pid namespace of the caller, for
    /// which kernels after that fail with `ESRCH`. Unlike a read of `/proc/PID`, it refers to no address space, so that it never waits
    /// for the end of one.
    fn info(&self) -> Result<Option<Info>, SyscallError> {
        let mut info = Info::default();
        // SAFETY: `info` is the structure whose size the number of the call contains, and the kernel writes no more than that.
        match unsafe { pidfd_get_info(self.0.as_raw_fd(), &raw mut info) } {
            Ok(_) => Ok(Some(info)),
            Err(Errno::ENOTTY | Errno::EINVAL) => Ok(None),
            Err(Errno::ESRCH) if !self.exited()? => Ok(None),
            Err(errno) => {
                Err(errno).call(|| format!("ioctl(PIDFD_GET_INFO) of pidfd {}", self.0.as_raw_fd()))
            }
        }
    }

    /// Another descriptor of the same process.
    ///
    /// # Errors
    /// `fcntl`
    pub fn try_clone(&self) -> Result<Self, SyscallError> {
        let call = || format!("fcntl(F_DUPFD_CLOEXEC) of pidfd {}", self.0.as_raw_fd());
        self.0.try_clone().map(Self).call(call)
    }

    /// True if the process has exited, with all of its threads. execve(2) is not an exit.
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
    /// Duplicates a descriptor of the process. Both refer to the same open file description, with its flags and offset.
    ///
    /// # Errors
    /// `pidfd_getfd`: `EPERM` without the right to trace the process, `EBADF` if it has no such descriptor, `ESRCH` if it has
    /// exited.
    pub fn descriptor(&self, number: RawFd) -> Result<OwnedFd, SyscallError> {
        let call = || format!("pidfd_getfd of descriptor {number} by pidfd {}", self.0.as_raw_fd());
        // SAFETY: the call takes integers and touches no memory.
        let got = unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.0.as_raw_fd(), number, 0) };
        let raw = i32::try_from(Errno::result(got).call(call)?).map_err(|_| Errno::EBADF).call(call)?;
        // SAFETY: the kernel returned this new descriptor (close-on-exec), and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(raw) })
    }
}

impl From<OwnedFd> for PidFd {
    /// `fd` must be a pidfd.
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Minor and major page faults of the process's reaped children, and of the children that those had reaped. The number changes
/// whenever the process reaps a child.
///
/// # Errors
/// `read` of `/proc/PID/stat`: `ENOENT` or `ESRCH` if there is no such process.
pub fn faults_of_reaped_children(pid: u32) -> Result<u64, SyscallError> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read(&path).call(|| format!("read of {path}"))?;
    child_faults_in_stat(&stat).ok_or(Errno::EIO).call(|| format!("parse of cminflt and cmajflt in {path}"))
}

/// The sum of `cminflt` and `cmajflt` in `/proc/PID/stat`.
fn child_faults_in_stat(stat: &[u8]) -> Option<u64> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let text = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
    // The iterator starts at the state, which is field 3.
    let mut fields = text.split_ascii_whitespace().skip(8);
    let minor: u64 = fields.next()?.parse().ok()?;
    let major: u64 = fields.nth(1)?.parse().ok()?;
    Some(minor.wrapping_add(major))
}

/// How many processes and threads were created on this host since boot, in all pid namespaces, also those with a chosen pid
/// (`set_tid` of clone3). If two calls return the same number, none was created in between.
///
/// # Errors
/// `read` of `/proc/stat`.
pub fn tasks_created() -> Result<u64, SyscallError> {
    const PATH: &str = "/proc/stat";
    let text = fs::read_to_string(PATH).call(|| format!("read of {PATH}"))?;
    let created = text.lines().find_map(|line| line.strip_prefix("processes ")?.trim_end().parse().ok());
    created.ok_or(Errno::EIO).call(|| format!("parse of {PATH}"))
}

/// True if the calling process is in the initial pid namespace, in which every process has a pid.
#[must_use]
pub fn is_in_initial_pid_namespace() -> bool {
    // PROC_PID_INIT_INO of linux/proc_ns.h
    fs::read_link("/proc/self/ns/pid").is_ok_and(|own| own.as_os_str() == "pid:[4026531836]")
}

/// The uid that owns `/proc/PID`: that of the process, or 0 if it is not dumpable.
///
/// # Errors
/// `stat`: `ENOENT` if there is no such process.
pub fn owner(pid: u32) -> Result<u32, SyscallError> {
    let path = format!("/proc/{pid}");
    let found = fs::metadata(&path).call(|| format!("stat of {path}"))?;
    Ok(found.uid())
}

/// The user whose process this is: of its effective, real, saved and file system uid the first one that is not root's, so that a
/// program of a user never counts as root's, whether it is dumpable or has more rights than its user.
///
/// # Errors
/// `ioctl(PIDFD_GET_INFO)`, or where the kernel has none, `read` of `/proc/PID/status`: `ESRCH` or `ENOENT` if the process has exited.
pub fn user_of(pid: u32, process: &PidFd) -> Result<u32, SyscallError> {
    if let Some(info) = process.info()? {
        return Ok(user_among(info.effective_uid, info.real_uid, info.saved_uid, info.file_system_uid));
    }
    let path = format!("/proc/{pid}/status");
    let status = fs::read(&path).call(|| format!("read of {path}"))?;
    user_in_status(&status).ok_or(Errno::EIO).call(|| format!("parse of Uid in {path}"))
}

fn user_in_status(status: &[u8]) -> Option<u32> {
    // The name of the program, before it, has no newline: the kernel escapes it.
    let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"Uid:"))?;
    let uids = std::str::from_utf8(line).ok()?.split_ascii_whitespace().map(|uid| uid.parse().ok());
    let [real, effective, saved, of_files] = *uids.collect::<Option<Vec<u32>>>()? else { return None };
    Some(user_among(effective, real, saved, of_files))
}

fn user_among(effective: u32, real: u32, saved: u32, of_files: u32) -> u32 {
    [effective, real, saved, of_files].into_iter().find(|uid| *uid != 0).unwrap_or(0)
}

/// The pid of the parent; 0 if the parent is outside of the caller's pid namespace.
///
/// # Errors
/// `pidfd_open`: `ESRCH` if there is no such process; `ioctl(PIDFD_GET_INFO)`, or where the kernel has none, `read` of
/// `/proc/PID/stat`.
pub fn parent_of(pid: u32) -> Result<u32, SyscallError> {
    if let Some(info) = open(pid)?.info()? {
        return Ok(info.parent);
    }
    parent_in_proc(pid)
}

fn parent_in_proc(pid: u32) -> Result<u32, SyscallError> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read(&path).call(|| format!("read of {path}"))?;
    parent_in_stat(&stat).ok_or(Errno::EIO).call(|| format!("parse of ppid in {path}"))
}

/// The state of the process's main thread, as `ps` shows it: `R` if it runs or waits for a processor.
///
/// # Errors
/// As [`faults_of_reaped_children`].
pub fn state_of(pid: u32) -> Result<char, SyscallError> {
    state_in(&format!("/proc/{pid}/stat"))
}

/// The same of one thread of the process.
///
/// # Errors
/// As [`state_of`].
pub fn state_of_thread(pid: u32, thread: u32) -> Result<char, SyscallError> {
    state_in(&format!("/proc/{pid}/task/{thread}/stat"))
}

fn state_in(path: &str) -> Result<char, SyscallError> {
    let stat = fs::read(path).call(|| format!("read of {path}"))?;
    state_in_stat(&stat).ok_or(Errno::EIO).call(|| format!("parse of the state in {path}"))
}

/// The field after the command name.
fn state_in_stat(stat: &[u8]) -> Option<char> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(name_end + 2).map(|state| char::from(*state))
}

/// The field after the state. The command name before it, in parentheses, may contain any byte.
fn parent_in_stat(stat: &[u8]) -> Option<u32> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The pids of all processes in `/proc`, in ascending order: those of the caller's pid namespace, and if it is mounted with
/// `hidepid` only those that the caller may access.
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

/// Calls `read` for the first thread of a process, and for further ones until one of them has not exited after it was read:
/// `/proc/TID` shows the mappings and descriptors of the process only while that thread runs. `None` if `read` returns that, or a read
/// of `/proc` fails. Does not return while threads start others and exit fast enough.
pub fn read_threads(pid: u32, mut read: impl FnMut(u32) -> Option<()>) -> Option<()> {
    let mut seen = BTreeSet::new();
    let mut threads = vec![pid];
    while !threads.is_empty() {
        for tid in threads {
            read(tid)?;
            if !has_exited(tid).ok()? {
                return Some(());
            }
            seen.insert(tid);
        }
        // execve by another thread gives it the id of the first one.
        let is_unread = |tid: &u32| !seen.contains(tid) || has_exited(*tid).is_ok_and(|exited| !exited);
        threads = threads_of(pid).ok()?.into_iter().filter(is_unread).collect();
    }
    Some(())
}

/// True if a thread exits, has exited, or does not exist. False for a kernel thread.
///
/// # Errors
/// `read` of `/proc/TID/stat`; `EINVAL` if it has another form.
pub fn has_exited(tid: u32) -> Result<bool, SyscallError> {
    /// `PF_EXITING` of `linux/sched.h`, set before the thread loses its address space.
    const EXITING: u32 = 0x4;
    let path = format!("/proc/{tid}/stat");
    let stat = match fs::read(&path) {
        Err(error) if is_absent(&error) => return Ok(true),
        other => other.call(|| format!("read of {path}"))?,
    };
    // The command name before may contain parentheses and spaces itself.
    let after = stat.iter().rposition(|byte| *byte == b')').and_then(|end| stat.get(end + 1..));
    let flags = after
        .and_then(|after| std::str::from_utf8(after).ok()?.split_ascii_whitespace().nth(6)?.parse().ok());
    let flags: u32 = flags.ok_or(Errno::EINVAL).call(|| format!("the flags in {path}"))?;
    Ok(flags & EXITING != 0)
}

/// Empty if the process does not exist.
fn threads_of(pid: u32) -> Result<Vec<u32>, SyscallError> {
    let path = format!("/proc/{pid}/task");
    let tasks = match fs::read_dir(&path) {
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        other => other.call(|| format!("open of {path}"))?,
    };
    let mut threads = Vec::new();
    for task in tasks {
        let name = match task {
            Err(error) if is_absent(&error) => break,
            other => other.call(|| format!("readdir of {path}"))?.file_name(),
        };
        threads.extend(name.to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(threads)
}

fn is_absent(error: &io::Error) -> bool {
    [Errno::ENOENT, Errno::ESRCH].iter().any(|errno| error.raw_os_error() == Some(*errno as i32))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn children_of(pid: u32) -> Vec<u32> {
        let mut children = all_processes().unwrap();
        children.retain(|one| parent_of(*one) == Ok(pid));
        children
    }

    /// A shell that waits for one child, until its input ends.
    fn family() -> (Child, u32) {
        let shell = Command::new("sh").args(["-c", "cat; true"]).stdin(Stdio::piped()).spawn().unwrap();
        let mut children = vec![];
        while children.is_empty() {
            children = children_of(shell.id());
        }
        (shell, children[0])
    }

    #[test]
    fn child_that_was_waited_for_leaves_its_faults_behind() {
        let stat = b"7 (a ) b) S 1 7 7 0 -1 0 100 20 3 4 5 6";
        assert_eq!(child_faults_in_stat(stat), Some(24));
        assert_eq!(child_faults_in_stat(b"7 (a) S 1"), None);
        let before = faults_of_reaped_children(std::process::id()).unwrap();
        let created = tasks_created().unwrap();
        assert!(Command::new("true").status().unwrap().success());
        assert_ne!(faults_of_reaped_children(std::process::id()).unwrap(), before);
        assert!(tasks_created().unwrap() > created);
    }

    #[test]
    fn exit_and_parents_are_reported() {
        let (mut shell, child) = family();
        let parent = shell.id();
        let pidfd = open(parent).unwrap();
        assert_eq!(pidfd.exited(), Ok(false));
        assert_eq!(parent_of(parent), Ok(std::process::id()));
        assert_eq!(children_of(parent), [child]);
        assert_eq!(parent_in_proc(child), Ok(parent));
        let all = all_processes().unwrap();
        assert!(all.contains(&child) && all.contains(&parent) && all.is_sorted());

        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert_eq!(pidfd.exited(), Ok(true));
        assert_eq!(parent_of(parent).unwrap_err().errno, Errno::ESRCH);
        assert_eq!(open(parent).unwrap_err().errno, Errno::ESRCH);
    }

    #[test]
    fn user_is_root_only_if_all_uids_are() {
        let user =
            |uids| user_in_status(format!("Name:\ta\\nUid:\nUid:\t{uids}\nGid:\t7\t7\t7\t7\n").as_bytes());
        assert_eq!(user("0\t0\t0\t0"), Some(0));
        assert_eq!(user("1000\t0\t0\t0"), Some(1000), "a set-user-id program");
        assert_eq!(user("0\t65534\t0\t65534"), Some(65534));
        assert_eq!(user("0\t0\t5\t0"), Some(5));
        assert_eq!((user("0\t0\t5"), user("0\t0\tx\t0")), (None, None));
        let own = std::process::id();
        assert_eq!(user_of(own, &open(own).unwrap()), Ok(nix::unistd::geteuid().as_raw()));
    }

    #[test]
    fn state_is_that_of_the_process() {
        assert_eq!(state_in_stat(b"7 (a) R) S 12 7 7"), Some('S'));
        assert_eq!(state_in_stat(b"7 (cat"), None);
        let (shell, child) = family();
        let started = std::time::Instant::now();
        while state_of(child) != Ok('S') {
            assert!(started.elapsed() < std::time::Duration::from_secs(10), "cat(1) waits for its input");
        }
        drop(shell);
    }

    #[test]
    fn parent_is_parsed_behind_any_command_name() {
        assert_eq!(parent_in_stat(b"7 (cat) S 12 7 7"), Some(12));
        assert_eq!(parent_in_stat(b"7 (a) R 1 (b \xff) S 12 7 7"), Some(12));
        assert_eq!(parent_in_stat(b"7 (cat"), None);
    }
}
