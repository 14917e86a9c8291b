//! Processes of the service that are to end, and may not: a system call on an address space, or the last close of a userfaultfd, keeps
//! them for as long as another process lasts. Only a thread that reaps them waits for them.

use std::process::Child;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use super::own_calls::Exclusion;

/// Time between two attempts to reap.
const INTERVAL: Duration = Duration::from_millis(100);

static ENDING: Mutex<Ending> = Mutex::new(Ending { processes: Vec::new(), has_thread: false });

struct Ending {
    processes: Vec<(Child, Option<Exclusion>)>,
    /// A thread reaps the processes.
    has_thread: bool,
}

/// Reaps a process when it has ended.
pub(super) fn add(child: Child, exclusion: Option<Exclusion>) {
    let mut ending = lock();
    ending.processes.push((child, exclusion));
    if !ending.has_thread {
        let started = std::thread::Builder::new().name("reaper".to_owned()).spawn(reap_all);
        // Without a thread, the next call of this function starts one.
        ending.has_thread = started.is_ok();
    }
}

/// Number of the processes that have not ended.
pub(super) fn count() -> usize {
    lock().processes.len()
}

fn reap_all() {
    loop {
        std::thread::sleep(INTERVAL);
        let mut ending = lock();
        ending.processes.retain_mut(|(child, exclusion)| !reap(child, exclusion));
        if ending.processes.is_empty() {
            ending.has_thread = false;
            return;
        }
    }
}

/// Returns true if the process had ended, and is reaped.
fn reap(child: &mut Child, exclusion: &mut Option<Exclusion>) -> bool {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    let waited = waitid(Id::Pid(Pid::from_raw(child.id().cast_signed())), flags);
    if waited == Ok(WaitStatus::StillAlive) {
        return false;
    }
    // Before another process can have the id.
    drop(exclusion.take());
    // It has ended, or was reaped elsewhere.
    let _ = child.wait();
    true
}

fn lock() -> MutexGuard<'static, Ending> {
    // No code panics with the lock held.
    ENDING.lock().unwrap_or_else(PoisonError::into_inner)
}
