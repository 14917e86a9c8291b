//! The harness of the end-to-end tests, the benches and the demo: cgroups, swap, services, and agents that write to files as
//! clients do. It removes what it created on drop, also when a test fails or is killed, and changes nothing else.

pub mod attack;
pub mod blocked_syscall;
pub mod built_programs;
pub mod certificates;
pub mod cgroup;
pub mod cleanup;
pub mod doctor;
pub mod fd_store_parent;
pub mod footprint;
pub mod guest;
pub mod harness;
pub mod host;
pub mod host_io;
pub mod hugepages;
pub mod incidents;
pub mod layered_file;
pub mod line_process;
pub mod mapper;
pub mod memfd_agent;
pub mod memory;
pub mod no_lost_writes;
pub mod pattern;
pub mod probe_pair;
pub mod programs;
pub mod raw;
pub mod reported;
pub mod service;
pub mod swap;
pub mod swap_areas;
pub mod systemd;
pub mod test_agent;
pub mod tracked;
pub mod unread;
pub mod victim;
pub mod watched;

pub use fdmap_tests_macros::test;

/// The reason why a test cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// The host lacks this feature.
    #[error("{0}")]
    Missing(String),
    /// A file could not be read or written.
    #[error("{what} {path}")]
    File {
        what: &'static str,
        path: std::path::PathBuf,
        #[source]
        error: std::io::Error,
    },
    /// A program failed.
    #[error("{program}: {message}")]
    Program {
        /// With its arguments.
        program: String,
        /// What it printed on standard error.
        message: String,
    },
    /// A system call failed.
    #[error("a system call failed")]
    Syscall(#[from] fdmap_sys::SyscallError),
    /// The client library failed.
    #[error("a call of the client failed")]
    Client(#[from] fdmap_client::ClientError),
    /// The answers of a service contradict each other.
    #[error("answers to a consumer")]
    History(#[from] no_lost_writes::history::HistoryError),
    /// A child process did not do what the test requested: its answer.
    #[error("child process: {0}")]
    Agent(String),
}

pub type HarnessResult<T> = Result<T, HarnessError>;
