//! What to measure on, and how often.

use fdmap_proto::error_chain;
use std::process::ExitCode;

use fdmap_tests::HarnessError;
use fdmap_tests::harness::require_all;

use crate::{BenchError, Measured};

/// Bytes that one block of pages covers: files are a multiple of this.
const GRAIN: u64 = 16 << 20;

/// What to measure on, and how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Size of the file.
    pub file_bytes: u64,
    /// Pairs that are measured of each way.
    pub rounds: usize,
}

impl Settings {
    /// Run by `cargo bench`: `FDMAP_BENCH_BYTES` (4 GiB) and `FDMAP_BENCH_ROUNDS` (25). Run by `cargo test`, which does not
    /// say `--bench`: once around on a small file, to see that it works.
    ///
    /// # Errors
    /// [`BenchError::Usage`] if a variable is not a number that can be used.
    pub fn from_env() -> Measured<Self> {
        if !is_bench() {
            return Ok(Self { file_bytes: 64 << 20, rounds: 1 });
        }
        let file_bytes = number("FDMAP_BENCH_BYTES", 4 << 30)?;
        if file_bytes < 4 * GRAIN || !file_bytes.is_multiple_of(GRAIN) {
            return Err(BenchError::Usage(format!("FDMAP_BENCH_BYTES is no multiple of {GRAIN} from 4 on")));
        }
        let rounds = usize::try_from(number("FDMAP_BENCH_ROUNDS", 25)?).unwrap_or(0).max(1);
        Ok(Self { file_bytes, rounds })
    }
}

fn number(name: &str, default: u64) -> Measured<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().map_err(|_| BenchError::Usage(format!("{name} is no number: {text:?}"))),
        Err(_) => Ok(default),
    }
}

fn is_bench() -> bool {
    std::env::args().any(|argument| argument == "--bench")
}

/// Runs a bench. What this host lacks is said, and is a failure unless this is but `cargo test`.
#[must_use]
pub fn run(bench: impl FnOnce(Settings) -> Measured<()>) -> ExitCode {
    match Settings::from_env().and_then(bench) {
        Ok(()) => ExitCode::SUCCESS,
        Err(BenchError::Bed(HarnessError::Missing(what))) => {
            eprintln!("not run: this host lacks {what}");
            if is_bench() || require_all() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
        }
        Err(error) => {
            eprintln!("not measured: {}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}
