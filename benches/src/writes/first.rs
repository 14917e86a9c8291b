//! The first and the second write to each page after write protection: tracked by the service, by the kernel alone, by signals, and
//! untracked.

use std::time::Instant;

use fdmap_client::MappedFile;
use fdmap_proto::units::{to_f64, to_u64, to_usize};
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::memory::{Pages, pages_of};
use fdmap_tests::tracked::{PAGE, WpTracker, asynchronous};
use serde::Serialize;

use super::WritesFixture;
use super::signal::Protection;
use crate::pairs::median;
use crate::{BenchError, BenchResult};

/// Pages written with one mechanism before the next one runs: some milliseconds of work, so that a temporarily slow machine slows
/// all of them.
const CHUNK_PAGES: u64 = 4096;

/// A mechanism of write tracking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mechanism {
    /// Asynchronous write protection with a userfaultfd of this process, without events.
    Raw,
    /// The same again, to show the difference between equal mechanisms.
    RawAgain,
    /// The service.
    Service,
    /// mprotect and a SIGSEGV handler.
    Signal,
    /// None.
    Untracked,
}

const MECHANISMS: [Mechanism; 5] =
    [Mechanism::Raw, Mechanism::RawAgain, Mechanism::Service, Mechanism::Signal, Mechanism::Untracked];

impl Mechanism {
    const fn name(self) -> &'static str {
        match self {
            Self::Raw => "WP_ASYNC alone",
            Self::RawAgain => "WP_ASYNC alone, another one",
            Self::Service => "tracked by the service",
            Self::Signal => "mprotect and SIGSEGV",
            Self::Untracked => "not tracked",
        }
    }

    /// Name of its file.
    const fn file(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::RawAgain => "raw-again",
            Self::Service => "service",
            Self::Signal => "signal",
            Self::Untracked => "untracked",
        }
    }
}

/// Result of one mechanism.
#[derive(Clone, Debug, Serialize)]
pub struct FirstWrite {
    pub name: &'static str,
    /// Median time of the first write to a page in nanoseconds.
    pub first_ns: f64,
    /// Median over pairs of chunks of the time divided by the time with WP_ASYNC alone.
    pub first_times_raw: f64,
    /// Median time of the second write in nanoseconds.
    pub second_ns: f64,
    /// Median over pairs of chunks of the time divided by the time without tracking.
    pub second_times_untracked: f64,
}

/// Measures all mechanisms, interleaved.
///
/// # Errors
/// [`BenchError`]
pub fn measure(fixture: &WritesFixture) -> BenchResult<Vec<FirstWrite>> {
    let bytes = fixture.settings.file_bytes / 16;
    let mut files = Vec::new();
    for mechanism in MECHANISMS {
        let file = fixture.map(mechanism.file(), bytes)?;
        pages_of(&file).write(0..bytes / PAGE, 1);
        files.push(file);
    }
    if let Some(file) = files.iter_mut().find(|file| file.info().name == Mechanism::Service.file()) {
        file.track()?;
    }
    let times = rounds(fixture, &files)?;
    drop(files);
    for mechanism in MECHANISMS {
        fixture.delete(mechanism.file())?;
    }
    let of = |mechanism: Mechanism, nth: usize| times[index_of(mechanism)].iter().map(move |pair| pair[nth]);
    let times_as_long = |mechanism: Mechanism, reference: Mechanism, nth: usize| {
        median(of(mechanism, nth).zip(of(reference, nth)).map(|(own, reference)| own / reference))
    };
    let outcome = |mechanism: Mechanism| FirstWrite {
        name: mechanism.name(),
        first_ns: median(of(mechanism, 0)),
        first_times_raw: times_as_long(mechanism, Mechanism::Raw, 0),
        second_ns: median(of(mechanism, 1)),
        second_times_untracked: times_as_long(mechanism, Mechanism::Untracked, 1),
    };
    Ok(MECHANISMS.into_iter().map(outcome).collect())
}

/// Position of a mechanism in [`MECHANISMS`].
fn index_of(mechanism: Mechanism) -> usize {
    MECHANISMS.iter().position(|other| *other == mechanism).unwrap_or(0)
}

/// Nanoseconds of the first and the second write, for each mechanism, chunk and round.
type Times = Vec<Vec<[f64; 2]>>;

fn rounds(fixture: &WritesFixture, files: &[MappedFile]) -> BenchResult<Times> {
    let pages: Vec<Pages<'_>> = files.iter().map(pages_of).collect();
    let raw = |mechanism: Mechanism| {
        let range = pages[index_of(mechanism)].range();
        WpTracker::new(Userfaultfd::create()?, Pagemap::open(None)?, range, PAGE, asynchronous())
    };
    let raw = [raw(Mechanism::Raw)?, raw(Mechanism::RawAgain)?];
    for tracker in &raw {
        tracker.arm()?;
    }
    let signal = Protection::of(pages[index_of(Mechanism::Signal)])?;
    let mut times: Times = vec![Vec::new(); MECHANISMS.len()];
    let count = pages[0].count();
    for round in 0..fixture.settings.rounds {
        let mut observed = Vec::new();
        for nth in 0..MECHANISMS.len() {
            // The order rotates: memory protected first is the coldest in the caches when it is written.
            match MECHANISMS[(nth + round) % MECHANISMS.len()] {
                Mechanism::Raw => observed.push(to_u64(raw[0].harvest()?.len())),
                Mechanism::RawAgain => observed.push(to_u64(raw[1].harvest()?.len())),
                Mechanism::Service => {
                    observed.push(fixture.checkpoint(Mechanism::Service.file(), true)?.observed_pages);
                }
                Mechanism::Signal => signal.arm()?,
                Mechanism::Untracked => {}
            }
        }
        if round > 0 && observed.iter().any(|pages| *pages != count) {
            return Err(BenchError::Wrong(format!("{observed:?} of {count} writes were observed")));
        }
        for (nth_chunk, first) in (0..count).step_by(to_usize(CHUNK_PAGES)).enumerate() {
            let chunk = first..count.min(first + CHUNK_PAGES);
            // Every mechanism follows every other one at times, because their number is prime.
            let step = 1 + (nth_chunk + round) % (MECHANISMS.len() - 1);
            for nth in 0..MECHANISMS.len() {
                let at = (nth * step + nth_chunk) % MECHANISMS.len();
                times[at].push(write_chunk(pages[at], &chunk));
            }
        }
        signal.expect(count)?;
    }
    Ok(times)
}

/// Writes each page of a chunk twice and returns the time of each write per page.
fn write_chunk(pages: Pages<'_>, chunk: &std::ops::Range<u64>) -> [f64; 2] {
    [2, 3].map(|value| {
        // Reading first makes the memory equally warm in the caches, no matter what ran before.
        std::hint::black_box(pages.read(chunk.clone()));
        let begin = Instant::now();
        pages.write(chunk.clone(), value);
        begin.elapsed().as_secs_f64() * 1e9 / to_f64(chunk.end - chunk.start)
    })
}
