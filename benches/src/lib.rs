//! Benchmarks of page state queries: pagemap, the probes, and the service over gRPC and the fdpass socket. A [`Fixture`] brings one
//! file into one [`Condition`] after another, with real swap; each [`Method`] reads the states of its pages.
//!
//! Two benches run the methods: `states` with criterion, and `sidebyside` interleaved with pagemap, for the table of
//! docs/performance.md. `writes` measures the cost of write tracking, `calls` the latency of calls beside another version,
//! `images` dumps beside plain copies and lazy restores, `precision` the share of reported pages that were changed, and `shim` the cost of the shim to programs.

pub mod calls;
pub mod condition;
pub mod file;
pub mod fixture;
pub mod images;
pub mod lazy;
pub mod method;
pub mod pairs;
pub mod precision;
pub mod report;
pub mod settings;
pub mod shim;
pub mod writes;

pub use condition::Condition;
pub use fixture::Fixture;
pub use method::Method;
pub use settings::Settings;

use std::sync::Arc;

use fdmap_server::probe::ScanError;
use fdmap_tests::HarnessError;

/// Why a benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The test fixture.
    #[error(transparent)]
    Harness(#[from] HarnessError),
    /// A request to the service.
    #[error(transparent)]
    Client(#[from] fdmap_client::ClientError),
    /// A system call.
    #[error(transparent)]
    Syscall(#[from] fdmap_sys::SyscallError),
    /// A probe.
    #[error(transparent)]
    Scan(#[from] Arc<ScanError>),
    /// A result is not as expected, so the measurement is invalid.
    #[error("{0}")]
    Wrong(String),
    /// An invalid argument or environment variable.
    #[error("{0}")]
    Usage(String),
    /// An I/O operation outside of the service.
    #[error("{what}")]
    Io {
        /// The operation.
        what: String,
        #[source]
        error: std::io::Error,
    },
}

/// Result of a benchmark step.
pub type BenchResult<T> = Result<T, BenchError>;
