//! What is asked about pages: requests checked and bounded, and answers cut into messages. No I/O; it refuses to know how
//! states are read or who is asking.

mod batches;
mod changes;
mod request;

pub use batches::{ChangeBatches, ScanBatches, lookup_pages, summary_message};
pub use changes::{Asked, ChangedBatches, ChangesQuery, cursor_name, rate_window};
pub use request::{DiffQuery, Encoding, LookupQuery, ScanQuery, SummaryQuery};

use std::time::Duration;

use fdmap_proto::convert::ConvertError;
use fdmap_proto::tracking::CursorNameError;
use fdmap_proto::units::{PageIndex, PageRange};

/// Why a request cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// It has no meaning.
    #[error("the request has no meaning")]
    Convert(#[from] ConvertError),
    /// A range without pages.
    #[error("pages {0} are none")]
    EmptyRange(PageRange),
    /// Pages that the file does not have.
    #[error("{asked} lie past the end of the file at page {file_pages}")]
    PastEnd {
        /// What was asked for.
        asked: String,
        /// Pages of the file.
        file_pages: u64,
    },
    /// More than the service does at once.
    #[error("{what}: {asked} are more than the limit of {most}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// Asked for.
        asked: u64,
        /// At most.
        most: u64,
    },
    /// Flags of `memfd_create` that the service does not take.
    #[error(
        "flags {0:#x} are not all of MFD_ALLOW_SEALING, MFD_HUGETLB with a page size, MFD_NOEXEC_SEAL and MFD_EXEC"
    )]
    MemfdFlags(u32),
    /// Things that do not go together.
    #[error("{0}")]
    Combination(&'static str),
    /// Not a name of a cursor.
    #[error("bad name of a cursor")]
    Cursor(#[source] CursorNameError),
    /// Too short or too long.
    #[error("a window of {0:?} is not between 1 ms and 1 minute")]
    Window(Duration),
    /// Longer than the service keeps snapshots.
    #[error("a snapshot is kept for at most {most:?}, not for {asked:?}")]
    KeepTooLong {
        /// Asked for.
        asked: Duration,
        /// At most.
        most: Duration,
    },
}

/// The pages that are asked for: all of the file, or a range that lies in it.
///
/// # Errors
/// [`QueryError::EmptyRange`] or [`QueryError::PastEnd`]
pub fn resolve_range(asked: Option<PageRange>, file_pages: u64) -> Result<PageRange, QueryError> {
    match asked {
        None => Ok(PageRange::first(file_pages)),
        Some(range) if range.is_empty() => Err(QueryError::EmptyRange(range)),
        Some(range) if range.end() > PageIndex(file_pages) => {
            Err(QueryError::PastEnd { asked: format!("pages {range}"), file_pages })
        }
        Some(range) => Ok(range),
    }
}
