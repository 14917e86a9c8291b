//! Sets of pages as sorted, disjoint ranges that do not touch. Pure.

use fdmap_proto::units::PageRange;

/// Sorts ranges and puts together those that touch or overlap; empty ones go.
pub fn normalize(ranges: &mut Vec<PageRange>) {
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

/// Adds a range, to the last one if it begins in it or right behind it.
pub fn push(ranges: &mut Vec<PageRange>, range: PageRange) {
    match ranges.last_mut() {
        Some(last) if range.start() >= last.start() && range.start() <= last.end() => {
            *last = PageRange::new(last.start(), last.end().max(range.end())).unwrap_or(*last);
        }
        _ if range.is_empty() => {}
        _ => ranges.push(range),
    }
}

/// What lies in `range` of each of `ranges`.
#[must_use]
pub fn within(ranges: &[PageRange], range: PageRange) -> Vec<PageRange> {
    ranges.iter().map(|some| some.intersect(range)).filter(|some| !some.is_empty()).collect()
}

/// Pages in all of them.
#[must_use]
pub fn pages(ranges: &[PageRange]) -> u64 {
    ranges.iter().map(|range| range.len()).sum()
}

/// From the first page of all to the last; empty if there are none.
#[must_use]
pub fn hull(ranges: &[PageRange]) -> PageRange {
    match (ranges.first(), ranges.last()) {
        (Some(first), Some(last)) => PageRange::new(first.start(), last.end()).unwrap_or(*first),
        _ => PageRange::default(),
    }
}

/// The parts of `whole` that none of `parts` has; `parts` are normalized.
#[must_use]
pub fn missing(whole: PageRange, parts: &[PageRange]) -> Vec<PageRange> {
    let mut at = whole.start();
    let mut gaps = Vec::new();
    for part in parts.iter().map(|part| part.intersect(whole)).filter(|part| !part.is_empty()) {
        gaps.extend(PageRange::new(at, part.start()).filter(|gap| !gap.is_empty()));
        at = at.max(part.end());
    }
    gaps.extend(PageRange::new(at, whole.end()).filter(|gap| !gap.is_empty()));
    gaps
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
        fn sets_are_what_a_naive_set_says(pairs in prop::collection::vec((0..60_u64, 0..9_u64), 0..12), start in 0..50_u64, len in 0..30_u64) {
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
    }
}
