//! The measured file: mapped and written by this process, with the amount of resident memory that a cgroup allows.

use std::sync::Arc;

use fdmap_client::{FdpassClient, MappedFile};
use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{PageIndex, PageRange, PageSize};
use fdmap_server::probe::{Probe, SyscallsProbe, XarrayProbe};
use fdmap_server::scan::{PageStateReader, ScanCoalescer, ScanSource};
use fdmap_sys::pagemap::Pagemap;
use fdmap_tests::HarnessError;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::pattern::Pattern;
use fdmap_tests::service::named;

use crate::condition::{Condition, Fill};
use crate::{BenchError, BenchResult};

/// Entries in 8 KiB.
pub const BATCH: usize = 1024;

/// A file of the service, mapped and written by this process.
pub struct BenchFile {
    pub fill: Fill,
    /// Size in pages.
    pub pages: u64,
    /// Scans with the xarray probe in this process.
    pub xarray: Arc<ScanCoalescer>,
    /// Scans with the syscalls probe in this process.
    pub syscalls: Arc<ScanCoalescer>,
    pagemap: Pagemap,
    /// Virtual page number of the start of the mapping.
    first_virtual: u64,
    file: MappedFile,
    /// The cgroup to which the pages are charged.
    cgroup: Cgroup,
}

impl BenchFile {
    /// Maps the file `name` and writes it.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn write(
        fdpass: &mut FdpassClient,
        name: &str,
        fill: Fill,
        xarray: &Arc<XarrayProbe>,
    ) -> BenchResult<Self> {
        let file = fdpass.map(&named(name), true)?;
        let page_size = fdpass.page_size();
        let pages = page_size.pages_in(to_u64(file.len()));
        // Enough for the file and its page tables.
        let cgroup = Cgroup::with_limit(to_u64(file.len()) * 2)?;
        // Pages are charged to the cgroup of the process that allocates them.
        cgroup.add(std::process::id())?;
        let written = fill_pages(&file, fill, pages, page_size);
        cgroup.give_back(std::process::id())?;
        written?;
        let scans = |probe: Arc<dyn Probe>| {
            let fd = fdmap_sys::fd::reopen_for_probe(file.as_fd())?;
            Ok::<_, BenchError>(PageStateReader::new(probe).open(ScanSource {
                name: "bench".into(),
                fd,
                page_size,
                hugetlb_order: None,
            }))
        };
        let xarray: Arc<dyn Probe> = Arc::<XarrayProbe>::clone(xarray);
        Ok(Self {
            fill,
            pages,
            xarray: scans(xarray)?,
            syscalls: scans(Arc::new(SyscallsProbe))?,
            pagemap: Pagemap::open(None)?,
            first_virtual: to_u64(file.as_ptr().addr()) / page_size.bytes(),
            cgroup,
            file,
        })
    }

    #[must_use]
    pub const fn all(&self) -> PageRange {
        PageRange::first(self.pages)
    }

    /// Brings the file into a condition with its fill order.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn enter(&self, condition: Condition) -> BenchResult<()> {
        let Some(limit) = condition.limit(to_u64(self.file.len())) else { return Ok(()) };
        // Reclaim may give up early with an error; retry.
        let mut result = Ok(());
        for _ in 0..20 {
            result = self.cgroup.limit(limit);
            if result.is_ok() {
                break;
            }
        }
        result.map_err(BenchError::from)
    }

    /// Fills `out` with this process's pagemap entries, starting at file page `page`.
    ///
    /// # Errors
    /// [`BenchError::Syscall`]
    pub fn pagemap(&self, page: PageIndex, out: &mut [u64]) -> BenchResult<()> {
        let got = self.pagemap.read(self.first_virtual + page.0, out)?;
        if got == out.len() { Ok(()) } else { Err(BenchError::Wrong(format!("pagemap ends at page {page}"))) }
    }
}

fn fill_pages(file: &MappedFile, fill: Fill, pages: u64, page_size: PageSize) -> BenchResult<()> {
    let pattern = Pattern { seed: 7, percent: 100 };
    for page in fill.pages(pages) {
        let at = page_size.offset_of(PageIndex(page)).unwrap_or(u64::MAX);
        if !file.write_at(at, &pattern.content(page)) {
            return Err(HarnessError::Agent(format!("page {page} cannot be written")).into());
        }
    }
    Ok(())
}

/// An endless sequence of pseudo-random pages of a file of `pages` pages.
pub fn random_pages(pages: u64) -> impl Iterator<Item = PageIndex> {
    (0..).map(move |nth| PageIndex(fdmap_tests::pattern::mix(nth) % pages))
}

/// A buffer for a batch of pagemap entries.
#[must_use]
pub fn batch(pages: u64) -> Vec<u64> {
    vec![0; BATCH.min(to_usize(pages))]
}
