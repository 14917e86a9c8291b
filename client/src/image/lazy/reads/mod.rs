//! Threads that read chunks of images: the store may be slow, and the thread that handles page faults never waits for it.

mod schedule;

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZero;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fdmap_sys::SyscallError;
use fdmap_sys::sched::set_time_slice;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::super::chain::{ChunkId, ImageChain};
use super::super::error::ImageError;
use schedule::Schedule;

pub(super) use schedule::Priority;

/// Threads. The stream uses at most half of them, and of the processors: the others are for page faults at any time.
const THREADS: usize = 8;
/// Chunks that were read and not taken: no further one is read meanwhile.
const MAX_WAITING_CHUNKS: usize = 16;

/// The shortest time slice: a thread that handles a page fault runs soon after it wakes, although the processors are busy, as with the stream.
pub(super) const FAULT_SLICE: Duration = Duration::from_micros(100);

type Read = dyn Fn(ChunkId) -> Result<Vec<u8>, ImageError> + Send + Sync;

/// A chunk that was read, or cannot be read. After a transient error the read is repeated, and it arrives again.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) chunk: ChunkId,
    pub(super) result: Result<Vec<u8>, ImageError>,
}

#[derive(Debug)]
struct State {
    schedule: Schedule,
    arrivals: VecDeque<Arrival>,
    has_ended: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Readable while there are arrivals.
    arrived: EventFd,
}

/// Reads chunks in the background. Its drop does not wait: a thread whose read is in progress ends with that, and has no effect any more.
pub(super) struct Reads(Arc<Shared>);

impl Reads {
    /// Starts threads that read chunks of one file of the chain.
    pub(super) fn start(chain: &Arc<ImageChain>, shmid: u32) -> Result<Self, SyscallError> {
        let chain = Arc::clone(chain);
        let read: Arc<Read> = Arc::new(move |chunk| chain.read_chunk(shmid, chunk));
        Self::with(&read)
    }

    fn with(read: &Arc<Read>) -> Result<Self, SyscallError> {
        let arrived = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| SyscallError { call: "eventfd".to_owned(), errno })?;
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let schedule = Schedule::new((processors / 2).clamp(1, THREADS / 2));
        let state = Mutex::new(State { schedule, arrivals: VecDeque::new(), has_ended: false });
        let shared = Arc::new(Shared { state, changed: Condvar::new(), arrived });
        // Dropped after an error, it ends the threads that were started.
        let own = Self(Arc::clone(&shared));
        for _ in 0..THREADS {
            let (shared, read) = (Arc::clone(&shared), Arc::clone(read));
            let thread = std::thread::Builder::new().name("fdmap-lazy-read".to_owned());
            thread.spawn(move || shared.work(&*read)).map_err(|error| SyscallError {
                call: "start of a thread".to_owned(),
                errno: fdmap_sys::error::errno_of(&error),
            })?;
        }
        Ok(own)
    }

    /// Wants a chunk, which arrives later: once for all requests before.
    pub(super) fn request(&self, chunk: ChunkId, priority: Priority) {
        self.0.lock().schedule.request(chunk, priority);
        self.0.changed.notify_one();
    }

    /// Takes what has arrived.
    pub(super) fn take(&self) -> VecDeque<Arrival> {
        // Not after the arrivals are taken: a later one makes it readable again. An error means that it was not readable.
        let _ = self.0.arrived.read();
        let mut state = self.0.lock();
        let arrivals = std::mem::take(&mut state.arrivals);
        arrivals.iter().for_each(|arrival| state.schedule.forget(arrival.chunk));
        drop(state);
        if arrivals.len() >= MAX_WAITING_CHUNKS {
            self.0.changed.notify_one();
        }
        arrivals
    }
}

/// Readable while there are arrivals.
impl AsFd for Reads {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.arrived.as_fd()
    }
}

impl fmt::Debug for Reads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reads").field(&self.0).finish()
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics with the lock held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, read: &Read) {
        // The kernel looks at the slice when the thread wakes. Errors of these calls cost time only.
        let _ = set_time_slice(FAULT_SLICE);
        while let Some((chunk, priority)) = self.next() {
            if priority == Priority::Stream {
                let _ = set_time_slice(Duration::ZERO);
            }
            // A chunk that never arrives would make threads wait for ever.
            let result = catch_unwind(AssertUnwindSafe(|| read(chunk))).unwrap_or_else(|_| {
                Err(ImageError::Usage(format!("the thread that reads chunk {chunk:?} panicked")))
            });
            if priority == Priority::Stream {
                let _ = set_time_slice(FAULT_SLICE);
            }
            let mut state = self.lock();
            match &result {
                Err(error) if error.is_transient() => state.schedule.delay(chunk, Instant::now()),
                _ => state.schedule.finish(chunk),
            }
            state.arrivals.push_back(Arrival { chunk, result });
            drop(state);
            // The counter cannot reach its limit.
            let _ = self.arrived.write(1);
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, time);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits for a chunk that is to be read, and why; `None`: no further one is.
    fn next(&self) -> Option<(ChunkId, Priority)> {
        let mut state = self.lock();
        loop {
            if state.has_ended {
                return None;
            }
            let now = Instant::now();
            state.schedule.wake(now);
            if state.arrivals.len() < MAX_WAITING_CHUNKS
                && let Some(next) = state.schedule.take()
            {
                // Each thread wakes the next one: to read, or to wait for what is due.
                if state.schedule.has_next() || state.schedule.next_due().is_some() {
                    self.changed.notify_one();
                }
                return Some(next);
            }
            // While many arrivals wait, those who take them wake it.
            let due = state.schedule.next_due().filter(|due| *due > now);
            state = match due {
                Some(due) => self.wait(state, due - now),
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::store::StoreError;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    /// Reads of chunks below 100 wait until the gate opens; that of chunk 200 panics; those of 300 and 301 fail three times.
    #[derive(Default)]
    struct Gate {
        is_open: Mutex<bool>,
        opened: Condvar,
        begun: Mutex<Vec<u64>>,
    }

    impl Gate {
        fn read(&self, chunk: ChunkId) -> Result<Vec<u8>, ImageError> {
            self.begun.lock().unwrap().push(chunk.first_page);
            assert!(chunk.first_page != 200, "planted");
            let reads = self.begun.lock().unwrap().iter().filter(|begun| **begun == chunk.first_page).count();
            if chunk.first_page >= 300 && reads <= 3 {
                let error = std::io::ErrorKind::ConnectionReset.into();
                let location = "planted".to_owned();
                return Err(ImageError::Store(StoreError { operation: "reading", location, error }));
            }
            let is_open = self.is_open.lock().unwrap();
            let closed = |is_open: &mut bool| chunk.first_page < 100 && !*is_open;
            drop(self.opened.wait_while(is_open, closed).unwrap());
            Ok(vec![1])
        }

        fn open(&self) {
            *self.is_open.lock().unwrap() = true;
            self.opened.notify_all();
        }
    }

    fn chunk(first_page: u64) -> ChunkId {
        ChunkId { level: 0, first_page }
    }

    fn reads() -> (Arc<Gate>, Reads) {
        let gate = Arc::new(Gate::default());
        let own = Arc::clone(&gate);
        let read: Arc<Read> = Arc::new(move |chunk| own.read(chunk));
        (gate, Reads::with(&read).unwrap())
    }

    /// Waits for arrivals until there are `count`, and returns them in order of the chunks.
    fn arrivals(reads: &Reads, count: usize) -> Vec<(u64, bool)> {
        let mut found = Vec::new();
        while found.len() < count {
            let mut polled = [PollFd::new(reads.as_fd(), PollFlags::POLLIN)];
            assert_ne!(poll(&mut polled, PollTimeout::from(20_000_u16)), Ok(0), "{found:?}");
            found.extend(reads.take().iter().map(|one| (one.chunk.first_page, one.result.is_ok())));
        }
        found.sort_unstable();
        found
    }

    #[test]
    fn slow_reads_delay_no_other_one() {
        let (gate, reads) = reads();
        (0..20).for_each(|number| reads.request(chunk(number), Priority::Stream));
        (50..53).for_each(|number| reads.request(chunk(number), Priority::Fault));
        reads.request(chunk(50), Priority::Fault);
        reads.request(chunk(100), Priority::Fault);
        reads.request(chunk(200), Priority::Fault);
        assert_eq!(arrivals(&reads, 2), [(100, true), (200, false)]);
        gate.open();
        let expected: Vec<_> = (0..20).chain(50..53).map(|number| (number, true)).collect();
        assert_eq!(arrivals(&reads, 23), expected);
        assert_eq!(gate.begun.lock().unwrap().len(), 25, "each is read once");
    }

    /// All other threads are busy.
    #[test]
    fn failed_reads_are_repeated_while_others_wait() {
        let (gate, reads) = reads();
        reads.request(chunk(300), Priority::Fault);
        reads.request(chunk(301), Priority::Fault);
        (0..6).for_each(|number| reads.request(chunk(number), Priority::Fault));
        let expected = [(300, false), (300, false), (300, false), (300, true)];
        let expected: Vec<_> = expected.into_iter().chain(expected.map(|(_, is_ok)| (301, is_ok))).collect();
        assert_eq!(arrivals(&reads, 8), expected);
        gate.open();
        assert_eq!(arrivals(&reads, 6).len(), 6);
    }

    #[test]
    fn no_further_chunk_is_read_while_many_wait() {
        let (gate, reads) = reads();
        (100..190).for_each(|number| reads.request(chunk(number), Priority::Fault));
        std::thread::sleep(Duration::from_millis(200));
        let begun = gate.begun.lock().unwrap().len();
        assert!((MAX_WAITING_CHUNKS..MAX_WAITING_CHUNKS + THREADS).contains(&begun), "{begun}");
        assert_eq!(arrivals(&reads, 90).len(), 90);
    }

    #[test]
    fn drop_waits_for_no_read() {
        let (gate, reads) = reads();
        (0..4).for_each(|number| reads.request(chunk(number), Priority::Fault));
        while gate.begun.lock().unwrap().len() < 4 {
            std::thread::yield_now();
        }
        let shared = Arc::clone(&reads.0);
        let begun = Instant::now();
        drop(reads);
        assert!(begun.elapsed() < Duration::from_secs(1));
        gate.open();
        // Each thread has a reference.
        while Arc::strong_count(&shared) > 1 {
            assert!(begun.elapsed() < Duration::from_secs(20), "the threads do not end");
            std::thread::yield_now();
        }
    }
}
