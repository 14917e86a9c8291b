//! Errors of operations on files.

use fdmap_proto::file::{NameError, OwnedName, Right, Seal};
use fdmap_sys::SyscallError;

use super::inode_calls::InodeCallError;
use crate::tracking::TrackingError;

/// A file of the previous process could not be recovered.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Tracking(#[from] TrackingError),
}

/// An operation on a file failed.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The registry has no file of this id, name or inode, or has one that the caller may not know.
    #[error("{0}")]
    NotFound(String),
    /// The owner has another file of this name.
    #[error("user {} already has a file named {:?}", .0.uid, .0.name)]
    NameTaken(OwnedName),
    /// The registry already owns the inode of the passed descriptor, under this name. `None`: the caller may not know it.
    #[error("the service already owns this inode{}", as_file(.0.as_ref()))]
    AlreadyOwned(Option<OwnedName>),
    #[error("invalid file name")]
    Name(#[from] NameError),
    #[error("invalid reason of a fence")]
    Reason(#[source] NameError),
    #[error("{file} is fenced: {reason}")]
    Fenced { file: String, reason: String },
    /// The size is 0, above the limit, or not a multiple of the huge page size.
    #[error("{0}")]
    Size(String),
    #[error("this host has no hugetlb pages of {requested} bytes; it has sizes {available:?}")]
    NoHugetlb {
        /// Bytes.
        requested: u64,
        /// Bytes, all sizes that the host has.
        available: Vec<u64>,
    },
    #[error("user {uid} lacks the {right} right to {file}")]
    Denied { uid: u32, right: Right, file: String },
    /// The operation requires the owner or an administrator.
    #[error("user {uid} does not own {file}")]
    NotOwner { uid: u32, file: String },
    /// Only an administrator changes the owner, or adopts for another user.
    #[error("user {uid} may not make user {owner} the owner of a file")]
    GivingAway { uid: u32, owner: u32 },
    /// Only administrators may, and users whom the service permits it.
    #[error("user {uid} may not keep files: they end with their last user. `fdmapd --allow-keep` permits it")]
    Keep { uid: u32 },
    #[error("seal {seal} of the file forbids {operation}")]
    Sealed { operation: String, seal: Seal },
    /// `F_SEAL_WRITE` fails with `EBUSY` while a writable mapping exists.
    #[error("cannot add seal write: the file has a writable mapping")]
    MappedWritable,
    /// The passed descriptor is not a memfd or other shared memory that the service can own.
    #[error("cannot adopt the descriptor: {0}")]
    NotAdoptable(&'static str),
    #[error("{subject} {limit}")]
    Limit {
        /// Whose limit it is.
        subject: String,
        /// Current use and the bound.
        limit: String,
    },
    #[error(
        "shared snapshot of {bytes} bytes is more than the limit of {max_bytes}: request a smaller range"
    )]
    SnapshotSize { bytes: u64, max_bytes: u64 },
    /// A change of an inode failed for a reason other than the kernel's answer.
    #[error("cannot {operation}")]
    Inode {
        /// With the file, such as `resize file "ram" of user 5 to 4096 bytes`.
        operation: String,
        #[source]
        error: InodeCallError,
    },
    /// Write tracking of the file could not start, or its record could not be saved.
    #[error("recording the file in its journal")]
    Persist(#[source] Box<TrackingError>),
    #[error("system call on a file")]
    Syscall(#[from] SyscallError),
}

impl FileError {
    /// The error of a call on an inode.
    pub(super) fn of_inode(operation: String, error: InodeCallError) -> Self {
        match error {
            InodeCallError::Syscall(error) => Self::Syscall(error),
            error => Self::Inode { operation, error },
        }
    }
}

fn as_file(name: Option<&OwnedName>) -> String {
    name.map_or(String::new(), |OwnedName { name, uid }| format!(" as file {name:?} of user {uid}"))
}
