//! Mappings that are tracked by userfaultfd, as the service will do it, but without it: for what the kernel does by itself.

use std::os::fd::{AsFd as _, OwnedFd};

use fdmap_sys::address::AddressRange;
use fdmap_sys::mapping::{Advice, SharedMapping};
use fdmap_sys::pagemap::{PageRegion, Pagemap, ScanFlags};
use fdmap_sys::uffd::{UffdEvent, UffdFeatures, Userfaultfd};
use fdmap_sys::{SyscallError, fd, memfd};

use crate::HarnessResult;

/// Bytes.
pub const PAGE: u64 = 4096;

/// Bytes.
pub const HUGE: u64 = 2 << 20;

/// What asynchronous write-protection of files needs.
#[must_use]
pub fn asynchronous() -> UffdFeatures {
    UffdFeatures::WP_ASYNC | UffdFeatures::WP_UNPOPULATED | UffdFeatures::WP_HUGETLBFS_SHMEM
}

/// The descriptors that report writes to a range of an address space.
#[derive(Debug)]
pub struct WpTracker {
    /// Of that address space.
    pub uffd: Userfaultfd,
    /// Of that address space.
    pub pagemap: Pagemap,
    /// The tracked range.
    pub range: AddressRange,
    /// Bytes of one reported page.
    pub unit: u64,
}

const ARM: ScanFlags = ScanFlags::WP_MATCHING.union(ScanFlags::CHECK_WPASYNC);
const LOOK: ScanFlags = ScanFlags::CHECK_WPASYNC;

impl WpTracker {
    /// Registers a range; nothing is protected yet.
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

    /// Protects all pages, those that do not exist too.
    ///
    /// # Errors
    /// `UFFDIO_WRITEPROTECT`
    pub fn arm(&self) -> Result<(), SyscallError> {
        self.uffd.write_protect(self.range, true)
    }

    /// The numbers of the pages written since they were last protected, which they are now again.
    ///
    /// # Errors
    /// `PAGEMAP_SCAN`
    pub fn harvest(&self) -> Result<Vec<u64>, SyscallError> {
        self.scan(ARM)
    }

    /// The same, without protecting them.
    ///
    /// # Errors
    /// `PAGEMAP_SCAN`
    pub fn look(&self) -> Result<Vec<u64>, SyscallError> {
        self.scan(LOOK)
    }

    /// The same, without a check that anything is tracked there at all.
    ///
    /// # Errors
    /// `PAGEMAP_SCAN`
    pub fn look_unchecked(&self) -> Result<Vec<u64>, SyscallError> {
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

    /// The next event, waited for.
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

/// What a file is made of.
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
    /// Where it is mapped.
    pub mapping: SharedMapping,
    /// The file, reopened for reading and writing.
    pub file: OwnedFd,
    /// The descriptor of `memfd_create`.
    pub original: OwnedFd,
}

impl TrackedMemfd {
    /// Maps a new file of `pages` (of 2 MiB unless it is of small ones), registered but not protected.
    ///
    /// # Errors
    /// [`crate::HarnessError::Syscall`]
    pub fn new(kind: PageKind, pages: u64) -> HarnessResult<Self> {
        Self::with(kind, pages, Userfaultfd::create()?, UffdFeatures::empty())
    }

    /// The same with a given userfaultfd and more features.
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

    /// The same with small pages, all of them written and then protected.
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

    /// Writes the first byte of a page (of 4 KiB, always) through the mapping.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn write(&self, page: u64, byte: u8) {
        assert!(self.mapping.write_at(offset_of(page), &[byte]), "there is a page {page}");
    }

    /// Reads the first byte of a page (of 4 KiB, always) through the mapping.
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    pub fn read(&self, page: u64) -> u8 {
        let mut byte = [0];
        assert!(self.mapping.read_at(offset_of(page), &mut byte), "there is a page {page}");
        byte[0]
    }

    /// Where a page (of 4 KiB, always) is mapped.
    #[must_use]
    pub fn at(&self, page: u64) -> *mut u8 {
        self.mapping.as_ptr().wrapping_add(offset_of(page))
    }
}

/// Where a mapping lies.
#[must_use]
pub fn range_of(mapping: &SharedMapping) -> AddressRange {
    let start = u64::try_from(mapping.as_ptr().addr()).unwrap_or(0);
    AddressRange { start, end: start + u64::try_from(mapping.len()).unwrap_or(0) }
}

fn offset_of(page: u64) -> usize {
    usize::try_from(page * PAGE).unwrap_or(usize::MAX)
}
