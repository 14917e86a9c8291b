//! The ways to learn the states of pages.

use std::hint::black_box;
use std::time::Duration;

use bytes::Bytes;
use fdmap_client::grpc::{Batch, ScanEncoding, ScanRequest};
use fdmap_proto::convert::AttributeSet;
use fdmap_proto::shared_snapshot::{BodyLayout, HEADER_BYTES, state_at};
use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{PageIndex, PageState, PagemapEntry};
use fdmap_server::pages::ScanOptions;
use fdmap_server::scan::ScanCoalescer;
use fdmap_tests::service::named;

use crate::bed::{Bed, NAME};
use crate::file::{anywhere, batch};
use crate::{BenchError, Measured};

/// A way to learn the states of pages. Those of the service end with the states counted by the one who asked; pagemap's end
/// with the entries in the reader's buffer, where it has not looked at them yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The whole mapping from /proc/self/pagemap, 8 KiB at a time.
    PagemapBatched,
    /// /proc/self/pagemap, 8 bytes at a time: pages all over the file.
    PagemapPages,
    /// The xarray probe: the whole file, up to the published snapshot, in this process.
    ProbeXarray,
    /// The syscalls probe, likewise.
    ProbeSyscalls,
    /// Scan over gRPC, of the file as it is now, in this encoding.
    Scan(ScanEncoding),
    /// A shared snapshot of the file as it is now: handed over, mapped and read.
    Shared(BodyLayout),
    /// Pages all over the file, from a shared snapshot that is there.
    SharedPages,
    /// Lookup over gRPC of so many pages all over the file as they are now.
    Lookup(u64),
}

/// What the time of a way is told for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Per {
    /// A page.
    Page,
    /// A call.
    Call,
}

/// Resident and swapped pages, as they were told.
type Counts = [u64; 2];

impl Way {
    /// Those that tell of a whole file.
    pub const WHOLE: [Self; 9] = [
        Self::PagemapBatched,
        Self::ProbeXarray,
        Self::ProbeSyscalls,
        Self::Scan(ScanEncoding::Runs),
        Self::Scan(ScanEncoding::Bitmaps { slots: false }),
        Self::Scan(ScanEncoding::Bitmaps { slots: true }),
        Self::Scan(ScanEncoding::Entries),
        Self::Shared(BodyLayout::Entries),
        Self::Shared(BodyLayout::States),
    ];
    /// Those that tell of single pages.
    pub const PAGES: [Self; 4] = [Self::PagemapPages, Self::SharedPages, Self::Lookup(1), Self::Lookup(64)];

    /// For people.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::PagemapBatched => "pagemap, 8 KiB reads".to_owned(),
            Self::PagemapPages => "pagemap, 8-byte reads".to_owned(),
            Self::ProbeXarray => "probe xarray".to_owned(),
            Self::ProbeSyscalls => "probe syscalls".to_owned(),
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

    /// What its time is told for.
    #[must_use]
    pub const fn per(self) -> Per {
        if matches!(self, Self::Lookup(_)) { Per::Call } else { Per::Page }
    }

    /// How many of those one run is.
    #[must_use]
    pub const fn count(self, pages: u64) -> u64 {
        match self {
            Self::PagemapPages => 4096,
            Self::SharedPages => 1 << 16,
            Self::Lookup(_) => 16,
            _ => pages,
        }
    }

    /// Asks once.
    ///
    /// # Errors
    /// [`BenchError`]; [`BenchError::Wrong`] if what is told is not what the condition says.
    pub fn run(self, bed: &Bed) -> Measured<()> {
        match self {
            Self::PagemapBatched => pagemap_batched(bed),
            Self::PagemapPages => pagemap_pages(bed, self.count(0)),
            Self::ProbeXarray => probe(bed, &bed.file()?.xarray),
            Self::ProbeSyscalls => probe(bed, &bed.file()?.syscalls),
            Self::Scan(encoding) => bed.expect(&self.name(), bed.wait(scan(bed, encoding))?),
            Self::Shared(layout) => bed.expect(&self.name(), shared(bed, layout)?),
            Self::SharedPages => shared_pages(bed, self.count(0)),
            Self::Lookup(pages) => bed.wait(lookups(bed, pages, self.count(0))),
        }
    }
}

fn pagemap_batched(bed: &Bed) -> Measured<()> {
    let file = bed.file()?;
    let mut entries = batch(file.pages);
    for first in (0..file.pages).step_by(entries.len()) {
        file.pagemap(PageIndex(first), &mut entries)?;
        black_box(&mut entries);
    }
    Ok(())
}

fn pagemap_pages(bed: &Bed, count: u64) -> Measured<()> {
    let file = bed.file()?;
    for page in anywhere(file.pages).take(to_usize(count)) {
        let mut entry = [0];
        file.pagemap(page, &mut entry)?;
        black_box(entry);
    }
    Ok(())
}

fn probe(bed: &Bed, scans: &std::sync::Arc<ScanCoalescer>) -> Measured<()> {
    let range = bed.file()?.all();
    black_box(bed.wait(scans.read(&[range], ScanOptions::default(), Duration::ZERO))?);
    Ok(())
}

async fn scan(bed: &Bed, encoding: ScanEncoding) -> Measured<Counts> {
    let options = ScanRequest { encoding, ..ScanRequest::default() };
    let mut scan = bed.client().scan(&named(NAME), &options).await?;
    let [mut resident, mut swapped] = [0, 0];
    while let Some(batch) = scan.next().await? {
        match &batch {
            Batch::Runs(runs) => {
                for run in runs {
                    match run.state {
                        PageState::Resident => resident += run.range.len(),
                        PageState::Swapped => swapped += run.range.len(),
                        _ => {}
                    }
                }
            }
            Batch::Bitmaps(bitmaps) => {
                resident += ones(&bitmaps.resident);
                swapped += ones(&bitmaps.swapped);
            }
            Batch::Entries { bytes, .. } => {
                let [more_resident, more_swapped] = count_entries(bytes);
                resident += more_resident;
                swapped += more_swapped;
            }
        }
        black_box(batch);
    }
    Ok([resident, swapped])
}

fn shared(bed: &Bed, layout: BodyLayout) -> Measured<Counts> {
    let snapshot = bed.fetch(layout)?;
    let body = snapshot.bytes().get(HEADER_BYTES..).unwrap_or(&[]);
    match layout {
        BodyLayout::Entries => Ok(count_entries(body)),
        BodyLayout::States => {
            let mut counts = [0, 0];
            for nth in 0..bed.file()?.pages {
                match state_at(body, nth) {
                    Some(PageState::Resident) => counts[0] += 1,
                    Some(PageState::Swapped) => counts[1] += 1,
                    _ => {}
                }
            }
            Ok(counts)
        }
    }
}

fn shared_pages(bed: &Bed, count: u64) -> Measured<()> {
    let snapshot = bed.shared()?;
    let mut told = 0;
    for page in anywhere(bed.file()?.pages).take(to_usize(count)) {
        told += u64::from(black_box(snapshot.entry(page)).is_some());
    }
    if told == count { Ok(()) } else { Err(BenchError::Wrong(format!("{told} of {count} pages were told"))) }
}

async fn lookups(bed: &Bed, pages: u64, count: u64) -> Measured<()> {
    let mut pages_of = anywhere(bed.file()?.pages);
    let name = named(NAME);
    for _ in 0..count {
        let asked: Vec<PageIndex> = pages_of.by_ref().take(to_usize(pages)).collect();
        let lookup = bed.client().lookup(&name, &asked, AttributeSet::NONE, Duration::ZERO, false).await?;
        let told = to_u64(lookup.pages.len());
        if told != pages {
            return Err(BenchError::Wrong(format!("{told} of {pages} pages were told")));
        }
    }
    Ok(())
}

fn ones(bitmap: &Bytes) -> u64 {
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
