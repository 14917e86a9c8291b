//! Translates page ranges to the pin records of `find_pins`, and answered records back to ranges. A record holds 64
//! pages. Pure.

use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};

use super::interface::{PinKind, PinnedRange};
use crate::bpf::records::PinRecord;
use crate::pages::{BLOCK_PAGES, BlockIndex, LEAF_PAGES};

/// Blocks that one run of the program examines: at most 65,536 pages, which takes well below a millisecond.
pub const MAX_WINDOW_BLOCKS: u64 = 16;
pub const MAX_WINDOW_RECORDS: usize = to_usize(MAX_WINDOW_BLOCKS * BLOCK_PAGES / LEAF_PAGES);

/// The blocks that one run examines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub first: BlockIndex,
    /// The block after the last one with a requested page.
    pub end: BlockIndex,
    /// Index of the first range with pages in the window.
    pub range: usize,
}

impl Window {
    /// Number of blocks.
    #[must_use]
    pub const fn blocks(self) -> u64 {
        self.end.0 - self.first.0
    }

    /// Number of records.
    #[must_use]
    pub const fn records(self) -> usize {
        to_usize(self.blocks() * BLOCK_PAGES / LEAF_PAGES)
    }
}

/// Splits `ranges`, which are in ascending order and do not overlap, into windows. A block is in at most one window.
#[must_use]
pub fn windows(ranges: &[PageRange]) -> Vec<Window> {
    let mut windows: Vec<Window> = Vec::new();
    for (at, range) in ranges.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
        let end = BlockIndex((range.end().0 - 1) / BLOCK_PAGES + 1);
        let mut next = BlockIndex::of(range.start());
        while next < end {
            if windows.last().is_none_or(|last| next.0 >= last.first.0 + MAX_WINDOW_BLOCKS) {
                windows.push(Window { first: next, end: next, range: at });
            }
            let Some(window) = windows.last_mut() else { break };
            next = end.min(BlockIndex(window.first.0 + MAX_WINDOW_BLOCKS));
            window.end = window.end.max(next);
        }
    }
    windows
}

/// Fills `records`, of length [`Window::records`], with the requests of a window.
pub fn fill_requests(window: Window, ranges: &[PageRange], records: &mut [PinRecord]) {
    records.fill(PinRecord::default());
    let first = window.first.first_page();
    let pages = PageRange::at(first, window.blocks() * BLOCK_PAGES);
    let inside = ranges[window.range..].iter().take_while(|range| range.start() < pages.end());
    for range in inside.map(|range| range.intersect(pages)) {
        let (mut next, end) = (range.start().0 - first.0, range.end().0 - first.0);
        while next < end {
            let in_leaf = next % LEAF_PAGES;
            let count = (LEAF_PAGES - in_leaf).min(end - next);
            let mask = u64::MAX >> (LEAF_PAGES - count) << in_leaf;
            if let Some(record) = records.get_mut(to_usize(next / LEAF_PAGES)) {
                record.requested |= mask;
            }
            next += count;
        }
    }
}

/// Appends the pages of answered records to `out`.
pub fn collect_pins(first: BlockIndex, records: &[PinRecord], out: &mut Vec<PinnedRange>) {
    for (i, record) in records.iter().enumerate() {
        let dma = record.dma & record.requested;
        let extra = record.extra_reference & record.requested & !dma;
        if dma | extra == 0 {
            continue;
        }
        let base = PageIndex(first.first_page().0 + to_u64(i) * LEAF_PAGES);
        let mut next = 0;
        while next < u64::BITS && (dma | extra) >> next != 0 {
            next += ((dma | extra) >> next).trailing_zeros();
            let (kind, plane) =
                if dma >> next & 1 == 1 { (PinKind::Dma, dma) } else { (PinKind::ExtraReference, extra) };
            let count = (plane >> next).trailing_ones();
            push(
                out,
                PinnedRange { range: PageRange::at(base.plus(u64::from(next)), u64::from(count)), kind },
            );
            next += count;
        }
    }
}

/// Appends pages that lie after those in `out`, and merges adjacent pages of one kind.
pub fn push(out: &mut Vec<PinnedRange>, pinned: PinnedRange) {
    if let Some(last) = out.last_mut()
        && last.kind == pinned.kind
        && last.range.end() == pinned.range.start()
    {
        let together = last.range.len() + pinned.range.len();
        last.range = PageRange::at(last.range.start(), together);
    } else {
        out.push(pinned);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn any_ranges() -> impl Strategy<Value = Vec<PageRange>> {
        let len = prop_oneof![4 => 0_u64..3, 2 => 0_u64..300, 1 => 0_u64..200_000];
        let gap = prop_oneof![4 => 0_u64..3, 2 => 0_u64..5000, 1 => 0_u64..1_000_000];
        proptest::collection::vec((gap, len), 0..60).prop_map(|pieces| {
            let mut at = 0;
            let range = |(gap, len)| {
                let start = at + gap;
                at = start + len;
                PageRange::at(PageIndex(start), len)
            };
            pieces.into_iter().map(range).collect()
        })
    }

    /// An arbitrary assignment of pins to pages.
    fn kind_of(page: u64) -> Option<PinKind> {
        match page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61 {
            0 => Some(PinKind::Dma),
            1 | 2 => Some(PinKind::ExtraReference),
            _ if (page / 777).is_multiple_of(5) => Some(PinKind::Dma),
            _ => None,
        }
    }

    proptest! {
        #[test]
        fn windows_contain_each_page_once_and_pins_are_returned(ranges in any_ranges()) {
            let windows = windows(&ranges);
            let mut out = Vec::new();
            let mut requested = 0;
            let mut before = BlockIndex(0);
            for window in windows {
                prop_assert!(window.first >= before && window.first < window.end);
                prop_assert!(window.blocks() <= MAX_WINDOW_BLOCKS);
                before = window.end;
                let mut records = vec![PinRecord { requested: 5, dma: 5, extra_reference: 5 }; window.records()];
                fill_requests(window, &ranges, &mut records);
                for (i, record) in records.iter_mut().enumerate() {
                    prop_assert_eq!((record.dma, record.extra_reference), (0, 0));
                    requested += u64::from(record.requested.count_ones());
                    for bit in 0..64 {
                        match kind_of(window.first.first_page().0 + to_u64(i) * 64 + bit) {
                            Some(PinKind::Dma) => record.dma |= 1 << bit,
                            Some(PinKind::ExtraReference) => record.extra_reference |= 1 << bit,
                            None => {}
                        }
                    }
                }
                collect_pins(window.first, &records, &mut out);
            }
            prop_assert_eq!(requested, ranges.iter().map(|range| range.len()).sum::<u64>());
            let expected: BTreeMap<u64, PinKind> = ranges.iter()
                .flat_map(|range| range.start().0..range.end().0)
                .filter_map(|page| Some((page, kind_of(page)?)))
                .collect();
            prop_assert!(out.windows(2).all(|two| two[0].range.end() <= two[1].range.start()));
            let joined = |two: &[PinnedRange]| two[0].range.end() == two[1].range.start() && two[0].kind == two[1].kind;
            prop_assert!(!out.windows(2).any(joined));
            let found: BTreeMap<u64, PinKind> = out.iter()
                .flat_map(|pinned| (pinned.range.start().0..pinned.range.end().0).map(|page| (page, pinned.kind)))
                .collect();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn dma_takes_precedence_and_only_requested_pages_are_reported() {
        let record = PinRecord { requested: 0b0111, dma: 0b1010, extra_reference: 0b1111 };
        let mut out = Vec::new();
        collect_pins(BlockIndex(1), &[record], &mut out);
        let one = |page: u64, kind| PinnedRange { range: PageRange::at(PageIndex(4096 + page), 1), kind };
        assert_eq!(
            out,
            [one(0, PinKind::ExtraReference), one(1, PinKind::Dma), one(2, PinKind::ExtraReference)]
        );
    }

    #[test]
    fn highest_pages_can_be_requested() {
        let last = PageRange::new(PageIndex(u64::MAX - 5000), PageIndex(u64::MAX)).unwrap();
        let windows = windows(&[last]);
        let [window] = windows[..] else { panic!("{windows:?}") };
        let mut records = [PinRecord::default(); 2 * 64];
        fill_requests(window, &[last], &mut records);
        assert_eq!(records.iter().map(|record| record.requested.count_ones()).sum::<u32>(), 5000);
    }
}
