//! The error type of the write tracker.

use fdmap_proto::units::{Generation, MappingId, PageRange};
use fdmap_sys::SyscallError;
use fdmap_sys::address::AddressRange;
use fdmap_sys::uffd::WRITE_TRACKING_NEEDS;

use super::cursors::CursorError;
use super::journal;
use super::observe::forks;
use super::observe::holder::CallError;
use crate::probe::ScanError;

#[derive(Debug, thiserror::Error)]
pub enum TrackingError {
    #[error("mapping {at} of the request {what}")]
    BadMapping {
        /// Position in the request, from 0.
        at: usize,
        what: &'static str,
    },
    #[error("process {pid} has no shared mapping of pages {pages} of the file that covers {range}")]
    NotMapped { pid: u32, range: AddressRange, pages: PageRange },
    #[error("{range} is already registered with another userfaultfd")]
    Busy {
        range: AddressRange,
        #[source]
        error: SyscallError,
    },
    #[error("the userfaultfd is not of the address space of process {0}")]
    OtherAddressSpace(u32),
    /// The kernel, or this userfaultfd, lacks a required feature.
    #[error("the mapping cannot be tracked")]
    NotTrackable(#[source] SyscallError),
    #[error("the mapping cannot be tracked: {}", WRITE_TRACKING_NEEDS)]
    Unsupported(#[source] SyscallError),
    /// Holds the limit.
    #[error("a file can have at most {0} tracked mappings")]
    TooManyMappings(usize),
    #[error("process {0} has exited")]
    Exited(u32),
    #[error("no tracked mapping {id} of process {pid}")]
    NoMapping { id: MappingId, pid: u32 },
    #[error("the file is fenced: {0}")]
    Fenced(String),
    /// The coverage policy is `Refuse`; holds the writer that is not observed.
    #[error("coverage policy refuse: {0}")]
    Refused(String),
    #[error("generation {generation} is not closed; the last closed generation is {last_closed}")]
    NotClosed { generation: Generation, last_closed: Generation },
    /// What the caller may have no more of.
    #[error("{0}")]
    Limit(String),
    #[error("the file has reached generation {}, the last one", Generation::MAX)]
    NoMoreGenerations,
    #[error(transparent)]
    Cursor(#[from] CursorError),
    #[error(transparent)]
    Forks(#[from] forks::ForksError),
    #[error("access to the journal of the file")]
    Journal(#[from] journal::JournalError),
    #[error("scan of the page states of the file")]
    Scan(#[from] ScanError),
    #[error("system call on the file or on a process that maps it")]
    Syscall(#[from] SyscallError),
    #[error("call on the address space of a tracked process")]
    Call(#[source] CallError),
}

impl From<CallError> for TrackingError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Syscall(error) => Self::Syscall(error),
            other => Self::Call(other),
        }
    }
}
