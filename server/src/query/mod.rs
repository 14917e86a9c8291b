//! Requests about pages: validation, bounds, and the division of an answer into messages. No I/O. It refuses to know how page
//! states are read and who the caller is.

mod batches;
mod changes;
mod density;
mod error;
mod request;
mod slots;

pub use batches::{DiffBatches, ScanBatches, lookup_pages, summary_message};
pub use changes::{ChangedBatches, ChangesQuery, ChangesStart, cursor_name, dirty_rate_window};
pub use error::QueryError;
pub use request::{DiffQuery, Encoding, LookupQuery, ScanQuery, SummaryQuery};
pub use slots::{settled_slots, slot_query};

use fdmap_proto::units::{PageIndex, PageRange};

/// Returns the requested pages: `None` selects all pages of the file, and a range must lie in it.
///
/// # Errors
/// [`QueryError::EmptyRange`] or [`QueryError::PastEnd`]
pub fn resolve_range(requested: Option<PageRange>, file_pages: u64) -> Result<PageRange, QueryError> {
    match requested {
        None => Ok(PageRange::first(file_pages)),
        Some(range) if range.is_empty() => Err(QueryError::EmptyRange(range)),
        Some(range) if range.end() > PageIndex(file_pages) => {
            Err(QueryError::PastEnd { requested: format!("page range {range}"), file_pages })
        }
        Some(range) => Ok(range),
    }
}
