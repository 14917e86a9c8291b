//! The client side of fdmap: ask a running `fdmapd` for files, and which of their pages hold data and where.
//!
//! - [`fdpass`], [`mapped`] and [`shared`] block, start no thread and need no async runtime: a descriptor of a file, the
//!   file in memory, its page states in memory.
//! - `Client` (feature `grpc`) asks everything else, asynchronously.
//!
//! Every call is bounded in time: see [`Timeouts`].

#[cfg(feature = "cli")]
pub mod adopt;
#[cfg(feature = "cli")]
pub mod audit;
#[cfg(feature = "cli")]
pub mod compare;
pub mod endpoint;
pub mod error;
pub mod fdpass;
#[cfg(feature = "grpc")]
pub mod grpc;
pub mod heatmap;
pub mod mapped;
pub mod shared_snapshot;
#[cfg(feature = "vm-memory")]
pub mod vm_memory;

pub use endpoint::Endpoint;
pub use error::ClientError;
pub use fdmap_proto as proto;
pub use fdpass::FdpassClient;
#[cfg(feature = "grpc")]
pub use grpc::Client;
pub use mapped::MappedFile;
pub use shared_snapshot::SharedSnapshot;

use std::time::Duration;

/// How long a service that does not answer is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For a connection.
    pub connect: Duration,
    /// For an answer, and for each further piece of an answer that comes in pieces.
    pub answer: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: Duration::from_secs(5), answer: Duration::from_secs(30) }
    }
}
