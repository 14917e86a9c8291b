//! Lazy restores beside complete ones.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fdmap_client::image::lazy::LazyFile;
use fdmap_client::image::restore::{RestoreOptions, RestoreService, restore};
use fdmap_client::image::{Control, DirectoryStore, ImageChain, ImageError, ImageStore};
use fdmap_tests::service::named;
use fdmap_tests::tracked::PAGE;
use serde::Serialize;
use tokio::runtime::Handle;

use crate::pairs::median;
use crate::{BenchError, BenchResult, Fixture, Settings};

/// Name of the restored file.
const COPY: &str = "copy";
/// Pages that are accessed before the stream has copied them.
const ACCESSES: u64 = 200;

/// Medians over all rounds, in milliseconds but for the page faults.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LazyTime {
    /// Until all pages of a complete restore were written.
    pub restored_ms: f64,
    /// Until the first page of a lazy restore was read: the service created the file meanwhile.
    pub first_access_ms: f64,
    /// Until all pages of a lazy restore were copied.
    pub filled_ms: f64,
    /// Accesses to pages that were not copied yet, microseconds: median and 99th percentile.
    pub fault_p50_us: f64,
    pub fault_p99_us: f64,
}

/// Restores the image in `folder` completely and lazily, interleaved.
///
/// # Errors
/// [`BenchError`]
pub fn measure(fixture: &Fixture, folder: &Path, settings: Settings) -> BenchResult<LazyTime> {
    let mut rounds = Vec::with_capacity(settings.rounds);
    for round in 0..settings.rounds {
        let mut time = LazyTime::default();
        for at in [round % 2, (round + 1) % 2] {
            run(fixture, folder, at == 1, &mut time)?;
            fixture.wait(fixture.client().delete(&named(COPY)))?;
        }
        rounds.push(time);
    }
    let of = |value: fn(&LazyTime) -> f64| median(rounds.iter().map(value));
    Ok(LazyTime {
        restored_ms: of(|time| time.restored_ms),
        first_access_ms: of(|time| time.first_access_ms),
        filled_ms: of(|time| time.filled_ms),
        fault_p50_us: of(|time| time.fault_p50_us),
        fault_p99_us: of(|time| time.fault_p99_us),
    })
}

fn failed(error: &ImageError) -> BenchError {
    BenchError::Wrong(fdmap_proto::error_chain(error))
}

/// Restores the image once, on a thread that may block.
fn run(fixture: &Fixture, folder: &Path, lazily: bool, time: &mut LazyTime) -> BenchResult<()> {
    let client = fixture.client().clone();
    let mut fdpass = fixture.service().fdpass()?;
    let folder = folder.to_owned();
    let mut measured = *time;
    let done = fixture.wait(async move {
        let runtime = Handle::current();
        let task = move || {
            let store = DirectoryStore::open(&folder).map_err(ImageError::from)?;
            let chain = ImageChain::open(&(Arc::new(store) as Arc<dyn ImageStore>))?;
            let service = RestoreService { client: &client, fdpass: &mut fdpass, runtime };
            let options =
                RestoreOptions { name: Some(COPY.to_owned()), jobs: 2, ..RestoreOptions::default() };
            if lazily {
                lazy(chain, service, &options, &mut measured)?;
            } else {
                let began = Instant::now();
                restore(&chain, service, &options, &Control::default())?;
                measured.restored_ms = millis(began.elapsed());
            }
            Ok(measured)
        };
        tokio::task::spawn_blocking(task).await
    });
    let done = done.map_err(|error| BenchError::Wrong(error.to_string()))?;
    *time = done.map_err(|error: ImageError| failed(&error))?;
    Ok(())
}

fn lazy(
    chain: ImageChain,
    service: RestoreService<'_>,
    options: &RestoreOptions,
    time: &mut LazyTime,
) -> Result<(), ImageError> {
    let began = Instant::now();
    let file = LazyFile::create(Arc::new(chain), service, options)?;
    let pages = fdmap_proto::units::to_u64(file.len()) / PAGE;
    let mut byte = [0];
    // The stream begins at the other end.
    let mut faults: Vec<_> = (0..ACCESSES.min(pages))
        .map(|number| {
            let page = pages - 1 - number * (pages / 2) / ACCESSES;
            let access = Instant::now();
            if !file.read_at(page * PAGE, &mut byte) {
                return f64::INFINITY;
            }
            if number == 0 {
                time.first_access_ms = millis(began.elapsed());
            }
            1e6 * access.elapsed().as_secs_f64()
        })
        .collect();
    file.finish()?;
    time.filled_ms = millis(began.elapsed());
    faults.sort_by(f64::total_cmp);
    let at = |per_cent: usize| faults.get(faults.len() * per_cent / 100).copied().unwrap_or_default();
    (time.fault_p50_us, time.fault_p99_us) = (at(50), at(99));
    Ok(())
}

fn millis(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

/// A table of docs/performance.md.
#[must_use]
pub fn markdown(time: &LazyTime) -> String {
    let LazyTime { restored_ms, first_access_ms, filled_ms, fault_p50_us, fault_p99_us } = time;
    let mut table = String::from(
        "| complete restore, ms | lazy: first access, ms | lazy: all pages, ms | page fault, us | p99, us |\n\
         | ---: | ---: | ---: | ---: | ---: |\n",
    );
    // Writing to a String does not fail.
    let _ = writeln!(
        table,
        "| {restored_ms:.1} | {first_access_ms:.2} | {filled_ms:.1} | {fault_p50_us:.0} | {fault_p99_us:.0} |"
    );
    table
}
