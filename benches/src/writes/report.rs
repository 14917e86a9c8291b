//! What was measured of writes, as Markdown tables and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::checkpoints::{CheckpointTime, Checkpoints};
use super::first::FirstWrite;
use super::swapped::{Access, SwappedIn};
use crate::report::Host;

/// Everything that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct WritesReport {
    /// Where.
    #[serde(flatten)]
    pub host: Host,
    /// First and second writes.
    pub first: Vec<FirstWrite>,
    /// Checkpoints and changes.
    pub checkpoints: Checkpoints,
    /// Accesses after a page-out.
    pub swapped: Vec<SwappedIn>,
}

/// What is to be reached.
struct Target {
    what: &'static str,
    reach: &'static str,
    got: f64,
    most: f64,
}

impl WritesReport {
    /// The tables of docs/performance.md.
    #[must_use]
    pub fn markdown(&self) -> String {
        [self.first_writes(), self.checkpoint_times(), self.changes(), self.swapped_in(), self.targets()]
            .join("\n")
    }

    fn first_writes(&self) -> String {
        let mut out =
            table(&["ns/page", "first write", "times WP_ASYNC alone", "second write", "times not tracked"]);
        for way in &self.first {
            line(
                &mut out,
                &[
                    way.name.to_owned(),
                    format!("{:.0}", way.first_ns),
                    format!("{:.2}", way.first_times_raw),
                    format!("{:.2}", way.second_ns),
                    format!("{:.2}", way.second_times_untracked),
                ],
            );
        }
        out
    }

    fn checkpoint_times(&self) -> String {
        let mut out =
            table(&["checkpoint", "inside the service, ms", "over gRPC, ms", "PAGEMAP_SCAN alone, ms"]);
        for CheckpointTime { name, inside_ms, call_ms, scan_ms, .. } in &self.checkpoints.checkpoints {
            line(&mut out, &[name.clone(), ms(*inside_ms), ms(*call_ms), ms(*scan_ms)]);
        }
        out
    }

    fn changes(&self) -> String {
        let mut out = table(&["changes of 10 pages", "over gRPC, ms"]);
        for changes in &self.checkpoints.changes {
            line(&mut out, &[changes.name.to_owned(), ms(changes.call_ms)]);
        }
        out
    }

    fn swapped_in(&self) -> String {
        let mut out =
            table(&["faults/page (major), ns/page", "read", "then write", "write at once", "and again"]);
        for SwappedIn { name, read, write, write_at_once, write_again } in &self.swapped {
            let cells = [read, write, write_at_once, write_again].map(access);
            line(&mut out, &[vec![(*name).to_owned()], cells.to_vec()].concat());
        }
        out
    }

    fn targets(&self) -> String {
        let mut out = table(&["what", "reach", "got"]);
        for Target { what, reach, got, most } in self.reached() {
            let got = format!("{got:.3}");
            line(
                &mut out,
                &[
                    what.to_owned(),
                    reach.to_owned(),
                    // A figure that is not there is not reached either.
                    if got.parse().is_ok_and(|got: f64| got <= most) { got } else { format!("**{got}**") },
                ],
            );
        }
        out
    }

    fn reached(&self) -> Vec<Target> {
        let times = |name: &str| {
            let way = self.first.iter().find(|way| way.name == name);
            way.map_or(f64::NAN, |way| way.first_times_raw)
        };
        let idle = self.checkpoints.checkpoints.first().map_or(f64::NAN, |idle| idle.inside_ms);
        let slowest = self.checkpoints.changes.iter().map(|changes| changes.call_ms).fold(0.0, f64::max);
        vec![
            Target {
                what: "first write, times WP_ASYNC alone",
                reach: "1.10",
                got: times("tracked by the service"),
                most: 1.1,
            },
            Target { what: "idle checkpoint inside the service, ms", reach: "0.020", got: idle, most: 0.02 },
            Target { what: "changes of 10 pages, ms", reach: "1", got: slowest, most: 1.0 },
        ]
    }
}

fn table(head: &[&str]) -> String {
    let rule = vec!["---:"; head.len().saturating_sub(1)].join(" | ");
    format!("| {} |\n| --- | {rule} |\n", head.join(" | "))
}

fn line(out: &mut String, cells: &[String]) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "| {} |", cells.join(" | "));
}

fn ms(ms: f64) -> String {
    if ms < 1.0 { format!("{ms:.3}") } else { format!("{ms:.2}") }
}

fn access(Access { minor, major, ns }: &Access) -> String {
    format!("{:.2} ({major:.2}), {ns:.0}", minor + major)
}
