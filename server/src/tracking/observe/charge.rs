//! What a user is charged for.

use std::fmt::Debug;
use std::sync::Arc;

use fdmap_sys::pagemap::Pagemap;

/// What a user is charged for an address space, until it is dropped. Of a Track request also until its userfaultfd is closed.
pub type Charge = Arc<dyn Charged>;

/// Charges a user until it is dropped.
pub trait Charged: Debug + Send + Sync {
    /// Of a subordinate user id, its owner.
    fn user(&self) -> u32;

    /// Sets the address space that it is for. Then the charge for page tables lasts until the address space has none. Only the first
    /// call has an effect.
    fn set_address_space(&self, _pagemap: Arc<Pagemap>) {}
}

#[cfg(test)]
impl Charged for () {
    fn user(&self) -> u32 {
        0
    }
}
