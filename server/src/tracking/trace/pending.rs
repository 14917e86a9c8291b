//! Byte ranges that were written and not asked for yet, in bounded memory. Pure.

use super::record::TO_THE_END;

/// Bytes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteRange {
    /// The first.
    pub offset: u64,
    /// How many; never reaches beyond 64 bits.
    pub length: u64,
}

impl ByteRange {
    /// Cut at the last nameable byte.
    #[must_use]
    pub const fn new(offset: u64, length: u64) -> Self {
        let end = if length == TO_THE_END { u64::MAX } else { offset.saturating_add(length) };
        Self { offset, length: end - offset }
    }

    /// The byte after the last.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.offset + self.length
    }

    /// True if both have a byte in common or touch, or if less than `gap` bytes lie between them; `later` does not begin before
    /// this one.
    const fn meets(self, later: Self, gap: u64) -> bool {
        later.offset <= self.end().saturating_add(gap)
    }

    fn join(&mut self, other: Self) {
        let end = self.end().max(other.end());
        self.offset = self.offset.min(other.offset);
        self.length = end - self.offset;
    }
}

/// Ranges of one file.
#[derive(Clone, Debug, Default)]
pub(super) struct Pending {
    ranges: Vec<ByteRange>,
}

impl Pending {
    /// Ranges that are kept apart.
    const MOST: usize = 4096;

    pub(super) fn add(&mut self, range: ByteRange) {
        if range.length == 0 {
            return;
        }
        // Most writers go on where they were.
        if let Some(last) = self.ranges.last_mut()
            && last.offset <= range.offset
            && last.meets(range, 0)
        {
            last.join(range);
            return;
        }
        self.ranges.push(range);
        if self.ranges.len() > Self::MOST {
            self.shrink();
        }
    }

    /// What was added, in ascending order and apart from one another.
    pub(super) fn take(&mut self) -> Vec<ByteRange> {
        let mut ranges = std::mem::take(&mut self.ranges);
        join(&mut ranges, 0);
        ranges
    }

    /// Puts together what overlaps, then what lies close, until half of the places are free.
    fn shrink(&mut self) {
        let mut gap = 0;
        loop {
            join(&mut self.ranges, gap);
            if self.ranges.len() <= Self::MOST / 2 {
                return;
            }
            gap = gap.saturating_mul(2).max(4096);
        }
    }
}

/// Sorts, and puts together what meets.
pub(super) fn join(ranges: &mut Vec<ByteRange>, gap: u64) {
    ranges.sort_unstable();
    ranges.dedup_by(|later, range| {
        let meets = range.meets(*later, gap);
        if meets {
            range.join(*later);
        }
        meets
    });
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn bytes(ranges: &[ByteRange]) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| range.offset..range.end()).collect()
    }

    proptest! {
        #[test]
        fn what_is_added_comes_out(added in proptest::collection::vec((0_u64..500, 0_u64..20), 0..60)) {
            let added: Vec<_> = added.into_iter().map(|(offset, length)| ByteRange::new(offset, length)).collect();
            let mut pending = Pending::default();
            added.iter().for_each(|range| pending.add(*range));
            let taken = pending.take();
            prop_assert!(taken.windows(2).all(|two| two[0].end() < two[1].offset));
            prop_assert_eq!(bytes(&taken), bytes(&added));
            prop_assert!(pending.take().is_empty());
        }
    }

    #[test]
    fn many_ranges_become_fewer_that_hold_them() {
        let mut pending = Pending::default();
        let offset = |nth: u64| nth * 10_000 % 7_777_777 * 1000;
        for nth in 0..100_000 {
            pending.add(ByteRange::new(offset(nth), 10));
            assert!(pending.ranges.len() <= Pending::MOST);
        }
        let taken = pending.take();
        for nth in 0..100_000 {
            let at = taken.partition_point(|range| range.offset <= offset(nth));
            assert!(taken[at - 1].end() >= offset(nth) + 10);
        }
    }

    #[test]
    fn range_to_the_end_ends_there() {
        assert_eq!(ByteRange::new(5, TO_THE_END), ByteRange { offset: 5, length: u64::MAX - 5 });
        assert_eq!(ByteRange::new(u64::MAX - 2, 10).end(), u64::MAX);
        let mut ranges =
            vec![ByteRange::new(3, TO_THE_END), ByteRange::new(0, TO_THE_END), ByteRange::new(9, 1)];
        join(&mut ranges, 1);
        assert_eq!(ranges, [ByteRange::new(0, TO_THE_END)]);
    }
}
