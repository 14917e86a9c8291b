//! [`ClientError`], the error type of this crate.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use fdmap_proto::ConvertError;
use fdmap_proto::shared_snapshot::LayoutError;
use fdmap_sys::{Errno, SyscallError};

/// Reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No service accepts connections at the address.
    #[error("connecting to fdmapd at {address}: {reason}")]
    Unreachable {
        /// Socket path or URI.
        address: String,
        /// Error of the connection attempt.
        reason: String,
    },
    /// The service did not respond in time.
    #[error("{call}: no response from fdmapd within {after:?}")]
    TimedOut {
        /// Name of the call.
        call: &'static str,
        /// Timeout that expired.
        after: Duration,
    },
    /// The connection ended during a call.
    #[error("connection to fdmapd lost: {0}")]
    Broken(String),
    /// The service rejected the request.
    #[error("{message}")]
    Refused {
        /// gRPC status code.
        code: RefusalCode,
        /// Error text of the service.
        message: String,
    },
    /// The response contains an invalid value.
    #[error("invalid response from fdmapd")]
    InvalidResponse(#[from] ConvertError),
    /// The response does not match the request.
    #[error("unexpected response from fdmapd: {0}")]
    Unexpected(&'static str),
    /// A shared snapshot is not readable.
    #[error("invalid shared snapshot")]
    Layout(#[from] LayoutError),
    /// A system call of the client failed.
    #[error(transparent)]
    Syscall(#[from] SyscallError),
    /// The file cannot be mapped as guest memory at the requested address.
    #[cfg(feature = "vm-memory")]
    #[error("mapping the file as guest memory: {0}")]
    Guest(String),
    /// Writes through a mapping cannot be tracked.
    #[error("cannot track writes to the mapping of {file:?}: {reason}")]
    Untrackable {
        /// Name of the file.
        file: String,
        /// Reason, for display.
        reason: &'static str,
    },
    /// An operation on a path failed.
    #[error("{what} {path}")]
    Path {
        /// Operation, such as "reading".
        what: &'static str,
        /// Operand.
        path: PathBuf,
        /// Error of the operation.
        #[source]
        error: std::io::Error,
    },
}

/// gRPC status code of a rejected request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalCode {
    /// The request is malformed.
    InvalidArgument,
    /// The request did not arrive in time.
    DeadlineExceeded,
    /// No such file, snapshot or cursor.
    NotFound,
    /// The name is taken, or the service already owns the memfd.
    AlreadyExists,
    /// The caller lacks a right.
    PermissionDenied,
    /// The caller's identity could not be verified.
    Unauthenticated,
    /// A limit is reached.
    ResourceExhausted,
    /// The state of the file or the host does not permit the operation.
    FailedPrecondition,
    /// Pages past the end of the file, or a generation that is not closed.
    OutOfRange,
    /// The service does not implement the call.
    Unimplemented,
    /// The service failed.
    Internal,
    /// The call cannot be made now: a process holds the lock of its address space, or of the file's inode. A retry may succeed.
    Unavailable,
    /// Any other status code.
    Other(i32),
}

impl RefusalCode {
    /// Converts the number of a `google.rpc.Code`.
    #[must_use]
    pub const fn from_number(code: i32) -> Self {
        match code {
            3 => Self::InvalidArgument,
            4 => Self::DeadlineExceeded,
            5 => Self::NotFound,
            6 => Self::AlreadyExists,
            7 => Self::PermissionDenied,
            8 => Self::ResourceExhausted,
            9 => Self::FailedPrecondition,
            11 => Self::OutOfRange,
            12 => Self::Unimplemented,
            13 => Self::Internal,
            14 => Self::Unavailable,
            16 => Self::Unauthenticated,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for RefusalCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument => f.write_str("invalid argument"),
            Self::DeadlineExceeded => f.write_str("deadline exceeded"),
            Self::NotFound => f.write_str("not found"),
            Self::AlreadyExists => f.write_str("already exists"),
            Self::PermissionDenied => f.write_str("permission denied"),
            Self::Unauthenticated => f.write_str("unauthenticated"),
            Self::ResourceExhausted => f.write_str("resource exhausted"),
            Self::FailedPrecondition => f.write_str("failed precondition"),
            Self::OutOfRange => f.write_str("out of range"),
            Self::Unimplemented => f.write_str("unimplemented"),
            Self::Internal => f.write_str("internal"),
            Self::Unavailable => f.write_str("unavailable"),
            Self::Other(code) => write!(f, "code {code}"),
        }
    }
}

impl ClientError {
    /// Status code, if the service rejected the request.
    #[must_use]
    pub const fn refusal(&self) -> Option<RefusalCode> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Classifies a failed system call on the connection: a timeout, a lost connection, or another error.
    pub(crate) fn of_connection(call: &'static str, after: Duration, error: SyscallError) -> Self {
        match error.errno {
            Errno::EAGAIN | Errno::ETIMEDOUT => Self::TimedOut { call, after },
            Errno::EPIPE | Errno::ECONNRESET => Self::Broken(error.errno.to_string()),
            _ => error.into(),
        }
    }
}
