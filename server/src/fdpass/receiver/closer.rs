//! The threads that close descriptors of clients.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// A close that takes longer is reported as blocked.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Closes descriptors without delay for the caller.
#[derive(Debug)]
pub(super) struct Closer {
    foreign: Queue,
    checked: Queue,
}

/// Descriptors that one thread closes. A close may take forever, and then so do all later ones.
#[derive(Debug)]
struct Queue {
    descriptors: Sender<OwnedFd>,
    /// Those that are not closed, with the one whose close is in progress.
    unclosed: Arc<AtomicU32>,
    /// When the close in progress began.
    began: Arc<Mutex<Option<Instant>>>,
}

impl Closer {
    /// Starts the threads, which end with the process.
    pub(super) fn start() -> io::Result<Self> {
        Ok(Self { foreign: Queue::start()?, checked: Queue::start()? })
    }

    /// Closes descriptors that may be of any kind.
    pub(super) fn close(&self, descriptors: impl IntoIterator<Item = OwnedFd>) {
        self.foreign.add(descriptors);
    }

    /// Closes copies of descriptors that reached the service. They wait for no others: a copy of a userfaultfd keeps its ranges
    /// registered.
    pub(super) fn close_checked(&self, descriptors: impl IntoIterator<Item = OwnedFd>) {
        self.checked.add(descriptors);
    }

    /// Descriptors that are not closed yet.
    pub(super) fn unclosed(&self) -> u32 {
        let of = |queue: &Queue| queue.unclosed.load(Ordering::Relaxed);
        of(&self.foreign).saturating_add(of(&self.checked))
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.foreign.is_blocked() || self.checked.is_blocked()
    }
}

impl Queue {
    fn start() -> io::Result<Self> {
        let (sender, descriptors) = channel::<OwnedFd>();
        let (began, unclosed) = (Arc::new(Mutex::new(None)), Arc::new(AtomicU32::new(0)));
        let (set, left) = (Arc::clone(&began), Arc::clone(&unclosed));
        let (start, started) = channel();
        Builder::new().name("fdmapd-closer".to_owned()).spawn(move || {
            // Allocates memory, as the first message of a channel does.
            let _ = start.send(());
            let set = |moment| *set.lock().unwrap_or_else(PoisonError::into_inner) = moment;
            for descriptor in descriptors {
                set(Some(Instant::now()));
                drop(descriptor);
                set(None);
                left.fetch_sub(1, Ordering::Relaxed);
            }
        })?;
        // What a new thread calls first is not in the list of the receiver's calls.
        let _ = started.recv();
        Ok(Self { descriptors: sender, unclosed, began })
    }

    fn add(&self, descriptors: impl IntoIterator<Item = OwnedFd>) {
        for descriptor in descriptors {
            self.unclosed.fetch_add(1, Ordering::Relaxed);
            // The thread receives until the sender is dropped.
            let _ = self.descriptors.send(descriptor);
        }
    }

    fn is_blocked(&self) -> bool {
        let began = *self.began.lock().unwrap_or_else(PoisonError::into_inner);
        began.is_some_and(|began| began.elapsed() >= CLOSE_TIMEOUT)
    }
}
