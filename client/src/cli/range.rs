//! Page ranges of the command line.

use fdmap_client::proto::{PageIndex, PageRange};

/// Page range without a known end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialRange {
    /// First page.
    pub start: PageIndex,
    /// Page after the last; `None`: the end of the file.
    pub end: Option<PageIndex>,
}

impl PartialRange {
    /// Completes the range for a file of `file_pages` pages; `None` if it would end before it starts.
    pub fn within(self, file_pages: u64) -> Option<PageRange> {
        PageRange::new(self.start, self.end.unwrap_or(PageIndex(file_pages)))
    }
}
