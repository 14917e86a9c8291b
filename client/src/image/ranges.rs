//! Sets of pages as sorted, disjoint ranges.

use fdmap_proto::{PageIndex, PageRange};

/// A set of pages: ranges in ascending order that neither touch nor overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageSet(Vec<PageRange>);

impl PageSet {
    /// Adds pages that start at or after the end of the set.
    pub fn push(&mut self, range: PageRange) {
        if range.is_empty() {
            return;
        }
        match self.0.last_mut() {
            Some(last) if last.end() >= range.start() => {
                debug_assert!(last.start() <= range.start(), "ranges are added in ascending order");
                let end = last.end().max(range.end());
                *last = PageRange::new(last.start(), end).unwrap_or(*last);
            }
            _ => self.0.push(range),
        }
    }

    /// The ranges, in ascending order.
    pub fn ranges(&self) -> &[PageRange] {
        &self.0
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.0.iter().map(|range| range.len()).sum()
    }

    /// The smallest set of at most `max` ranges that has all pages of this one and begins and ends its ranges at multiples of a power of two.
    pub fn coarsened(&self, max: usize) -> Self {
        let mut set = self.clone();
        let mut pages = 2;
        while set.0.len() > max.max(1) {
            let round = |range: &PageRange| {
                let end = range.end().0.saturating_add(pages - 1) / pages * pages;
                PageRange::new(PageIndex(range.start().0 / pages * pages), PageIndex(end))
            };
            set = set.0.iter().filter_map(round).collect();
            pages *= 2;
        }
        set
    }

    /// Pages of `range` that are in the set, and those that are not, in ascending order.
    pub fn split(&self, range: PageRange) -> impl Iterator<Item = (PageRange, bool)> + '_ {
        let first = self.0.partition_point(|one| one.end() <= range.start());
        let mut inside =
            self.0[first..].iter().map(move |one| one.intersect(range)).take_while(|one| !one.is_empty());
        let mut next = inside.next();
        let mut at = range.start();
        std::iter::from_fn(move || {
            if at >= range.end() {
                return None;
            }
            let (end, is_in) = match next {
                Some(one) if one.start() == at => {
                    next = inside.next();
                    (one.end(), true)
                }
                Some(one) => (one.start(), false),
                None => (range.end(), false),
            };
            let part = PageRange::new(at, end)?;
            at = end;
            Some((part, is_in))
        })
    }
}

impl FromIterator<PageRange> for PageSet {
    /// Collects ranges in ascending order.
    fn from_iter<I: IntoIterator<Item = PageRange>>(ranges: I) -> Self {
        let mut set = Self::default();
        ranges.into_iter().for_each(|range| set.push(range));
        set
    }
}

/// Parts of `range` of at most `pages` pages, cut at multiples of `pages`.
pub fn parts(range: PageRange, pages: u64) -> impl Iterator<Item = PageRange> {
    let mut at = range.start();
    std::iter::from_fn(move || {
        if at >= range.end() {
            return None;
        }
        let end = PageIndex((at.0 / pages + 1) * pages).min(range.end());
        let part = PageRange::new(at, end)?;
        at = end;
        Some(part)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(start: u64, end: u64) -> PageRange {
        PageRange::new(PageIndex(start), PageIndex(end)).unwrap()
    }

    fn pages(range: PageRange) -> impl Iterator<Item = u64> {
        range.start().0..range.end().0
    }

    proptest! {
        #[test]
        fn split_agrees_with_a_bitmap(bits in proptest::collection::vec(any::<bool>(), 64), start in 0_u64..64, len in 0_u64..64) {
            let one = |page: &u64| bits[usize::try_from(*page).unwrap()];
            let set: PageSet = (0..64).filter(one).map(|page| range(page, page + 1)).collect();
                        prop_assert!(set.0.windows(2).all(|pair| pair[0].end() < pair[1].start()));
            let asked = range(start, (start + len).min(64).max(start));
            let split: Vec<_> = set.split(asked).collect();
            let all: Vec<_> = split.iter().flat_map(|(part, is_in)| pages(*part).map(move |page| (page, *is_in))).collect();
            prop_assert_eq!(all, pages(asked).map(|page| (page, one(&page))).collect::<Vec<_>>());
        }

        #[test]
        fn coarsened_set_has_all_pages_in_few_ranges(bits in proptest::collection::vec(any::<bool>(), 200), max in 1_usize..20) {
            let set: PageSet =
                (0..200).filter(|page| bits[usize::try_from(*page).unwrap()]).map(|page| range(page, page + 1)).collect();
            let coarse = set.coarsened(max);
            prop_assert!(coarse.0.len() <= max);
            prop_assert!(set.0.iter().all(|one| coarse.split(*one).all(|(_, is_in)| is_in)));
            if set.0.len() <= max {
                prop_assert_eq!(coarse, set);
            }
        }

        #[test]
        fn parts_are_the_range(start in 0_u64..100, len in 0_u64..100, size in 1_u64..20) {
            let all: Vec<_> = parts(range(start, start + len), size).collect();
            prop_assert!(all.iter().all(|part| !part.is_empty() && part.start().0 / size == (part.end().0 - 1) / size));
            prop_assert_eq!(all.iter().copied().flat_map(pages).collect::<Vec<_>>(), (start..start + len).collect::<Vec<_>>());
        }
    }
}
