//! Errors of request validation.

use std::time::Duration;

use fdmap_proto::convert::ConvertError;
use fdmap_proto::tracking::CursorNameError;
use fdmap_proto::units::PageRange;

/// A request is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// A field is missing or has an invalid value.
    #[error("invalid request")]
    Convert(#[from] ConvertError),
    #[error("empty page range {0}")]
    EmptyRange(PageRange),
    #[error("{requested} is past the end of the file, which has {file_pages} pages")]
    PastEnd { requested: String, file_pages: u64 },
    /// The request exceeds a limit of the service.
    #[error("{resource}: {requested} is more than the limit of {limit}")]
    TooMany { resource: &'static str, requested: u64, limit: u64 },
    #[error(
        "memfd_create flags {0:#x}: only MFD_ALLOW_SEALING, MFD_HUGETLB with a page size, MFD_NOEXEC_SEAL and MFD_EXEC are \
         supported"
    )]
    MemfdFlags(u32),
    /// Two fields exclude each other.
    #[error("{0}")]
    Combination(&'static str),
    #[error("invalid cursor name")]
    Cursor(#[source] CursorNameError),
    #[error("window of {0:?} is not between 1 ms and 1 minute")]
    Window(Duration),
    #[error("retain_for of {requested:?} is more than the limit of {limit:?}")]
    RetainTooLong { requested: Duration, limit: Duration },
}
