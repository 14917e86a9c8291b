//! The threads of a holder that close userfaultfds. A close may wait for a process for ever: it keeps its thread, and what no thread
//! can take waits. So a process that holds its mmap_lock takes a bounded number of threads.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::thread::start_thread;

/// Threads of one holder that close userfaultfds.
const MAX_CLOSERS: usize = 4;

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(super) struct Closers {
    state: Mutex<State>,
    added: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Work>,
    /// Those in progress, and those that wait.
    unfinished: usize,
    threads: usize,
    /// Threads that wait for work.
    idle: usize,
    /// They end when nothing waits.
    ending: bool,
}

impl Closers {
    /// Starts one thread, so that there is at least one. Others follow when they are needed.
    ///
    /// # Errors
    /// `clone`
    pub(super) fn start() -> io::Result<Arc<Self>> {
        let closers = Arc::new(Self::default());
        closers.start_closer(&mut closers.lock())?;
        Ok(closers)
    }

    /// Does `work`, which may never return, when a thread is free.
    pub(super) fn add(self: &Arc<Self>, work: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        state.waiting.push_back(Box::new(work));
        state.unfinished += 1;
        if state.waiting.len() > state.idle && state.threads < MAX_CLOSERS {
            // Without another thread the work waits for those that exist.
            let _ = self.start_closer(&mut state);
        }
        drop(state);
        self.added.notify_one();
    }

    /// Number of closes that have not returned.
    pub(super) fn unfinished(&self) -> usize {
        self.lock().unfinished
    }

    /// Ends the threads when all is closed.
    pub(super) fn end(&self) {
        self.lock().ending = true;
        self.added.notify_all();
    }

    fn start_closer(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let closers = Arc::clone(self);
        start_thread("closer", move || closers.run())?;
        state.threads += 1;
        Ok(())
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(work) = state.waiting.pop_front() {
                drop(state);
                work();
                state = self.lock();
                state.unfinished -= 1;
                continue;
            }
            if state.ending {
                return;
            }
            state.idle += 1;
            state = self.added.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics with the lock held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn closes_that_never_return_take_a_bounded_number_of_threads() {
        const CLOSES: usize = 100;
        let closers = Closers::start().unwrap();
        let begun = Arc::new(AtomicUsize::new(0));
        let (block, blocked) = channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        for _ in 0..CLOSES {
            let (begun, blocked) = (Arc::clone(&begun), Arc::clone(&blocked));
            closers.add(move || {
                begun.fetch_add(1, Ordering::SeqCst);
                // Ends when the sender is dropped.
                let _ = blocked.lock().unwrap_or_else(PoisonError::into_inner).recv();
            });
        }
        let until = |what: &str, condition: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !condition() {
                assert!(began.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        until("all threads are blocked", &|| begun.load(Ordering::SeqCst) == MAX_CLOSERS);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(begun.load(Ordering::SeqCst), MAX_CLOSERS);
        assert_eq!(closers.lock().threads, MAX_CLOSERS);
        assert_eq!(closers.unfinished(), CLOSES);
        drop(block);
        until("those that waited are closed", &|| closers.unfinished() == 0);
        assert_eq!(begun.load(Ordering::SeqCst), CLOSES);
        assert_eq!(closers.lock().threads, MAX_CLOSERS);
    }

    #[test]
    fn one_blocked_close_does_not_delay_the_next_one() {
        let closers = Closers::start().unwrap();
        let (_block, blocked) = channel::<()>();
        closers.add(move || {
            let _ = blocked.recv();
        });
        let (done, is_done) = channel();
        closers.add(move || {
            let _ = done.send(());
        });
        assert_eq!(is_done.recv_timeout(TIMEOUT), Ok(()));
    }
}
