//! Client library of fdmap.
//!
//! - [`FdpassClient`], [`MappedFile`] and [`SharedSnapshot`] are blocking, start no threads and need no async runtime. They
//!   open files, map them, and read page states from shared memory.
//! - `Client` (feature `grpc`) provides all other operations asynchronously.
//!
//! Every call has a timeout; see [`Timeouts`].

#[cfg(feature = "cli")]
pub mod adopt;
#[cfg(feature = "cli")]
pub mod audit;
#[cfg(feature = "cli")]
pub mod compare;
pub mod endpoint;
pub mod error;
pub mod fdpass;
pub mod file_name;
#[cfg(feature = "grpc")]
pub mod grpc;
pub mod heatmap;
#[cfg(feature = "image")]
pub mod image;
pub mod mapped;
#[cfg(feature = "migration")]
pub mod migration;
pub mod shared_snapshot;
mod trust;
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

/// Timeouts of calls to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Maximum time to connect. The default is 5 s.
    pub connect: Duration,
    /// Maximum time to wait for a response, or for the next message of a stream. The default is 30 s.
    pub answer: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: Duration::from_secs(5), answer: Duration::from_secs(30) }
    }
}
