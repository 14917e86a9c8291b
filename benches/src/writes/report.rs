//! Results of the write tracking benchmarks as Markdown tables and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::checkpoints::{CheckpointTime, Checkpoints};
use super::first::FirstWrite;
use super::swapped::{Access, SwappedIn};
use crate::report::Host;

/// Results of all write tracking benchmarks.
#[derive(Clone, Debug, Serialize)]
pub struct WritesReport {
    #[serde(flatten)]
    pub host: Host,
    /// First and second write to each page.
    pub first: Vec<FirstWrite>,
    /// Checkpoints and changes.
    pub checkpoints: Checkpoints,
    /// Accesses to swapped pages.
    pub swapped: Vec<SwappedIn>,
}

/// A performance goal and the measured value.
struct Goal {
    what: &'static str,
    /// The goal as printed.
    goal: &'static str,
    measured: f64,
    max: f64,
}

impl WritesReport {
    /// The tables of docs/performance.md.
    #[must_use]
    pub fn markdown(&self) -> String {
        [self.first_writes(), self.checkpoint_times(), self.changes(), self.swapped_in(), self.goal_table()]
            .join("\n")
    }

    fn first_writes(&self) -> String {
        let mut out =
            table(&["ns/page", "first write", "times WP_ASYNC alone", "second write", "times not tracked"]);
        for mechanism in &self.first {
            line(
                &mut out,
                &[
                    mechanism.name.to_owned(),
                    format!("{:.0}", mechanism.first_ns),
                    format!("{:.2}", mechanism.first_times_raw),
                    format!("{:.2}", mechanism.second_ns),
                    format!("{:.2}", mechanism.second_times_untracked),
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

    fn goal_table(&self) -> String {
        let mut out = table(&["what", "goal", "measured"]);
        for Goal { what, goal, measured, max } in self.goals() {
            let measured = format!("{measured:.3}");
            line(
                &mut out,
                &[
                    what.to_owned(),
                    goal.to_owned(),
                    // NaN, a missing figure, misses the goal.
                    if measured.parse().is_ok_and(|value: f64| value <= max) {
                        measured
                    } else {
                        format!("**{measured}**")
                    },
                ],
            );
        }
        out
    }

    fn goals(&self) -> Vec<Goal> {
        let times = |name: &str| {
            let mechanism = self.first.iter().find(|mechanism| mechanism.name == name);
            mechanism.map_or(f64::NAN, |mechanism| mechanism.first_times_raw)
        };
        let idle = self.checkpoints.checkpoints.first().map_or(f64::NAN, |idle| idle.inside_ms);
        let slowest = self.checkpoints.changes.iter().map(|changes| changes.call_ms).fold(0.0, f64::max);
        vec![
            Goal {
                what: "first write, times WP_ASYNC alone",
                goal: "1.10",
                measured: times("tracked by the service"),
                max: 1.1,
            },
            Goal { what: "idle checkpoint inside the service, ms", goal: "0.020", measured: idle, max: 0.02 },
            Goal { what: "changes of 10 pages, ms", goal: "1", measured: slowest, max: 1.0 },
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
