//! Processes that were killed. One that waits for a file system may take long to end.

use std::process::Child;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// After this, a process is left to the next [`count`] or [`reap`].
const KILL_TIMEOUT: Duration = Duration::from_millis(100);

/// Those that had not ended when they were last looked at, each with what it was started for.
static KILLED: Mutex<Vec<(&str, Child)>> = Mutex::new(Vec::new());

/// Kills the process, and waits a moment for its end.
pub(super) fn kill(purpose: &'static str, mut child: Child) {
    // Fails only for a process that has ended.
    let _ = child.kill();
    let began = Instant::now();
    while is_running(&mut child) {
        if began.elapsed() >= KILL_TIMEOUT {
            lock().push((purpose, child));
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Number of killed processes that have not ended.
pub(super) fn count(purpose: &str) -> usize {
    reap();
    lock().iter().filter(|(of, _)| *of == purpose).count()
}

/// Reaps those that have ended.
pub(crate) fn reap() {
    lock().retain_mut(|(_, child)| is_running(child));
}

fn is_running(child: &mut Child) -> bool {
    // An error means that it was reaped.
    matches!(child.try_wait(), Ok(None))
}

fn lock() -> MutexGuard<'static, Vec<(&'static str, Child)>> {
    // No code panics while it holds the lock.
    KILLED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;

    #[test]
    fn killed_process_is_reaped() {
        let sleeper = Command::new("sleep").arg("60").spawn().unwrap();
        let path = format!("/proc/{}", sleeper.id());
        kill("a test", sleeper);
        // On a host under load, its end may take longer than `kill` waits.
        let began = Instant::now();
        while count("a test") > 0 {
            assert!(began.elapsed() < Duration::from_secs(30), "the process does not end");
            std::thread::yield_now();
        }
        assert!(!Path::new(&path).exists(), "the process is left");
    }

    #[test]
    fn process_that_has_not_ended_counts_for_its_purpose() {
        let sleeper = Command::new("sleep").arg("60").spawn().unwrap();
        lock().push(("another test", sleeper));
        assert_eq!((count("another test"), count("no test")), (1, 0));
        let mut killed = lock();
        let at = killed.iter().position(|(of, _)| *of == "another test").unwrap();
        let (_, mut sleeper) = killed.swap_remove(at);
        drop(killed);
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
}
