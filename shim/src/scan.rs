//! `PAGEMAP_SCAN` as the kernel documents it, over what is known of pages. Pure.

use fdmap_proto::PagemapEntry;

/// `struct pm_scan_arg` of `linux/fs.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Argument {
    pub size: u64,
    pub flags: u64,
    pub start: u64,
    pub end: u64,
    pub walk_end: u64,
    pub vec: u64,
    pub vec_len: u64,
    pub max_pages: u64,
    pub category_inverted: u64,
    pub category_mask: u64,
    pub category_anyof_mask: u64,
    pub return_mask: u64,
}

/// `struct page_region` of `linux/fs.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Region {
    pub start: u64,
    pub end: u64,
    pub categories: u64,
}

/// Offset of `walk_end`: all that the kernel writes of the argument.
pub const WALK_END_AT: u64 = 32;

/// `PAGEMAP_SCAN`
pub const REQUEST: u64 = 0xc060_6610;
/// `PM_SCAN_WP_MATCHING`
pub const WP_MATCHING: u64 = 1 << 0;
/// `PM_SCAN_CHECK_WPASYNC`
pub const CHECK_WPASYNC: u64 = 1 << 1;

const IS_WPALLOWED: u64 = 1 << 0;
const IS_WRITTEN: u64 = 1 << 1;
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
/// Up to `PAGE_IS_GUARD`. Kernels that do not have the last ones refuse them.
pub const CATEGORIES: u64 = (1 << 9) - 1;
/// Those that every kernel with `PAGEMAP_SCAN` has: up to `PAGE_IS_HUGE`.
pub const FIRST_CATEGORIES: u64 = (1 << 7) - 1;

const _: () = assert!(size_of::<Argument>() == 96);
const _: () = assert!(std::mem::offset_of!(Argument, walk_end) == 32);
const _: () = assert!(size_of::<Region>() == 24);

/// The categories of a service file's page: what the kernel says, unless the page table has no page there; then what the
/// file says. `ours`: it is protected by the service, of which the program is to see nothing.
pub const fn categories(kernel: u64, file: PagemapEntry, ours: bool) -> u64 {
    let hidden = if ours { IS_WPALLOWED | IS_WRITTEN } else { 0 };
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

impl Argument {
    /// Whether a page of these categories is asked for.
    pub const fn wants(&self, categories: u64) -> bool {
        let turned = categories ^ self.category_inverted;
        turned & self.category_mask == self.category_mask
            && (self.category_anyof_mask == 0 || turned & self.category_anyof_mask != 0)
    }
}

/// What a scan found, within what the caller has room for.
#[derive(Clone, Debug)]
pub struct Found {
    page_bytes: u64,
    room: u64,
    most_pages: u64,
    return_mask: u64,
    pages: u64,
    regions: Vec<Region>,
}

/// The scan ends early, here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped(pub u64);

impl Found {
    /// Nothing yet.
    pub const fn new(argument: &Argument, page_bytes: u64) -> Self {
        let most_pages = if argument.max_pages == 0 { u64::MAX } else { argument.max_pages };
        let (room, return_mask) = (argument.vec_len, argument.return_mask);
        Self { page_bytes, room, most_pages, return_mask, pages: 0, regions: Vec::new() }
    }

    /// Takes pages that are asked for, in ascending order.
    ///
    /// # Errors
    /// [`Stopped`] where there is no room for more, or there were as many pages as wanted. Where no regions are wanted at all
    /// everything is taken, and nothing told.
    pub fn push(&mut self, start: u64, end: u64, categories: u64) -> Result<(), Stopped> {
        if self.room == 0 || start >= end {
            return Ok(());
        }
        let categories = categories & self.return_mask;
        let allowed = self.most_pages - self.pages;
        let wanted = (end - start) / self.page_bytes;
        let cut = if wanted > allowed { start + allowed * self.page_bytes } else { end };
        if cut == start {
            return Err(Stopped(start));
        }
        let full = self.room_left() == 0;
        match self.regions.last_mut() {
            Some(last) if last.end == start && last.categories == categories => last.end = cut,
            _ if full => return Err(Stopped(start)),
            _ => self.regions.push(Region { start, end: cut, categories }),
        }
        self.pages += (cut - start) / self.page_bytes;
        if cut < end { Err(Stopped(cut)) } else { Ok(()) }
    }

    /// Regions that can be added still.
    pub fn room_left(&self) -> u64 {
        self.room.saturating_sub(u64::try_from(self.regions.len()).unwrap_or(u64::MAX))
    }

    /// Pages that can be added still; `None`: any number.
    pub const fn pages_left(&self) -> Option<u64> {
        if self.most_pages == u64::MAX { None } else { Some(self.most_pages - self.pages) }
    }

    /// True if nothing more can be told, though it was asked for.
    pub fn is_full(&self) -> bool {
        self.room > 0 && (self.room_left() == 0 || self.pages_left() == Some(0))
    }

    /// What was found.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }
}

#[cfg(test)]
mod tests;
