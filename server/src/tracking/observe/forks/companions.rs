//! The readers of fork events of all users.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use fdmap_proto::error_chain;

use super::Forks;

/// Starts a companion with the first mapping of a user that is tracked. It ends with the last one.
#[derive(Debug)]
pub(crate) struct Companions {
    /// Whether fork events are read.
    enabled: bool,
    users: Mutex<HashMap<u32, Weak<Forks>>>,
}

impl Companions {
    pub(crate) fn new(enabled: bool) -> Self {
        Self { enabled, users: Mutex::default() }
    }

    /// `None`: disabled, or none can be started.
    pub(crate) fn of_user(&self, user: u32) -> Option<Arc<Forks>> {
        if !self.enabled {
            return None;
        }
        // No code panics with the lock held.
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.retain(|_, forks| forks.strong_count() > 0);
        if let Some(forks) = users.get(&user).and_then(Weak::upgrade) {
            return Some(forks);
        }
        let started = Forks::start(user).inspect_err(|error| {
            tracing::warn!(user, error = error_chain(error), "forks are not observed");
        });
        let forks = started.ok()?;
        users.insert(user, Arc::downgrade(&forks));
        Some(forks)
    }
}
