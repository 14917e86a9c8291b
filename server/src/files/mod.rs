//! The memfds that the service owns: making and adopting them, what they are now, who may do what, who hears of changes.
//! It refuses to know how page states are read, and nothing here speaks gRPC.

mod caller;
mod ephemeral;
mod events;
mod limits;
mod owned;
mod quota;
mod registry;
mod retained;
mod shared;

pub use caller::Caller;
pub use ephemeral::EphemeralFiles;
pub use events::{FileEvent, Happened};
pub use limits::Limits;
pub use owned::ServiceFile;
pub use quota::{Quota, Share};
pub use registry::{Creation, Registry};
pub use retained::{Kept, RetainedError};
pub use shared::SharedSnapshots;

use fdmap_proto::file::{NameError, Right, Seal};
use fdmap_sys::SyscallError;

use crate::tracking::TrackingError;

/// Why a file of an earlier process cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its generations.
    #[error(transparent)]
    Dirty(#[from] TrackingError),
}

/// Why something could not be done with a file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// No file of that id or name.
    #[error("no {0}")]
    NotFound(String),
    /// The name is taken.
    #[error("a file named {0:?} is there already")]
    NameTaken(String),
    /// The memfd is owned already.
    #[error("the memfd is here already as {0:?}")]
    AlreadyOwned(String),
    /// The name is none.
    #[error("bad name of a file")]
    Name(#[from] NameError),
    /// A size of 0 or beyond the limit, or no multiple of the huge page size.
    #[error("{0}")]
    Size(String),
    /// The host has no hugetlb pages of that size.
    #[error("this host has no hugetlb pages of {asked} bytes; it has {present:?}")]
    NoHugetlb {
        /// Asked for.
        asked: u64,
        /// What there is.
        present: Vec<u64>,
    },
    /// The caller may not.
    #[error("user {uid} has no right to {right} {file}")]
    Denied {
        /// The caller.
        uid: u32,
        /// What for.
        right: Right,
        /// Which file.
        file: String,
    },
    /// Only the owner and administrators may.
    #[error("user {uid} does not own {file}")]
    NotOwner {
        /// The caller.
        uid: u32,
        /// Which file.
        file: String,
    },
    /// Only administrators give files away, or take them in the name of others.
    #[error("user {uid} may not make user {owner} an owner")]
    GivingAway {
        /// The caller.
        uid: u32,
        /// The owner that was asked for.
        owner: u32,
    },
    /// A seal stands in the way.
    #[error("{what} is forbidden by the file's seal {seal}")]
    Sealed {
        /// The call.
        what: String,
        /// The seal.
        seal: Seal,
    },
    /// A writable mapping stands in the way of `F_SEAL_WRITE`.
    #[error("the file cannot be sealed against writing while it is mapped writable")]
    MappedWritable,
    /// What was passed is no memfd that can be owned.
    #[error("the descriptor cannot be adopted: {0}")]
    NotAdoptable(&'static str),
    /// A limit is reached.
    #[error("user {uid} has {limit}")]
    Limit {
        /// The user.
        uid: u32,
        /// What is used up, with its bound.
        limit: String,
    },
    /// A shared snapshot would be larger than any may be.
    #[error("a shared snapshot of {bytes} bytes is more than the limit of {most}: ask for a range")]
    SnapshotSize {
        /// Its bytes.
        bytes: u64,
        /// At most.
        most: u64,
    },
    /// Its generations could not begin.
    #[error("keeping the file for the service's next process")]
    Keeping(#[source] Box<TrackingError>),
    /// A system call failed.
    #[error("a system call on the file failed")]
    Syscall(#[from] SyscallError),
}
