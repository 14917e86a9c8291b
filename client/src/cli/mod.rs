//! The command line `fdmap`: arguments, output and exit codes. The library implements all operations.

mod args;
mod bits;
mod commands;
mod output;
mod parse;
mod private_socket;
mod range;
mod views;

pub use args::{Cli, Command};
pub use commands::run;

use fdmap_client::ClientError;
use fdmap_client::adopt::AdoptError;
use fdmap_client::error::RefusalCode;
use fdmap_client::image::ImageError;
use fdmap_client::migration::MigrationError;
use fdmap_sys::{Errno, SyscallError};

/// Environment variable with the pid of the command that started an `fdmap adopt` helper.
const ADOPT_FOR: &str = "FDMAP_ADOPT_FOR";

/// Reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// A call to the service failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Adoption of a process failed.
    #[error("process {pid}")]
    Adopt {
        /// Process id.
        pid: u32,
        /// Cause.
        #[source]
        error: AdoptError,
    },
    /// An image was not written or read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A file was not migrated.
    #[error(transparent)]
    Migration(#[from] MigrationError),
    /// I/O on a local file, descriptor or stdout failed.
    #[error("{what}")]
    Io {
        /// Operation and operand.
        what: String,
        /// Cause.
        #[source]
        error: std::io::Error,
    },
    /// The arguments are invalid.
    #[error("{0}")]
    Usage(String),
    /// The async runtime failed to start.
    #[error("starting the async runtime")]
    Runtime(#[source] std::io::Error),
    /// The reader of stdout closed the pipe. Not reported to the user.
    #[error("stdout was closed")]
    Closed,
}

impl CliError {
    /// Exit code; see [`args::EXIT_CODES`].
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Client(error) | Self::Adopt { error: AdoptError::Client(error), .. } => client_code(error),
            Self::Adopt { error: AdoptError::Denied(_), .. } => 4,
            Self::Image(ImageError::Usage(_)) => 2,
            Self::Image(ImageError::Client(error)) => client_code(error),
            Self::Migration(error) => migration_code(error),
            Self::Image(_) | Self::Adopt { .. } | Self::Io { .. } | Self::Runtime(_) => 7,
            Self::Closed => 0,
        }
    }
}

fn migration_code(error: &MigrationError) -> u8 {
    match error {
        MigrationError::Image(ImageError::Usage(_)) => 2,
        MigrationError::Image(ImageError::Client(error)) | MigrationError::Client(error) => {
            client_code(error)
        }
        MigrationError::StaysFenced(error) => migration_code(error),
        MigrationError::Lost { .. } | MigrationError::Unknown { .. } => 5,
        MigrationError::Refused { .. } | MigrationError::Changed { .. } => 6,
        MigrationError::Image(_)
        | MigrationError::NotPaused(_)
        | MigrationError::Serve { .. }
        | MigrationError::Ended(_) => 7,
    }
}

fn client_code(error: &ClientError) -> u8 {
    match error {
        ClientError::Refused { code, .. } => match code {
            RefusalCode::NotFound => 3,
            RefusalCode::PermissionDenied | RefusalCode::Unauthenticated => 4,
            _ => 6,
        },
        ClientError::Unreachable { .. } | ClientError::TimedOut { .. } | ClientError::Broken(_) => 5,
        ClientError::Syscall(SyscallError { errno: Errno::EACCES | Errno::EPERM, .. }) => 4,
        ClientError::Path { error, .. } if error.kind() == std::io::ErrorKind::PermissionDenied => 4,
        _ => 7,
    }
}

impl From<fdmap_sys::SyscallError> for CliError {
    fn from(error: fdmap_sys::SyscallError) -> Self {
        Self::Client(error.into())
    }
}
