//! What a user is charged for.

use std::fmt::Debug;
use std::sync::Arc;

/// What a user is charged for an address space, until it is dropped. Of a Track request also until its userfaultfd is closed.
pub type Charge = Arc<dyn Charged>;

/// Charges a user until it is dropped.
pub trait Charged: Debug + Send + Sync {
    /// Of a subordinate user id, its owner.
    fn user(&self) -> u32;
}

#[cfg(test)]
impl Charged for () {
    fn user(&self) -> u32 {
        0
    }
}
