//! Threads of a process, by `/proc/PID/task`.

use std::fs;

use crate::error::{CallContext, SyscallError};

/// A system call that a thread is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Syscall {
    pub number: i64,
    pub arguments: [u64; 6],
}

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadState {
    /// It runs, or is ready to.
    Running,
    /// It sleeps outside of a system call, as in a page fault, or SIGSTOP stopped it.
    Paused,
    /// It sleeps in this call.
    InSyscall(Syscall),
    /// It sleeps uninterruptibly, has exited, or cannot be read.
    Unavailable,
}

/// The threads of a process that run its code, and their states. Omits IO workers and user workers (io_uring, vhost), which never
/// return to user mode. The threads may change while the list is read.
///
/// # Errors
/// `open` or `readdir` of `/proc/PID/task`.
pub fn threads(pid: u32) -> Result<Vec<(u32, ThreadState)>, SyscallError> {
    let path = format!("/proc/{pid}/task");
    let mut threads = Vec::new();
    for entry in fs::read_dir(&path).call(|| format!("open of {path}"))? {
        let name = entry.call(|| format!("readdir of {path}"))?.file_name();
        let Some(tid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        threads.extend(state(pid, tid).map(|state| (tid, state)));
    }
    Ok(threads)
}

/// True if the process has a thread `tid` that is not a zombie.
#[must_use]
pub fn is_alive(pid: u32, tid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// `None`: an IO worker or user worker.
fn state(pid: u32, tid: u32) -> Option<ThreadState> {
    let read = |name| fs::read_to_string(format!("/proc/{pid}/task/{tid}/{name}")).ok();
    let (Some(stat), Some(syscall)) = (read("stat"), read("syscall")) else {
        return Some(ThreadState::Unavailable);
    };
    (!is_kernel_worker(&stat)).then(|| parse_state(&stat, &syscall).unwrap_or(ThreadState::Unavailable))
}

/// True if `/proc/PID/task/TID/stat` is that of a thread that the kernel created in the process. It never returns to user mode.
fn is_kernel_worker(stat: &str) -> bool {
    /// `linux/sched.h`: a worker of io_uring.
    const PF_IO_WORKER: u64 = 0x10;
    /// Any such thread, since Linux 6.4. Before, the bit is unused.
    const PF_USER_WORKER: u64 = 0x4000;
    // Field 9 of proc_pid_stat(5); the first one after the name is field 3.
    let flags = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(6));
    let flags: Option<u64> = flags.and_then(|flags| flags.parse().ok());
    flags.is_some_and(|flags| flags & (PF_IO_WORKER | PF_USER_WORKER) != 0)
}

/// Parses `/proc/PID/task/TID/stat` and `syscall`.
fn parse_state(stat: &str, syscall: &str) -> Option<ThreadState> {
    let (_, rest) = stat.rsplit_once(')')?;
    match rest.split_ascii_whitespace().next()? {
        "R" | "S" => {}
        // The call that SIGSTOP interrupted has its result already.
        "T" => return Some(ThreadState::Paused),
        _ => return Some(ThreadState::Unavailable),
    }
    let mut words = syscall.split_ascii_whitespace();
    let first = words.next()?;
    if first == "running" {
        return Some(ThreadState::Running);
    }
    let number: i64 = first.parse().ok()?;
    if number < 0 {
        return Some(ThreadState::Paused);
    }
    let mut arguments = [0; 6];
    for argument in &mut arguments {
        *argument = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some(ThreadState::InSyscall(Syscall { number, arguments }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_states_are_parsed() {
        const SLEEPS: &str = "7 (a ) b) S 1 7";
        let syscall = "0 0x3 0x7fd1 0x20000 0x0 0xffffffff 0x0 0x7ffc 0x7fd1";
        let read = Syscall { number: 0, arguments: [3, 0x7fd1, 0x20000, 0, 0xffff_ffff, 0] };
        assert_eq!(parse_state(SLEEPS, syscall), Some(ThreadState::InSyscall(read)));
        assert_eq!(parse_state("7 (a) R 1", "running\n"), Some(ThreadState::Running));
        assert_eq!(parse_state(SLEEPS, "-1 0x7ffc 0x7fd1"), Some(ThreadState::Paused));
        assert_eq!(parse_state("7 (a) T 1", syscall), Some(ThreadState::Paused));
        assert_eq!(parse_state("7 (a) D 1", syscall), Some(ThreadState::Unavailable));
        assert_eq!(parse_state(SLEEPS, "0 0x3"), None);
    }

    #[test]
    fn workers_of_the_kernel_are_recognized_by_their_flags() {
        assert!(!is_kernel_worker("7 (a ) b) S 1 7 7 0 -1 4194304 100 0"));
        assert!(is_kernel_worker("7 (iou-wrk-6) S 1 7 7 0 -1 4210752 0 0"), "PF_USER_WORKER");
        assert!(is_kernel_worker("7 (iou-wrk-6) S 1 7 7 0 -1 80 0 0"), "PF_IO_WORKER");
        assert!(!is_kernel_worker("7 (a) S 1"));
    }

    #[test]
    fn own_threads_are_listed() {
        let own = std::process::id();
        assert!(!matches!(state(own, own), None | Some(ThreadState::Unavailable)));
        assert!(threads(own).unwrap().len() >= 2);
        assert!(threads(0x7fff_fff0).is_err());
    }
}
