//! Checkpoints of a large sparse file that one tracked mapping writes to, and the changes between two of them.

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

use super::Stage;
use crate::file::anywhere;
use crate::pairs::median;
use crate::{BenchError, Measured};

/// The file's name.
const NAME: &str = "sparse";

/// Regions that one scan can bring: as many as the service's.
const REGIONS: usize = 4096;

/// How long it may take until nothing of the writes before is in doubt.
const REST: Duration = Duration::from_secs(20);

/// Calls in each round of those that are over in no time.
const SHORT_CALLS: usize = 8;

/// What was measured of one state of the file.
#[derive(Clone, Debug, Serialize)]
pub struct CheckpointTime {
    /// Which.
    pub name: String,
    /// Pages that were written in each generation.
    pub pages: u64,
    /// Milliseconds inside the service.
    pub inside_ms: f64,
    /// Milliseconds of the whole call.
    pub call_ms: f64,
    /// Milliseconds of one `PAGEMAP_SCAN` of the same mapping in the client, by turns.
    pub scan_ms: f64,
}

/// What was measured of changes.
#[derive(Clone, Debug, Serialize)]
pub struct ChangesTime {
    /// Their encoding.
    pub name: &'static str,
    /// Milliseconds from the request to the end of the stream.
    pub call_ms: f64,
}

/// All that was measured here.
#[derive(Clone, Debug, Serialize)]
pub struct Checkpoints {
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Pages of it that hold data.
    pub data_pages: u64,
    /// State by state.
    pub checkpoints: Vec<CheckpointTime>,
    /// Of ten pages.
    pub changes: Vec<ChangesTime>,
}

/// Measures checkpoints and changes.
///
/// # Errors
/// [`BenchError`]
pub fn measure(stage: &Stage) -> Measured<Checkpoints> {
    let file_bytes = stage.settings.file_bytes * 4;
    let pages = file_bytes / PAGE;
    let dense = pages / 16;
    let mut file = stage.map(NAME, file_bytes)?;
    file.track()?;
    let bench = Sparse::new(stage, &file)?;
    let (few, many, all) = (some(10, pages), some(dense.min(10_000), pages), (0..dense).collect::<Vec<_>>());
    for pages in [&few, &many, &all] {
        bench.pages.write(pages.iter().copied(), 1);
    }
    let mut checkpoints = vec![bench.idle()?, bench.idle_exact()?];
    checkpoints.push(bench.written(&few)?);
    let changes = bench.changes(&few)?;
    checkpoints.push(bench.written(&many)?);
    checkpoints.push(bench.written(&all)?);
    let mut data: Vec<u64> = few.into_iter().chain(many).chain(all).collect();
    data.sort_unstable();
    data.dedup();
    drop(file);
    stage.delete(NAME)?;
    Ok(Checkpoints { file_bytes, data_pages: to_u64(data.len()), checkpoints, changes })
}

/// So many pages that lie all over a file of `pages`, in ascending order.
fn some(count: u64, pages: u64) -> Vec<u64> {
    let mut some = BTreeSet::new();
    let mut anywhere = anywhere(pages);
    while to_u64(some.len()) < count {
        some.extend(anywhere.next().map(|page| page.0));
    }
    some.into_iter().collect()
}

/// A tracked file that nobody else can write to.
struct Sparse<'a> {
    stage: &'a Stage,
    pages: Pages<'a>,
    pagemap: Pagemap,
}

impl<'a> Sparse<'a> {
    fn new(stage: &'a Stage, file: &'a MappedFile) -> Measured<Self> {
        stage.wait(stage.client().seal_writers(&named(NAME)))?;
        Ok(Self { stage, pages: pages_of(file), pagemap: Pagemap::open(None)? })
    }

    /// Nothing is written: the service need not look.
    fn idle(&self) -> Measured<CheckpointTime> {
        let began = Instant::now();
        // Pages that were on their way to a list look held for a while after they were written.
        while !self.stage.checkpoint(NAME, false)?.unchanged {
            if began.elapsed() > REST {
                return Err(BenchError::Wrong(format!(
                    "a checkpoint finds writes {REST:?} after the last one"
                )));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.by_turns("idle", 0, SHORT_CALLS, || {
            let timed = self.checkpoint(false)?;
            if timed.made.unchanged { Ok(timed) } else { Err(BenchError::Wrong("not idle".to_owned())) }
        })
    }

    /// Nothing is written, and the service looks all the same.
    fn idle_exact(&self) -> Measured<CheckpointTime> {
        self.by_turns("idle, exact", 0, 1, || self.checkpoint(true))
    }

    /// The same pages are written in each generation.
    fn written(&self, written: &[u64]) -> Measured<CheckpointTime> {
        let count = to_u64(written.len());
        self.by_turns(&format!("{count} pages written"), count, 1, || {
            self.pages.write(written.iter().copied(), 2);
            let timed = self.checkpoint(false)?;
            let seen = timed.made.observed_pages;
            // The next to look is the scan.
            self.pages.write(written.iter().copied(), 3);
            if seen == count {
                return Ok(timed);
            }
            Err(BenchError::Wrong(format!("{seen} of {count} written pages were seen")))
        })
    }

    /// Times checkpoints, so many at once, by turns with as many scans.
    fn by_turns(
        &self,
        name: &str,
        pages: u64,
        at_once: usize,
        checkpoint: impl Fn() -> Measured<Timed>,
    ) -> Measured<CheckpointTime> {
        let (mut inside, mut calls, mut scans) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.stage.settings.rounds {
            for _ in 0..at_once {
                let timed = checkpoint()?;
                inside.push(timed.made.duration);
                calls.push(timed.call);
            }
            let begin = Instant::now();
            let seen = self.scan()?;
            scans.push(begin.elapsed());
            if seen != pages {
                return Err(BenchError::Wrong(format!("{seen} of {pages} written pages were scanned")));
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

    fn checkpoint(&self, exact: bool) -> Measured<Timed> {
        let begin = Instant::now();
        let made = self.stage.checkpoint(NAME, exact)?;
        Ok(Timed { call: begin.elapsed(), made })
    }

    /// What the service does by page tables, without it: the written pages, which are protected again. Gives how many.
    fn scan(&self) -> Measured<u64> {
        let flags = ScanFlags::WP_MATCHING.union(ScanFlags::CHECK_WPASYNC);
        let mut regions = vec![PageRegion::default(); REGIONS];
        let (mut rest, mut pages) = (self.pages.range(), 0);
        while !rest.is_empty() {
            let scanned = self.pagemap.scan(rest, flags, &mut regions)?;
            pages +=
                regions[..scanned.count].iter().map(|region| (region.end - region.start) / PAGE).sum::<u64>();
            rest.start = scanned.walk_end;
        }
        Ok(pages)
    }

    /// The changes of one generation.
    fn changes(&self, written: &[u64]) -> Measured<Vec<ChangesTime>> {
        self.pages.write(written.iter().copied(), 4);
        let closed = self.checkpoint(false)?.made.generation;
        let since = closed.previous();
        let encodings = [("runs", ChangesEncoding::Runs), ("bitmaps", ChangesEncoding::Bitmaps)];
        let mut times = vec![Vec::new(); encodings.len()];
        for _ in 0..self.stage.settings.rounds * SHORT_CALLS {
            for ((name, encoding), times) in encodings.iter().zip(&mut times) {
                let begin = Instant::now();
                let told = self.stage.wait(self.told(since, *encoding))?;
                times.push(begin.elapsed().as_secs_f64() * 1e3);
                if told != to_u64(written.len()) {
                    return Err(BenchError::Wrong(format!("{name}: {told} changed pages are told")));
                }
            }
        }
        let outcome = |((name, _), times): ((&'static str, _), Vec<f64>)| ChangesTime {
            name,
            call_ms: median(times.into_iter()),
        };
        Ok(encodings.into_iter().zip(times).map(outcome).collect())
    }

    async fn told(&self, since: Generation, encoding: ChangesEncoding) -> Measured<u64> {
        let options = ChangesOptions { since, encoding, ..ChangesOptions::default() };
        let mut changes = self.stage.client().changes(&named(NAME), options).await?;
        let mut told = 0;
        while let Some(batch) = changes.next().await? {
            told += match batch {
                ChangedBatch::Runs(runs) => runs.iter().map(|pages| pages.run.range.len()).sum::<u64>(),
                ChangedBatch::Bitmaps(bitmaps) => {
                    bitmaps.changed.iter().map(|byte| u64::from(byte.count_ones())).sum()
                }
                ChangedBatch::Entries { .. } => 0,
            };
        }
        Ok(told)
    }
}

/// A checkpoint, and how long the call took.
struct Timed {
    made: Checkpoint,
    call: Duration,
}
