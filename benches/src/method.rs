//! Methods of reading page states.

use std::hint::black_box;
use std::time::Duration;

use bytes::Bytes;
use fdmap_client::grpc::{ScanBatch, ScanEncoding, ScanRequest};
use fdmap_proto::convert::AttributeSet;
use fdmap_proto::shared_snapshot::{BodyLayout, HEADER_BYTES, state_at};
use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{PageIndex, PageState, PagemapEntry};
use fdmap_server::pages::ScanOptions;
use fdmap_server::scan::ScanCoalescer;
use fdmap_tests::service::named;

use crate::file::{batch, random_pages};
use crate::fixture::{Fixture, NAME};
use crate::{BenchError, BenchResult};

/// A method of reading page states. A run of a service method includes counting the states in the client; a run of a pagemap method
/// ends with the entries in the reader's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Reads the whole mapping from /proc/self/pagemap in batches of 8 KiB.
    PagemapBatched,
    /// Reads single entries of random pages from /proc/self/pagemap.
    PagemapPages,
    /// Scans the whole file with the xarray probe in this process, including publication of the snapshot.
    ProbeXarray,
    /// The same with the syscalls probe.
    ProbeSyscalls,
    /// Calls Scan over gRPC with `max_age` 0 and this encoding.
    Scan(ScanEncoding),
    /// Fetches a new shared snapshot, maps it and reads all of it.
    Shared(BodyLayout),
    /// Reads random pages from a mapped shared snapshot.
    SharedPages,
    /// Calls Lookup over gRPC for this number of random pages with `max_age` 0.
    Lookup(u64),
}

/// The unit that a time refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeUnit {
    PerPage,
    PerCall,
}

/// Reported numbers of resident and swapped pages.
type Counts = [u64; 2];

impl Method {
    /// The methods that read a whole file.
    pub const WHOLE: [Self; 10] = [
        Self::PagemapBatched,
        Self::ProbeXarray,
        Self::ProbeSyscalls,
        Self::Scan(ScanEncoding::Auto),
        Self::Scan(ScanEncoding::Runs),
        Self::Scan(ScanEncoding::Bitmaps { slots: false }),
        Self::Scan(ScanEncoding::Bitmaps { slots: true }),
        Self::Scan(ScanEncoding::Entries),
        Self::Shared(BodyLayout::Entries),
        Self::Shared(BodyLayout::States),
    ];
    /// The methods that read single pages.
    pub const PAGES: [Self; 4] = [Self::PagemapPages, Self::SharedPages, Self::Lookup(1), Self::Lookup(64)];

    /// Label in tables.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::PagemapBatched => "pagemap, 8 KiB reads".to_owned(),
            Self::PagemapPages => "pagemap, 8-byte reads".to_owned(),
            Self::ProbeXarray => "probe xarray".to_owned(),
            Self::ProbeSyscalls => "probe syscalls".to_owned(),
            Self::Scan(ScanEncoding::Auto) => "Scan, auto".to_owned(),
            Self::Scan(ScanEncoding::Runs) => "Scan, runs with slots".to_owned(),
            Self::Scan(ScanEncoding::Bitmaps { slots: false }) => "Scan, bitmaps".to_owned(),
            Self::Scan(ScanEncoding::Bitmaps { slots: true }) => "Scan, bitmaps with slots".to_owned(),
            Self::Scan(ScanEncoding::Entries) => "Scan, entries with slots".to_owned(),
            Self::Shared(BodyLayout::Entries) => "shared snapshot, entries with slots".to_owned(),
            Self::Shared(BodyLayout::States) => "shared snapshot, states".to_owned(),
            Self::SharedPages => "page in a mapped snapshot".to_owned(),
            Self::Lookup(1) => "Lookup, 1 page".to_owned(),
            Self::Lookup(pages) => format!("Lookup, {pages} pages"),
        }
    }

    #[must_use]
    pub const fn time_unit(self) -> TimeUnit {
        if matches!(self, Self::Lookup(_)) { TimeUnit::PerCall } else { TimeUnit::PerPage }
    }

    /// Number of units in one run on a file of `pages` pages.
    #[must_use]
    pub const fn count(self, pages: u64) -> u64 {
        match self {
            Self::PagemapPages => 4096,
            Self::SharedPages => 1 << 16,
            Self::Lookup(_) => 16,
            _ => pages,
        }
    }

    /// Runs the method once.
    ///
    /// # Errors
    /// [`BenchError`]; [`BenchError::Wrong`] if the result does not match the condition.
    pub fn run(self, fixture: &Fixture) -> BenchResult<()> {
        match self {
            Self::PagemapBatched => pagemap_batched(fixture),
            Self::PagemapPages => pagemap_pages(fixture, self.count(0)),
            Self::ProbeXarray => probe(fixture, &fixture.file()?.xarray),
            Self::ProbeSyscalls => probe(fixture, &fixture.file()?.syscalls),
            Self::Scan(encoding) => fixture.expect(&self.name(), fixture.wait(scan(fixture, encoding))?),
            Self::Shared(layout) => fixture.expect(&self.name(), shared(fixture, layout)?),
            Self::SharedPages => shared_pages(fixture, self.count(0)),
            Self::Lookup(pages) => fixture.wait(lookups(fixture, pages, self.count(0))),
        }
    }
}

fn pagemap_batched(fixture: &Fixture) -> BenchResult<()> {
    let file = fixture.file()?;
    let mut entries = batch(file.pages);
    for first in (0..file.pages).step_by(entries.len()) {
        file.pagemap(PageIndex(first), &mut entries)?;
        black_box(&mut entries);
    }
    Ok(())
}

fn pagemap_pages(fixture: &Fixture, count: u64) -> BenchResult<()> {
    let file = fixture.file()?;
    for page in random_pages(file.pages).take(to_usize(count)) {
        let mut entry = [0];
        file.pagemap(page, &mut entry)?;
        black_box(entry);
    }
    Ok(())
}

fn probe(fixture: &Fixture, scans: &std::sync::Arc<ScanCoalescer>) -> BenchResult<()> {
    let range = fixture.file()?.all();
    black_box(fixture.wait(scans.read(&[range], ScanOptions::default(), Duration::ZERO))?);
    Ok(())
}

async fn scan(fixture: &Fixture, encoding: ScanEncoding) -> BenchResult<Counts> {
    let options = ScanRequest { encoding, ..ScanRequest::default() };
    let mut scan = fixture.client().scan(&named(NAME), &options).await?;
    let [mut resident, mut swapped] = [0, 0];
    while let Some(batch) = scan.next().await? {
        match &batch {
            ScanBatch::Runs(runs) => {
                for run in runs {
                    match run.state {
                        PageState::Resident => resident += run.range.len(),
                        PageState::Swapped => swapped += run.range.len(),
                        _ => {}
                    }
                }
            }
            ScanBatch::Bitmaps(bitmaps) => {
                resident += count_ones(&bitmaps.resident);
                swapped += count_ones(&bitmaps.swapped);
            }
            ScanBatch::Entries { bytes, .. } => {
                let [more_resident, more_swapped] = count_entries(bytes);
                resident += more_resident;
                swapped += more_swapped;
            }
        }
        black_box(batch);
    }
    Ok([resident, swapped])
}

fn shared(fixture: &Fixture, layout: BodyLayout) -> BenchResult<Counts> {
    let snapshot = fixture.fetch(layout)?;
    let body = snapshot.bytes().get(HEADER_BYTES..).unwrap_or(&[]);
    match layout {
        BodyLayout::Entries => Ok(count_entries(body)),
        BodyLayout::States => {
            let mut counts = [0, 0];
            for page in 0..fixture.file()?.pages {
                match state_at(body, page) {
                    Some(PageState::Resident) => counts[0] += 1,
                    Some(PageState::Swapped) => counts[1] += 1,
                    _ => {}
                }
            }
            Ok(counts)
        }
    }
}

fn shared_pages(fixture: &Fixture, count: u64) -> BenchResult<()> {
    let snapshot = fixture.shared()?;
    let mut found = 0;
    for page in random_pages(fixture.file()?.pages).take(to_usize(count)) {
        found += u64::from(black_box(snapshot.entry(page)).is_some());
    }
    if found == count { Ok(()) } else { Err(BenchError::Wrong(format!("found {found} of {count} pages"))) }
}

async fn lookups(fixture: &Fixture, pages: u64, count: u64) -> BenchResult<()> {
    let mut random = random_pages(fixture.file()?.pages);
    let name = named(NAME);
    for _ in 0..count {
        let requested: Vec<PageIndex> = random.by_ref().take(to_usize(pages)).collect();
        let lookup =
            fixture.client().lookup(&name, &requested, AttributeSet::NONE, Duration::ZERO, false).await?;
        let found = to_u64(lookup.pages.len());
        if found != pages {
            return Err(BenchError::Wrong(format!("found {found} of {pages} pages")));
        }
    }
    Ok(())
}

fn count_ones(bitmap: &Bytes) -> u64 {
    bitmap.iter().map(|byte| u64::from(byte.count_ones())).sum()
}

fn count_entries(bytes: &[u8]) -> Counts {
    let (words, _) = bytes.as_chunks::<8>();
    let [mut resident, mut swapped] = [0, 0];
    for word in words {
        let entry = PagemapEntry(u64::from_le_bytes(*word));
        resident += u64::from(entry.is_present());
        swapped += u64::from(entry.is_swap());
    }
    [resident, swapped]
}
