//! Reads the maps of all processes of this pid namespace, each of which may block the reader: `/proc/PID/maps` waits for the
//! mmap_lock of the process.
//!
//! One thread reads process after process. If it stalls, another thread goes on with the next process, and the first one ends when
//! the process lets it. Until then further audits leave that process out.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A process that takes longer does not delay those after it.
const STALL_TIMEOUT: Duration = Duration::from_millis(50);

/// Threads that read the maps of processes, in all audits. With more of them, no thread is started.
const MAX_READERS: usize = 16;

static READERS: AtomicUsize = AtomicUsize::new(0);

/// Processes for which readers wait.
static BLOCKED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Reads one process. An error means that its maps could not be read.
pub(super) trait Read<T>: Fn(u32) -> Result<Vec<T>, Unreadable> + Send + Sync + 'static {}

impl<T, F: Fn(u32) -> Result<Vec<T>, Unreadable> + Send + Sync + 'static> Read<T> for F {}

/// The maps of a process could not be read.
pub(super) struct Unreadable;

/// What was found until the deadline.
pub(super) struct Audited<T> {
    pub(super) found: Vec<T>,
    /// At least one process was not read.
    pub(super) incomplete: bool,
}

/// Reads each of `processes` with `read`, until the deadline.
pub(super) fn all<T: Send + 'static>(
    processes: Vec<u32>,
    deadline: Instant,
    read: impl Read<T>,
) -> Audited<T> {
    let count = processes.len();
    let blocked = lock(&BLOCKED).clone();
    let processes: Vec<_> = processes.into_iter().filter(|pid| !blocked.contains(pid)).collect();
    let mut audited = Audited { found: Vec::new(), incomplete: processes.len() != count };
    let mut unread = processes.len();
    let (sender, receiver) = mpsc::channel();
    let queue = Queue { processes: processes.into_iter(), turn: 0, reading: None };
    let audit = Arc::new(Audit { queue: Mutex::new(queue), read });
    let mut started = audit.start_reader(0, &sender);
    while unread > 0 && started.is_ok() {
        let left = deadline.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left.min(STALL_TIMEOUT)) {
            Ok(result) => {
                unread -= 1;
                match result {
                    Ok(found) => audited.found.extend(found),
                    Err(Unreadable) => audited.incomplete = true,
                }
            }
            Err(RecvTimeoutError::Timeout) if left > STALL_TIMEOUT => {
                if let Some(turn) = audit.supersede() {
                    started = audit.start_reader(turn, &sender);
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    audit.supersede();
    audited.incomplete |= unread > 0;
    audited
}

/// The processes that were not read yet. A reader holds the lock for no call that may block.
struct Queue {
    processes: std::vec::IntoIter<u32>,
    /// Number of the reader that goes on. Those before it end after their process.
    turn: usize,
    /// The process that this reader reads.
    reading: Option<u32>,
}

struct Audit<R> {
    queue: Mutex<Queue>,
    read: R,
}

impl<R> Audit<R> {
    /// If the reader is in the middle of a process, that process counts as blocked, and a reader of the returned number may go on.
    fn supersede(&self) -> Option<usize> {
        let mut queue = lock(&self.queue);
        let pid = queue.reading.take()?;
        lock(&BLOCKED).insert(pid);
        queue.turn += 1;
        Some(queue.turn)
    }

    fn start_reader<T: Send + 'static>(
        self: &Arc<Self>,
        turn: usize,
        sender: &Sender<Result<Vec<T>, Unreadable>>,
    ) -> io::Result<()>
    where
        R: Read<T>,
    {
        let counted = Counted::new().ok_or(io::ErrorKind::QuotaExceeded)?;
        let (audit, sender) = (Arc::clone(self), sender.clone());
        let run = move || {
            let _counted = counted;
            audit.read_all(turn, &sender);
        };
        std::thread::Builder::new().name("mapper-audit".to_owned()).spawn(run).map(drop)
    }

    fn read_all<T>(&self, turn: usize, sender: &Sender<Result<Vec<T>, Unreadable>>)
    where
        R: Read<T>,
    {
        while let Some(pid) = self.next(turn) {
            let result = (self.read)(pid);
            self.end(turn, pid);
            // Fails if the deadline has passed.
            if sender.send(result).is_err() {
                return;
            }
        }
    }

    /// The next process for this reader, unless another one goes on.
    fn next(&self, turn: usize) -> Option<u32> {
        let mut queue = lock(&self.queue);
        if queue.turn != turn {
            return None;
        }
        queue.reading = queue.processes.next();
        queue.reading
    }

    /// The reader has read the process.
    fn end(&self, turn: usize, pid: u32) {
        let mut queue = lock(&self.queue);
        if queue.turn == turn {
            queue.reading = None;
        } else {
            lock(&BLOCKED).remove(&pid);
        }
    }
}

/// One of [`READERS`].
struct Counted;

impl Counted {
    fn new() -> Option<Self> {
        let counted = Self;
        (READERS.fetch_add(1, Ordering::SeqCst) < MAX_READERS).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        READERS.fetch_sub(1, Ordering::SeqCst);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds one of these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKING: [u32; 2] = [3, 7];

    /// Reads `processes`, of which those in [`BLOCKING`] block for `time`.
    fn read(processes: std::ops::Range<u32>, time: Duration, deadline: Duration) -> (Vec<u32>, bool) {
        let read = move |pid| {
            if BLOCKING.contains(&pid) {
                std::thread::sleep(time);
            }
            Ok(vec![pid])
        };
        let mut audited = all(processes.collect(), Instant::now() + deadline, read);
        audited.found.sort_unstable();
        (audited.found, audited.incomplete)
    }

    // One test, as the blocked processes are those of all audits.
    #[test]
    fn each_process_is_read_but_those_that_block_for_too_long() {
        let (long, deadline) = (Duration::from_secs(2), Duration::from_millis(600));
        let others = || (1..10).filter(|pid| !BLOCKING.contains(pid)).collect::<Vec<_>>();
        assert_eq!(read(1..10, Duration::ZERO, long), ((1..10).collect(), false));
        assert_eq!(read(1..10, 3 * STALL_TIMEOUT, long), ((1..10).collect(), false), "they are late");
        assert_eq!(read(1..10, long, deadline), (others(), true));
        let began = Instant::now();
        assert_eq!(read(1..10, long, deadline), (others(), true), "these two are left out");
        assert!(began.elapsed() < deadline);
        std::thread::sleep(long);
        assert_eq!(read(1..10, Duration::ZERO, long), ((1..10).collect(), false), "they can be read again");
        let unreadable = |pid| if pid == 1 { Err(Unreadable) } else { Ok(vec![pid]) };
        let audited = all(vec![1, 2], Instant::now() + long, unreadable);
        assert!(audited.incomplete && audited.found == [2]);
    }
}
