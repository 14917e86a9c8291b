//! The fixture of the page state benchmarks: swap, a service, clients, and a file in one condition after another.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use fdmap_client::grpc::{CreateFile, PageSummary, SummaryOptions};
use fdmap_client::proto::shared_snapshot::BodyLayout;
use fdmap_client::{Client, FdpassClient, SharedSnapshot};
use fdmap_proto::units::to_u64;
use fdmap_proto::{Backing, PageIndex, PagemapEntry};
use fdmap_server::pages::ScanOptions;
use fdmap_server::probe::XarrayProbe;
use fdmap_tests::HarnessError;
use fdmap_tests::host::{HostLock, read};
use fdmap_tests::service::{Service, named};
use fdmap_tests::swap::{Swap, SwapKind};

use crate::file::{BenchFile, batch};
use crate::{BenchError, BenchResult, Condition, Settings};

/// Name of the file.
pub const NAME: &str = "bench";

/// A service and a file. The fields are dropped in order: the file's memory must be free before swap is removed.
pub struct Fixture {
    file: Option<BenchFile>,
    shared: Option<SharedSnapshot>,
    summary: Option<PageSummary>,
    client: Client,
    fdpass: RefCell<FdpassClient>,
    runtime: tokio::runtime::Runtime,
    xarray: Arc<XarrayProbe>,
    /// Anonymous memory of the service without a file, in bytes.
    idle_bytes: u64,
    settings: Settings,
    service: Service,
    _swap: Swap,
    _host: HostLock,
}

impl Fixture {
    /// Sets up swap and starts a service.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn make(settings: Settings) -> BenchResult<Self> {
        fdmap_tests::host::root()?;
        let alone = HostLock::acquire()?;
        let swap = Swap::make(settings.file_bytes + (64 << 20), SwapKind::Any)?;
        let service = Service::start(&["--probe", "xarray"])?;
        let xarray = XarrayProbe::load().map_err(|error| {
            let what = format!("the xarray probe: {}", fdmap_proto::error_chain(&error));
            HarnessError::Missing(what)
        })?;
        let failed = |error| BenchError::Io { what: "starting the runtime".to_owned(), error };
        // As in the command-line tool: a client that waits for each answer needs one thread.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        Ok(Self {
            file: None,
            shared: None,
            summary: None,
            client: runtime.block_on(service.client())?,
            fdpass: RefCell::new(service.fdpass()?),
            runtime,
            xarray: Arc::new(xarray),
            idle_bytes: memory_of(service.pid())?,
            settings,
            service,
            _swap: swap,
            _host: alone,
        })
    }

    /// Brings the file into a condition and checks that pagemap and both probes report it.
    ///
    /// # Errors
    /// [`BenchError::Wrong`] if one of them does not.
    pub fn enter(&mut self, condition: Condition) -> BenchResult<()> {
        if self.file.as_ref().is_none_or(|file| file.fill != condition.fill()) {
            self.recreate_file(condition)?;
        }
        self.shared = None;
        self.file()?.enter(condition)?;
        self.check(condition)?;
        let snapshot = self.fetch(BodyLayout::Entries)?;
        self.shared = Some(snapshot);
        Ok(())
    }

    /// Replaces the file with a new one.
    pub(crate) fn recreate_file(&mut self, condition: Condition) -> BenchResult<()> {
        let old = self.file.take();
        self.shared = None;
        if old.is_some() {
            drop(old);
            self.runtime.block_on(self.client.delete(&named(NAME)))?;
        }
        let file = CreateFile {
            name: NAME.to_owned(),
            size_bytes: self.settings.file_bytes,
            backing: Backing::Shmem,
            ..CreateFile::default()
        };
        self.runtime.block_on(self.client.create(file))?;
        let file = BenchFile::write(&mut self.fdpass.borrow_mut(), NAME, condition.fill(), &self.xarray)?;
        self.file = Some(file);
        Ok(())
    }

    /// Checks the states, and the page tables of the mapping that wrote every page: a resident page has an entry, a swapped page
    /// has none, which is why pagemap cannot report it.
    fn check(&mut self, condition: Condition) -> BenchResult<()> {
        let summary = self.runtime.block_on(self.client.summary(&named(NAME), &SummaryOptions::default()))?;
        let file = self.file()?;
        let wrong = |what: &str, got: u64| {
            Err(BenchError::Wrong(format!("{}: {what}: {got} of {} pages", condition.name(), file.pages)))
        };
        let written = to_u64(condition.fill().pages(file.pages).count());
        if summary.hole_pages != file.pages - written || summary.unknown_pages != 0 {
            return wrong("holes", summary.hole_pages);
        }
        let (min, max) = condition.swapped();
        if !(min..=max).contains(&(summary.swapped_pages * 1000 / file.pages)) {
            return wrong("swapped", summary.swapped_pages);
        }
        let (mut present, mut swap) = (0, 0);
        let mut entries = batch(file.pages);
        for first in (0..file.pages).step_by(entries.len()) {
            file.pagemap(PageIndex(first), &mut entries)?;
            for entry in entries.iter().map(|word| PagemapEntry(*word)) {
                present += u64::from(entry.is_present());
                swap += u64::from(entry.is_swap());
            }
        }
        if swap != 0 {
            return wrong("pagemap reports swapped shmem pages, so this is not a stock kernel", swap);
        }
        // A page that was unmapped for swap-out and then kept may be resident without an entry.
        if present > summary.resident_pages || present + file.pages / 100 < summary.resident_pages {
            return wrong("present in pagemap", present);
        }
        for (probe, scans) in [("xarray", &file.xarray), ("syscalls", &file.syscalls)] {
            let all = [file.all()];
            let read = scans.read(&all, ScanOptions::default(), Duration::ZERO);
            let snapshot = self.runtime.block_on(read)?.snapshot;
            let own = fdmap_server::pages::Summary::of(&snapshot, file.all(), false);
            // mincore reports pages in the swap cache as resident.
            let near = |a: u64, b: u64| a.abs_diff(b) <= file.pages / 100;
            if own.hole != summary.hole_pages || !near(own.swapped, summary.swapped_pages) {
                return wrong(probe, own.swapped);
            }
        }
        self.summary = Some(summary);
        Ok(())
    }

    /// The file in its current condition.
    ///
    /// # Errors
    /// [`BenchError::Wrong`] before the first condition.
    pub fn file(&self) -> BenchResult<&BenchFile> {
        self.file.as_ref().ok_or_else(|| BenchError::Wrong("there is no file yet".to_owned()))
    }

    /// A shared snapshot of the file in its current condition, with entries.
    ///
    /// # Errors
    /// [`BenchError::Wrong`] before the first condition.
    pub fn shared(&self) -> BenchResult<&SharedSnapshot> {
        self.shared.as_ref().ok_or_else(|| BenchError::Wrong("there is no snapshot yet".to_owned()))
    }

    /// The number of pages in each state.
    ///
    /// # Errors
    /// [`BenchError::Wrong`] before the first condition.
    pub fn summary(&self) -> BenchResult<&PageSummary> {
        self.summary.as_ref().ok_or_else(|| BenchError::Wrong("nothing is counted yet".to_owned()))
    }

    #[must_use]
    pub const fn service(&self) -> &Service {
        &self.service
    }

    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    /// Runs a request to completion.
    pub fn wait<T>(&self, answer: impl Future<Output = T>) -> T {
        self.runtime.block_on(answer)
    }

    /// Fetches a new shared snapshot of the whole file.
    ///
    /// # Errors
    /// [`BenchError::Client`]
    pub fn fetch(&self, layout: BodyLayout) -> BenchResult<SharedSnapshot> {
        Ok(self.fdpass.borrow_mut().snapshot(&named(NAME), None, layout, Duration::ZERO)?)
    }

    /// Size of the service's snapshot of the file, in bytes per page.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn snapshot_bytes_per_page(&self) -> BenchResult<f64> {
        let file = self.file()?;
        let all = [file.all()];
        let read = file.xarray.read(&all, ScanOptions::default(), Duration::from_secs(3600));
        let snapshot = self.wait(read)?.snapshot;
        Ok(per_page(to_u64(snapshot.bytes()), file.pages))
    }

    /// Growth of the service's anonymous memory since it had no file, in bytes per page. Excludes the file's own memory; includes
    /// memory that the allocator retains.
    ///
    /// # Errors
    /// [`BenchError`]
    pub fn service_bytes_per_page(&self) -> BenchResult<f64> {
        let grown = memory_of(self.service.pid())?.saturating_sub(self.idle_bytes);
        Ok(per_page(grown, self.file()?.pages))
    }

    /// Compares the numbers of resident and swapped pages that a method reported with the summary; up to 1 % of the pages may have
    /// moved.
    ///
    /// # Errors
    /// [`BenchError::Wrong`]
    pub fn expect(&self, what: &str, counts: [u64; 2]) -> BenchResult<()> {
        let summary = self.summary()?;
        let expected = [summary.resident_pages + summary.swap_cached_pages, summary.swapped_pages];
        let slack = self.file()?.pages / 100;
        if expected.iter().zip(counts).all(|(expected, got)| expected.abs_diff(got) <= slack) {
            return Ok(());
        }
        Err(BenchError::Wrong(format!(
            "{what}: {counts:?} resident and swapped pages, expected {expected:?}"
        )))
    }
}

/// Anonymous memory of a process in bytes.
fn memory_of(pid: u32) -> BenchResult<u64> {
    let status = read(format!("/proc/{pid}/status"))?;
    let kib = status.lines().find_map(|line| {
        let value = line.strip_prefix("RssAnon:")?;
        value.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    });
    let missing = || HarnessError::Missing("RssAnon in /proc/PID/status".to_owned());
    Ok(kib.ok_or_else(missing)? * 1024)
}

fn per_page(bytes: u64, pages: u64) -> f64 {
    fdmap_proto::units::to_f64(bytes) / fdmap_proto::units::to_f64(pages)
}
