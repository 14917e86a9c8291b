//! Size of the file and number of rounds, from the environment.

use fdmap_proto::error_chain;
use std::process::ExitCode;

use fdmap_tests::HarnessError;
use fdmap_tests::harness::require_all;

use crate::{BenchError, BenchResult};

/// File sizes are a multiple of the bytes covered by one block of pages.
const BLOCK_BYTES: u64 = 16 << 20;

/// Parameters of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Size of the file in bytes.
    pub file_bytes: u64,
    /// Number of measured pairs of each method.
    pub rounds: usize,
}

impl Settings {
    /// Under `cargo bench`: `FDMAP_BENCH_BYTES` (default 4 GiB) and `FDMAP_BENCH_ROUNDS` (default 25). Under `cargo test`, which does
    /// not pass `--bench`: one round on a small file.
    ///
    /// # Errors
    /// [`BenchError::Usage`] if a variable has an invalid value.
    pub fn from_env() -> BenchResult<Self> {
        if !is_bench() {
            return Ok(Self { file_bytes: 64 << 20, rounds: 1 });
        }
        let file_bytes = number("FDMAP_BENCH_BYTES", 4 << 30)?;
        if file_bytes < 4 * BLOCK_BYTES || !file_bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(BenchError::Usage(format!(
                "FDMAP_BENCH_BYTES is not a multiple of {BLOCK_BYTES}, at least four times it"
            )));
        }
        let rounds = usize::try_from(number("FDMAP_BENCH_ROUNDS", 25)?).unwrap_or(0).max(1);
        Ok(Self { file_bytes, rounds })
    }
}

fn number(name: &str, default: u64) -> BenchResult<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().map_err(|_| BenchError::Usage(format!("{name} is not a number: {text:?}"))),
        Err(_) => Ok(default),
    }
}

fn is_bench() -> bool {
    std::env::args().any(|argument| argument == "--bench")
}

/// Runs a benchmark. A missing host feature is printed and fails the benchmark, but not under `cargo test`.
#[must_use]
pub fn run(bench: impl FnOnce(Settings) -> BenchResult<()>) -> ExitCode {
    match Settings::from_env().and_then(bench) {
        Ok(()) => ExitCode::SUCCESS,
        Err(BenchError::Harness(HarnessError::Missing(what))) => {
            eprintln!("not run: this host lacks {what}");
            if is_bench() || require_all() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
        }
        Err(error) => {
            eprintln!("benchmark failed: {}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}
