//! Precision of write tracking in steady state: which of the reported pages were really changed. Each workload writes to a file;
//! after a while all their processes are stopped, a checkpoint is made, and the file is compared with what it held at the previous
//! checkpoint. A page that was written with the content that it had counts as unchanged.

pub mod content;
pub mod guest;
pub mod redis;
pub mod report;
pub mod stopped;
pub mod writers;

use std::time::{Duration, Instant};

use fdmap_tests::host::HostLock;
use fdmap_tests::no_lost_writes::consumer::Consumer;
use fdmap_tests::no_lost_writes::pages::PageSet;
use fdmap_tests::service::{Service, named};

use crate::{BenchError, BenchResult, Settings};
use content::Content;
use report::Precision;
use stopped::Stopped;

/// Generations before the first one that counts. Files are conservative for some 10 s after their adoption.
const SETTLE_GENERATIONS: u64 = 5;
const SETTLE_TIME: Duration = Duration::from_secs(15);
const SETTLE_PAUSE: Duration = Duration::from_millis(200);

/// Programs that write to one file of a service.
pub trait Workload {
    fn name(&self) -> &'static str;

    /// Name of the file in the service.
    fn file(&self) -> &str;

    /// All processes that write to the file.
    fn processes(&self) -> Vec<u32>;

    /// Writes for a while. Each call has another seed.
    ///
    /// # Errors
    /// [`BenchError`]
    fn write(&mut self, seed: u64) -> BenchResult<()>;
}

/// A workload by its name, and how it is started.
type Start = fn(&Service) -> BenchResult<Box<dyn Workload>>;

/// All workloads.
const WORKLOADS: [(&str, Start); 4] = [
    (writers::NAME, writers::start),
    (writers::BESIDE_OTHERS, writers::start_beside_others),
    (redis::NAME, redis::start),
    (guest::NAME, guest::start),
];

/// Measures the workloads whose names contain one of `filters`; all if there is none.
///
/// # Errors
/// [`BenchError`]
pub fn measure(settings: Settings, filters: &[String]) -> BenchResult<Vec<Precision>> {
    fdmap_tests::host::root()?;
    let _alone = HostLock::acquire()?;
    let is_chosen = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter));
    let chosen = WORKLOADS.iter().filter(|(name, _)| is_chosen(name));
    chosen.map(|(_, start)| measure_one(settings, *start)).collect()
}

fn measure_one(settings: Settings, start: Start) -> BenchResult<Precision> {
    let failed = |error| BenchError::Io { what: "starting the runtime".to_owned(), error };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let service = Service::start(&[])?;
    let mut workload = start(&service)?;
    let file = workload.file().to_owned();
    let mut content = Content::map(&mut service.fdpass()?, &named(&file))?;
    let client = runtime.block_on(service.client())?;
    let mut consumer = Consumer::new(client, named(&file), content.pages(), 1);
    let mut precision = Precision::new(workload.name());
    let (began, mut seed) = (Instant::now(), 0);
    let mut settled = 0;
    // Pages that were changed and not reported yet.
    let mut unreported = PageSet::of(content.pages());
    while precision.generations < settings.rounds as u64 {
        seed += 1;
        workload.write(seed)?;
        let stopped = Stopped::stop(&workload.processes())?;
        let seen = runtime.block_on(consumer.step(false))?.clone();
        let changed = content.changed_pages()?;
        drop(stopped);
        let lost = unreported.without(&seen.changed);
        if lost.count() > 0 {
            return Err(BenchError::Wrong(format!(
                "{}: changed and not reported: {lost:?}",
                workload.name()
            )));
        }
        // A write that the kernel ends after the stop, such as one of a device, is in this generation or in the next.
        unreported = changed.without(&seen.changed);
        settled += 1;
        if settled > SETTLE_GENERATIONS && (seen.coverage_exact || began.elapsed() > SETTLE_TIME)
            || precision.generations > 0
        {
            precision.add(&seen, &changed);
        } else {
            std::thread::sleep(SETTLE_PAUSE);
        }
    }
    Ok(precision)
}
