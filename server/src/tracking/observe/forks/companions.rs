//! The readers of fork events of all users.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use fdmap_proto::error_chain;

use super::Forks;

/// Starts a companion with the first mapping of a user that is tracked. It ends with the last one.
#[derive(Debug)]
pub(crate) struct Companions {
    /// Whether fork events are read.
    enabled: bool,
    users: Mutex<HashMap<u32, Arc<Reader>>>,
}

/// The reader of one user, locked while it starts.
type Reader = Mutex<Weak<Forks>>;

impl Companions {
    pub(crate) fn new(enabled: bool) -> Self {
        Self { enabled, users: Mutex::default() }
    }

    /// `None`: disabled, or none can be started.
    pub(crate) fn of_user(&self, user: u32) -> Option<Arc<Forks>> {
        if !self.enabled {
            return None;
        }
        // A start that hangs delays no other user.
        let reader = self.reader_of(user);
        let mut reader = lock(&reader);
        if let Some(forks) = reader.upgrade() {
            return Some(forks);
        }
        let started = Forks::start(user).inspect_err(|error| {
            tracing::warn!(user, error = error_chain(error), "forks are not observed");
        });
        let forks = started.ok()?;
        *reader = Arc::downgrade(&forks);
        Some(forks)
    }

    fn reader_of(&self, user: u32) -> Arc<Reader> {
        let mut users = lock(&self.users);
        // One that only the map has is neither locked nor about to be.
        users.retain(|_, reader| Arc::strong_count(reader) > 1 || lock(reader).strong_count() > 0);
        Arc::clone(users.entry(user).or_default())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
