//! The semantics of `PAGEMAP_SCAN` as documented by the kernel, applied to known page categories. Pure.

use fdmap_proto::PagemapEntry;
use fdmap_sys::pagemap::{PageRegion, PmScanArg};

/// Offset of [`PmScanArg::walk_end`], the only field that the kernel writes.
pub const WALK_END_OFFSET: u64 = 32;

const IS_WPALLOWED: u64 = 1 << 0;
const IS_WRITTEN: u64 = 1 << 1;
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
/// All categories up to `PAGE_IS_GUARD`. A kernel that lacks one of them returns `EINVAL`.
pub const ALL_CATEGORIES: u64 = (1 << 9) - 1;
/// The categories of every kernel with `PAGEMAP_SCAN`, up to `PAGE_IS_HUGE`.
pub const BASE_CATEGORIES: u64 = (1 << 7) - 1;

const _: () = assert!(std::mem::offset_of!(PmScanArg, walk_end) == 32);

/// Returns the corrected categories of a page of a service file: the kernel's categories if the page table maps the page, else
/// categories made from the page's state in the file. `tracked_by_service` hides the write protection set by the service.
pub const fn corrected_categories(kernel: u64, file: PagemapEntry, tracked_by_service: bool) -> u64 {
    let hidden = if tracked_by_service { IS_WPALLOWED | IS_WRITTEN } else { 0 };
    if kernel & IS_PRESENT != 0 {
        return kernel & !hidden;
    }
    let kept = kernel & !(hidden | IS_PRESENT | IS_SWAPPED | IS_FILE);
    match (file.is_present(), file.is_swap()) {
        (true, _) => kept | IS_PRESENT | IS_FILE,
        (false, true) => kept | IS_SWAPPED | IS_FILE,
        (false, false) => kept,
    }
}

/// Checks whether `argument` selects a page with these categories.
pub const fn selects(argument: &PmScanArg, categories: u64) -> bool {
    let inverted = categories ^ argument.category_inverted;
    inverted & argument.category_mask == argument.category_mask
        && (argument.category_anyof_mask == 0 || inverted & argument.category_anyof_mask != 0)
}

/// The regions reported by a scan, within the limits of its argument.
#[derive(Clone, Debug)]
pub struct ScanOutput {
    page_bytes: u64,
    max_regions: u64,
    max_pages: u64,
    return_mask: u64,
    pages: u64,
    regions: Vec<PageRegion>,
}

/// The scan reached a limit at this address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitReached(pub u64);

impl ScanOutput {
    pub const fn new(argument: &PmScanArg, page_bytes: u64) -> Self {
        let max_pages = if argument.max_pages == 0 { u64::MAX } else { argument.max_pages };
        let (max_regions, return_mask) = (argument.vec_len, argument.return_mask);
        Self { page_bytes, max_regions, max_pages, return_mask, pages: 0, regions: Vec::new() }
    }

    /// Adds selected pages, in ascending order.
    ///
    /// # Errors
    /// [`LimitReached`] if the maximum number of regions or of pages is reached. With a maximum of 0 regions all pages are accepted
    /// and none is reported.
    pub fn push(&mut self, start: u64, end: u64, categories: u64) -> Result<(), LimitReached> {
        if self.max_regions == 0 || start >= end {
            return Ok(());
        }
        let categories = categories & self.return_mask;
        let allowed = self.max_pages - self.pages;
        let count = (end - start) / self.page_bytes;
        let cut = if count > allowed { start + allowed * self.page_bytes } else { end };
        if cut == start {
            return Err(LimitReached(start));
        }
        let full = self.regions_left() == 0;
        match self.regions.last_mut() {
            Some(last) if last.end == start && last.categories == categories => last.end = cut,
            _ if full => return Err(LimitReached(start)),
            _ => self.regions.push(PageRegion { start, end: cut, categories }),
        }
        self.pages += (cut - start) / self.page_bytes;
        if cut < end { Err(LimitReached(cut)) } else { Ok(()) }
    }

    /// Number of regions that can still be added.
    pub fn regions_left(&self) -> u64 {
        self.max_regions.saturating_sub(u64::try_from(self.regions.len()).unwrap_or(u64::MAX))
    }

    /// Number of pages that can still be added; `None` if unlimited.
    pub const fn pages_left(&self) -> Option<u64> {
        if self.max_pages == u64::MAX { None } else { Some(self.max_pages - self.pages) }
    }

    /// Checks whether a limit is reached.
    pub fn is_full(&self) -> bool {
        self.max_regions > 0 && (self.regions_left() == 0 || self.pages_left() == Some(0))
    }

    pub fn regions(&self) -> &[PageRegion] {
        &self.regions
    }
}

#[cfg(test)]
mod tests;
