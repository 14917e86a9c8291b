//! Checkpoints of a large sparse file written through one tracked mapping, and the changes between two checkpoints.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use fdmap_client::MappedFile;
use fdmap_client::grpc::{ChangedBatch, ChangesEncoding, ChangesOptions, Checkpoint};
use fdmap_proto::units::{Generation, to_u64};
use fdmap_sys::pagemap::{PageRegion, Pagemap, ScanFlags};
use fdmap_tests::memory::{Pages, pages_of};
use fdmap_tests::service::named;
use fdmap_tests::tracked::PAGE;
use serde::Serialize;

use super::WritesFixture;
use crate::file::random_pages;
use crate::pairs::median;
use crate::{BenchError, BenchResult};

/// Name of the file.
const NAME: &str = "sparse";

/// Maximum number of regions of one scan, as in the service.
const MAX_REGIONS: usize = 4096;

/// Longest wait for a checkpoint without conservative pages after the last write.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// Number of calls in each round of an operation that takes microseconds.
const SHORT_CALLS: usize = 8;

/// Result in one state of the file.
#[derive(Clone, Debug, Serialize)]
pub struct CheckpointTime {
    pub name: String,
    /// Number of pages written in each generation.
    pub pages: u64,
    /// Time inside the service in milliseconds.
    pub inside_ms: f64,
    /// Time of the whole call in milliseconds.
    pub call_ms: f64,
    /// Time of one interleaved `PAGEMAP_SCAN` of the same mapping in the client, in milliseconds.
    pub scan_ms: f64,
}

/// Result for one encoding of changes.
#[derive(Clone, Debug, Serialize)]
pub struct ChangesTime {
    /// Name of the encoding.
    pub name: &'static str,
    /// Time from the request to the end of the stream in milliseconds.
    pub call_ms: f64,
}

/// All results.
#[derive(Clone, Debug, Serialize)]
pub struct Checkpoints {
    /// Size of the file in bytes.
    pub file_bytes: u64,
    /// Number of pages that hold data.
    pub data_pages: u64,
    /// One result for each state of the file.
    pub checkpoints: Vec<CheckpointTime>,
    /// Changes of ten pages.
    pub changes: Vec<ChangesTime>,
}

/// Measures checkpoints and changes.
///
/// # Errors
/// [`BenchError`]
pub fn measure(fixture: &WritesFixture) -> BenchResult<Checkpoints> {
    let file_bytes = fixture.settings.file_bytes * 4;
    let pages = file_bytes / PAGE;
    let dense = pages / 16;
    let mut file = fixture.map(NAME, file_bytes)?;
    file.track()?;
    let bench = Sparse::new(fixture, &file)?;
    let (few, many, all) = (
        sorted_random_pages(10, pages),
        sorted_random_pages(dense.min(10_000), pages),
        (0..dense).collect::<Vec<_>>(),
    );
    for pages in [&few, &many, &all] {
        bench.pages.write(pages.iter().copied(), 1);
    }
    let mut checkpoints = vec![bench.idle()?, bench.idle_forced()?];
    checkpoints.push(bench.written(&few)?);
    let changes = bench.changes(&few)?;
    checkpoints.push(bench.written(&many)?);
    checkpoints.push(bench.written(&all)?);
    let mut data: Vec<u64> = few.into_iter().chain(many).chain(all).collect();
    data.sort_unstable();
    data.dedup();
    drop(file);
    fixture.delete(NAME)?;
    Ok(Checkpoints { file_bytes, data_pages: to_u64(data.len()), checkpoints, changes })
}

/// Returns `count` random pages of a file of `pages` pages, in ascending order.
fn sorted_random_pages(count: u64, pages: u64) -> Vec<u64> {
    let mut chosen = BTreeSet::new();
    let mut random = random_pages(pages);
    while to_u64(chosen.len()) < count {
        chosen.extend(random.next().map(|page| page.0));
    }
    chosen.into_iter().collect()
}

/// A tracked, writer-sealed file.
struct Sparse<'a> {
    fixture: &'a WritesFixture,
    pages: Pages<'a>,
    pagemap: Pagemap,
}

impl<'a> Sparse<'a> {
    fn new(fixture: &'a WritesFixture, file: &'a MappedFile) -> BenchResult<Self> {
        fixture.wait(fixture.client().seal_writers(&named(NAME)))?;
        Ok(Self { fixture, pages: pages_of(file), pagemap: Pagemap::open(None)? })
    }

    /// Checkpoints without writes that need no scan.
    fn idle(&self) -> BenchResult<CheckpointTime> {
        let start = Instant::now();
        // For a while after a write, references from the kernel's LRU batches look like extra references.
        while !self.fixture.checkpoint(NAME, false)?.unchanged {
            if start.elapsed() > IDLE_TIMEOUT {
                return Err(BenchError::Wrong(format!(
                    "a checkpoint still reports writes {IDLE_TIMEOUT:?} after the last one"
                )));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.interleaved("idle", 0, SHORT_CALLS, || {
            let timed = self.checkpoint(false)?;
            if timed.made.unchanged { Ok(timed) } else { Err(BenchError::Wrong("not idle".to_owned())) }
        })
    }

    /// Checkpoints without writes, with a forced scan.
    fn idle_forced(&self) -> BenchResult<CheckpointTime> {
        self.interleaved("idle, forced scan", 0, 1, || self.checkpoint(true))
    }

    /// Checkpoints after the same pages were written.
    fn written(&self, written: &[u64]) -> BenchResult<CheckpointTime> {
        let count = to_u64(written.len());
        self.interleaved(&format!("{count} pages written"), count, 1, || {
            self.pages.write(written.iter().copied(), 2);
            let timed = self.checkpoint(false)?;
            let observed = timed.made.observed_pages;
            // The next reader of the written bits is the scan.
            self.pages.write(written.iter().copied(), 3);
            if observed == count {
                return Ok(timed);
            }
            Err(BenchError::Wrong(format!("{observed} of {count} written pages were observed")))
        })
    }

    /// Measures `at_once` checkpoints, interleaved with one scan, in each round.
    fn interleaved(
        &self,
        name: &str,
        pages: u64,
        at_once: usize,
        checkpoint: impl Fn() -> BenchResult<Timed>,
    ) -> BenchResult<CheckpointTime> {
        let (mut inside, mut calls, mut scans) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.fixture.settings.rounds {
            for _ in 0..at_once {
                let timed = checkpoint()?;
                inside.push(timed.made.duration);
                calls.push(timed.call);
            }
            let begin = Instant::now();
            let scanned = self.scan()?;
            scans.push(begin.elapsed());
            if scanned != pages {
                return Err(BenchError::Wrong(format!("the scan found {scanned} of {pages} written pages")));
            }
        }
        let ms = |times: Vec<Duration>| median(times.into_iter().map(|time| time.as_secs_f64() * 1e3));
        Ok(CheckpointTime {
            name: name.to_owned(),
            pages,
            inside_ms: ms(inside),
            call_ms: ms(calls),
            scan_ms: ms(scans),
        })
    }

    fn checkpoint(&self, force_scan: bool) -> BenchResult<Timed> {
        let begin = Instant::now();
        let made = self.fixture.checkpoint(NAME, force_scan)?;
        Ok(Timed { call: begin.elapsed(), made })
    }

    /// Scans and re-protects the written pages without the service. Returns their number.
    fn scan(&self) -> BenchResult<u64> {
        let flags = ScanFlags::WP_MATCHING.union(ScanFlags::CHECK_WPASYNC);
        let mut regions = vec![PageRegion::default(); MAX_REGIONS];
        let (mut rest, mut pages) = (self.pages.range(), 0);
        while !rest.is_empty() {
            let scanned = self.pagemap.scan(rest, flags, &mut regions)?;
            pages +=
                regions[..scanned.count].iter().map(|region| (region.end - region.start) / PAGE).sum::<u64>();
            rest.start = scanned.walk_end;
        }
        Ok(pages)
    }

    /// Reads the changes of one generation.
    fn changes(&self, written: &[u64]) -> BenchResult<Vec<ChangesTime>> {
        self.pages.write(written.iter().copied(), 4);
        let closed = self.checkpoint(false)?.made.generation;
        let since = closed.previous();
        let encodings = [("runs", ChangesEncoding::Runs), ("bitmaps", ChangesEncoding::Bitmaps)];
        let mut times = vec![Vec::new(); encodings.len()];
        for _ in 0..self.fixture.settings.rounds * SHORT_CALLS {
            for ((name, encoding), times) in encodings.iter().zip(&mut times) {
                let begin = Instant::now();
                let reported = self.fixture.wait(self.count_changes(since, *encoding))?;
                times.push(begin.elapsed().as_secs_f64() * 1e3);
                if reported != to_u64(written.len()) {
                    return Err(BenchError::Wrong(format!("{name}: {reported} changed pages are reported")));
                }
            }
        }
        let outcome = |((name, _), times): ((&'static str, _), Vec<f64>)| ChangesTime {
            name,
            call_ms: median(times.into_iter()),
        };
        Ok(encodings.into_iter().zip(times).map(outcome).collect())
    }

    async fn count_changes(&self, since: Generation, encoding: ChangesEncoding) -> BenchResult<u64> {
        let options = ChangesOptions { since, encoding, ..ChangesOptions::default() };
        let mut changes = self.fixture.client().changes(&named(NAME), options).await?;
        let mut changed = 0;
        while let Some(batch) = changes.next().await? {
            changed += match batch {
                ChangedBatch::Runs(runs) => runs.iter().map(|pages| pages.run.range.len()).sum::<u64>(),
                ChangedBatch::Bitmaps(bitmaps) => {
                    bitmaps.changed.iter().map(|byte| u64::from(byte.count_ones())).sum()
                }
                ChangedBatch::Entries { .. } => 0,
            };
        }
        Ok(changed)
    }
}

/// A checkpoint with the duration of the call.
struct Timed {
    made: Checkpoint,
    call: Duration,
}
