//! What the shim costs programs that know nothing of it: each figure by turns with the same program without it.

use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::time::Instant;

use fdmap_tests::programs::Compiled;
use fdmap_tests::service::{Service, program};
use serde::Serialize;

use crate::pairs::median;
use crate::report::Host;
use crate::{BenchError, Measured, Settings};

/// Mappings of a memfd that one run of the program makes and ends.
const PAIRS: usize = 200;

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct ShimReport {
    /// Where.
    #[serde(flatten)]
    pub host: Host,
    /// Each figure.
    pub costs: Vec<Cost>,
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Cost {
    /// Of what.
    pub what: &'static str,
    /// Microseconds without the shim: the median.
    pub without_us: f64,
    /// The same under it.
    pub with_us: f64,
}

/// What the program prints for each, and what that is.
const FIGURES: [(&str, &str); 4] = [
    ("memfd", "mmap and munmap of a memfd of 4 MiB, adopted and tracked"),
    ("anonymous", "mmap and munmap of anonymous memory"),
    ("read", "read of one byte of /dev/zero"),
    ("pagemap", "pread of 1024 entries of /proc/self/pagemap, of a service file"),
];

/// Runs each so many times, by turns.
///
/// # Errors
/// [`BenchError`]
pub fn measure(settings: Settings) -> Measured<Vec<Cost>> {
    let service = Service::start(&[])?;
    let shim = program("libfdmap_shim.so")?;
    let compiled = Compiled::new("costs")?;
    let under = |mut command: Command| {
        command.env("LD_PRELOAD", &shim).env("FDMAP_RUNTIME_DIR", service.folder());
        command
    };
    let start = || Command::new("/bin/true");
    let run = || {
        let mut costs = Command::new(compiled.path());
        costs.arg(PAIRS.to_string());
        costs
    };
    let mut starts = Vec::new();
    let mut figures = vec![Vec::new(); FIGURES.len()];
    for _ in 0..settings.rounds {
        // One start is too short to be told from noise.
        for _ in 0..10 {
            starts.push([took(start())?, took(under(start()))?]);
        }
        let (without, with) = (printed(run())?, printed(under(run()))?);
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

/// Microseconds from start to end.
fn took(mut command: Command) -> Measured<f64> {
    let shown = format!("{command:?}");
    let failed = |error| BenchError::Io { what: format!("running {shown}"), error };
    let began = Instant::now();
    let status = command.status().map_err(failed)?;
    let took = began.elapsed().as_secs_f64() * 1e6;
    if status.success() { Ok(took) } else { Err(BenchError::Wrong(format!("{shown}: {status}"))) }
}

fn printed(mut command: Command) -> Measured<String> {
    let shown = format!("{command:?}");
    let failed = |error| BenchError::Io { what: format!("running {shown}"), error };
    let output = command.stderr(Stdio::inherit()).output().map_err(failed)?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(BenchError::Wrong(format!("{shown}: {}", output.status)))
    }
}

/// Microseconds of a figure, told in nanoseconds.
fn figure(printed: &str, name: &str) -> Measured<f64> {
    let value = printed.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
    value.map(|ns| ns / 1e3).ok_or_else(|| BenchError::Wrong(format!("there is no {name} in {printed:?}")))
}

impl ShimReport {
    /// The table.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = "| | without, us | under the shim, us |\n| --- | ---: | ---: |\n".to_owned();
        for Cost { what, without_us, with_us } in &self.costs {
            // Writing to a string does not fail.
            let _ = writeln!(text, "| {what} | {without_us:.2} | {with_us:.2} |");
        }
        text
    }
}
