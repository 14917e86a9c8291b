//! Random lists of operations on one file against one question: is an incremental copy, kept only from Checkpoint and Changes, equal
//! to the file after each checkpoint?
//!
//! Each test tries lists for one kind of memory, with all methods of mapping the file, and with all writers together and each by
//! itself. A failing list is shrunk to the smallest one that fails. All tests together try lists for FDMAP_OPERATION_SECONDS
//! [default: 20], and at least one of each combination. FDMAP_OPERATION_SEED repeats a run.

mod incremental;
mod plan;
mod processes;
mod world;

use std::cell::RefCell;
use std::time::{Duration, Instant};

use fdmap_client::proto::Backing;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, vmstat};
use fdmap_tests::hugepages::{hugetlb_2m, shmem_thp};
use fdmap_tests::pattern::mix;
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::tracked::HUGE;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use tokio::runtime::Runtime;

use incremental::Counts;
use plan::{Combination, Kind, MAPPING_METHODS, Step};
use processes::Processes;
use world::World;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// The number of tests that share the time.
const TESTS: u32 = 5;
/// Huge pages for hugetlb files: one of at most 5, and those that are being deleted.
const HUGETLB_PAGES: u64 = 40;

/// The value of a variable of the environment, or a default.
fn number(variable: &str, default: u64) -> u64 {
    let Some(value) = std::env::var_os(variable) else { return default };
    let value = value.to_string_lossy().into_owned();
    value.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {value:?}"))
}

/// A generator of random numbers that a seed determines.
fn generator(seed: u64) -> TestRng {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
}

/// Runs the steps on a new file. The copy must equal the file after each checkpoint.
async fn run(processes: &mut Processes, combination: Combination, steps: &[Step]) -> Result<Counts, String> {
    let mut world = World::new(processes, combination).await?;
    let mut result = Ok(());
    for step in steps.iter().chain([&Step::Checkpoint { force: false }]) {
        result = world.apply(*step).await.map_err(|error| format!("{step:?}: {error}"));
        if result.is_err() {
            break;
        }
    }
    // The memory of a file is freed also after a failure, because smaller lists follow.
    let counts = world.finish().await;
    result.and(counts)
}

/// Tries lists of a combination for a time. Returns their counts, or why the smallest list failed.
fn try_lists(
    runtime: &Runtime,
    processes: &RefCell<Processes>,
    combination: Combination,
    seed: u64,
    limit: Duration,
) -> Result<Counts, String> {
    let config = Config { cases: 1, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let (began, counts) = (Instant::now(), RefCell::new(Counts::default()));
    for list in 0.. {
        if list > 0 && began.elapsed() >= limit {
            break;
        }
        // A runner counts the lists of all its runs, so that each run after the first one would try none.
        let mut runner = TestRunner::new_with_rng(config.clone(), generator(seed ^ mix(list)));
        let result = runner.run(&combination.lists(), |steps| {
            let run = runtime.block_on(run(&mut processes.borrow_mut(), combination, &steps));
            counts.borrow_mut().add(run.map_err(TestCaseError::fail)?);
            Ok(())
        });
        result.map_err(|error| format!("{combination:?}: {error}"))?;
    }
    Ok(counts.into_inner())
}

/// Tries lists of all combinations for a kind of memory.
fn try_combinations(kind: Kind) {
    let seed = number("FDMAP_OPERATION_SEED", fdmap_sys::clock::monotonic_ns());
    let combinations = plan::combinations(kind);
    let limit = Duration::from_secs(number("FDMAP_OPERATION_SECONDS", 20)) / TESTS;
    let limit = limit / u32::try_from(combinations.len()).unwrap();
    eprintln!("{kind:?}: FDMAP_OPERATION_SEED={seed}");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let processes = RefCell::new(Processes::start(kind));
    for method in MAPPING_METHODS {
        let mut counts = Counts::default();
        for (index, combination) in (0..).zip(&combinations).filter(|(_, one)| one.method == method) {
            // The lists of a combination do not depend on the number of lists of other ones.
            let tried = try_lists(&runtime, &processes, *combination, mix(seed) ^ index, limit);
            counts.add(tried.unwrap_or_else(|error| panic!("FDMAP_OPERATION_SEED={seed}: {error}")));
        }
        eprintln!("{kind:?}, {method:?}: no write was lost: {counts:?}");
    }
}

fn try_swapped(backing: Backing) {
    let _swap = require(Swap::make(1 << 28, SwapKind::Any));
    let before = vmstat("pswpout").unwrap();
    try_combinations(Kind { backing, swapped: true });
    let swapped = vmstat("pswpout").unwrap() - before;
    eprintln!("{swapped} pages were swapped out");
    assert!(swapped > 1000, "only {swapped} pages were swapped out");
}

fn try_huge(swapped: bool, host: &HostLock) {
    let _setting = require(shmem_thp(host));
    let before = vmstat("thp_file_alloc").unwrap();
    match swapped {
        true => try_swapped(Backing::ShmemThp),
        false => try_combinations(Kind { backing: Backing::ShmemThp, swapped }),
    }
    let allocated = vmstat("thp_file_alloc").unwrap() - before;
    assert!(allocated > 0, "no transparent huge page was allocated");
}

#[test]
fn copies_of_shmem_files_are_complete() {
    try_combinations(Kind { backing: Backing::Shmem, swapped: false });
}

#[test]
fn copies_of_swapped_shmem_files_are_complete() {
    let _host = HostLock::acquire().unwrap();
    try_swapped(Backing::Shmem);
}

#[test]
fn copies_of_transparent_huge_pages_are_complete() {
    let host = HostLock::acquire().unwrap();
    try_huge(false, &host);
}

#[test]
fn copies_of_swapped_transparent_huge_pages_are_complete() {
    let host = HostLock::acquire().unwrap();
    try_huge(true, &host);
}

#[test]
fn copies_of_hugetlb_files_are_complete() {
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, HUGETLB_PAGES));
    try_combinations(Kind { backing: Backing::Hugetlb(HUGE), swapped: false });
}
