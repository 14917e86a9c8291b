//! [`Cancellation`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The operation was cancelled before its end.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("cancelled")]
pub struct Cancelled;

/// Ends an operation early. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Cancellation(Arc<AtomicBool>);

impl Cancellation {
    /// Ends the operation soon.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// True once the operation is to end.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
