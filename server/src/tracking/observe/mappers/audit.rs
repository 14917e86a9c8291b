//! Reads the maps of all processes of this pid namespace, each of which may block the reader: `/proc/PID/maps` waits for the
//! mmap_lock of the process.
//!
//! Threads read one process after the other. Processes that block leave the others to the remaining threads. A blocked thread ends
//! when the process lets it, or with this process.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Threads that read the maps of processes, in all audits of this process. At this number, no further one is started.
const MAX_READERS: usize = 16;

static READERS: AtomicUsize = AtomicUsize::new(0);

/// Reads one process. An error means that its maps could not be read.
pub(super) trait Read<T>: Fn(u32) -> Result<Vec<T>, Unreadable> + Send + Sync + 'static {}

impl<T, F: Fn(u32) -> Result<Vec<T>, Unreadable> + Send + Sync + 'static> Read<T> for F {}

/// The maps of a process could not be read.
pub(super) struct Unreadable;

/// What was found until the deadline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Audited<T> {
    pub(super) found: Vec<T>,
    /// At least one process was not read.
    pub(super) incomplete: bool,
}

/// Reads each of `processes` with `read`, until the deadline, or until no reader returns one for `stall_timeout`.
pub(super) fn all<T: Send + 'static>(
    processes: Vec<u32>,
    deadline: Instant,
    stall_timeout: Duration,
    read: impl Read<T>,
) -> Audited<T> {
    let mut audited = Audited { found: Vec::new(), incomplete: false };
    let mut unread = processes.len();
    let audit = Arc::new(Audit { unread: Mutex::new(processes.into_iter()), read });
    let (sender, receiver) = mpsc::channel();
    // If one cannot be started, those before it read all.
    let _ = (0..unread.min(MAX_READERS)).try_for_each(|_| audit.start_reader(&sender));
    drop(sender);
    while unread > 0 {
        let left = deadline.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left.min(stall_timeout)) {
            Ok(Ok(found)) => audited.found.extend(found),
            Ok(Err(Unreadable)) => audited.incomplete = true,
            Err(_) => break,
        }
        unread -= 1;
    }
    // Readers that do not wait for a process end.
    *audit.lock() = Vec::new().into_iter();
    audited.incomplete |= unread > 0;
    audited
}

struct Audit<R> {
    /// The processes that no reader has read yet.
    unread: Mutex<std::vec::IntoIter<u32>>,
    read: R,
}

impl<R> Audit<R> {
    fn start_reader<T: Send + 'static>(
        self: &Arc<Self>,
        sender: &Sender<Result<Vec<T>, Unreadable>>,
    ) -> io::Result<()>
    where
        R: Read<T>,
    {
        let slot = ReaderSlot::new().ok_or(io::ErrorKind::QuotaExceeded)?;
        let (audit, sender) = (Arc::clone(self), sender.clone());
        let run = move || {
            let _slot = slot;
            while let Some(pid) = audit.next() {
                // Fails if the deadline has passed.
                if sender.send((audit.read)(pid)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("mapper-audit".to_owned()).spawn(run).map(drop)
    }

    fn next(&self) -> Option<u32> {
        self.lock().next()
    }

    /// No reader holds the lock in a call that may block.
    fn lock(&self) -> MutexGuard<'_, std::vec::IntoIter<u32>> {
        // No code panics while it holds it.
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of [`READERS`].
struct ReaderSlot;

impl ReaderSlot {
    fn new() -> Option<Self> {
        let slot = Self;
        (READERS.fetch_add(1, Ordering::SeqCst) < MAX_READERS).then_some(slot)
    }
}

impl Drop for ReaderSlot {
    fn drop(&mut self) {
        READERS.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKING: [u32; 2] = [3, 7];
    const STALL_TIMEOUT: Duration = Duration::from_millis(500);

    /// Reads some processes, of which those in [`BLOCKING`] block for `time`. Returns those that were read.
    fn read(time: Duration, deadline: Duration) -> (Vec<u32>, bool) {
        let read = move |pid| {
            if BLOCKING.contains(&pid) {
                std::thread::sleep(time);
            }
            Ok(vec![pid])
        };
        let mut audited = all((1..40).collect(), Instant::now() + deadline, STALL_TIMEOUT, read);
        audited.found.sort_unstable();
        (audited.found, audited.incomplete)
    }

    // One test, as the readers are those of all audits.
    #[test]
    fn each_process_is_read_but_those_that_block_for_too_long() {
        let long = 5 * STALL_TIMEOUT;
        let others = || (1..40).filter(|pid| !BLOCKING.contains(pid)).collect::<Vec<_>>();
        assert_eq!(read(Duration::ZERO, long), ((1..40).collect(), false));
        assert_eq!(read(STALL_TIMEOUT / 4, long), ((1..40).collect(), false), "they are late");
        let began = Instant::now();
        assert_eq!(read(long, 10 * long), (others(), true));
        assert!(began.elapsed() < long, "all others are read, and no reader goes on");
        assert!(read(long, Duration::ZERO).1, "the deadline has passed");
        let began = Instant::now();
        while READERS.load(Ordering::SeqCst) > 0 {
            assert!(began.elapsed() < 10 * long, "a reader does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(read(Duration::ZERO, long), ((1..40).collect(), false), "they can be read again");
        let unreadable = |pid| if pid == 1 { Err(Unreadable) } else { Ok(vec![pid]) };
        let audited = all(vec![1, 2], Instant::now() + long, STALL_TIMEOUT, unreadable);
        assert_eq!(audited, Audited { found: vec![2], incomplete: true });
    }
}
