//! The first write to each page after its memory was armed, and the second: tracked by the service, by the kernel alone, by
//! signals, and not at all.

use std::time::Instant;

use fdmap_client::MappedFile;
use fdmap_proto::units::{to_f64, to_u64, to_usize};
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::memory::{Pages, pages_of};
use fdmap_tests::tracked::{PAGE, WpTracker, asynchronous};
use serde::Serialize;

use super::Stage;
use super::signal::Protection;
use crate::pairs::median;
use crate::{BenchError, Measured};

/// Pages that are written by one way before the next one has its turn: some milliseconds, so that a machine that is slow for
/// a while is slow for all.
const PIECE: u64 = 4096;

/// One who keeps track of writes, or nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Asynchronous write-protection by a userfaultfd of this process, without events.
    Raw,
    /// The same again: how far two of the same differ.
    RawAgain,
    /// The service.
    Service,
    /// mprotect and SIGSEGV.
    Signal,
    /// Nobody.
    Untracked,
}

const WAYS: [Way; 5] = [Way::Raw, Way::RawAgain, Way::Service, Way::Signal, Way::Untracked];

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Raw => "WP_ASYNC alone",
            Self::RawAgain => "WP_ASYNC alone, another one",
            Self::Service => "tracked by the service",
            Self::Signal => "mprotect and SIGSEGV",
            Self::Untracked => "not tracked",
        }
    }

    /// The file's name.
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

/// What was measured of one way.
#[derive(Clone, Debug, Serialize)]
pub struct FirstWrite {
    /// Which.
    pub name: &'static str,
    /// Nanoseconds of a first write to a page: the median over pieces.
    pub first_ns: f64,
    /// How many times what it takes with WP_ASYNC alone: the median over pairs of pieces.
    pub first_times_raw: f64,
    /// Nanoseconds of the second one.
    pub second_ns: f64,
    /// How many times what it takes without tracking.
    pub second_times_untracked: f64,
}

/// Measures all ways by turns.
///
/// # Errors
/// [`BenchError`]
pub fn measure(stage: &Stage) -> Measured<Vec<FirstWrite>> {
    let bytes = stage.settings.file_bytes / 16;
    let mut files = Vec::new();
    for way in WAYS {
        let file = stage.map(way.file(), bytes)?;
        pages_of(&file).write(0..bytes / PAGE, 1);
        files.push(file);
    }
    if let Some(file) = files.iter_mut().find(|file| file.info().name == Way::Service.file()) {
        file.track()?;
    }
    let times = rounds(stage, &files)?;
    drop(files);
    for way in WAYS {
        stage.delete(way.file())?;
    }
    let of = |way: Way, nth: usize| times[place(way)].iter().map(move |both| both[nth]);
    let times_as_long = |way: Way, reference: Way, nth: usize| {
        median(of(way, nth).zip(of(reference, nth)).map(|(own, reference)| own / reference))
    };
    let outcome = |way: Way| FirstWrite {
        name: way.name(),
        first_ns: median(of(way, 0)),
        first_times_raw: times_as_long(way, Way::Raw, 0),
        second_ns: median(of(way, 1)),
        second_times_untracked: times_as_long(way, Way::Untracked, 1),
    };
    Ok(WAYS.into_iter().map(outcome).collect())
}

/// Where a way stands among all.
fn place(way: Way) -> usize {
    WAYS.iter().position(|other| *other == way).unwrap_or(0)
}

/// Nanoseconds of a first and of a second write, of each piece in each round, of each way.
type Times = Vec<Vec<[f64; 2]>>;

fn rounds(stage: &Stage, files: &[MappedFile]) -> Measured<Times> {
    let pages: Vec<Pages<'_>> = files.iter().map(pages_of).collect();
    let raw = |way: Way| {
        let range = pages[place(way)].range();
        WpTracker::new(Userfaultfd::create()?, Pagemap::open(None)?, range, PAGE, asynchronous())
    };
    let raw = [raw(Way::Raw)?, raw(Way::RawAgain)?];
    for tracker in &raw {
        tracker.arm()?;
    }
    let signal = Protection::of(pages[place(Way::Signal)])?;
    let mut times: Times = vec![Vec::new(); WAYS.len()];
    let count = pages[0].count();
    for round in 0..stage.settings.rounds {
        let mut seen = Vec::new();
        for nth in 0..WAYS.len() {
            // What is armed first is the farthest from the processor when it is written.
            match WAYS[(nth + round) % WAYS.len()] {
                Way::Raw => seen.push(to_u64(raw[0].harvest()?.len())),
                Way::RawAgain => seen.push(to_u64(raw[1].harvest()?.len())),
                Way::Service => seen.push(stage.checkpoint(Way::Service.file(), true)?.observed_pages),
                Way::Signal => signal.arm()?,
                Way::Untracked => {}
            }
        }
        if round > 0 && seen.iter().any(|seen| *seen != count) {
            return Err(BenchError::Wrong(format!("{seen:?} of {count} writes were seen")));
        }
        for (nth_piece, first) in (0..count).step_by(to_usize(PIECE)).enumerate() {
            let piece = first..count.min(first + PIECE);
            // Each comes after each other one at times: their number is a prime.
            let step = 1 + (nth_piece + round) % (WAYS.len() - 1);
            for nth in 0..WAYS.len() {
                let at = (nth * step + nth_piece) % WAYS.len();
                times[at].push(piece_of(pages[at], &piece));
            }
        }
        signal.expect(count)?;
    }
    Ok(times)
}

/// Writes each page of a piece once, and once more.
fn piece_of(pages: Pages<'_>, piece: &std::ops::Range<u64>) -> [f64; 2] {
    [2, 3].map(|value| {
        // The memory is as near to the processor whatever ran before, faults of the first writes among that.
        std::hint::black_box(pages.read(piece.clone()));
        let begin = Instant::now();
        pages.write(piece.clone(), value);
        begin.elapsed().as_secs_f64() * 1e9 / to_f64(piece.end - piece.start)
    })
}
