//! When each block was scanned.

use fdmap_proto::provenance::{Moment, Uncertainty};

use super::blocks::{BlockIndex, BlockRange};

/// Time and properties of one scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanStamp {
    /// No state is older.
    pub begin: Moment,
    /// No state is newer.
    pub end: Moment,
    pub distinguish_swap_cached: bool,
    /// What could not be determined. Unknown pages are counted from the blocks instead.
    pub uncertainty: Uncertainty,
    /// The probe could not read the file: all pages are unknown, and there are no blocks. A file may have 2^63 bytes,
    /// so blocks would need too much memory.
    pub opaque: bool,
}

/// Spans that [`Spans::forget_oldest`] keeps. Blocks without a span only have to be scanned again.
const MAX_SPANS: usize = 256;

/// Spans of blocks with the stamp of their last scan, in ascending order and without overlap.
#[derive(Clone, Debug, Default)]
pub struct Spans {
    spans: Vec<(BlockRange, ScanStamp)>,
    /// Some scan was opaque at any time.
    any_blind: bool,
}

impl Spans {
    /// Sets the stamp of `range`.
    pub fn put(&mut self, range: BlockRange, stamp: ScanStamp) {
        if range.is_empty() {
            return;
        }
        let first = self.first_ending_after(range.start());
        let behind = self.spans.partition_point(|(old, _)| old.start() < range.end());
        let rest = |(old, stamp): (BlockRange, ScanStamp), start: BlockIndex, end: BlockIndex| {
            let rest = BlockRange::new(old.start().max(start), old.end().min(end));
            rest.filter(|rest| !rest.is_empty()).map(|rest| (rest, stamp))
        };
        // Parts of the first and the last overlapped span may remain.
        let met = &self.spans[first..behind];
        let before = met.first().and_then(|old| rest(*old, old.0.start(), range.start()));
        let after = met.last().and_then(|old| rest(*old, range.end(), old.0.end()));
        self.any_blind |= stamp.opaque;
        self.spans.splice(first..behind, before.into_iter().chain([(range, stamp)]).chain(after));
    }

    /// Removes the oldest spans if there are too many.
    pub fn forget_oldest(&mut self) {
        let Some(surplus) = self.spans.len().checked_sub(MAX_SPANS).filter(|surplus| *surplus > 0) else {
            return;
        };
        let mut begins: Vec<_> = self.spans.iter().map(|(_, stamp)| stamp.begin.monotonic_ns).collect();
        let (_, oldest_kept, _) = begins.select_nth_unstable(surplus);
        let oldest_kept = *oldest_kept;
        self.spans.retain(|(_, stamp)| stamp.begin.monotonic_ns >= oldest_kept);
        // Many scans may have begun at the same moment.
        self.spans.truncate(MAX_SPANS);
    }

    /// The opaque parts of `range`, in ascending order.
    pub fn opaque(&self, range: BlockRange) -> impl Iterator<Item = BlockRange> {
        let first = match self.any_blind {
            true => self.first_ending_after(range.start()),
            false => self.spans.len(),
        };
        let inside = self.spans[first..].iter().take_while(move |(span, _)| span.start() < range.end());
        inside.filter(|(_, stamp)| stamp.opaque).filter_map(move |(span, _)| {
            BlockRange::new(span.start().max(range.start()), span.end().min(range.end()))
        })
    }

    /// The index of the first span that ends after `block`: the number of spans if there is none.
    fn first_ending_after(&self, block: BlockIndex) -> usize {
        self.spans.partition_point(|(span, _)| span.end() <= block)
    }

    /// One stamp for all of `range`: earliest begin, latest end, all uncertainty. `None` unless all of `range` has
    /// stamps.
    #[must_use]
    pub fn over(&self, range: BlockRange) -> Option<ScanStamp> {
        let mut next = range.start();
        let mut whole: Option<ScanStamp> = None;
        for (span, stamp) in &self.spans[self.first_ending_after(next)..] {
            if next >= range.end() && whole.is_some() {
                break;
            }
            if span.start() > next {
                return None;
            }
            next = span.end();
            whole = Some(whole.map_or(*stamp, |whole| whole.joined(stamp)));
        }
        whole.filter(|_| next >= range.end())
    }

    /// The blocks of `range` without a stamp that satisfies `fresh`, in ascending order.
    #[must_use]
    pub fn stale(&self, range: BlockRange, fresh: impl Fn(&ScanStamp) -> bool) -> Vec<BlockRange> {
        let mut stale = Vec::new();
        let mut next = range.start();
        let mut add = |from: BlockIndex, to: BlockIndex| {
            stale.extend(BlockRange::new(from, to.min(range.end())).filter(|r| !r.is_empty()));
        };
        let until_end = self.spans[self.first_ending_after(next)..].iter();
        let inside = until_end.take_while(|(span, _)| span.start() < range.end());
        for (span, _) in inside.filter(|(_, stamp)| fresh(stamp)) {
            add(next, span.start().max(next));
            next = span.end();
        }
        if next < range.end() {
            add(next, range.end());
        }
        stale
    }
}

impl ScanStamp {
    /// One stamp for both: earlier begin, later end, all uncertainty.
    #[must_use]
    pub fn joined(self, other: &Self) -> Self {
        let mut uncertainty = self.uncertainty;
        uncertainty += other.uncertainty;
        let earlier = |a: Moment, b: Moment| if a.monotonic_ns <= b.monotonic_ns { a } else { b };
        let later = |a: Moment, b: Moment| if a.monotonic_ns >= b.monotonic_ns { a } else { b };
        Self {
            begin: earlier(self.begin, other.begin),
            end: later(self.end, other.end),
            distinguish_swap_cached: self.distinguish_swap_cached && other.distinguish_swap_cached,
            uncertainty,
            opaque: self.opaque || other.opaque,
        }
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "the tests use small numbers")]
mod tests {
    use std::time::UNIX_EPOCH;

    use proptest::prelude::*;

    use super::*;

    fn stamp(at: u64) -> ScanStamp {
        let moment = Moment { monotonic_ns: at, wall: UNIX_EPOCH };
        ScanStamp {
            begin: moment,
            end: moment,
            distinguish_swap_cached: true,
            uncertainty: Uncertainty::default(),
            opaque: false,
        }
    }

    fn range(start: u64, end: u64) -> BlockRange {
        BlockRange::new(BlockIndex(start), BlockIndex(end)).unwrap()
    }

    proptest! {
        #[test]
        fn spans_equal_the_oracle(
            puts in proptest::collection::vec((0_u64..40, 0_u64..20), 0..30), from in 0_u64..40, len in 0_u64..30,
        ) {
            let mut spans = Spans::default();
            let mut oracle = [None::<u64>; 100];
            for (at, (start, len)) in puts.iter().enumerate() {
                let at = at as u64 + 1;
                spans.put(range(*start, start + len), stamp(at));
                (*start..start + len).for_each(|block| oracle[block as usize] = Some(at));
            }
            let asked = &oracle[from as usize..(from + len) as usize];
            let expected = asked.iter().copied().collect::<Option<Vec<_>>>();
            let got = spans.over(range(from, from + len));
            match expected {
                Some(all) if !all.is_empty() => {
                    let got = got.unwrap();
                    prop_assert_eq!(got.begin.monotonic_ns, *all.iter().min().unwrap());
                    prop_assert_eq!(got.end.monotonic_ns, *all.iter().max().unwrap());
                }
                None => prop_assert_eq!(got, None),
                Some(_) => {}
            }

            let stale = spans.stale(range(from, from + len), |s| s.begin.monotonic_ns > 5);
            for block in 0..100 {
                let is_stale = stale.iter().any(|r| r.start().0 <= block && block < r.end().0);
                let expected = (from..from + len).contains(&block) && oracle[block as usize].is_none_or(|at| at <= 5);
                prop_assert_eq!(is_stale, expected, "block {}", block);
            }
        }
    }

    #[test]
    fn number_of_spans_is_bounded() {
        let mut spans = Spans::default();
        for i in 0..10_000 {
            spans.put(range(i * 2, i * 2 + 1), stamp(i));
        }
        assert!((0..10_000).all(|i| spans.over(range(i * 2, i * 2 + 1)).is_some()));
        spans.forget_oldest();
        assert_eq!(spans.spans.len(), MAX_SPANS);
        assert!(spans.over(range(19_998, 19_999)).is_some(), "the newest reading is kept");
        assert!(spans.over(range(0, 1)).is_none());
        (0..1000).for_each(|i| spans.put(range(i * 2, i * 2 + 1), stamp(20_000)));
        spans.forget_oldest();
        assert_eq!(spans.spans.len(), MAX_SPANS, "also of readings that began at one moment");
    }
}
