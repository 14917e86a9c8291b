//! Scans on behalf of requesters: one file, one probe, any number of concurrent requests. This folder owns the
//! descriptor that is scanned and the latest snapshot. It does not know how a probe reads the kernel, or who the
//! requesters are.

mod coalesce;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use fdmap_proto::units::PageSize;

pub use coalesce::ScanCoalescer;

use crate::probe::{Probe, ScanError};

/// The file that is scanned.
#[derive(Debug)]
pub struct ScanSource {
    /// The name of the file with its first owner, for the log.
    pub name: Arc<str>,
    /// A read-only descriptor.
    pub fd: OwnedFd,
    /// Size of a base page.
    pub page_size: PageSize,
    /// log2 of the base pages in a huge page; `None` if the file is not on hugetlbfs.
    pub hugetlb_order: Option<u8>,
}

impl ScanSource {
    /// The current size of the file, in pages.
    ///
    /// # Errors
    /// `fstat` failed.
    pub fn file_pages(&self) -> Result<u64, ScanError> {
        let bytes = fdmap_sys::fd::stat(&self.fd)?.st_size;
        Ok(self.page_size.pages_in(u64::try_from(bytes).unwrap_or(0)))
    }
}

/// Starts scanning files with the selected probe.
#[derive(Clone)]
pub struct PageStateReader {
    probe: Arc<dyn Probe>,
}

impl PageStateReader {
    #[must_use]
    pub fn new(probe: Arc<dyn Probe>) -> Self {
        Self { probe }
    }

    /// The coalescer of a new file. Each file needs exactly one.
    #[must_use]
    pub fn open(&self, source: ScanSource) -> Arc<ScanCoalescer> {
        ScanCoalescer::new(source, Arc::clone(&self.probe))
    }
}
