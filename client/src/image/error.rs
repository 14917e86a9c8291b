//! [`ImageError`].

use fdmap_proto::PageRange;
use fdmap_sys::SyscallError;

use super::format::FormatError;
use super::store::StoreError;
use crate::ClientError;

/// Reason why an image was not written or read.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error(transparent)]
    Store(StoreError),
    /// An object has invalid content.
    #[error("{object}")]
    Format {
        /// Location of the object.
        object: String,
        #[source]
        error: FormatError,
    },
    /// An object is missing or contradicts another one.
    #[error("{object}: {reason}")]
    Invalid {
        /// Location of the object.
        object: String,
        reason: String,
    },
    /// The store has no complete image.
    #[error("{0} has no complete image: inventory.img is missing")]
    Incomplete(String),
    /// The target of a dump is in use.
    #[error("{0} is not empty: it has {1}")]
    NotEmpty(String, String),
    /// A call to the service failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A system call failed.
    #[error(transparent)]
    Syscall(#[from] SyscallError),
    /// A page cannot be read.
    #[error("reading pages {range} of {file}")]
    Read {
        file: String,
        range: PageRange,
        #[source]
        error: SyscallError,
    },
    /// The parent image cannot be the base of this dump.
    #[error("{parent} cannot be the parent: {reason}")]
    Parent {
        /// Location of the parent.
        parent: String,
        reason: String,
    },
    /// The command or cgroup that pauses the writers failed.
    #[error("{what}")]
    Pause {
        /// Operation and operand.
        what: String,
        #[source]
        error: std::io::Error,
    },
    /// A process passed a userfaultfd that cannot be served.
    #[error("hand-off of a userfaultfd: {0}")]
    HandOff(String),
    /// A lazy restore found content that cannot be read.
    #[error("{pages} pages cannot be restored: {first}")]
    Damaged {
        pages: u64,
        /// Reason for the first one.
        first: String,
    },
    /// The request contradicts itself.
    #[error("{0}")]
    Usage(String),
    /// The operation was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl From<StoreError> for ImageError {
    fn from(error: StoreError) -> Self {
        if error.is_cancelled() { Self::Cancelled } else { Self::Store(error) }
    }
}

impl ImageError {
    /// True if a read failed that may succeed later: the store cannot be reached, or is overloaded.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_transient())
    }

    pub(super) fn invalid(object: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { object: object.into(), reason: reason.into() }
    }

    pub(super) fn format(object: impl Into<String>) -> impl FnOnce(FormatError) -> Self {
        let object = object.into();
        move |error| Self::Format { object, error }
    }
}
