//! The coverage gaps of a file, by generation. Pure.

use std::collections::VecDeque;

use fdmap_proto::tracking::{Coverage, CoverageGap, Effect, GapKind};
use fdmap_proto::units::Generation;

/// Gaps that are kept one by one. The log only records that older gaps existed.
const MAX_GAPS: usize = 256;

/// The gaps of all generations of a file. A clone costs O(gaps), at most [`MAX_GAPS`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GapLog {
    /// In the order in which they first occurred. A gap that continues in the next generation is extended in place. `last` is
    /// always set.
    gaps: VecDeque<CoverageGap>,
    dropped: Option<DroppedGaps>,
}

/// Gaps of which no details are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DroppedGaps {
    /// The last generation that had one.
    last: Generation,
    /// At least one left writes out.
    ignored: bool,
}

/// Coverage that also has gaps of now.
pub(crate) fn with_gaps(mut coverage: Coverage, gaps: Vec<CoverageGap>) -> Coverage {
    for gap in gaps {
        if !coverage.gaps.iter().any(|known| is_same(known, &gap)) {
            coverage.gaps.push(gap);
        }
    }
    coverage.exact &= coverage.gaps.is_empty();
    coverage
}

impl GapLog {
    /// Adds the gaps of `generation`, which is not older than the generations added before. The `first` and `last` of `gaps`
    /// are replaced.
    pub(crate) fn add(&mut self, generation: Generation, gaps: Vec<CoverageGap>) {
        for gap in gaps {
            let continued = self.gaps.iter_mut().rev().find(|known| {
                let last = known.last.unwrap_or(generation);
                is_same(known, &gap) && (last == generation || last.next() == Some(generation))
            });
            match continued {
                Some(known) => known.last = Some(generation),
                None => {
                    self.gaps.push_back(CoverageGap { first: generation, last: Some(generation), ..gap });
                }
            }
        }
        while self.gaps.len() > MAX_GAPS {
            if let Some(gap) = self.gaps.pop_front() {
                self.add_dropped(gap.last.unwrap_or(generation), gap.effect == Effect::Ignored);
            }
        }
    }

    /// Records that gaps existed up to generation `last`, without details; `ignored`: at least one left writes out.
    pub(crate) fn add_dropped(&mut self, last: Generation, ignored: bool) {
        let before = self.dropped.unwrap_or(DroppedGaps { last, ignored });
        self.dropped = Some(DroppedGaps { last: last.max(before.last), ignored: ignored || before.ignored });
    }

    /// True if any generation had a gap.
    #[must_use]
    pub(crate) fn has_gaps(&self) -> bool {
        self.dropped.is_some() || !self.gaps.is_empty()
    }

    /// True if any generation left writes out.
    #[must_use]
    pub(crate) fn has_ignored(&self) -> bool {
        self.dropped.is_some_and(|dropped| dropped.ignored)
            || self.gaps.iter().any(|gap| gap.effect == Effect::Ignored)
    }

    /// Coverage of the generations after `since`, up to `until`, the last closed one. A gap that continues in `until` has no
    /// `last`.
    #[must_use]
    pub(crate) fn coverage(
        &self,
        since: Generation,
        until: Generation,
        tracked_mappings: u64,
        granularity_pages: u64,
    ) -> Coverage {
        let mut gaps: Vec<CoverageGap> = Vec::new();
        if let Some(DroppedGaps { last, ignored }) = self.dropped.filter(|dropped| dropped.last > since) {
            gaps.push(CoverageGap {
                kind: GapKind::LostEvents,
                effect: if ignored { Effect::Ignored } else { Effect::Conservative },
                pid: None,
                range: None,
                detail: "details of earlier gaps were dropped: too many gaps, or the service was restarted"
                    .to_owned(),
                remedy: "request the coverage after each checkpoint".to_owned(),
                first: since.next().unwrap_or(since),
                last: Some(last),
            });
        }
        let kept = self.gaps.iter().filter(|gap| gap.last.is_none_or(|last| last > since));
        gaps.extend(
            kept.map(|gap| CoverageGap { last: gap.last.filter(|last| *last != until), ..gap.clone() }),
        );
        Coverage { exact: gaps.is_empty(), gaps, tracked_mappings, granularity_pages }
    }
}

/// True if both describe the same gap, in whatever generations.
fn is_same(a: &CoverageGap, b: &CoverageGap) -> bool {
    let CoverageGap { kind, effect, pid, range, detail, remedy: _, first: _, last: _ } = a;
    (*kind, *effect, *pid, *range) == (b.kind, b.effect, b.pid, b.range) && *detail == b.detail
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generation(number: u64) -> Generation {
        Generation::new(number).unwrap()
    }

    fn gap_of(pid: u32) -> CoverageGap {
        CoverageGap {
            kind: GapKind::UntrackedMapping,
            effect: Effect::Conservative,
            pid: Some(pid),
            range: None,
            detail: String::new(),
            remedy: String::new(),
            first: Generation::NONE,
            last: None,
        }
    }

    fn spans(log: &GapLog, since: u64, until: u64) -> Vec<(Option<u32>, u64, Option<u64>)> {
        let coverage = log.coverage(generation(since), generation(until), 0, 1);
        assert_eq!(coverage.exact, coverage.gaps.is_empty());
        coverage.gaps.iter().map(|gap| (gap.pid, gap.first.get(), gap.last.map(Generation::get))).collect()
    }

    #[test]
    fn continued_gap_is_one_gap() {
        let mut log = GapLog::default();
        log.add(generation(1), vec![gap_of(7)]);
        log.add(generation(2), vec![gap_of(7), gap_of(8)]);
        log.add(generation(4), vec![gap_of(7)]);
        assert_eq!(spans(&log, 0, 4), [(Some(7), 1, Some(2)), (Some(8), 2, Some(2)), (Some(7), 4, None)]);
        assert_eq!(spans(&log, 2, 4), [(Some(7), 4, None)]);
        assert!(spans(&log, 4, 5).is_empty());
    }

    #[test]
    fn coverage_with_gaps_of_now_is_not_exact() {
        let mut log = GapLog::default();
        log.add(generation(1), vec![gap_of(7)]);
        let coverage = |since, gaps| {
            let coverage = with_gaps(log.coverage(generation(since), generation(1), 0, 1), gaps);
            (coverage.gaps.len(), coverage.exact)
        };
        assert_eq!(coverage(1, vec![]), (0, true));
        assert_eq!(coverage(1, vec![gap_of(8)]), (1, false));
        assert_eq!(coverage(0, vec![gap_of(7), gap_of(8)]), (2, false));
    }

    #[test]
    fn dropped_gaps_are_still_reported() {
        let mut log = GapLog::default();
        for pid in 0..300 {
            log.add(generation(u64::from(pid) + 1), vec![gap_of(pid)]);
        }
        let coverage = log.coverage(generation(0), generation(300), 0, 1);
        assert_eq!(coverage.gaps.len(), MAX_GAPS + 1);
        assert_eq!(coverage.gaps[0].last, Some(generation(44)));
        assert_eq!(coverage.gaps[0].effect, Effect::Conservative, "all of them were");
        assert!(log.has_gaps() && !log.has_ignored());
        assert_eq!(log.coverage(generation(44), generation(300), 0, 1).gaps.len(), MAX_GAPS);
    }

    #[test]
    fn ignored_writes_are_reported_for_ever() {
        let mut log = GapLog::default();
        assert!(!log.has_gaps() && log.coverage(generation(0), generation(9), 0, 1).exact);
        log.add_dropped(generation(5), true);
        log.add_dropped(generation(3), false);
        assert!(log.has_gaps() && log.has_ignored());
        let gaps = log.coverage(generation(2), generation(9), 0, 1).gaps;
        assert_eq!(gaps.len(), 1);
        assert_eq!(
            (gaps[0].effect, gaps[0].first, gaps[0].last),
            (Effect::Ignored, generation(3), Some(generation(5)))
        );
        assert!(log.coverage(generation(5), generation(9), 0, 1).exact);
    }
}
