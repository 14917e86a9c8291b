//! Errors of packets and operations on the fdpass socket.

use std::sync::Arc;

use fdmap_proto::convert::ConvertError;
use fdmap_proto::{FDPASS_VERSION, MAX_FDPASS_MESSAGE_BYTES};
use fdmap_sys::SyscallError;
use tonic::Code;

use crate::blocking::BlockingError;
use crate::files::FileError;
use crate::probe::ScanError;
use crate::query::QueryError;
use crate::status::GrpcCode;
use crate::tracking::TrackingError;

/// Length of `Hello.client`.
pub(super) const MAX_CLIENT_NAME_BYTES: usize = 64;

/// A packet violates the protocol, or its request is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    #[error("message is longer than {MAX_FDPASS_MESSAGE_BYTES} bytes")]
    TooLong,
    /// The packet is not a protobuf `FdpassRequest`.
    #[error("cannot decode the message as FdpassRequest: {0}")]
    Undecodable(String),
    /// The request has no operation, or one of a newer version of the protocol.
    #[error("the request has no operation of protocol version {FDPASS_VERSION}")]
    NoOperation,
    #[error("{operation} takes {expected} descriptors, but the packet carries {got}")]
    Descriptors { operation: &'static str, expected: usize, got: usize },
    /// `MSG_CTRUNC`: the kernel dropped descriptors of the packet.
    #[error("descriptors of the packet were lost: the service has too many open")]
    DescriptorsLost,
    #[error("the first request of a session must be Hello")]
    NoHello,
    #[error("the session has already received Hello")]
    SecondHello,
    #[error("invalid protocol version {0}")]
    Version(u32),
    #[error("client name of {0} bytes is longer than {MAX_CLIENT_NAME_BYTES}")]
    ClientName(usize),
    /// The operation is invalid. The session continues.
    #[error(transparent)]
    Invalid(#[from] QueryError),
}

impl ProtocolError {
    /// True if the service closes the session after the error.
    #[must_use]
    pub const fn is_fatal(&self) -> bool {
        !matches!(self, Self::Invalid(_))
    }
}

impl From<ConvertError> for ProtocolError {
    fn from(error: ConvertError) -> Self {
        Self::Invalid(error.into())
    }
}

impl GrpcCode for ProtocolError {
    fn code(&self) -> Code {
        match self {
            Self::Invalid(error) => error.code(),
            Self::DescriptorsLost => Code::ResourceExhausted,
            Self::NoOperation => Code::Unimplemented,
            Self::TooLong
            | Self::Undecodable(_)
            | Self::Descriptors { .. }
            | Self::NoHello
            | Self::SecondHello
            | Self::Version(_)
            | Self::ClientName(_) => Code::InvalidArgument,
        }
    }
}

/// An operation failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum OperationError {
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    #[error(transparent)]
    Query(#[from] QueryError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Scan(#[from] Arc<ScanError>),
    #[error(transparent)]
    Tracking(#[from] TrackingError),
    #[error(transparent)]
    Blocking(#[from] BlockingError),
    /// A passed descriptor has the wrong type.
    #[error("checking a passed descriptor")]
    Descriptor(#[source] SyscallError),
    /// Found by the receiver.
    #[error("a passed descriptor is no userfaultfd, pagemap or maps")]
    ForeignDescriptor,
    #[error("process {0} not found")]
    NoProcess(u32, #[source] SyscallError),
    #[error("the process that connected has exited, or is in another pid namespace: it has no mappings here")]
    PeerGone,
    /// The session ends: its next packet would bring further ones.
    #[error(
        "too many userfaultfds of the user, or of all users, are not closed, because processes hold the locks of their address \
         spaces (mmap_lock)"
    )]
    Closing,
    #[error(
        "too many userfaultfds of user {0}, or of all users, are not closed, because processes hold the locks of their address \
         spaces (mmap_lock)"
    )]
    TargetClosing(u32),
    #[error("checking the process that connected")]
    Peer(#[source] SyscallError),
    /// Whether the process exists is not for the caller to know.
    #[error("user {uid} has no process {pid} whose mappings may be tracked")]
    Foreign { pid: u32, uid: u32 },
}

impl OperationError {
    pub(super) const fn is_fatal(&self) -> bool {
        match self {
            Self::Protocol(error) => error.is_fatal(),
            Self::Closing => true,
            _ => false,
        }
    }
}

impl From<ScanError> for OperationError {
    fn from(error: ScanError) -> Self {
        Self::Scan(Arc::new(error))
    }
}

impl GrpcCode for OperationError {
    fn code(&self) -> Code {
        match self {
            Self::Protocol(error) => error.code(),
            Self::Query(error) => error.code(),
            Self::File(error) => error.code(),
            Self::Scan(error) => error.code(),
            Self::Tracking(error) => error.code(),
            Self::Blocking(error) => error.code(),
            Self::Descriptor(_) | Self::ForeignDescriptor => Code::InvalidArgument,
            Self::NoProcess(..) => Code::NotFound,
            Self::PeerGone => Code::FailedPrecondition,
            Self::Peer(_) => Code::Internal,
            Self::Foreign { .. } => Code::PermissionDenied,
            Self::Closing | Self::TargetClosing(_) => Code::ResourceExhausted,
        }
    }
}
