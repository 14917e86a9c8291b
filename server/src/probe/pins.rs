//! Questions about pins, 64 pages a record: from ranges to windows of records, and from answered records to ranges. Pure.

use bytemuck::{Pod, Zeroable};
use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};

use super::{PinKind, Pinned};
use crate::pages::{BLOCK_PAGES, BlockIndex, LEAF_PAGES};

/// Blocks that one run of the program looks at: at most 65,536 pages, well below a millisecond.
pub const WINDOW_BLOCKS: u64 = 16;
/// Records of a window.
pub const WINDOW_RECORDS: usize = to_usize(WINDOW_BLOCKS * BLOCK_PAGES / LEAF_PAGES);

/// What `bpf/page_pins.bpf.c` is asked of 64 pages, and its answer; bit i is the i-th page. `bpf/pin_record.h`, field by
/// field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PinRecord {
    /// Pages asked for.
    pub wanted: u64,
    /// Of these, pinned for DMA.
    pub dma: u64,
    /// Of these, held by somebody else.
    pub held: u64,
}

const _: () = assert!(size_of::<PinRecord>() == 24);

/// Blocks that are looked at in one run, and where in the ranges their first page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The first block.
    pub first: BlockIndex,
    /// The block after the last one of which a page is asked for.
    pub end: BlockIndex,
    /// The first range with pages in it.
    pub range: usize,
}

impl Window {
    /// Its blocks.
    #[must_use]
    pub const fn blocks(self) -> u64 {
        self.end.0 - self.first.0
    }

    /// Records that stand for its pages.
    #[must_use]
    pub const fn records(self) -> usize {
        to_usize(self.blocks() * BLOCK_PAGES / LEAF_PAGES)
    }
}

/// Cuts `ranges`, which ascend and do not overlap, into windows. Each block is in one of them at most.
#[must_use]
pub fn windows(ranges: &[PageRange]) -> Vec<Window> {
    let mut windows: Vec<Window> = Vec::new();
    for (at, range) in ranges.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
        let end = BlockIndex((range.end().0 - 1) / BLOCK_PAGES + 1);
        let mut next = BlockIndex::of(range.start());
        while next < end {
            if windows.last().is_none_or(|last| next.0 >= last.first.0 + WINDOW_BLOCKS) {
                windows.push(Window { first: next, end: next, range: at });
            }
            let Some(window) = windows.last_mut() else { break };
            next = end.min(BlockIndex(window.first.0 + WINDOW_BLOCKS));
            window.end = window.end.max(next);
        }
    }
    windows
}

/// The questions of a window; `records` are [`Window::records`] of any content.
pub fn ask(window: Window, ranges: &[PageRange], records: &mut [PinRecord]) {
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
                record.wanted |= mask;
            }
            next += count;
        }
    }
}

/// Adds what was answered to `out`.
pub fn gather(first: BlockIndex, records: &[PinRecord], out: &mut Vec<Pinned>) {
    for (i, record) in records.iter().enumerate() {
        let dma = record.dma & record.wanted;
        let held = record.held & record.wanted & !dma;
        if dma | held == 0 {
            continue;
        }
        let base = PageIndex(first.first_page().0 + to_u64(i) * LEAF_PAGES);
        let mut next = 0;
        while next < u64::BITS && (dma | held) >> next != 0 {
            next += ((dma | held) >> next).trailing_zeros();
            let (kind, plane) =
                if dma >> next & 1 == 1 { (PinKind::Dma, dma) } else { (PinKind::Held, held) };
            let count = (plane >> next).trailing_ones();
            push(out, Pinned { range: PageRange::at(base.plus(u64::from(next)), u64::from(count)), kind });
            next += count;
        }
    }
}

/// Adds pages that lie behind those that are there.
pub fn push(out: &mut Vec<Pinned>, pinned: Pinned) {
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

    /// Some rule by which pages are pinned.
    fn kind_of(page: u64) -> Option<PinKind> {
        match page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61 {
            0 => Some(PinKind::Dma),
            1 | 2 => Some(PinKind::Held),
            _ if (page / 777).is_multiple_of(5) => Some(PinKind::Dma),
            _ => None,
        }
    }

    proptest! {
        #[test]
        fn windows_hold_each_page_once_and_what_is_answered_comes_out(ranges in any_ranges()) {
            let windows = windows(&ranges);
            let mut out = Vec::new();
            let mut asked = 0;
            let mut before = BlockIndex(0);
            for window in windows {
                prop_assert!(window.first >= before && window.first < window.end);
                prop_assert!(window.blocks() <= WINDOW_BLOCKS);
                before = window.end;
                let mut records = vec![PinRecord { wanted: 5, dma: 5, held: 5 }; window.records()];
                ask(window, &ranges, &mut records);
                for (i, record) in records.iter_mut().enumerate() {
                    prop_assert_eq!((record.dma, record.held), (0, 0));
                    asked += u64::from(record.wanted.count_ones());
                    for bit in 0..64 {
                        match kind_of(window.first.first_page().0 + to_u64(i) * 64 + bit) {
                            Some(PinKind::Dma) => record.dma |= 1 << bit,
                            Some(PinKind::Held) => record.held |= 1 << bit,
                            None => {}
                        }
                    }
                }
                gather(window.first, &records, &mut out);
            }
            prop_assert_eq!(asked, ranges.iter().map(|range| range.len()).sum::<u64>());
            let expected: BTreeMap<u64, PinKind> = ranges.iter()
                .flat_map(|range| range.start().0..range.end().0)
                .filter_map(|page| Some((page, kind_of(page)?)))
                .collect();
            prop_assert!(out.windows(2).all(|two| two[0].range.end() <= two[1].range.start()));
            let joined = |two: &[Pinned]| two[0].range.end() == two[1].range.start() && two[0].kind == two[1].kind;
            prop_assert!(!out.windows(2).any(joined));
            let found: BTreeMap<u64, PinKind> = out.iter()
                .flat_map(|pinned| (pinned.range.start().0..pinned.range.end().0).map(|page| (page, pinned.kind)))
                .collect();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn dma_says_more_than_held_and_nothing_is_told_that_was_not_asked() {
        let record = PinRecord { wanted: 0b0111, dma: 0b1010, held: 0b1111 };
        let mut out = Vec::new();
        gather(BlockIndex(1), &[record], &mut out);
        let one = |page: u64, kind| Pinned { range: PageRange::at(PageIndex(4096 + page), 1), kind };
        assert_eq!(out, [one(0, PinKind::Held), one(1, PinKind::Dma), one(2, PinKind::Held)]);
    }

    #[test]
    fn last_pages_there_are_can_be_asked_for() {
        let last = PageRange::new(PageIndex(u64::MAX - 5000), PageIndex(u64::MAX)).unwrap();
        let windows = windows(&[last]);
        let [window] = windows[..] else { panic!("{windows:?}") };
        let mut records = [PinRecord::default(); 2 * 64];
        ask(window, &[last], &mut records);
        assert_eq!(records.iter().map(|record| record.wanted.count_ones()).sum::<u32>(), 5000);
    }
}
