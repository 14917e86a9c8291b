//! Random lists of operations on one file, each list with all kinds of writers, against one question: is an incremental copy, kept
//! only from Checkpoint and Changes, equal to the file after each checkpoint?
//!
//! A failing list is shrunk to the smallest one that fails. FDMAP_OPERATION_SECONDS sets for how long lists are tried [default:
//! 5], FDMAP_OPERATION_SEED repeats a run.

mod plan;
mod world;

use std::time::{Duration, Instant};

use fdmap_tests::service::Service;
use fdmap_tests::test;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use plan::{FileKind, FileOperation};
use world::World;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

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

/// Runs the operations on a new file. The copy must equal the file after each checkpoint.
async fn run(service: &Service, kind: FileKind, operations: &[FileOperation]) -> Result<(), String> {
    let mut world = World::new(service, kind).await;
    for operation in operations.iter().chain([&FileOperation::Checkpoint { force: false }]) {
        if let Some(stale) = world.apply(*operation).await {
            return Err(format!("after {operation:?} the copy differs from the file in pages {stale:?}"));
        }
    }
    world.finish().await;
    Ok(())
}

fn try_lists(kind: FileKind) {
    let seed = number("FDMAP_OPERATION_SEED", fdmap_sys::clock::monotonic_ns());
    let limit = Duration::from_secs(number("FDMAP_OPERATION_SECONDS", 5));
    eprintln!("{kind:?}: FDMAP_OPERATION_SEED={seed}");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let service = Service::start(&[]).unwrap();
    let config = Config { cases: 1, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, generator(seed));
    let (began, mut lists) = (Instant::now(), 0_u64);
    while lists == 0 || began.elapsed() < limit {
        lists += 1;
        let result = runner.run(&plan::operations(kind), |operations| {
            runtime.block_on(run(&service, kind, &operations)).map_err(TestCaseError::fail)
        });
        result.unwrap_or_else(|error| panic!("{kind:?}, list {lists} of seed {seed}: {error}"));
    }
    eprintln!("{kind:?}: {lists} lists of operations lost no write");
}

#[test]
fn copy_of_created_file_is_complete() {
    try_lists(FileKind::Created);
}

#[test]
fn copy_of_adopted_file_is_complete() {
    try_lists(FileKind::Adopted);
}
