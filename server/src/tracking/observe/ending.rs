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
/// Processes of one user that do not end. With so many, no further one is started for that user.
const MAX_PER_USER: usize = 16;
/// Processes of all users but root that do not end.
const MAX_OF_USERS: usize = 256;

static ENDING: Mutex<Ending> = Mutex::new(Ending { processes: Vec::new(), has_thread: false });

struct Ending {
    processes: Vec<EndingProcess>,
    /// A thread reaps the processes.
    has_thread: bool,
}

struct EndingProcess {
    /// Whose processes it works for.
    user: u32,
    child: Child,
    exclusion: Option<Exclusion>,
}

/// Reaps a process that works for `user` when it has ended.
pub(super) fn add(user: u32, child: Child, exclusion: Option<Exclusion>) {
    let mut ending = lock();
    ending.processes.push(EndingProcess { user, child, exclusion });
    if !ending.has_thread {
        let started = std::thread::Builder::new().name("reaper".to_owned()).spawn(reap_all);
        // Without a thread, the next call of this function starts one.
        ending.has_thread = started.is_ok();
    }
}

/// Takes back a process that was added, and goes on. `None`: it is reaped.
pub(super) fn take(pid: u32) -> Option<(Child, Option<Exclusion>)> {
    let mut ending = lock();
    let at = ending.processes.iter().position(|process| process.child.id() == pid)?;
    let EndingProcess { child, exclusion, .. } = ending.processes.swap_remove(at);
    Some((child, exclusion))
}

/// Kills a process that was added, if it is not reaped.
pub(super) fn kill(pid: u32) {
    if let Some(process) = lock().processes.iter_mut().find(|process| process.child.id() == pid) {
        // Fails only if it was reaped elsewhere.
        let _ = process.child.kill();
    }
}

/// True if another process may be started for `user`: the user, and all users together, do not have too many that do not end.
pub(super) fn may_start(user: u32) -> bool {
    let mut ending = lock();
    ending.may_start(user) || {
        ending.processes.retain_mut(|process| !process.reap());
        ending.may_start(user)
    }
}

impl Ending {
    fn may_start(&self, user: u32) -> bool {
        admits(self.processes.iter().map(|process| process.user), user)
    }
}

/// Pure. `ending`: the users of the processes that have not ended.
fn admits(ending: impl Iterator<Item = u32>, user: u32) -> bool {
    let (mut own, mut of_users) = (0, 0);
    for one in ending {
        own += usize::from(one == user);
        of_users += usize::from(one != 0);
    }
    own < MAX_PER_USER && (user == 0 || of_users < MAX_OF_USERS)
}

fn reap_all() {
    loop {
        std::thread::sleep(INTERVAL);
        let mut ending = lock();
        ending.processes.retain_mut(|process| !process.reap());
        if ending.processes.is_empty() {
            ending.has_thread = false;
            return;
        }
    }
}

impl EndingProcess {
    /// Returns true if the process had ended, and is reaped.
    fn reap(&mut self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let waited = waitid(Id::Pid(Pid::from_raw(self.child.id().cast_signed())), flags);
        if waited == Ok(WaitStatus::StillAlive) {
            return false;
        }
        // Before another process can have the id.
        drop(self.exclusion.take());
        // It has ended, or was reaped elsewhere.
        let _ = self.child.wait();
        true
    }
}

fn lock() -> MutexGuard<'static, Ending> {
    // No code panics with the lock held.
    ENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_with_processes_that_do_not_end_leave_room_for_others() {
        let of_one = || std::iter::repeat_n(1, MAX_PER_USER);
        assert!(admits(of_one().skip(1), 1) && !admits(of_one(), 1));
        assert!(admits(of_one(), 2) && admits(of_one(), 0));
        let of_many = || (1..).flat_map(|user| std::iter::repeat_n(user, MAX_PER_USER)).take(MAX_OF_USERS);
        assert!(!admits(of_many(), 1000), "the processes of all users are limited");
        assert!(admits(of_many().skip(1), 1000) && admits(of_many(), 0));
        assert!(!admits(std::iter::repeat_n(0, MAX_PER_USER), 0));
    }
}
