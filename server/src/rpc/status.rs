//! The only place where an error becomes a gRPC status.

use fdmap_proto::error_chain;
use std::error::Error;
use std::sync::Arc;

use fdmap_sys::{Errno, SyscallError};
use tonic::{Code, Status};

use crate::files::{FileError, RetainedError};
use crate::probe::ScanError;
use crate::query::QueryError;
use crate::tracking::{CursorError, TrackingError};

/// An error on its way to a status.
#[derive(Debug)]
pub(crate) struct Failure<E>(pub(crate) E);

/// The status code of an error.
pub(crate) trait Coded {
    /// As gRPC defines the codes.
    fn code(&self) -> Code;
}

impl Coded for FileError {
    fn code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NotFound,
            Self::NameTaken(_) | Self::AlreadyOwned(_) => Code::AlreadyExists,
            Self::Name(_) | Self::Size(_) => Code::InvalidArgument,
            Self::NoHugetlb { asked, .. } if !asked.is_power_of_two() => Code::InvalidArgument,
            Self::NoHugetlb { .. } | Self::Sealed { .. } | Self::MappedWritable => Code::FailedPrecondition,
            Self::NotAdoptable(_) => Code::FailedPrecondition,
            Self::Denied { .. } | Self::NotOwner { .. } | Self::GivingAway { .. } => Code::PermissionDenied,
            Self::Limit { .. } | Self::SnapshotSize { .. } => Code::ResourceExhausted,
            Self::Keeping(error) => error.code(),
            Self::Syscall(error) => error.code(),
        }
    }
}

impl Coded for SyscallError {
    fn code(&self) -> Code {
        match self.errno {
            Errno::ENOMEM | Errno::ENOSPC | Errno::EMFILE | Errno::ENFILE | Errno::EDQUOT => {
                Code::ResourceExhausted
            }
            Errno::EPERM | Errno::EACCES | Errno::EBUSY => Code::FailedPrecondition,
            Errno::EINVAL | Errno::EFBIG => Code::InvalidArgument,
            _ => Code::Internal,
        }
    }
}

impl Coded for QueryError {
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
            | Self::KeepTooLong { .. } => Code::InvalidArgument,
        }
    }
}

impl Coded for TrackingError {
    fn code(&self) -> Code {
        match self {
            Self::BadMapping { .. } => Code::InvalidArgument,
            Self::NotMapped { .. } | Self::Busy { .. } | Self::Refused(_) => Code::FailedPrecondition,
            Self::NotTrackable(error) => match error.code() {
                Code::ResourceExhausted => Code::ResourceExhausted,
                _ => Code::FailedPrecondition,
            },
            Self::TooManyMappings(_) | Self::NoMoreGenerations => Code::ResourceExhausted,
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
            Self::Scan(error) => scan_code(error),
            Self::Syscall(error) => match error.errno {
                // The process has gone, or another program runs in it.
                Errno::ESRCH | Errno::ENOENT => Code::FailedPrecondition,
                _ => error.code(),
            },
        }
    }
}

impl Coded for RetainedError {
    fn code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NotFound,
            Self::NotYours(_) => Code::PermissionDenied,
        }
    }
}

impl Coded for Arc<ScanError> {
    fn code(&self) -> Code {
        scan_code(self)
    }
}

fn scan_code(error: &ScanError) -> Code {
    match error {
        ScanError::Syscall(error) => match error.code() {
            Code::ResourceExhausted => Code::ResourceExhausted,
            _ => Code::Internal,
        },
        ScanError::Cancelled => Code::Cancelled,
        ScanError::Run(_) | ScanError::Walk { .. } | ScanError::Decode(_) | ScanError::Panicked => {
            Code::Internal
        }
    }
}

impl<E: Coded + Error> From<Failure<E>> for Status {
    fn from(Failure(error): Failure<E>) -> Self {
        Self::new(error.code(), error_chain(&error))
    }
}

/// For `?` in handlers.
pub(super) fn status<E>(error: E) -> Status
where
    Status: From<Failure<E>>,
{
    Failure(error).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_names_each_cause_once() {
        let errno = Errno::ENOSPC;
        let error = FileError::Syscall(SyscallError { call: "memfd_create(\"ram\")".to_owned(), errno });
        let status = Status::from(Failure(error));
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(
            status.message(),
            "a system call on the file failed: memfd_create(\"ram\"): ENOSPC: No space left on device"
        );
    }
}
