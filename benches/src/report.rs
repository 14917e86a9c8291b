//! Results of the page state benchmarks as a Markdown table and as JSON.

use std::fmt::{self, Write as _};
use std::path::Path;

use serde::Serialize;

use crate::method::TimeUnit;
use crate::pairs::Outcome;
use crate::{BenchError, BenchResult, Condition, Fixture, Settings};

/// Host and parameters of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Host {
    /// Kernel release.
    pub kernel: String,
    /// Number of processors available to the benchmark.
    pub processors: usize,
    /// Size of the file in bytes.
    pub file_bytes: u64,
    /// Number of measured pairs of each method.
    pub rounds: usize,
}

impl Host {
    /// Describes this host.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let kernel = fdmap_tests::host::read("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            kernel: kernel.trim().to_owned(),
            processors: std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get),
            file_bytes: settings.file_bytes,
            rounds: settings.rounds,
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, processors, file_bytes, rounds } = self;
        write!(
            f,
            "Linux {kernel}, {processors} processors, file of {} MiB, {rounds} rounds",
            file_bytes >> 20
        )
    }
}

/// Writes a report as JSON beside cargo's directory for temporary files and returns the JSON.
///
/// # Errors
/// [`BenchError::Io`]
pub fn write_json(report: &impl Serialize, temporary: &str, name: &str) -> BenchResult<String> {
    let failed = |what: String| move |error| BenchError::Io { what, error };
    let json = serde_json::to_string_pretty(report)
        .map_err(|error| failed("writing JSON".to_owned())(error.into()))?;
    let path = Path::new(temporary).with_file_name(name);
    std::fs::write(&path, &json).map_err(failed(format!("writing {}", path.display())))?;
    Ok(json)
}

/// Results of all conditions.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub host: Host,
    /// One section for each condition.
    pub conditions: Vec<Section>,
}

/// Results in one condition.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    pub name: &'static str,
    /// Number of holes.
    pub hole: u64,
    /// Number of resident pages.
    pub resident: u64,
    /// Number of swapped pages.
    pub swapped: u64,
    /// Number of runs of pages with equal states.
    pub runs: u64,
    /// See [`Fixture::snapshot_bytes_per_page`].
    pub snapshot_bytes_per_page: f64,
    /// See [`Fixture::service_bytes_per_page`].
    pub service_bytes_per_page: f64,
    /// One row for each method.
    pub methods: Vec<Row>,
}

/// Result of one method in one condition.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub name: String,
    /// `page` or `call`.
    pub per: &'static str,
    /// Median time in nanoseconds.
    pub ns: f64,
    /// Median time of pagemap in the same rounds.
    pub pagemap_ns: f64,
    /// Median over pairs of pagemap's time divided by the method's; `None` for calls.
    pub ratio: Option<f64>,
}

impl Report {
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self { host: Host::new(settings), conditions: Vec::new() }
    }

    /// Adds the results of a condition.
    ///
    /// # Errors
    /// [`crate::BenchError::Wrong`] if the fixture has no file.
    pub fn add(&mut self, condition: Condition, fixture: &Fixture, outcomes: &[Outcome]) -> BenchResult<()> {
        let summary = fixture.summary()?;
        let row = |outcome: &Outcome| {
            let is_call = outcome.method.time_unit() == TimeUnit::PerCall;
            Row {
                name: outcome.method.name(),
                per: if is_call { "call" } else { "page" },
                ns: outcome.ns,
                pagemap_ns: outcome.reference_ns,
                ratio: (!is_call).then_some(outcome.ratio),
            }
        };
        self.conditions.push(Section {
            name: condition.name(),
            hole: summary.hole_pages,
            resident: summary.resident_pages,
            swapped: summary.swapped_pages,
            runs: summary.runs,
            snapshot_bytes_per_page: fixture.snapshot_bytes_per_page()?,
            service_bytes_per_page: fixture.service_bytes_per_page()?,
            methods: outcomes.iter().map(row).collect(),
        });
        Ok(())
    }

    /// The table of docs/performance.md: one row for each method, one column for each condition.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut out = String::new();
        let mut line = |first: &str, cell: &dyn Fn(&Section) -> String| {
            let cells: Vec<String> = self.conditions.iter().map(cell).collect();
            // Writing to a String cannot fail.
            let _ = writeln!(out, "| {first} | {} |", cells.join(" | "));
        };
        line("ns/page (times as fast as pagemap)", &|section| section.name.to_owned());
        line("---", &|_| "---:".to_owned());
        let names = self.conditions.first().map_or(&[][..], |section| &section.methods);
        for (nth, method) in names.iter().enumerate() {
            let per = if method.per == "call" { ", µs/call" } else { "" };
            line(&format!("{}{per}", method.name), &|section| {
                section.methods.get(nth).map_or_else(String::new, cell)
            });
        }
        let per_cent = |pages: u64, of: &Section| {
            let all = of.hole + of.resident + of.swapped;
            format!("{} %", (pages * 100 + all / 2).checked_div(all).unwrap_or(0))
        };
        line("pages swapped", &|section| per_cent(section.swapped, section));
        line("runs", &|section| section.runs.to_string());
        line("snapshot, bytes/page", &|section| format!("{:.2}", section.snapshot_bytes_per_page));
        line("growth of fdmapd, bytes/page", &|section| format!("{:.2}", section.service_bytes_per_page));
        out
    }
}

fn cell(row: &Row) -> String {
    match row.ratio {
        Some(ratio) if row.ns < 100.0 => format!("{:.2} ({ratio:.1}x)", row.ns),
        Some(ratio) => format!("{:.0} ({ratio:.1}x)", row.ns),
        None => format!("{:.0}", row.ns / 1000.0),
    }
}
