//! The command line `fdmap`: arguments, what it prints, and its exit codes. What can be asked is the library's.

mod args;
mod bits;
mod commands;
mod output;
mod parse;
mod views;

pub use args::{Cli, Command};
pub use commands::run;

use fdmap_client::ClientError;
use fdmap_client::adopt::AdoptError;
use fdmap_client::error::RefusalCode;

/// The variable that tells an `fdmap adopt` whose work it does.
const ADOPT_FOR: &str = "FDMAP_ADOPT_FOR";

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The service, or the way to it.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A process that was to be adopted.
    #[error("process {pid}")]
    Adopt {
        /// The process.
        pid: u32,
        /// Why not.
        #[source]
        error: AdoptError,
    },
    /// A file or descriptor given on the command line, or the terminal.
    #[error("{what}")]
    Io {
        /// What was being done.
        what: String,
        /// Why not.
        #[source]
        error: std::io::Error,
    },
    /// The arguments do not go together.
    #[error("{0}")]
    Usage(String),
    /// The async runtime could not be started.
    #[error("starting the runtime")]
    Runtime(#[source] std::io::Error),
    /// The reader of our output has gone: no error worth a word.
    #[error("the output was closed")]
    Closed,
}

impl CliError {
    /// The exit code: docs in [`args::EXIT_CODES`].
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Client(error) | Self::Adopt { error: AdoptError::Client(error), .. } => client_code(error),
            Self::Adopt { error: AdoptError::Denied(_), .. } => 4,
            Self::Adopt { .. } | Self::Io { .. } | Self::Runtime(_) => 7,
            Self::Closed => 0,
        }
    }
}

const fn client_code(error: &ClientError) -> u8 {
    match error {
        ClientError::Refused { code, .. } => match code {
            RefusalCode::NotFound => 3,
            RefusalCode::PermissionDenied | RefusalCode::Unauthenticated => 4,
            _ => 6,
        },
        ClientError::Unreachable { .. } | ClientError::TimedOut { .. } | ClientError::Broken(_) => 5,
        _ => 7,
    }
}

impl From<fdmap_sys::SyscallError> for CliError {
    fn from(error: fdmap_sys::SyscallError) -> Self {
        Self::Client(error.into())
    }
}
