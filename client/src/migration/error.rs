//! [`MigrationError`].

use std::time::Duration;

use fdmap_proto::PageRange;
use tonic::{Code, Status};

use crate::ClientError;
use crate::error::RefusalCode;
use crate::image::ImageError;

/// Reason why a file was not migrated.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// Reading the file, or the pause of its writers, failed.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A call to the service of this host failed, or the destination is not reached.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The destination refused the file, and keeps no part of it.
    #[error("{destination} refused the file: {reason}")]
    Refused { destination: String, reason: String },
    /// The connection broke and could not be opened again in time. The destination drops what it has.
    #[error("lost the connection to {destination} for {after:?}: {reason}")]
    Lost { destination: String, after: Duration, reason: String },
    /// The connection broke after the destination was asked to complete the file. The source stays fenced, and the writers paused.
    #[error(
        "lost the connection to {destination} after it was asked to complete the file: {reason}. It may have the file: look there. \
         The file here stays fenced, and its writers paused: `fdmap fence --remove` ends the fence"
    )]
    Unknown { destination: String, reason: String },
    /// The fence of the file could not be ended after an error, or it is not known.
    #[error("{0}. The file here stays fenced, perhaps: `fdmap fence --remove` ends the fence")]
    StaysFenced(#[source] Box<Self>),
    /// Writers wrote after they were paused.
    #[error("pages {0} were written, or pinned for DMA, after the writers were paused")]
    NotPaused(PageRange),
    /// The file was changed otherwise than by writes.
    #[error("the {what} of {file} changed meanwhile")]
    Changed { file: String, what: &'static str },
    /// Serving the destination failed.
    #[error("{what}")]
    Serve {
        /// Operation and operand.
        what: String,
        #[source]
        error: std::io::Error,
    },
    /// The source ended the migration, or did not come back in time.
    #[error("{0}")]
    Ended(String),
}

/// Why a step is refused.
#[derive(Debug)]
pub(super) struct Rejected(pub(super) Status);

impl From<Status> for Rejected {
    fn from(status: Status) -> Self {
        Self(status)
    }
}

impl From<ImageError> for Rejected {
    fn from(error: ImageError) -> Self {
        let message = fdmap_proto::error_chain(&error);
        let status = match &error {
            ImageError::Client(ClientError::Refused { code, .. }) => Status::new(code_of(*code), message),
            ImageError::Syscall(error) if is_full(error.errno) => Status::resource_exhausted(message),
            _ => Status::aborted(message),
        };
        Self(status)
    }
}

/// The code of a refusal by the service at the destination.
fn code_of(refusal: RefusalCode) -> Code {
    match refusal {
        RefusalCode::InvalidArgument | RefusalCode::OutOfRange => Code::InvalidArgument,
        RefusalCode::AlreadyExists => Code::AlreadyExists,
        RefusalCode::PermissionDenied => Code::PermissionDenied,
        RefusalCode::ResourceExhausted => Code::ResourceExhausted,
        _ => Code::FailedPrecondition,
    }
}

fn is_full(errno: fdmap_sys::Errno) -> bool {
    use fdmap_sys::Errno;
    matches!(errno, Errno::ENOSPC | Errno::ENOMEM | Errno::EDQUOT | Errno::EFBIG)
}
