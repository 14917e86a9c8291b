//! Figures of one workload, and their table.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use fdmap_client::proto::GapKind;
use fdmap_tests::no_lost_writes::history::Checkpoint;
use fdmap_tests::no_lost_writes::pages::PageSet;
use serde::Serialize;

use crate::report::Host;

/// Results of all workloads.
#[derive(Clone, Debug, Serialize)]
pub struct PrecisionReport {
    #[serde(flatten)]
    pub host: Host,
    pub workloads: Vec<Precision>,
}

/// Pages of all generations of one workload.
#[derive(Clone, Debug, Serialize)]
pub struct Precision {
    pub name: &'static str,
    pub generations: u64,
    /// Generations whose coverage was exact.
    pub exact_generations: u64,
    /// Pages whose content changed.
    pub changed: u64,
    /// Pages reported as observed.
    pub observed: u64,
    /// Those of them whose content did not change.
    pub observed_unchanged: u64,
    /// Pages reported as conservative.
    pub conservative: u64,
    /// Those of them whose content did not change.
    pub conservative_unchanged: u64,
    /// Kinds of coverage gaps.
    pub gaps: BTreeSet<GapKind>,
}

impl Precision {
    pub(super) fn new(name: &'static str) -> Self {
        Self {
            name,
            generations: 0,
            exact_generations: 0,
            changed: 0,
            observed: 0,
            observed_unchanged: 0,
            conservative: 0,
            conservative_unchanged: 0,
            gaps: BTreeSet::new(),
        }
    }

    /// Adds a generation.
    pub(super) fn add(&mut self, seen: &Checkpoint, changed: &PageSet) {
        let observed = seen.changed.without(&seen.conservative);
        self.generations += 1;
        self.exact_generations += u64::from(seen.coverage_exact);
        self.changed += changed.count();
        self.observed += observed.count();
        self.observed_unchanged += observed.without(changed).count();
        self.conservative += seen.conservative.count();
        self.conservative_unchanged += seen.conservative.without(changed).count();
        self.gaps.extend(&seen.gaps);
    }
}

impl PrecisionReport {
    /// The table of docs/performance.md.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut out = String::from(
            "| workload | pages changed per generation | reported | of them conservative | reported without a change | \
             observed without a change | generations with exact coverage | gaps |\n\
             | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n",
        );
        for workload in &self.workloads {
            let each = |pages: u64| (pages + workload.generations / 2) / workload.generations.max(1);
            let reported = workload.observed + workload.conservative;
            let unchanged = workload.observed_unchanged + workload.conservative_unchanged;
            // Writing to a String cannot fail.
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {} | {} |",
                workload.name,
                each(workload.changed),
                each(reported),
                each(workload.conservative),
                per_cent(unchanged, reported),
                per_cent(workload.observed_unchanged, workload.observed),
                per_cent(workload.exact_generations, workload.generations),
                workload.gaps.iter().map(|gap| <&str>::from(*gap)).collect::<Vec<_>>().join(", "),
            );
        }
        out
    }
}

/// A share with one decimal.
fn per_cent(part: u64, whole: u64) -> String {
    let tenths = (part * 1000 + whole / 2).checked_div(whole).unwrap_or(0);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_counted_by_whether_they_changed() {
        let set = |pages: &[u64]| {
            let mut set = PageSet::of(64);
            set.extend(pages.iter().copied());
            set
        };
        let seen = Checkpoint {
            called: 1,
            returned: 2,
            listed: 3,
            exact: false,
            generation: 1,
            unchanged: false,
            changed: set(&[1, 2, 3, 4, 5]),
            conservative: set(&[4, 5]),
            coverage_exact: true,
            gaps: BTreeSet::new(),
        };
        let mut precision = Precision::new("writes");
        precision.add(&seen, &set(&[1, 2, 4]));
        assert_eq!((precision.observed, precision.observed_unchanged), (3, 1));
        assert_eq!((precision.conservative, precision.conservative_unchanged), (2, 1));
        assert_eq!((precision.generations, precision.exact_generations, precision.changed), (1, 1, 3));
        assert_eq!(per_cent(1, 3), "33.3 %");
    }
}
