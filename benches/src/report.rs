//! What was measured, as a Markdown table and as JSON.

use std::fmt::{self, Write as _};
use std::path::Path;

use serde::Serialize;

use crate::pairs::Outcome;
use crate::way::Per;
use crate::{Bed, BenchError, Condition, Measured, Settings};

/// Where and how it was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Host {
    /// The kernel's release.
    pub kernel: String,
    /// Processors that the bench may use.
    pub processors: usize,
    /// Size of the file.
    pub file_bytes: u64,
    /// Pairs that were measured of each way.
    pub rounds: usize,
}

impl Host {
    /// This one.
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

/// Leaves a report as JSON in a folder beside cargo's for temporary files; gives that JSON.
///
/// # Errors
/// [`BenchError::Io`]
pub fn leave(report: &impl Serialize, temporary: &str, name: &str) -> Measured<String> {
    let failed = |what: String| move |error| BenchError::Io { what, error };
    let json = serde_json::to_string_pretty(report)
        .map_err(|error| failed("writing JSON".to_owned())(error.into()))?;
    let path = Path::new(temporary).with_file_name(name);
    std::fs::write(&path, &json).map_err(failed(format!("writing {}", path.display())))?;
    Ok(json)
}

/// Everything that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Where.
    #[serde(flatten)]
    pub host: Host,
    /// Condition by condition.
    pub conditions: Vec<Section>,
}

/// What was measured in one condition.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    /// Which.
    pub name: &'static str,
    /// Its pages without data.
    pub hole: u64,
    /// Its pages in memory.
    pub resident: u64,
    /// Its pages in swap.
    pub swapped: u64,
    /// Its runs of pages in one state.
    pub runs: u64,
    /// What a snapshot takes for each page.
    pub snapshot_bytes_per_page: f64,
    /// By how much the service has grown for each page.
    pub service_bytes_per_page: f64,
    /// Way by way.
    pub ways: Vec<Row>,
}

/// What was measured of one way in one condition.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Which.
    pub name: String,
    /// `page` or `call`.
    pub per: &'static str,
    /// The median.
    pub ns: f64,
    /// pagemap's, in the same rounds.
    pub pagemap_ns: f64,
    /// How many times as fast as pagemap, the median over pairs; of calls nothing.
    pub ratio: Option<f64>,
}

impl Report {
    /// Nothing is measured yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self { host: Host::new(settings), conditions: Vec::new() }
    }

    /// Adds a condition.
    ///
    /// # Errors
    /// If the bed has no file.
    pub fn add(&mut self, condition: Condition, bed: &Bed, outcomes: &[Outcome]) -> Measured<()> {
        let summary = bed.summary()?;
        let row = |outcome: &Outcome| {
            let is_call = outcome.way.per() == Per::Call;
            Row {
                name: outcome.way.name(),
                per: if is_call { "call" } else { "page" },
                ns: outcome.ns,
                pagemap_ns: outcome.reference_ns,
                ratio: (!is_call).then_some(outcome.ratio),
            }
        };
        self.conditions.push(Section {
            name: condition.name(),
            hole: summary.hole,
            resident: summary.resident,
            swapped: summary.swapped,
            runs: summary.runs,
            snapshot_bytes_per_page: bed.bytes_kept()?,
            service_bytes_per_page: bed.bytes_grown()?,
            ways: outcomes.iter().map(row).collect(),
        });
        Ok(())
    }

    /// A table for docs/performance.md: a row for each way, a column for each condition.
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
        let names = self.conditions.first().map_or(&[][..], |section| &section.ways);
        for (nth, way) in names.iter().enumerate() {
            let per = if way.per == "call" { ", µs/call" } else { "" };
            line(&format!("{}{per}", way.name), &|section| {
                section.ways.get(nth).map_or_else(String::new, cell)
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
