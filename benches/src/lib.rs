//! How fast page states are told: by pagemap, by the probes, by the service over each of its planes. One [`Bed`] has a file
//! in one [`Condition`] after another, with real swap; each [`Way`] tells the states of its pages.
//!
//! Two benches run them: `states` by criterion, and `sidebyside` in pairs with pagemap, for the table of docs/performance.md.
//! `writes` measures what tracking of writes costs, and `shim` what the shim costs programs.

pub mod bed;
pub mod condition;
pub mod file;
pub mod pairs;
pub mod report;
pub mod settings;
pub mod shim;
pub mod way;
pub mod writes;

pub use bed::Bed;
pub use condition::Condition;
pub use settings::Settings;
pub use way::Way;

use std::sync::Arc;

use fdmap_server::probe::ScanError;
use fdmap_tests::HarnessError;

/// Why nothing can be measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The test bed.
    #[error(transparent)]
    Bed(#[from] HarnessError),
    /// The client.
    #[error(transparent)]
    Client(#[from] fdmap_client::ClientError),
    /// A system call.
    #[error(transparent)]
    Syscall(#[from] fdmap_sys::SyscallError),
    /// A probe.
    #[error(transparent)]
    Scan(#[from] Arc<ScanError>),
    /// The states are not what they should be.
    #[error("{0}")]
    Wrong(String),
    /// An argument or a variable of the environment.
    #[error("{0}")]
    Usage(String),
    /// A file could not be written, or the runtime not be started.
    #[error("{what}")]
    Io {
        /// What was being done.
        what: String,
        /// Why not.
        #[source]
        error: std::io::Error,
    },
}

/// The result of measuring.
pub type Measured<T> = Result<T, BenchError>;
