//! [`ConvertError`].

use crate::file::NameError;
use crate::tracking::CursorNameError;

/// Reason why a message is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// A required field is absent.
    #[error("field {0} is missing")]
    Missing(&'static str),
    /// An enum field is unspecified, or has a value that this version does not know.
    #[error("unknown value {value} of enum {field}")]
    UnknownEnum {
        /// Name of the enum.
        field: &'static str,
        /// Value on the wire.
        value: i32,
    },
    /// An id is 0.
    #[error("{0} is 0")]
    ZeroId(&'static str),
    /// A file name is invalid.
    #[error("invalid file name")]
    Name(#[from] NameError),
    /// A page token was not returned by a previous request.
    #[error("invalid page_token")]
    PageToken,
    /// A page range ends before it starts.
    #[error("page range {start}..{end} ends before it starts")]
    Backwards {
        /// First page.
        start: u64,
        /// Page after the last.
        end: u64,
    },
    /// A duration or timestamp is negative, not normalized, or out of range.
    #[error("invalid {field}: {seconds} s and {nanos} ns")]
    Duration {
        /// Name of the field.
        field: &'static str,
        /// Seconds on the wire.
        seconds: i64,
        /// Nanoseconds on the wire.
        nanos: i32,
    },
    /// A number is out of range.
    #[error("{field} {value} is out of range")]
    Number {
        /// Name of the field.
        field: &'static str,
        /// Value on the wire.
        value: u64,
    },
    /// A rate is negative or not finite.
    #[error("{0} is not a valid rate")]
    Rate(&'static str),
    /// A hugetlb page size without hugetlb backing, or the reverse.
    #[error("hugetlb_page_size {0} does not match the backing")]
    HugetlbSize(u64),
    /// A column of a batch has the wrong length.
    #[error("column {column} has {got} elements for {runs} runs")]
    Columns {
        /// Name of the column.
        column: &'static str,
        /// Elements in the column.
        got: usize,
        /// Required elements.
        runs: usize,
    },
    /// A run is empty, or its page indexes overflow.
    #[error("invalid run: {length} pages, {skip} pages after page {start}")]
    Run {
        /// End of the previous run.
        start: u64,
        /// Pages between the runs.
        skip: u64,
        /// Pages in the run.
        length: u64,
    },
    /// A cursor name is invalid.
    #[error("invalid cursor name")]
    Cursor(#[from] CursorNameError),
    /// Exact coverage with gaps.
    #[error("coverage is exact but has {0} gaps")]
    ExactWithGaps(usize),
    /// An address range is empty or overflows.
    #[error("invalid mapping of {length_bytes} bytes at address {address:#x}")]
    Addresses {
        /// Start address.
        address: u64,
        /// Length in bytes.
        length_bytes: u64,
    },
    /// A word is not a swap slot.
    #[error("invalid swap slot {0:#x}")]
    Slot(u64),
}
