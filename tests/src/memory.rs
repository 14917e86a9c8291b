//! Memory of this process that tests touch page by page and page out, and its page faults.

use std::marker::PhantomData;

use fdmap_client::MappedFile;
use fdmap_proto::PagemapEntry;
use fdmap_sys::address::AddressRange;
use fdmap_sys::error::CallContext as _;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_sys::testing::raw_mapping::RawMapping;
use nix::libc::{MADV_NOHUGEPAGE, MADV_PAGEOUT};
use nix::sys::resource::{UsageWho, getrusage};

use crate::HarnessResult;
use crate::host::settle_lru_lists;
use crate::tracked::PAGE;

/// Maximum number of `MADV_PAGEOUT` calls for pages that stay mapped.
const MAX_ATTEMPTS: usize = 20;

/// Page faults of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Faults without I/O.
    pub minor: u64,
    /// Faults with I/O.
    pub major: u64,
}

impl Faults {
    /// The faults of the calling thread during `run`.
    ///
    /// # Errors
    /// [`crate::HarnessError::Syscall`]
    pub fn during(run: impl FnOnce()) -> HarnessResult<Self> {
        let before = Self::so_far()?;
        run();
        let after = Self::so_far()?;
        Ok(Self { minor: after.minor - before.minor, major: after.major - before.major })
    }

    fn so_far() -> HarnessResult<Self> {
        let usage =
            getrusage(UsageWho::RUSAGE_THREAD).call(|| "getrusage of the calling thread".to_owned())?;
        let count = |faults| u64::try_from(faults).unwrap_or(0);
        Ok(Self { minor: count(usage.minor_page_faults()), major: count(usage.major_page_faults()) })
    }

    /// Minor and major faults.
    #[must_use]
    pub const fn all(self) -> u64 {
        self.minor + self.major
    }
}

/// Private anonymous memory in small pages, unmapped on drop.
#[derive(Debug)]
pub struct Private(RawMapping);

impl Private {
    /// Maps `pages` pages, none of them populated.
    ///
    /// # Errors
    /// [`crate::HarnessError::Syscall`]: `mmap` or `madvise`, also for 0 pages.
    pub fn new(pages: u64) -> HarnessResult<Self> {
        let memory = RawMapping::anonymous(usize::try_from(pages * PAGE).unwrap_or(0))?;
        memory.advise(0, memory.len(), MADV_NOHUGEPAGE)?;
        Ok(Self(memory))
    }

    #[must_use]
    pub const fn pages(&self) -> Pages<'_> {
        Pages { start: self.0.at(0), len: self.0.len(), _memory: PhantomData }
    }
}

/// Pages in the memory of this process, which stays mapped while it is borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    start: *mut u8,
    len: usize,
    _memory: PhantomData<&'a ()>,
}

/// The pages of a mapped file, in small pages.
#[must_use]
pub const fn pages_of(file: &MappedFile) -> Pages<'_> {
    Pages { start: file.as_ptr(), len: file.len(), _memory: PhantomData }
}

impl<'a> Pages<'a> {
    #[must_use]
    pub fn count(self) -> u64 {
        u64::try_from(self.len).unwrap_or(u64::MAX) / PAGE
    }

    #[must_use]
    pub const fn start(self) -> *mut u8 {
        self.start
    }

    /// The length in bytes.
    #[must_use]
    pub const fn len(self) -> usize {
        self.len
    }

    /// Always false: the kernel maps no empty range.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    #[must_use]
    pub fn range(self) -> AddressRange {
        let start = u64::try_from(self.start.addr()).unwrap_or(0);
        AddressRange { start, end: start + u64::try_from(self.len).unwrap_or(0) }
    }

    /// The memory, for calls on parts of it.
    #[inline]
    #[must_use]
    pub fn mapping(self) -> BorrowedMapping<'a> {
        // SAFETY: Pages are created from objects that map the range until the borrow ends, and into whose memory no references
        // exist but to atomics.
        unsafe { BorrowedMapping::from_raw_parts(self.start, self.len) }
    }

    /// Writes the first 8 bytes of each of these pages. The memory must be writable.
    ///
    /// # Panics
    /// If one of the pages does not exist.
    #[inline]
    pub fn write(self, pages: impl IntoIterator<Item = u64>, value: u64) {
        let mapping = self.mapping();
        pages.into_iter().for_each(|page| mapping.store(offset_of(page), value));
    }

    /// Reads the first 8 bytes of each of these pages; returns their sum.
    ///
    /// # Panics
    /// If one of the pages does not exist.
    #[inline]
    pub fn read(self, pages: impl IntoIterator<Item = u64>) -> u64 {
        let mapping = self.mapping();
        pages.into_iter().fold(0, |sum, page| sum.wrapping_add(mapping.load(offset_of(page))))
    }

    /// Pages out all pages by `MADV_PAGEOUT`. Returns the number of pages that are still mapped after several
    /// attempts.
    ///
    /// # Errors
    /// [`crate::HarnessError::Syscall`]
    pub fn page_out(self) -> HarnessResult<u64> {
        for _ in 0..MAX_ATTEMPTS {
            // MADV_PAGEOUT skips pages in the batches of other CPUs.
            settle_lru_lists()?;
            self.mapping().advise(0, self.len, MADV_PAGEOUT)?;
            if self.mapped()? == 0 {
                break;
            }
        }
        self.mapped()
    }

    /// The number of pages that are present in the page tables of this process.
    fn mapped(self) -> HarnessResult<u64> {
        let mut entries = vec![0; usize::try_from(self.count()).unwrap_or(0)];
        let read = Pagemap::open(None)?.read(self.range().start / PAGE, &mut entries)?;
        let present = entries[..read].iter().filter(|entry| PagemapEntry(**entry).is_present()).count();
        Ok(u64::try_from(present).unwrap_or(u64::MAX))
    }
}

#[inline]
fn offset_of(page: u64) -> usize {
    usize::try_from(page * PAGE).unwrap_or(usize::MAX)
}
