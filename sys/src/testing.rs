//! Calls that tests and benches make on purpose and the product does not. Built only with the feature `testing`.

pub mod aio;
pub mod blocked;
pub mod borrowed;
pub mod calls;
#[cfg(target_arch = "x86_64")]
pub mod calls32;
pub mod credentials;
pub mod fuse;
pub mod hangup;
pub mod kernel_access;
pub mod mounts;
pub mod raw_mapping;
pub mod segment;
pub mod space;
pub mod uring;
pub mod write_faults;
