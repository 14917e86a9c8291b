//! Cost of the shim to an unmodified program: each figure interleaved with the same program without the shim.

use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::time::Instant;

use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, program};
use serde::Serialize;

use crate::pairs::median;
use crate::report::Host;
use crate::{BenchError, BenchResult, Settings};

/// Number of mmap and munmap calls in one run of the program.
const MMAPS_PER_RUN: usize = 200;

/// Results of the shim benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct ShimReport {
    #[serde(flatten)]
    pub host: Host,
    pub costs: Vec<Cost>,
}

/// One operation without and with the shim.
#[derive(Clone, Debug, Serialize)]
pub struct Cost {
    /// The operation.
    pub what: &'static str,
    /// Median time without the shim in microseconds.
    pub without_us: f64,
    /// Median time with the shim in microseconds.
    pub with_us: f64,
}

/// Names printed by the program, with descriptions.
const FIGURES: [(&str, &str); 4] = [
    ("memfd", "mmap and munmap of a memfd of 4 MiB, adopted and tracked"),
    ("anonymous", "mmap and munmap of anonymous memory"),
    ("read", "read of one byte of /dev/zero"),
    ("pagemap", "pread of 1024 entries of /proc/self/pagemap, of a service file"),
];

/// Runs the program without and with the shim, interleaved.
///
/// # Errors
/// [`BenchError`]
pub fn measure(settings: Settings) -> BenchResult<Vec<Cost>> {
    let service = Service::start(&[])?;
    let shim = program("libfdmap_shim.so")?;
    let compiled = Compiled::new("costs")?;
    let with_shim = |mut command: Command| {
        command.env("LD_PRELOAD", &shim).env("FDMAP_RUNTIME_DIR", service.folder());
        command
    };
    let start = || Command::new("/bin/true");
    let run = || {
        let mut costs = Command::new(compiled.path());
        costs.arg(MMAPS_PER_RUN.to_string());
        costs
    };
    let mut starts = Vec::new();
    let mut figures = vec![Vec::new(); FIGURES.len()];
    for _ in 0..settings.rounds {
        // A single start is dominated by noise.
        for _ in 0..10 {
            starts.push([run_time(start())?, run_time(with_shim(start()))?]);
        }
        let (without, with) = (stdout_of(run())?, stdout_of(with_shim(run()))?);
        for ((name, _), figures) in FIGURES.iter().zip(&mut figures) {
            figures.push([figure(&without, name)?, figure(&with, name)?]);
        }
    }
    let cost = |what, pairs: &[[f64; 2]]| Cost {
        what,
        without_us: median(pairs.iter().map(|[without, _]| *without)),
        with_us: median(pairs.iter().map(|[_, with]| *with)),
    };
    let mut costs = vec![cost("start and end of /bin/true", &starts)];
    costs.extend(FIGURES.iter().zip(&figures).map(|((_, what), pairs)| cost(what, pairs)));
    Ok(costs)
}

/// Time from start to exit in microseconds.
fn run_time(mut command: Command) -> BenchResult<f64> {
    let shown = format!("{command:?}");
    let failed = |error| BenchError::Io { what: format!("running {shown}"), error };
    let start = Instant::now();
    let status = command.status().map_err(failed)?;
    let elapsed = start.elapsed().as_secs_f64() * 1e6;
    if status.success() { Ok(elapsed) } else { Err(BenchError::Wrong(format!("{shown}: {status}"))) }
}

fn stdout_of(mut command: Command) -> BenchResult<String> {
    let shown = format!("{command:?}");
    let failed = |error| BenchError::Io { what: format!("running {shown}"), error };
    let output = command.stderr(Stdio::inherit()).output().map_err(failed)?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(BenchError::Wrong(format!("{shown}: {}", output.status)))
    }
}

/// Parses a figure printed in nanoseconds and returns microseconds.
fn figure(output: &str, name: &str) -> BenchResult<f64> {
    let value = output.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
    value.map(|ns| ns / 1e3).ok_or_else(|| BenchError::Wrong(format!("no {name} in {output:?}")))
}

impl ShimReport {
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = "| | without, us | under the shim, us |\n| --- | ---: | ---: |\n".to_owned();
        for Cost { what, without_us, with_us } in &self.costs {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "| {what} | {without_us:.2} | {with_us:.2} |");
        }
        text
    }
}
