//! What a service holds of its host.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::libc;

use crate::host::{children_of, read};
use crate::service::Service;
use crate::{HarnessError, HarnessResult};

/// What a service holds.
#[derive(Clone, Debug)]
pub struct Footprint {
    /// The targets of its descriptors, sorted.
    descriptors: Vec<PathBuf>,
    /// Threads but the idle ones of tokio's pool.
    threads: usize,
    /// Threads of tokio's pool for calls that may block which wait for work.
    idle_threads: usize,
    processes: usize,
    resident_bytes: u64,
}

/// Memory that the allocator may retain for later requests after a sweep, which returns what is free. On two processors, a load run of
/// 40 s retained 4 MiB, and one of ten minutes at most 12 MiB.
const MAX_GROWTH_BYTES: u64 = 16 << 20;

/// Idle threads of the pool that need not end: a sweep, every 10 s, takes several, and each waits 10 s for further work.
const MAX_IDLE_THREADS: usize = 8;

impl Footprint {
    pub fn of(service: &Service) -> HarnessResult<Self> {
        let pid = service.pid();
        let status = read(format!("/proc/{pid}/status"))?;
        let field = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name));
            value.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(u64::MAX)
        };
        let folder = PathBuf::from(format!("/proc/{pid}/fd"));
        let entries = std::fs::read_dir(&folder);
        let entries = entries.map_err(|error| HarnessError::File { what: "reading", path: folder, error })?;
        // Those that the service closes meanwhile are omitted.
        let targets = entries.flatten().flat_map(|entry| std::fs::read_link(entry.path()));
        let mut descriptors: Vec<_> = targets.collect();
        descriptors.sort();
        let (idle, threads): (Vec<_>, Vec<_>) = threads_of(pid)?.into_iter().partition(Thread::is_idle);
        let (idle_threads, threads) = (idle.len(), threads.len());
        let processes = children_of(pid)?.len();
        let resident_bytes = field("VmRSS:").saturating_mul(1024);
        Ok(Self { descriptors, threads, idle_threads, processes, resident_bytes })
    }

    /// The number of open descriptors.
    #[must_use]
    pub fn descriptors(&self) -> u64 {
        self.descriptors.len() as u64
    }

    /// True if this is no more than `before`, except for memory that the allocator retains.
    fn is_back_at(&self, before: &Self) -> bool {
        self.descriptors.len() <= before.descriptors.len()
            && self.threads <= before.threads
            && self.idle_threads <= before.idle_threads + MAX_IDLE_THREADS
            && self.processes <= before.processes
            && self.resident_bytes <= before.resident_bytes + MAX_GROWTH_BYTES
    }

    /// Waits until the service holds no more than `before`, and returns what it holds then.
    ///
    /// # Panics
    /// If it holds more after `within`.
    pub fn wait_for(service: &Service, before: &Self, within: Duration) -> HarnessResult<Self> {
        let began = Instant::now();
        loop {
            let now = Self::of(service)?;
            if now.is_back_at(before) {
                return Ok(now);
            }
            if began.elapsed() > within {
                let mut added = now.descriptors.clone();
                for target in &before.descriptors {
                    if let Ok(at) = added.binary_search(target) {
                        added.remove(at);
                    }
                }
                panic!("the service held {before} before, and {now} after {within:?}; further: {added:?}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

struct Thread {
    name: String,
    /// The system call in which it sleeps, and its arguments: proc_pid_syscall(5).
    call: String,
}

impl Thread {
    /// True if it is one of the pool and waits for work: in futex(2) with a timeout. A mutex has none, nor has a worker of the runtime.
    fn is_idle(&self) -> bool {
        let words: Vec<_> = self.call.split(' ').collect();
        let is_futex = words.first() == Some(&libc::SYS_futex.to_string().as_str());
        let has_timeout = words.get(4).is_some_and(|timeout| *timeout != "0x0");
        self.name == "tokio-rt-worker" && is_futex && has_timeout
    }
}

/// The threads of a process. One that ends meanwhile may be omitted.
fn threads_of(pid: u32) -> HarnessResult<Vec<Thread>> {
    let folder = PathBuf::from(format!("/proc/{pid}/task"));
    let entries = std::fs::read_dir(&folder);
    let entries = entries.map_err(|error| HarnessError::File { what: "reading", path: folder, error })?;
    let threads = entries.flatten().flat_map(|entry| {
        let file = |name: &str| read(entry.path().join(name)).map(|text| text.trim_end().to_owned());
        file("comm").and_then(|name| Ok(Thread { name, call: file("syscall")? }))
    });
    Ok(threads.collect())
}

impl fmt::Display for Footprint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { descriptors, threads, idle_threads, processes, resident_bytes } = self;
        let (descriptors, mib) = (descriptors.len(), resident_bytes >> 20);
        write!(
            out,
            "{descriptors} descriptors, {threads} threads and {idle_threads} idle ones, {processes} child processes, {mib} MiB"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_threads_of_the_pool_that_wait_for_work_are_idle() {
        let pool = "202 0x55682bed7918 0x89 0x0 0x7f69ec88a9c0 0x0 0xffffffff 0x7f69ec88a9a8 0x7f69ed0f3829";
        let worker = "202 0x55682bdb1288 0x89 0x2 0x0 0x0 0x5568ffffffff 0x7f69e75fc518 0x7f69ed0f3829";
        let epoll = "232 0x4b 0x55682becdc20 0x400 0x1a 0x0 0x8000000000000000 0x7f69e77fd480 0x7f69ed0faf36";
        let ioctl = "16 0x5 0xc0606610 0x7f69ec88a9c0 0x7f69ec88a9c0 0x0 0x0 0x7f69ec88a9a8 0x7f69ed0f3829";
        let is_idle =
            |name: &str, call: &str| Thread { name: name.to_owned(), call: call.to_owned() }.is_idle();
        assert!(is_idle("tokio-rt-worker", pool));
        for call in [worker, epoll, ioctl, "running", ""] {
            assert!(!is_idle("tokio-rt-worker", call), "{call}");
        }
        assert!(!is_idle("starter", pool));
    }
}
