//! Byte ranges that were written and not drained yet, in bounded memory. Pure.

use std::collections::BTreeSet;

use super::Thread;
use crate::tracking::observe::byte_range::{ByteRange, join};

/// The pending ranges of one file.
#[derive(Clone, Debug, Default)]
pub(super) struct Pending {
    ranges: Vec<ByteRange>,
    /// Threads that wrote. Those beyond [`Pending::MAX_THREADS`] are left out: their events have no explanation then.
    threads: BTreeSet<Thread>,
    /// Ranges were merged across gaps.
    merged: bool,
}

impl Pending {
    /// Ranges beyond this number are merged, also across gaps.
    const MAX_RANGES: usize = 4096;
    const MAX_THREADS: usize = 4096;

    /// Adds a call of `thread` that wrote `range`, which is empty if the call changed no content.
    pub(super) fn add(&mut self, range: ByteRange, thread: Thread) {
        if self.threads.len() < Self::MAX_THREADS {
            self.threads.insert(thread);
        }
        if range.length == 0 {
            return;
        }
        // Most writers continue where they stopped.
        if let Some(last) = self.ranges.last_mut()
            && last.offset <= range.offset
            && last.meets(range, 0)
        {
            last.join(range);
            return;
        }
        self.ranges.push(range);
        if self.ranges.len() > Self::MAX_RANGES {
            self.shrink();
        }
    }

    /// Removes all ranges and returns them in ascending order, merged where they overlap or touch.
    pub(super) fn take(&mut self) -> Vec<ByteRange> {
        let mut ranges = std::mem::take(&mut self.ranges);
        join(&mut ranges, 0);
        ranges
    }

    /// True if ranges that [`Self::take`] returns contain bytes that no call wrote.
    pub(super) fn take_merged(&mut self) -> bool {
        std::mem::take(&mut self.merged)
    }

    pub(super) fn take_threads(&mut self) -> BTreeSet<Thread> {
        std::mem::take(&mut self.threads)
    }

    /// Merges overlapping ranges, then ranges with increasing gaps, until at most half of the maximum remains.
    fn shrink(&mut self) {
        let mut gap = 0;
        loop {
            join(&mut self.ranges, gap);
            if self.ranges.len() <= Self::MAX_RANGES / 2 {
                return;
            }
            gap = gap.saturating_mul(2).max(4096);
            self.merged = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tracking::observe::byte_range::TO_THE_END;

    fn bytes(ranges: &[ByteRange]) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| range.offset..range.end()).collect()
    }

    #[test]
    fn ranges_that_were_merged_across_gaps_are_marked() {
        let mut pending = Pending::default();
        for at in 0..5000 {
            pending.add(ByteRange::new(at * 8192, 1), 7);
        }
        assert!(pending.take_merged() && pending.take().len() < 5000);
        pending.add(ByteRange::new(0, 1), 7);
        assert!(!pending.take_merged());
    }

    proptest! {
        #[test]
        fn taken_ranges_equal_the_added_ranges(added in proptest::collection::vec((0_u64..500, 0_u64..20), 0..60)) {
            let added: Vec<_> = added.into_iter().map(|(offset, length)| ByteRange::new(offset, length)).collect();
            let mut pending = Pending::default();
            added.iter().for_each(|range| pending.add(*range, 7));
            let taken = pending.take();
            prop_assert!(taken.windows(2).all(|two| two[0].end() < two[1].offset));
            prop_assert_eq!(bytes(&taken), bytes(&added));
            prop_assert!(pending.take().is_empty());
        }
    }

    #[test]
    fn excess_ranges_are_merged_and_cover_all_bytes() {
        let mut pending = Pending::default();
        let offset = |nth: u64| nth * 10_000 % 7_777_777 * 1000;
        for nth in 0..100_000 {
            pending.add(ByteRange::new(offset(nth), 10), Thread::try_from(nth).unwrap());
            assert!(pending.threads.len() <= Pending::MAX_THREADS);
            assert!(pending.ranges.len() <= Pending::MAX_RANGES);
        }
        let taken = pending.take();
        for nth in 0..100_000 {
            let at = taken.partition_point(|range| range.offset <= offset(nth));
            assert!(taken[at - 1].end() >= offset(nth) + 10);
        }
    }

    #[test]
    fn range_to_the_end_does_not_overflow() {
        assert_eq!(ByteRange::new(5, TO_THE_END), ByteRange { offset: 5, length: u64::MAX - 5 });
        assert_eq!(ByteRange::new(u64::MAX - 2, 10).end(), u64::MAX);
        let mut ranges =
            vec![ByteRange::new(3, TO_THE_END), ByteRange::new(0, TO_THE_END), ByteRange::new(9, 1)];
        join(&mut ranges, 1);
        assert_eq!(ranges, [ByteRange::new(0, TO_THE_END)]);
    }
}
