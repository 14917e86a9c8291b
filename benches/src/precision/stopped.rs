//! Processes that are stopped by SIGSTOP for a while.

use std::time::{Duration, Instant};

use fdmap_tests::HarnessError;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{BenchError, BenchResult};

/// Longest wait until all threads have stopped.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Stopped processes, continued on drop.
pub struct Stopped(Vec<Pid>);

impl Stopped {
    /// Stops processes, and waits until each thread has stopped.
    ///
    /// # Errors
    /// [`BenchError::Wrong`] if a thread does not stop in time.
    pub fn stop(processes: &[u32]) -> BenchResult<Self> {
        let pids: Vec<_> = processes.iter().map(|pid| Pid::from_raw(pid.cast_signed())).collect();
        let stopped = Self(pids);
        stopped.signal(Signal::SIGSTOP);
        let began = Instant::now();
        for pid in processes {
            while !all_threads_stopped(*pid)? {
                if began.elapsed() > STOP_TIMEOUT {
                    return Err(BenchError::Wrong(format!("process {pid} does not stop")));
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        Ok(stopped)
    }

    fn signal(&self, signal: Signal) {
        for pid in &self.0 {
            // A process that ended fails the next request to it.
            let _ = kill(*pid, signal);
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.signal(Signal::SIGCONT);
    }
}

fn all_threads_stopped(pid: u32) -> BenchResult<bool> {
    let path = format!("/proc/{pid}/task");
    let failed =
        |error| BenchError::Harness(HarnessError::File { what: "reading", path: path.clone().into(), error });
    for thread in std::fs::read_dir(&path).map_err(failed)? {
        let stat = thread.map_err(failed)?.path().join("stat");
        // A thread may have ended.
        let text = std::fs::read_to_string(stat).unwrap_or_default();
        let state = text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        if state.is_some_and(|state| !matches!(state, 'T' | 'Z' | 'X')) {
            return Ok(false);
        }
    }
    Ok(true)
}
