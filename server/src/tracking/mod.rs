//! Generations of writes to a file: which pages were written in which of them, by whomever, and what is known of that. It owns
//! the tracked mappings, the stamps and the journal; it refuses to know who asks, and reads page states by `probe` alone.

mod asked;
mod audit;
mod calls;
mod children;
mod close;
mod collect;
mod coverage;
mod cursors;
mod data;
mod dirty_rate;
mod event_sources;
mod evidence;
mod forked;
pub mod forks;
mod journal;
mod look;
mod loops;
mod observed;
mod ranges;
mod record;
mod recover;
mod split;
mod stamp;
mod stamps;
mod start;
mod state;
#[cfg(feature = "xarray")]
mod trace;
#[cfg(not(feature = "xarray"))]
#[path = "untraced.rs"]
mod trace;
mod track;
mod tracker;

pub use close::seal_writers;
pub use cursors::{CursorError, CursorUser, FrozenSet};
pub use dirty_rate::{DirtyRate, DirtyRateWindow, pages_per_second};
pub use event_sources::EventSources;
pub use recover::{RecoveredFile, RecoveryError};
pub use stamp::PageStamp;
pub use stamps::{Changed, Counts, StampMap};
pub use start::TrackerOptions;
pub use track::{REQUIRED_FEATURES, Registration, parse_extents};
pub use tracker::{Checkpoint, CheckpointEvent, Tracker, View};

use fdmap_proto::units::{Generation, MappingId, PageRange};
use fdmap_sys::SyscallError;
use fdmap_sys::address::AddressRange;

use crate::probe::ScanError;

/// Why something could not be done about writes.
#[derive(Debug, thiserror::Error)]
pub enum TrackingError {
    /// A mapping that makes no sense.
    #[error("mapping {at} of the request {what}")]
    BadMapping {
        /// Which, from 0 on.
        at: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// Not a mapping of that file.
    #[error("process {pid} does not map pages {pages} of the file at {range}, shared and as a whole")]
    NotMapped {
        /// Whose.
        pid: u32,
        /// Where.
        range: AddressRange,
        /// Which pages were to be there.
        pages: PageRange,
    },
    /// Somebody else's userfaultfd has it.
    #[error("another userfaultfd is registered in {range} already")]
    Busy {
        /// Where.
        range: AddressRange,
        /// What the kernel said.
        #[source]
        error: SyscallError,
    },
    /// This kernel, or this userfaultfd, cannot.
    #[error("the mapping cannot be tracked")]
    NotTrackable(#[source] SyscallError),
    /// A limit.
    #[error("the file has {0} tracked mappings, or would have more")]
    TooManyMappings(usize),
    /// No such mapping.
    #[error("no tracked mapping {id} of process {pid}")]
    NoMapping {
        /// The id.
        id: MappingId,
        /// Whose it should be.
        pid: u32,
    },
    /// The policy says so.
    #[error("not all writers are observed, and the file's policy is to refuse: {0}")]
    Refused(String),
    /// The generation is not closed.
    #[error("generation {asked} is not closed; the last one that is is {closed}")]
    NotClosed {
        /// Asked for.
        asked: Generation,
        /// The last closed one.
        closed: Generation,
    },
    /// All numbers are used.
    #[error("the file has had as many generations as there are numbers: {}", Generation::MAX)]
    NoMoreGenerations,
    /// A cursor.
    #[error(transparent)]
    Cursor(#[from] CursorError),
    /// Nobody would read the forks of the client.
    #[error(transparent)]
    Forks(#[from] forks::ForksError),
    /// The journal.
    #[error("the journal of the file")]
    Journal(#[from] journal::JournalError),
    /// The probe.
    #[error("reading the states of its pages")]
    Scan(#[from] ScanError),
    /// A system call.
    #[error("a system call on the file or on a process that maps it")]
    Syscall(#[from] SyscallError),
}
