//! Sets of pages. A *normalized* set is a list of sorted, disjoint, non-adjacent, non-empty ranges. Pure.

use fdmap_proto::units::PageRange;

/// Every page that a file can have.
pub(crate) const ALL_PAGES: PageRange = PageRange::first(u64::MAX);

/// Normalizes `ranges`: sorts them, merges those that touch or overlap, and drops empty ones.
pub(crate) fn normalize(ranges: &mut Vec<PageRange>) {
    ranges.retain(|range| !range.is_empty());
    if ranges.is_sorted_by(|a, b| a.end() < b.start()) {
        return;
    }
    ranges.sort_unstable_by_key(|range| range.start());
    ranges.dedup_by(|next, range| match PageRange::new(range.start(), range.end().max(next.end())) {
        Some(both) if next.start() <= range.end() => {
            *range = both;
            true
        }
        _ => false,
    });
}

/// Appends `range`, or extends the last range if `range` begins in it or directly after it.
pub(crate) fn push(ranges: &mut Vec<PageRange>, range: PageRange) {
    match ranges.last_mut() {
        Some(last) if range.start() >= last.start() && range.start() <= last.end() => {
            *last = PageRange::new(last.start(), last.end().max(range.end())).unwrap_or(*last);
        }
        _ if range.is_empty() => {}
        _ => ranges.push(range),
    }
}

/// The part of each of `ranges` that lies in `window`.
#[must_use]
pub(crate) fn within(ranges: &[PageRange], window: PageRange) -> Vec<PageRange> {
    ranges.iter().map(|range| range.intersect(window)).filter(|range| !range.is_empty()).collect()
}

/// The number of pages in a normalized set.
#[must_use]
pub(crate) fn pages(ranges: &[PageRange]) -> u64 {
    ranges.iter().map(|range| range.len()).sum()
}

/// The smallest range that contains a normalized set; empty if the set is empty.
#[must_use]
pub(crate) fn hull(ranges: &[PageRange]) -> PageRange {
    match (ranges.first(), ranges.last()) {
        (Some(first), Some(last)) => PageRange::new(first.start(), last.end()).unwrap_or(*first),
        _ => PageRange::default(),
    }
}

/// The parts of `whole` that are not in the normalized set `parts`.
#[must_use]
pub(crate) fn missing(whole: PageRange, parts: &[PageRange]) -> Vec<PageRange> {
    let mut at = whole.start();
    let mut gaps = Vec::new();
    for part in parts.iter().map(|part| part.intersect(whole)).filter(|part| !part.is_empty()) {
        gaps.extend(PageRange::new(at, part.start()).filter(|gap| !gap.is_empty()));
        at = at.max(part.end());
    }
    gaps.extend(PageRange::new(at, whole.end()).filter(|gap| !gap.is_empty()));
    gaps
}

/// The pages in both of two normalized sets.
#[must_use]
pub(crate) fn intersection(a: &[PageRange], b: &[PageRange]) -> Vec<PageRange> {
    let mut both = Vec::new();
    let (mut i, mut j) = (0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        let part = x.intersect(*y);
        if !part.is_empty() {
            both.push(part);
        }
        if x.end() <= y.end() { i += 1 } else { j += 1 }
    }
    both
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fdmap_proto::units::PageIndex;
    use proptest::prelude::*;

    use super::*;

    fn ranges_of(pairs: &[(u64, u64)]) -> Vec<PageRange> {
        pairs.iter().map(|(start, len)| PageRange::at(PageIndex(*start), *len)).collect()
    }

    fn set(ranges: &[PageRange]) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| range.start().0..range.end().0).collect()
    }

    proptest! {
        #[test]
        fn sets_equal_those_of_the_oracle(pairs in prop::collection::vec((0..60_u64, 0..9_u64), 0..12), start in 0..50_u64, len in 0..30_u64) {
            let raw = ranges_of(&pairs);
            let mut ranges = raw.clone();
            normalize(&mut ranges);
            prop_assert_eq!(set(&ranges), set(&raw));
            prop_assert!(ranges.is_sorted_by(|a, b| a.end() < b.start()));
            prop_assert_eq!(pages(&ranges), set(&raw).len() as u64);
            let window = PageRange::at(PageIndex(start), len);
            let inside: BTreeSet<u64> = set(&raw).into_iter().filter(|page| window.contains(PageIndex(*page))).collect();
            prop_assert_eq!(&set(&within(&ranges, window)), &inside);
            let gaps = missing(window, &ranges);
            prop_assert_eq!(set(&gaps), set(&[window]).difference(&inside).copied().collect::<BTreeSet<_>>());
            let mut sorted = raw;
            sorted.sort_by_key(|range| range.start());
            let mut pushed = Vec::new();
            sorted.iter().for_each(|range| push(&mut pushed, *range));
            prop_assert_eq!(set(&pushed), set(&ranges));
        }

        #[test]
        fn intersection_equals_that_of_the_oracle(a in some_ranges(), b in some_ranges()) {
            let oracle: BTreeSet<u64> = set(&a).intersection(&set(&b)).copied().collect();
            prop_assert_eq!(set(&intersection(&a, &b)), oracle);
        }
    }

    fn some_ranges() -> impl Strategy<Value = Vec<PageRange>> {
        prop::collection::vec((0..80_u64, 0..9_u64), 0..10).prop_map(|pairs| {
            let mut ranges = ranges_of(&pairs);
            normalize(&mut ranges);
            ranges
        })
    }
}
