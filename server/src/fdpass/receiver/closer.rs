//! The thread that closes descriptors of clients.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// A close that takes longer is reported as blocked.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Closes descriptors without delay for the caller. A close may take forever, and then so do all later ones.
#[derive(Debug)]
pub(super) struct Closer {
    queue: Sender<OwnedFd>,
    /// When the close in progress began.
    began: Arc<Mutex<Option<Instant>>>,
}

impl Closer {
    /// Starts the thread, which ends with the process.
    pub(super) fn start() -> io::Result<Self> {
        let (queue, descriptors) = channel::<OwnedFd>();
        let began = Arc::new(Mutex::new(None));
        let set = Arc::clone(&began);
        Builder::new().name("fdmapd-closer".to_owned()).spawn(move || {
            let set = |moment| *set.lock().unwrap_or_else(PoisonError::into_inner) = moment;
            for descriptor in descriptors {
                set(Some(Instant::now()));
                drop(descriptor);
                set(None);
            }
        })?;
        Ok(Self { queue, began })
    }

    pub(super) fn close(&self, descriptors: impl IntoIterator<Item = OwnedFd>) {
        for descriptor in descriptors {
            // The thread receives until the sender is dropped.
            let _ = self.queue.send(descriptor);
        }
    }

    pub(super) fn is_blocked(&self) -> bool {
        let began = *self.began.lock().unwrap_or_else(PoisonError::into_inner);
        began.is_some_and(|began| began.elapsed() >= CLOSE_TIMEOUT)
    }
}
