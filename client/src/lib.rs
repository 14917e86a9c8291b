//! The client side of fdmap: ask a running `fdmapd` for files, and which of their pages hold data and where.
//!
//! - [`handover`], [`mapped`] and [`shared`] block, start no thread and need no async runtime: a descriptor of a file, the
//!   file in memory, its page states in memory.
//! - `Client` (feature `grpc`) asks everything else, asynchronously.
//!
//! Every call is bounded in time: see [`Timeouts`].

#[cfg(feature = "cli")]
pub mod adopt;
#[cfg(feature = "cli")]
pub mod compare;
pub mod error;
#[cfg(feature = "grpc")]
pub mod grpc;
#[cfg(feature = "vm-memory")]
pub mod guest;
pub mod handover;
pub mod heatmap;
#[cfg(feature = "cli")]
pub mod inspect;
pub mod mapped;
pub mod place;
pub mod shared;

pub use error::ClientError;
pub use fdmap_proto as proto;
#[cfg(feature = "grpc")]
pub use grpc::Client;
pub use handover::Handover;
pub use mapped::MappedFile;
pub use place::Place;
pub use shared::SharedSnapshot;

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
