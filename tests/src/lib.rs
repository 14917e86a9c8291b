//! The test bed of the end-to-end tests, the benches and the demo: real cgroups, real swap, a real service, and actors that
//! write to files as clients do. Everything that is made here is removed on drop, also when a test fails or is killed, and
//! nothing is touched that was not made here.

pub mod cgroup;
pub mod cleanup;
pub mod fd_store_parent;
pub mod guest;
pub mod harness;
pub mod host;
pub mod hugepages;
pub mod line_process;
pub mod memfd_agent;
pub mod memory;
pub mod no_lost_writes;
pub mod pattern;
pub mod probe_pair;
pub mod programs;
pub mod raw;
pub mod service;
pub mod sitter;
pub mod swap;
pub mod test_agent;
pub mod tracked;

pub use fdmap_tests_macros::test;

/// Why the test bed cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// This host does not have it.
    #[error("{0}")]
    Missing(String),
    /// A file could not be read or written.
    #[error("{what} {path}")]
    File {
        /// What was being done.
        what: &'static str,
        /// With which file.
        path: std::path::PathBuf,
        /// Why not.
        #[source]
        error: std::io::Error,
    },
    /// A program failed.
    #[error("{program}: {said}")]
    Program {
        /// The program and its arguments.
        program: String,
        /// What it said.
        said: String,
    },
    /// A system call failed.
    #[error("a system call failed")]
    Syscall(#[from] fdmap_sys::SyscallError),
    /// The client library failed.
    #[error("a call of the client failed")]
    Client(#[from] fdmap_client::ClientError),
    /// The answers of a service contradict themselves.
    #[error("what a consumer was told")]
    History(#[from] no_lost_writes::history::HistoryError),
    /// An actor did not do as it was told.
    #[error("the actor said {0:?}")]
    Agent(String),
}

/// The result of the test bed.
pub type HarnessResult<T> = Result<T, HarnessError>;
