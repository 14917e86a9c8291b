//! Lazy restore: memory is usable at once, and its pages are filled from an image, on first access and by a stream of all others.
//!
//! ```text
//!   mapping registered with userfaultfd for missing pages
//!      |
//!      |  page fault --------------> fill the page and its neighbours            (first)
//!      |  MADV_DONTNEED, MADV_REMOVE -> the pages are zero, no content is copied
//!      |                             stream: pages that were in memory at the dump, then the others
//!      v
//!   all content was copied -> unregister: absent pages are holes                 -> complete
//!   content cannot be read -> its pages raise SIGBUS, all others are served until the process ends
//!   the store is not reached -> its pages wait: the read is repeated
//!   cancelled, error       -> pages without content raise SIGBUS, unregister     -> failed
//! ```
//!
//! A page fault for missing pages belongs to one mapping, not to the file: read(2) and other mappings of a shared file find zero where a page
//! is absent. So memory is restored lazily in two ways only:
//!
//! - [`LazyFile`]: a new file of the service. Until it is complete, the service opens it for administrators only, and this process
//!   accesses it by the registered mapping.
//! - [`accept`] and [`serve`]: private memory of another process, which passes its userfaultfd as Firecracker does.
//!
//! Refused: a shared mapping of another process. UFFD_EVENT_REMOVE does not distinguish MADV_DONTNEED, which keeps the content of a file, from
//! MADV_REMOVE, which drops it.

mod accept;
mod changes;
mod content;
mod faults;
mod file;
mod fill;
mod filler;
mod handoff;
mod lacking;
mod order;
mod pages;
mod reads;
mod refusal;
mod spaces;

use std::time::Duration;

use serde::Serialize;

use super::error::ImageError;

pub use accept::{HandOff, accept};
pub use file::{LazyFile, single_file};
pub use handoff::{parse_mappings, serve};

/// A mapping that is registered for missing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LazyRegion {
    /// Start address in the process, a multiple of the page size.
    pub address: u64,
    /// Length, a multiple of the page size.
    pub bytes: u64,
    /// Offset in the file of the image, a multiple of the page size.
    pub offset: u64,
    /// Page size of the mapping.
    pub page_bytes: u64,
}

/// How pages were filled, in pages of the mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LazyCounts {
    /// Page faults that were served.
    pub faults: u64,
    /// Pages with content that were copied for a page fault, neighbours included.
    pub fault_pages: u64,
    /// Pages with content that were copied by the stream.
    pub streamed_pages: u64,
    /// Page faults of pages without data.
    pub zero_pages: u64,
    /// Pages that existed before they were copied.
    pub existing_pages: u64,
    /// Pages that the process removed before they were copied.
    pub removed_pages: u64,
    /// Pages whose content could not be read.
    pub damaged_pages: u64,
    /// Reads that failed and were repeated.
    pub repeated_reads: u64,
}

/// Why content could not be read.
#[derive(Clone, Copy, Debug)]
pub enum LazyNotice<'a> {
    /// A chunk cannot be read: accesses to its pages raise SIGBUS.
    Damaged(&'a ImageError),
    /// The store failed for a moment. The read is repeated until it succeeds, and accesses to its pages wait. Reported now and then.
    Repeated(&'a ImageError),
}

/// How a lazy restore ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LazyEnd {
    /// All content was copied.
    Complete,
    /// The process ended before.
    ProcessEnded,
}

/// What a lazy restore has done.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LazyReport {
    pub end: LazyEnd,
    pub counts: LazyCounts,
    #[serde(skip)]
    pub elapsed: Duration,
}
