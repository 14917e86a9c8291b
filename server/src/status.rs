//! The one place that maps errors to gRPC status codes. `rpc` and `fdpass` share it.
//!
//! It owns the mapping for every error of the layers below. `fdpass` implements [`GrpcCode`] for its own protocol errors.

use std::error::Error;
use std::sync::Arc;

use fdmap_proto::error_chain;
use fdmap_sys::{Errno, SyscallError};
use tonic::{Code, Status};

use crate::files::{FileError, InodeCallError, RetainedError};
use crate::probe::ScanError;
use crate::query::QueryError;
use crate::tracking::{CallError, CursorError, TrackingError};

/// An error with a gRPC status code.
pub(crate) trait GrpcCode: Error {
    fn code(&self) -> Code;
}

/// The status of an error. The message is the error and its sources on one line.
#[expect(clippy::needless_pass_by_value, reason = "map_err passes the error by value")]
pub(crate) fn status(error: impl GrpcCode) -> Status {
    Status::new(error.code(), error_chain(&error))
}

impl GrpcCode for FileError {
    fn code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NotFound,
            Self::NameTaken(_) | Self::AlreadyOwned(_) => Code::AlreadyExists,
            Self::Name(_) | Self::Reason(_) | Self::Size(_) => Code::InvalidArgument,
            Self::NoHugetlb { requested, .. } if !requested.is_power_of_two() => Code::InvalidArgument,
            Self::NoHugetlb { .. } | Self::Sealed { .. } | Self::MappedWritable => Code::FailedPrecondition,
            Self::NotAdoptable(_) | Self::Fenced { .. } => Code::FailedPrecondition,
            Self::Denied { .. } | Self::NotOwner { .. } | Self::GivingAway { .. } | Self::Keep { .. } => {
                Code::PermissionDenied
            }
            Self::Limit { .. } | Self::SnapshotSize { .. } => Code::ResourceExhausted,
            Self::Inode { error, .. } => error.code(),
            Self::Persist(error) => error.code(),
            Self::Syscall(error) => error.code(),
        }
    }
}

impl GrpcCode for InodeCallError {
    fn code(&self) -> Code {
        match self {
            // A retry may succeed.
            Self::Blocked | Self::Ended | Self::Earlier | Self::TooManyBlocked(_) | Self::TooManyOfAll => {
                Code::Unavailable
            }
            Self::Start(error) | Self::Syscall(error) => error.code(),
        }
    }
}

impl GrpcCode for SyscallError {
    fn code(&self) -> Code {
        match self.errno {
            Errno::ENOMEM | Errno::ENOSPC | Errno::EMFILE | Errno::ENFILE | Errno::EDQUOT => {
                Code::ResourceExhausted
            }
            Errno::EPERM | Errno::EACCES | Errno::EBUSY | Errno::EAGAIN => Code::FailedPrecondition,
            Errno::EINVAL | Errno::EFBIG => Code::InvalidArgument,
            _ => Code::Internal,
        }
    }
}

impl GrpcCode for QueryError {
    fn code(&self) -> Code {
        match self {
            Self::PastEnd { .. } => Code::OutOfRange,
            Self::Convert(_)
            | Self::EmptyRange(_)
            | Self::TooMany { .. }
            | Self::Combination(_)
            | Self::Cursor(_)
            | Self::MemfdFlags(_)
            | Self::Window(_)
            | Self::RetainTooLong { .. } => Code::InvalidArgument,
        }
    }
}

impl GrpcCode for TrackingError {
    fn code(&self) -> Code {
        match self {
            Self::BadMapping { .. } => Code::InvalidArgument,
            Self::NotMapped { .. }
            | Self::Busy { .. }
            | Self::OtherAddressSpace(_)
            | Self::Exited(_)
            | Self::Refused(_)
            | Self::Fenced(_)
            | Self::Unsupported(_) => Code::FailedPrecondition,
            Self::NotTrackable(error) => match error.code() {
                Code::ResourceExhausted => Code::ResourceExhausted,
                _ => Code::FailedPrecondition,
            },
            Self::TooManyMappings(_) | Self::Limit(_) | Self::NoMoreGenerations => Code::ResourceExhausted,
            Self::NoMapping { .. } => Code::NotFound,
            Self::NotClosed { .. } => Code::OutOfRange,
            Self::Cursor(error) => match error {
                CursorError::NotFound(_) => Code::NotFound,
                CursorError::Taken(_) => Code::AlreadyExists,
                CursorError::NotYours(_) => Code::PermissionDenied,
                CursorError::NotBegun(_) | CursorError::OtherGeneration { .. } => Code::FailedPrecondition,
                CursorError::TooMany => Code::ResourceExhausted,
            },
            Self::Journal(_) => Code::Internal,
            Self::Forks(_) => Code::ResourceExhausted,
            Self::Scan(error) => error.code(),
            Self::Call(error) => error.code(),
            Self::Syscall(error) => match error.errno {
                // The process exited, or executed another program.
                Errno::ESRCH | Errno::ENOENT => Code::FailedPrecondition,
                _ => error.code(),
            },
        }
    }
}

impl GrpcCode for CallError {
    fn code(&self) -> Code {
        match self {
            // A retry may succeed.
            Self::Blocked | Self::Ended => Code::Unavailable,
            Self::Closed => Code::FailedPrecondition,
            Self::Descriptors => Code::ResourceExhausted,
            Self::Result(_) => Code::Internal,
            Self::Syscall(error) => error.code(),
        }
    }
}

impl GrpcCode for RetainedError {
    fn code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NotFound,
            Self::OtherUser(_) => Code::PermissionDenied,
        }
    }
}

impl GrpcCode for ScanError {
    fn code(&self) -> Code {
        match self {
            Self::Syscall(error) => match error.code() {
                Code::ResourceExhausted => Code::ResourceExhausted,
                _ => Code::Internal,
            },
            Self::Cancelled => Code::Cancelled,
            Self::Run(_) | Self::Walk { .. } | Self::Decode(_) | Self::Panicked => Code::Internal,
        }
    }
}

impl GrpcCode for Arc<ScanError> {
    fn code(&self) -> Code {
        self.as_ref().code()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_each_cause_once() {
        let errno = Errno::ENOSPC;
        let error = FileError::Syscall(SyscallError { call: "memfd_create(\"ram\")".to_owned(), errno });
        let status = status(error);
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(
            status.message(),
            "system call on a file: memfd_create(\"ram\"): ENOSPC: No space left on device"
        );
    }
}
