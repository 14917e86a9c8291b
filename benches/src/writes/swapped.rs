//! Accesses to swapped pages: reads and writes after swap-out, in private memory, in a file and in a tracked file.

use std::time::Instant;

use fdmap_client::MappedFile;
use fdmap_proto::units::{to_f64, to_u64};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::memory::{Faults, Pages, Private, pages_of};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::tracked::PAGE;
use serde::Serialize;

use super::WritesFixture;
use crate::pairs::median;
use crate::{BenchError, BenchResult};

const PLAIN: &str = "plain";
const TRACKED: &str = "tracked";

/// Cost of one access per page.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Access {
    /// Minor faults.
    pub minor: f64,
    /// Major faults.
    pub major: f64,
    /// Time in nanoseconds.
    pub ns: f64,
}

/// Result for one kind of memory.
#[derive(Clone, Debug, Serialize)]
pub struct SwappedIn {
    pub name: &'static str,
    /// Read after swap-out.
    pub read: Access,
    /// Write after that read.
    pub write: Access,
    /// Write after swap-out, without a read.
    pub write_at_once: Access,
    /// Second write after that.
    pub write_again: Access,
}

/// One kind of memory.
#[derive(Clone, Copy)]
struct Case<'a> {
    name: &'static str,
    pages: Pages<'a>,
    /// A checkpoint is made between a write and the swap-out that follows.
    checkpoint: bool,
}

/// Measures all kinds of memory, interleaved.
///
/// # Errors
/// [`BenchError`]
pub fn measure(fixture: &WritesFixture) -> BenchResult<Vec<SwappedIn>> {
    let bytes = fixture.settings.file_bytes / 64;
    let _swap = Swap::make(4 * bytes + (64 << 20), SwapKind::Any)?;
    let cgroup = Cgroup::with_limit(8 * bytes + (64 << 20))?;
    let private = Private::new(bytes / PAGE)?;
    let plain = fixture.map(PLAIN, bytes)?;
    let mut tracked = fixture.map(TRACKED, bytes)?;
    tracked.track()?;
    let measured = in_cgroup(fixture, &cgroup, &private, &plain, &tracked);
    // Free the memory before swap is removed.
    drop((private, plain, tracked));
    for name in [PLAIN, TRACKED] {
        fixture.delete(name)?;
    }
    measured
}

fn in_cgroup(
    fixture: &WritesFixture,
    cgroup: &Cgroup,
    private: &Private,
    plain: &MappedFile,
    tracked: &MappedFile,
) -> BenchResult<Vec<SwappedIn>> {
    let case = |name, pages, checkpoint| Case { name, pages, checkpoint };
    let cases = [
        case("private memory", private.pages(), false),
        case("file", pages_of(plain), false),
        case("tracked file, a generation closed", pages_of(tracked), true),
        case("tracked file, in the same generation", pages_of(tracked), false),
    ];
    // Pages are charged to the cgroup of the process that allocates them.
    cgroup.add(std::process::id())?;
    for case in &cases[..3] {
        case.pages.write(0..case.pages.count(), 1);
    }
    cgroup.give_back(std::process::id())?;
    let mut rounds: Vec<Vec<[Access; 4]>> = vec![Vec::new(); cases.len()];
    for _ in 0..fixture.settings.rounds {
        for (case, rounds) in cases.iter().zip(&mut rounds) {
            rounds.push(round(fixture, *case)?);
        }
    }
    let outcome = |(case, rounds): (&Case<'_>, Vec<[Access; 4]>)| {
        let nth = |nth: usize| {
            let median_of =
                |field: fn(&Access) -> f64| median(rounds.iter().map(|accesses| field(&accesses[nth])));
            Access {
                minor: median_of(|access| access.minor),
                major: median_of(|access| access.major),
                ns: median_of(|access| access.ns),
            }
        };
        SwappedIn { name: case.name, read: nth(0), write: nth(1), write_at_once: nth(2), write_again: nth(3) }
    };
    Ok(cases.iter().zip(rounds).map(outcome).collect())
}

/// Swaps out, reads and writes; swaps out again and writes twice.
fn round(fixture: &WritesFixture, case: Case<'_>) -> BenchResult<[Access; 4]> {
    let all = 0..case.pages.count();
    let read = || {
        std::hint::black_box(case.pages.read(all.clone()));
    };
    let write = || case.pages.write(all.clone(), 2);
    let access = |run: &dyn Fn()| access(to_u64(all.clone().count()), run);
    swap_out(fixture, case)?;
    let (read, written) = (access(&read)?, access(&write)?);
    swap_out(fixture, case)?;
    Ok([read, written, access(&write)?, access(&write)?])
}

/// Writes every page and swaps it out.
fn swap_out(fixture: &WritesFixture, case: Case<'_>) -> BenchResult<()> {
    case.pages.write(0..case.pages.count(), 3);
    if case.checkpoint {
        fixture.checkpoint(TRACKED, true)?;
    }
    let resident = case.pages.page_out()?;
    if resident == 0 {
        Ok(())
    } else {
        Err(BenchError::Wrong(format!("{}: {resident} pages stay resident", case.name)))
    }
}

fn access(pages: u64, run: &dyn Fn()) -> BenchResult<Access> {
    let mut ns = 0.0;
    let faults = Faults::during(|| {
        let begin = Instant::now();
        run();
        ns = begin.elapsed().as_secs_f64() * 1e9;
    })?;
    let pages = to_f64(pages);
    Ok(Access { minor: to_f64(faults.minor) / pages, major: to_f64(faults.major) / pages, ns: ns / pages })
}
