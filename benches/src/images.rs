//! Dumps beside `cat`, and how much each of them swaps in; incremental dumps beside a copy of the changed pages.

use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use fdmap_client::grpc::CreateFile;
use fdmap_proto::PageIndex;
use fdmap_proto::units::{to_f64, to_usize};
use fdmap_tests::host::vmstat;
use fdmap_tests::service::{named, program};
use fdmap_tests::tracked::PAGE;
use serde::Serialize;

use crate::fixture::NAME;
use crate::lazy::{self, LazyTime};
use crate::pairs::median;
use crate::{BenchError, BenchResult, Condition, Fixture, Settings};

/// Images are kept in memory: the storage is not measured.
const FOLDER: &str = "/dev/shm";
const CONDITIONS: [Condition; 2] = [Condition::Resident, Condition::MostlySwapped];
/// Of 1000 pages, those that change between two images.
const CHANGED_PER_MILLE: u64 = 10;

/// Medians of one comparison.
#[derive(Clone, Debug, Serialize)]
pub struct ImageTime {
    pub name: String,
    /// Seconds of the reference.
    pub reference_s: f64,
    /// Seconds of the dump.
    pub dump_s: f64,
    /// Time of the dump divided by that of the reference: median over all pairs.
    pub quotient: f64,
    /// Pages that were swapped in while the reference ran, in percent of the pages of the file.
    pub reference_moved: f64,
    /// The same of the dump.
    pub dump_moved: f64,
}

/// All results.
#[derive(Clone, Debug, Serialize)]
pub struct ImageTimes {
    pub dumps: Vec<ImageTime>,
    pub lazy: LazyTime,
}

/// Measures all comparisons.
///
/// # Errors
/// [`BenchError`]
pub fn measure(settings: Settings) -> BenchResult<ImageTimes> {
    let mut fixture = Fixture::make(settings)?;
    let folder = tempfile::tempdir_in(FOLDER).map_err(failed("creating a folder in /dev/shm"))?;
    let mut times = Vec::new();
    for condition in CONDITIONS {
        let mut runs = Vec::new();
        for round in 0..settings.rounds {
            // The first one of a pair may find other caches than the second.
            let mut pair = [Run::default(); 2];
            for at in [round % 2, (round + 1) % 2] {
                // The run before has moved pages.
                fixture.recreate_file(condition)?;
                fixture.enter(condition)?;
                pair[at] = whole(&fixture, folder.path(), at == 1)?;
            }
            runs.push(pair);
        }
        times.push(outcome(format!("whole file, {}", condition.name()), &runs));
    }
    let mut runs = Vec::new();
    incremental(&fixture, folder.path(), settings, &mut runs)?;
    times.push(outcome("1 % of the file changed".to_owned(), &runs));
    fixture.recreate_file(Condition::Resident)?;
    fixture.enter(Condition::Resident)?;
    let image = folder.path().join("lazy");
    fdmap(&fixture, &["dump".as_ref(), NAME.as_ref(), image.as_os_str()])?;
    let lazy = lazy::measure(&fixture, &image, settings)?;
    Ok(ImageTimes { dumps: times, lazy })
}

#[derive(Clone, Copy, Debug, Default)]
struct Run {
    seconds: f64,
    /// Percent of the pages of the file.
    moved: f64,
}

fn failed(what: &str) -> impl FnOnce(std::io::Error) -> BenchError + use<> {
    let what = what.to_owned();
    move |error| BenchError::Io { what, error }
}

fn outcome(name: String, runs: &[[Run; 2]]) -> ImageTime {
    let of = |at: usize, value: fn(&Run) -> f64| median(runs.iter().map(|pair| value(&pair[at])));
    ImageTime {
        name,
        reference_s: of(0, |run| run.seconds),
        dump_s: of(1, |run| run.seconds),
        quotient: median(runs.iter().map(|[reference, dump]| dump.seconds / reference.seconds)),
        reference_moved: of(0, |run| run.moved),
        dump_moved: of(1, |run| run.moved),
    }
}

/// Copies the whole file, by `cat` or by a dump.
fn whole(fixture: &Fixture, folder: &Path, dumps: bool) -> BenchResult<Run> {
    let before = vmstat("pswpin")?;
    let target = folder.join("target");
    let began = Instant::now();
    if dumps {
        fdmap(fixture, &["dump".as_ref(), NAME.as_ref(), target.as_os_str()])?;
    } else {
        let copy = format!("cat <&3 >'{}'", target.display());
        fdmap(fixture, &["open", NAME, "--", "sh", "-c", &copy].map(AsRef::as_ref))?;
    }
    let seconds = began.elapsed().as_secs_f64();
    let moved = 100.0 * to_f64(vmstat("pswpin")?.saturating_sub(before)) / to_f64(fixture.file()?.pages);
    let removed = if dumps { std::fs::remove_dir_all(&target) } else { std::fs::remove_file(&target) };
    removed.map_err(failed("removing a copy"))?;
    Ok(Run { seconds, moved })
}

fn fdmap(fixture: &Fixture, arguments: &[&std::ffi::OsStr]) -> BenchResult<()> {
    let mut command = Command::new(program("fdmap")?);
    command.arg("--runtime-dir").arg(fixture.service().folder()).args(arguments);
    let output = command.output().map_err(failed("running fdmap"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(BenchError::Wrong(String::from_utf8_lossy(&output.stderr).into_owned()))
}

/// Writes pages of a tracked file that is resident. Copies these pages by pread and pwrite, and by an incremental dump.
fn incremental(
    fixture: &Fixture,
    folder: &Path,
    settings: Settings,
    runs: &mut Vec<[Run; 2]>,
) -> BenchResult<()> {
    const TRACKED: &str = "tracked";
    let pages = settings.file_bytes / PAGE;
    let create =
        CreateFile { name: TRACKED.to_owned(), size_bytes: settings.file_bytes, ..CreateFile::default() };
    let client = fixture.client();
    fixture.wait(client.create(create))?;
    let mut mapping = fixture.service().fdpass()?.map(&named(TRACKED), true)?;
    mapping.track()?;
    store(&mapping, (0..pages).map(PageIndex), 1)?;
    let image = |number: usize| folder.join(number.to_string());
    fdmap(fixture, &["dump".as_ref(), TRACKED.as_ref(), image(0).as_os_str()])?;
    for round in 0..settings.rounds {
        let step = 1000 / CHANGED_PER_MILLE;
        let shift = fdmap_proto::units::to_u64(round) % step;
        let changed: Vec<_> = (0..pages).filter(|page| page % step == shift).map(PageIndex).collect();
        store(&mapping, changed.iter().copied(), 2)?;
        let began = Instant::now();
        copy_pages(&mapping, &folder.join("pages"), &changed)?;
        let reference = Run { seconds: began.elapsed().as_secs_f64(), moved: 0.0 };
        let began = Instant::now();
        let (parent, target) = (image(round), image(round + 1));
        let arguments =
            ["dump".as_ref(), TRACKED.as_ref(), target.as_os_str(), "--parent".as_ref(), parent.as_os_str()];
        fdmap(fixture, &arguments)?;
        runs.push([reference, Run { seconds: began.elapsed().as_secs_f64(), moved: 0.0 }]);
    }
    drop(mapping);
    let name = named(TRACKED);
    Ok(fixture.wait(client.delete(&name))?)
}

/// Writes one byte to each page.
fn store(
    mapping: &fdmap_client::MappedFile,
    pages: impl Iterator<Item = PageIndex>,
    byte: u8,
) -> BenchResult<()> {
    for page in pages {
        if !mapping.write_at(page.0 * PAGE, &[byte]) {
            return Err(BenchError::Wrong(format!("page {page} is not in the mapping")));
        }
    }
    Ok(())
}

fn copy_pages(mapping: &fdmap_client::MappedFile, target: &Path, pages: &[PageIndex]) -> BenchResult<()> {
    let file = File::create(target).map_err(failed("creating a file"))?;
    let mut page = vec![0; to_usize(PAGE)];
    for (position, index) in (0..).zip(pages) {
        fdmap_sys::fd::read_at(mapping.as_fd().as_fd(), index.0 * PAGE, &mut page)?;
        file.write_all_at(&page, position * PAGE).map_err(failed("writing a page"))?;
    }
    Ok(())
}

/// The tables of docs/performance.md.
#[must_use]
pub fn markdown(times: &ImageTimes) -> String {
    let mut table = String::from(
        "| | reference, s | `fdmap dump`, s | dump / reference | swapped in by the reference | by the dump |\n\
         | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for time in &times.dumps {
        let ImageTime { name, reference_s, dump_s, quotient, reference_moved, dump_moved } = time;
        // Writing to a String does not fail.
        let _ = writeln!(
            table,
            "| {name} | {reference_s:.3} | {dump_s:.3} | {quotient:.2} | {reference_moved:.1} % | {dump_moved:.1} % |"
        );
    }
    table + "\n" + &lazy::markdown(&times.lazy)
}
