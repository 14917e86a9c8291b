//! Pages that are written, paged out, read and written again: what each access takes, in private memory, in a file, and in a
//! tracked one.

use std::time::Instant;

use fdmap_client::MappedFile;
use fdmap_proto::units::{to_f64, to_u64};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::memory::{Faults, Pages, Private, pages_of};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::tracked::PAGE;
use serde::Serialize;

use super::Stage;
use crate::pairs::median;
use crate::{BenchError, Measured};

/// The names of the files.
const PLAIN: &str = "plain";
const TRACKED: &str = "tracked";

/// What an access of every page took, for each page.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Access {
    /// Minor faults.
    pub minor: f64,
    /// Major faults.
    pub major: f64,
    /// Nanoseconds.
    pub ns: f64,
}

/// What was measured of one kind of memory.
#[derive(Clone, Debug, Serialize)]
pub struct SwappedIn {
    /// Which.
    pub name: &'static str,
    /// Each page was read,
    pub read: Access,
    /// and then written.
    pub write: Access,
    /// Paged out again, each page was written at once.
    pub write_at_once: Access,
    /// And once more.
    pub write_again: Access,
}

/// The memory that is measured.
#[derive(Clone, Copy)]
struct Case<'a> {
    name: &'static str,
    pages: Pages<'a>,
    /// A generation is closed between a write and the page-out after it.
    checkpoint: bool,
}

/// Measures all kinds of memory by turns.
///
/// # Errors
/// [`BenchError`]
pub fn measure(stage: &Stage) -> Measured<Vec<SwappedIn>> {
    let bytes = stage.settings.file_bytes / 64;
    let _swap = Swap::make(4 * bytes + (64 << 20), SwapKind::Any)?;
    let cgroup = Cgroup::with_limit(8 * bytes + (64 << 20))?;
    let private = Private::new(bytes / PAGE)?;
    let plain = stage.map(PLAIN, bytes)?;
    let mut tracked = stage.map(TRACKED, bytes)?;
    tracked.track()?;
    let measured = in_cgroup(stage, &cgroup, &private, &plain, &tracked);
    // Before the swap goes.
    drop((private, plain, tracked));
    for name in [PLAIN, TRACKED] {
        stage.delete(name)?;
    }
    measured
}

fn in_cgroup(
    stage: &Stage,
    cgroup: &Cgroup,
    private: &Private,
    plain: &MappedFile,
    tracked: &MappedFile,
) -> Measured<Vec<SwappedIn>> {
    let case = |name, pages, checkpoint| Case { name, pages, checkpoint };
    let cases = [
        case("private memory", private.pages(), false),
        case("file", pages_of(plain), false),
        case("tracked file, a generation closed", pages_of(tracked), true),
        case("tracked file, in the same generation", pages_of(tracked), false),
    ];
    // Memory is charged to where its writer is, and stays charged there.
    cgroup.add(std::process::id())?;
    for case in &cases[..3] {
        case.pages.write(0..case.pages.count(), 1);
    }
    cgroup.give_back(std::process::id())?;
    let mut rounds: Vec<Vec<[Access; 4]>> = vec![Vec::new(); cases.len()];
    for _ in 0..stage.settings.rounds {
        for (case, rounds) in cases.iter().zip(&mut rounds) {
            rounds.push(round(stage, *case)?);
        }
    }
    let outcome = |(case, rounds): (&Case<'_>, Vec<[Access; 4]>)| {
        let nth = |nth: usize| {
            let of = |what: fn(&Access) -> f64| median(rounds.iter().map(|accesses| what(&accesses[nth])));
            Access {
                minor: of(|access| access.minor),
                major: of(|access| access.major),
                ns: of(|access| access.ns),
            }
        };
        SwappedIn { name: case.name, read: nth(0), write: nth(1), write_at_once: nth(2), write_again: nth(3) }
    };
    Ok(cases.iter().zip(rounds).map(outcome).collect())
}

/// Read and write, then write and write again.
fn round(stage: &Stage, case: Case<'_>) -> Measured<[Access; 4]> {
    let all = 0..case.pages.count();
    let read = || {
        std::hint::black_box(case.pages.read(all.clone()));
    };
    let write = || case.pages.write(all.clone(), 2);
    let access = |run: &dyn Fn()| access(to_u64(all.clone().count()), run);
    away(stage, case)?;
    let (read, written) = (access(&read)?, access(&write)?);
    away(stage, case)?;
    Ok([read, written, access(&write)?, access(&write)?])
}

/// Writes every page and has it paged out.
fn away(stage: &Stage, case: Case<'_>) -> Measured<()> {
    case.pages.write(0..case.pages.count(), 3);
    if case.checkpoint {
        stage.checkpoint(TRACKED, true)?;
    }
    let stay = case.pages.page_out()?;
    if stay == 0 { Ok(()) } else { Err(BenchError::Wrong(format!("{}: {stay} pages stay", case.name))) }
}

fn access(pages: u64, run: &dyn Fn()) -> Measured<Access> {
    let mut ns = 0.0;
    let faults = Faults::during(|| {
        let begin = Instant::now();
        run();
        ns = begin.elapsed().as_secs_f64() * 1e9;
    })?;
    let pages = to_f64(pages);
    Ok(Access { minor: to_f64(faults.minor) / pages, major: to_f64(faults.major) / pages, ns: ns / pages })
}
