//! Tasks that sleep in a system call.

use std::time::{Duration, Instant};

use nix::unistd::Pid;

const WAIT: Duration = Duration::from_secs(10);

/// True while the thread or process sleeps in the system call of this number: `proc_pid_syscall(5)`. False if it has ended.
#[must_use]
pub fn sleeps_in_call(task: Pid, number: i64) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{task}/syscall")).unwrap_or_default();
    text.split_whitespace().next() == Some(&number.to_string())
}

/// Waits until the thread or process sleeps in the system call of this number. Returns false if it does not for 10 seconds.
#[must_use]
pub fn wait_for_call(task: Pid, number: i64) -> bool {
    let end = Instant::now() + WAIT;
    while !sleeps_in_call(task, number) {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}
