//! The one error of this crate.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use fdmap_proto::ConvertError;
use fdmap_proto::shared_snapshot::LayoutError;
use fdmap_sys::{Errno, SyscallError};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no service to talk to.
    #[error("no fdmapd answers at {place}: {reason}")]
    Unreachable {
        /// Where it was looked for.
        place: String,
        /// What was met there.
        reason: String,
    },
    /// The service does not answer.
    #[error("fdmapd did not answer {what} within {after:?}")]
    TimedOut {
        /// What it was asked.
        what: &'static str,
        /// How long it was waited for.
        after: Duration,
    },
    /// The connection ended in the middle of something.
    #[error("the connection to fdmapd ended: {0}")]
    Broken(String),
    /// The service says no.
    #[error("{message}")]
    Refused {
        /// Why, as gRPC's code.
        code: RefusalCode,
        /// In words.
        message: String,
    },
    /// The service's answer has no meaning.
    #[error("the answer of fdmapd has no meaning")]
    Meaning(#[from] ConvertError),
    /// The service's answer is not one to the question.
    #[error("the answer of fdmapd does not fit the question: {0}")]
    Unexpected(&'static str),
    /// A shared snapshot cannot be read.
    #[error("a shared snapshot cannot be read")]
    Layout(#[from] LayoutError),
    /// A system call of our own failed.
    #[error("a system call failed")]
    Syscall(#[from] SyscallError),
    /// The file cannot be guest memory there.
    #[cfg(feature = "vm-memory")]
    #[error("the file cannot be guest memory there: {0}")]
    Guest(String),
    /// A mapping whose writes cannot be observed.
    #[error("the writes to the mapping of {file:?} cannot be observed: {reason}")]
    Untrackable {
        /// The file's name.
        file: String,
        /// Why not.
        reason: &'static str,
    },
    /// A path cannot be used.
    #[error("{what} {path}")]
    Path {
        /// What was being done.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        #[source]
        error: std::io::Error,
    },
}

/// Why the service says no: the codes of gRPC that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalCode {
    /// The request could never be right.
    InvalidArgument,
    /// No such file or snapshot.
    NotFound,
    /// The name is taken, or the memfd is owned already.
    AlreadyExists,
    /// A right is missing.
    PermissionDenied,
    /// Nobody vouches for the caller.
    Unauthenticated,
    /// A limit is reached.
    ResourceExhausted,
    /// The file or the host is not in a state for it.
    FailedPrecondition,
    /// Past the end of the file.
    OutOfRange,
    /// The service does not know the call.
    Unimplemented,
    /// The service failed.
    Internal,
    /// Any other code.
    Other(i32),
}

impl RefusalCode {
    /// From the number that goes over the wire.
    #[must_use]
    pub const fn from_number(code: i32) -> Self {
        match code {
            3 => Self::InvalidArgument,
            5 => Self::NotFound,
            6 => Self::AlreadyExists,
            7 => Self::PermissionDenied,
            8 => Self::ResourceExhausted,
            9 => Self::FailedPrecondition,
            11 => Self::OutOfRange,
            12 => Self::Unimplemented,
            13 => Self::Internal,
            16 => Self::Unauthenticated,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for RefusalCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument => f.write_str("invalid argument"),
            Self::NotFound => f.write_str("not found"),
            Self::AlreadyExists => f.write_str("already exists"),
            Self::PermissionDenied => f.write_str("permission denied"),
            Self::Unauthenticated => f.write_str("unauthenticated"),
            Self::ResourceExhausted => f.write_str("resource exhausted"),
            Self::FailedPrecondition => f.write_str("failed precondition"),
            Self::OutOfRange => f.write_str("out of range"),
            Self::Unimplemented => f.write_str("unimplemented"),
            Self::Internal => f.write_str("internal"),
            Self::Other(code) => write!(f, "code {code}"),
        }
    }
}

impl ClientError {
    /// The service's reason, if it was the service that said no.
    #[must_use]
    pub const fn refusal(&self) -> Option<RefusalCode> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// A system call on a connection: a silent service, one that went away, or something else.
    pub(crate) fn of_connection(what: &'static str, after: Duration, error: SyscallError) -> Self {
        match error.errno {
            Errno::EAGAIN | Errno::ETIMEDOUT => Self::TimedOut { what, after },
            Errno::EPIPE | Errno::ECONNRESET => Self::Broken(error.errno.to_string()),
            _ => error.into(),
        }
    }
}
