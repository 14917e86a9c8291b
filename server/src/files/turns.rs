//! The order of calls on one file.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Calls that work on the generations of one file take turns, in the order in which they began to wait.
#[derive(Clone, Debug)]
pub struct Turns(Arc<Semaphore>);

impl Turns {
    /// Waits for the turn of the caller, which lasts until the permit is dropped. `None` only if the semaphore is closed, and nothing
    /// closes it.
    pub(crate) async fn wait(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0).acquire_owned().await.ok()
    }
}

impl Default for Turns {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}
