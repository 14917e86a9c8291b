//! Latency of calls to the service of this version beside another one, whose programs `FDMAP_OTHER_PROGRAMS` names. Without that
//! variable both are of this version, and the quotients show what two equal services differ by.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use fdmap_client::grpc::{CreateFile, ScanEncoding, ScanRequest};
use fdmap_client::{Client, MappedFile};
use fdmap_tests::built_programs::{own_program, program};
use fdmap_tests::host::HostLock;
use fdmap_tests::memory::pages_of;
use fdmap_tests::service::{Service, named};
use fdmap_tests::tracked::PAGE;
use serde::Serialize;

use crate::file::random_pages;
use crate::pairs::median;
use crate::{BenchError, BenchResult, Settings};

/// Calls that take microseconds are made so often in a round.
const SHORT_CALLS: usize = 8;
const SMALL_PAGES: u64 = 16;
const SMALL: &str = "small";
const LARGE: &str = "large";
/// Longest wait for an idle checkpoint after the last write.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// The latency of one call.
#[derive(Clone, Debug, Serialize)]
pub struct CallTime {
    pub name: String,
    /// Median of the other version, in microseconds.
    pub other_us: f64,
    /// Median of this version, in microseconds.
    pub this_us: f64,
    /// The time of this version divided by that of the other one: median over all pairs.
    pub quotient: f64,
}

/// Measures all calls.
///
/// # Errors
/// [`BenchError`]
pub fn measure(settings: Settings) -> BenchResult<Vec<CallTime>> {
    fdmap_tests::host::root()?;
    let _alone = HostLock::acquire()?;
    let failed = |error| BenchError::Io { what: "starting the runtime".to_owned(), error };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(failed)?;
    let programs = [program("fdmapd")?, own_program("fdmapd")?];
    let [other, this] = programs.map(|program| runtime.block_on(Side::start(program, settings)));
    let mut bench = Bench { sides: [other?, this?], rounds: settings.rounds, runtime, times: Vec::new() };
    bench.small()?;
    bench.large(settings.file_bytes / PAGE)?;
    Ok(bench.times)
}

/// A service with files that this process maps and tracks.
struct Side {
    client: Client,
    service: Service,
    small: MappedFile,
    large: MappedFile,
}

impl Side {
    async fn start(program: PathBuf, settings: Settings) -> BenchResult<Self> {
        let service = Service::start_command(Command::new(program))?;
        let client = service.client().await?;
        let small = map(&service, &client, SMALL, SMALL_PAGES * PAGE).await?;
        let large = map(&service, &client, LARGE, settings.file_bytes).await?;
        Ok(Self { client, service, small, large })
    }

    async fn checkpoint(&self, name: &str, force_scan: bool) -> BenchResult<bool> {
        Ok(self.client.checkpoint(&named(name), force_scan, None).await?.unchanged)
    }
}

async fn map(service: &Service, client: &Client, name: &str, size_bytes: u64) -> BenchResult<MappedFile> {
    let file = CreateFile { name: name.to_owned(), size_bytes, ..CreateFile::default() };
    client.create(file).await?;
    let mut mapping = service.fdpass()?.map(&named(name), true)?;
    mapping.track()?;
    Ok(mapping)
}

struct Bench {
    sides: [Side; 2],
    rounds: usize,
    runtime: tokio::runtime::Runtime,
    times: Vec<CallTime>,
}

impl Bench {
    /// Times a call to both services, one after the other, in each round. `prepare` runs before it, untimed.
    fn time(
        &mut self,
        name: &str,
        calls: usize,
        prepare: impl Fn(&Side),
        call: &impl AsyncFn(&Side) -> BenchResult<()>,
    ) -> BenchResult<()> {
        let mut pairs = Vec::new();
        for round in 0..self.rounds * calls {
            let mut pair = [0.0; 2];
            // The first call of a pair may find other caches than the second.
            for at in [round % 2, (round + 1) % 2] {
                let side = &self.sides[at];
                prepare(side);
                let began = Instant::now();
                self.runtime.block_on(call(side))?;
                pair[at] = began.elapsed().as_secs_f64() * 1e6;
            }
            pairs.push(pair);
        }
        self.times.push(CallTime {
            name: name.to_owned(),
            other_us: median(pairs.iter().map(|[other, _]| *other)),
            this_us: median(pairs.iter().map(|[_, this]| *this)),
            quotient: median(pairs.iter().map(|[other, this]| this / other)),
        });
        Ok(())
    }

    /// Waits until checkpoints of a file are idle: for a while after a write, its cause is not certain.
    fn settle(&self, name: &str) -> BenchResult<()> {
        for side in &self.sides {
            let began = Instant::now();
            while !self.runtime.block_on(side.checkpoint(name, false))? {
                if began.elapsed() > IDLE_TIMEOUT {
                    return Err(BenchError::Wrong(format!("{name} is still written after {IDLE_TIMEOUT:?}")));
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        Ok(())
    }

    /// Calls about files of 16 pages.
    fn small(&mut self) -> BenchResult<()> {
        self.settle(SMALL)?;
        self.time("Checkpoint, idle", SHORT_CALLS, |_| (), &async |side| {
            side.checkpoint(SMALL, false).await.map(drop)
        })?;
        self.time("Checkpoint, idle, `force_scan`", SHORT_CALLS, |_| (), &async |side| {
            side.checkpoint(SMALL, true).await.map(drop)
        })?;
        let write = |side: &Side| pages_of(&side.small).write(0..1, 2);
        self.time("Checkpoint, 1 page written", SHORT_CALLS, write, &async |side| {
            side.checkpoint(SMALL, false).await.map(drop)
        })?;
        self.time("Scan, 16 pages", SHORT_CALLS, |_| (), &async |side| scan(side, SMALL).await)?;
        self.time("Create and Delete", SHORT_CALLS, |_| (), &async |side| {
            let file = CreateFile { name: "new".to_owned(), size_bytes: PAGE, ..CreateFile::default() };
            side.client.create(file).await?;
            Ok(side.client.delete(&named("new")).await?)
        })?;
        self.time("fdpass session: Hello, Open", SHORT_CALLS, |_| (), &async |side| {
            Ok(side.service.fdpass()?.open(&named(SMALL), true).map(drop)?)
        })?;
        // A session of its own, and the end of the mapping.
        self.time("Open, mmap, Track, munmap", SHORT_CALLS, |_| (), &async |side| {
            let mut mapping = side.service.fdpass()?.map(&named(SMALL), true)?;
            Ok(mapping.track()?)
        })
    }

    /// Harvests of a sparse file with this number of pages.
    fn large(&mut self, pages: u64) -> BenchResult<()> {
        self.settle(LARGE)?;
        let dense = pages / 4;
        let few: BTreeSet<_> = random_pages(pages).map(|page| page.0).take(10).collect();
        for side in &self.sides {
            pages_of(&side.large).write(0..dense, 1);
        }
        self.settle(LARGE)?;
        self.time("Checkpoint, idle, `force_scan`, large file", 1, |_| (), &async |side| {
            side.checkpoint(LARGE, true).await.map(drop)
        })?;
        let ten = |side: &Side| pages_of(&side.large).write(few.iter().copied(), 2);
        self.time("Checkpoint, 10 pages of the large file written", 1, ten, &async |side| {
            side.checkpoint(LARGE, false).await.map(drop)
        })?;
        let quarter = |side: &Side| pages_of(&side.large).write(0..dense, 3);
        self.time("Checkpoint, a quarter of the large file written", 1, quarter, &async |side| {
            side.checkpoint(LARGE, false).await.map(drop)
        })?;
        self.time("Scan, large file", 1, |_| (), &async |side| scan(side, LARGE).await)
    }
}

async fn scan(side: &Side, name: &str) -> BenchResult<()> {
    // An encoding that services of all versions know.
    let request = ScanRequest { encoding: ScanEncoding::Runs, ..ScanRequest::default() };
    let scan = side.client.scan(&named(name), &request).await?;
    Ok(scan.runs().await.map(drop)?)
}

/// A Markdown table.
#[must_use]
pub fn markdown(times: &[CallTime]) -> String {
    let mut table =
        "| call, µs | other version | this version | quotient |\n| --- | ---: | ---: | ---: |\n".to_owned();
    for CallTime { name, other_us, this_us, quotient } in times {
        table += &format!("| {name} | {other_us:.0} | {this_us:.0} | {quotient:.2} |\n");
    }
    table
}
