//! Mappings that are tracked by userfaultfd as the service tracks them, but without the service, for tests of the
//! kernel.

use std::os::fd::{AsFd as _, OwnedFd};

use fdmap_sys::address::AddressRange;
use fdmap_sys::mapping::{Advice, SharedMapping};
use fdmap_sys::pagemap::{PageRegion, Pagemap, ScanFlags};
use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_sys::uffd::{UffdEvent, UffdFeatures, Userfaultfd};
use fdmap_sys::{SyscallError, fd, memfd};

use crate::HarnessResult;

/// Size of a base page in bytes.
pub const PAGE: u64 = 4096;

/// Size of a huge page in bytes.
pub const HUGE: u64 = 2 << 20;

/// The features that asynchronous write protection of files requires.
#[must_use]
pub fn asynchronous() -> UffdFeatures {
    UffdFeatures::WP_ASYNC | UffdFeatures::WP_UNPOPULATED | UffdFeatures::WP_HUGETLBFS_SHMEM
}

/// The descriptors that report writes to a range of an address space.
#[derive(Debug)]
pub struct WpTracker {
    /// The userfaultfd of the address space.
    pub uffd: Userfaultfd,
    /// The pagemap of the address space.
    pub pagemap: Pagemap,
    /// The tracked range.
    pub range: AddressRange,
    /// Size of one reported page in bytes.
    pub unit: u64,
}

const ARM: ScanFlags = ScanFlags::WP_MATCHING.union(ScanFlags::CHECK_WPASYNC);
const PEEK: ScanFlags = ScanFlags::CHECK_WPASYNC;

impl WpTracker {
    /// Registers a range without protecting it.
    ///
    /// # Errors
    /// [`crate::HarnessError::Syscall`]
    pub fn new(
        uffd: Userfaultfd,
        pagemap: Pagemap,
        range: AddressRange,
        unit: u64,
        features: UffdFeatures,
    ) -> HarnessResult<Self> {
        uffd.api(features)?;
        uffd.register_wp(range)?;
        Ok(Self { uffd, pagemap, range, unit })
    }

    /// Protects all pages, including those that do not exist yet.
    ///
    /// # Errors
    /// `UFFDIO_WRITEPROTECT`
    pub fn arm(&self) -> Result<(), SyscallError> {
        self.uffd.write_protect(self.range, true)
    }

    /// The numbers of the pages written since they were last protected. Protects them again.
    ///
    /// # Errors
    /// `PAGEMAP_SCAN`
    pub fn harvest(&self) -> Result<Vec<u64>, SyscallError> {
        self.scan(ARM)
    }

    /// Like [`harvest`](Self::harvest), but does not protect the pages.
    ///
    /// # Errors
    /// `PAGEMAP_SCAN`
    pub fn peek(&self) -> Result<Vec<u64>, SyscallError> {
        self.scan(PEEK)
    }

    /// Like [`peek`](Self::peek), but does not check whether the range is tracked.
    ///
    /// # Errors
    /// `PAGEMAP_SCAN`
    pub fn peek_unchecked(&self) -> Result<Vec<u64>, SyscallError> {
        self.scan(ScanFlags::empty())
    }

    fn scan(&self, flags: ScanFlags) -> Result<Vec<u64>, SyscallError> {
        let mut pages = Vec::new();
        let mut regions = [PageRegion::default(); 64];
        let mut rest = self.range;
        while !rest.is_empty() {
            let scanned = self.pagemap.scan(rest, flags, &mut regions)?;
            for region in &regions[..scanned.count] {
                let page = |address: u64| (address - self.range.start) / self.unit;
                pages.extend(page(region.start)..page(region.end));
            }
            rest.start = scanned.walk_end;
        }
        Ok(pages)
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// `read`
    pub fn event(&self) -> Result<UffdEvent, SyscallError> {
        loop {
            if let Some(event) = self.uffd.read_event()? {
                return Ok(event);
            }
            std::thread::yield_now();
        }
    }
}

/// The backing of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// shmem in small pages
    Shmem,
    /// shmem in transparent huge pages, where [`crate::hugepages::shmem_thp`] is set
    Thp,
    /// hugetlb pages of 2 MiB
    Hugetlb,
}

/// A memfd that is mapped and tracked in this process.
#[derive(Debug)]
pub struct TrackedMemfd {
    pub tracker: WpTracker,
    /// The mapping of the file.
    pub mapping: SharedMapping,
    /// The file, reopened for reading and writing.
    pub file: OwnedFd,
    /// The descriptor of `memfd_create`.
    pub original: OwnedFd,
}

impl TrackedMemfd {
    /// Maps and registers a new file of `pages` pages without protecting it. The pages have 4 KiB for
    /// [`PageKind::Shmem`], otherwise 2 MiB.
    ///
    /// # Errors
    /// [`crate::HarnessError::Syscall`]
    pub fn new(kind: PageKind, pages: u64) -> HarnessResult<Self> {
        Self::with(kind, pages, Userfaultfd::create()?, UffdFeatures::empty())
    }

    /// Like [`new`](Self::new), with a given userfaultfd and additional features.
    ///
    /// # Errors
    /// [`crate::HarnessError::Syscall`]
    pub fn with(kind: PageKind, pages: u64, uffd: Userfaultfd, more: UffdFeatures) -> HarnessResult<Self> {
        let bytes = pages * if kind == PageKind::Shmem { PAGE } else { HUGE };
        let original = memfd::create("tracked", (kind == PageKind::Hugetlb).then_some(HUGE))?;
        memfd::resize(original.as_fd(), bytes)?;
        let file = fd::reopen(original.as_fd(), true)?;
        let mapping =
            SharedMapping::shared_aligned(&file, usize::try_from(bytes).unwrap_or(0), 2 << 20, true)?;
        if kind == PageKind::Thp {
            mapping.advise(Advice::HugePage)?;
        }
        let unit = if kind == PageKind::Hugetlb { HUGE } else { PAGE };
        let range = range_of(&mapping);
        let tracker = WpTracker::new(uffd, Pagemap::open(None)?, range, unit, asynchronous() | more)?;
        Ok(Self { tracker, mapping, file, original })
    }

    /// A file of small pages, all of them written and then protected.
    ///
    /// # Errors
    /// [`crate::HarnessError::Syscall`]
    pub fn armed(pages: u64) -> HarnessResult<Self> {
        let tracked = Self::new(PageKind::Shmem, pages)?;
        for page in 0..pages {
            tracked.write(page, 1);
        }
        tracked.tracker.arm()?;
        Ok(tracked)
    }

    /// Writes the first byte of a page of 4 KiB through the mapping.
    ///
    /// # Panics
    /// If the page does not exist.
    pub fn write(&self, page: u64, byte: u8) {
        assert!(self.mapping.write_at(offset_of(page), &[byte]), "page {page} does not exist");
    }

    /// Reads the first byte of a page of 4 KiB through the mapping.
    ///
    /// # Panics
    /// If the page does not exist.
    #[must_use]
    pub fn read(&self, page: u64) -> u8 {
        let mut byte = [0];
        assert!(self.mapping.read_at(offset_of(page), &mut byte), "page {page} does not exist");
        byte[0]
    }

    /// The address of a page of 4 KiB.
    #[must_use]
    pub fn at(&self, page: u64) -> *mut u8 {
        self.mapping.as_ptr().wrapping_add(offset_of(page))
    }

    /// `madvise` of `pages` pages of 4 KiB.
    ///
    /// # Errors
    /// `madvise`; `EFAULT` if one of the pages does not exist.
    pub fn advise(&self, first: u64, pages: u64, advice: i32) -> Result<(), SyscallError> {
        BorrowedMapping::of(&self.mapping).advise(offset_of(first), offset_of(pages), advice)
    }
}

/// The address range of a mapping.
#[must_use]
pub fn range_of(mapping: &SharedMapping) -> AddressRange {
    let start = u64::try_from(mapping.as_ptr().addr()).unwrap_or(0);
    AddressRange { start, end: start + u64::try_from(mapping.len()).unwrap_or(0) }
}

fn offset_of(page: u64) -> usize {
    usize::try_from(page * PAGE).unwrap_or(usize::MAX)
}
