//! Which pages of a mapping still lack their content. Pure.

use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{PageIndex, PageRange};
use fdmap_sys::address::AddressRange;

use super::super::PAGE_BYTES;
use super::LazyRegion;

/// How an absent page has to be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// With its content.
    Content,
    /// With zeroes: the image has no data of it, or it was removed.
    Zero,
    /// Its content cannot be read.
    Damaged,
}

/// The pages of one mapping, of the page size of the mapping, numbered from its start.
#[derive(Debug)]
pub(super) struct RegionPages {
    region: LazyRegion,
    /// The image has data of the page, which was not copied yet.
    missing: Bits,
    damaged: Bits,
}

impl RegionPages {
    /// `stored`: the pages of the file that the image has, in ascending order.
    pub(super) fn new(region: LazyRegion, stored: impl Iterator<Item = PageRange>) -> Self {
        let pages = region.bytes / region.page_bytes;
        let mut own = Self { region, missing: Bits::with_len(pages), damaged: Bits::with_len(pages) };
        for range in stored {
            let range = own.pages_of(range);
            own.missing.change(range, true);
        }
        own
    }

    /// Bytes of a page.
    pub(super) const fn page_bytes(&self) -> u64 {
        self.region.page_bytes
    }

    /// Number of pages without content.
    pub(super) const fn missing_pages(&self) -> u64 {
        self.missing.count
    }

    pub(super) const fn has_damaged(&self) -> bool {
        self.damaged.count > 0
    }

    /// The pages that have a page of the file, which has base pages.
    pub(super) fn pages_of(&self, file: PageRange) -> PageRange {
        let end = self.region.offset.saturating_add(self.region.bytes);
        let first =
            file.start().0.saturating_mul(PAGE_BYTES).clamp(self.region.offset, end) - self.region.offset;
        let last =
            file.end().0.saturating_mul(PAGE_BYTES).clamp(self.region.offset, end) - self.region.offset;
        let unit = self.region.page_bytes;
        range(first / unit, last.div_ceil(unit)).unwrap_or_else(|| PageRange::first(0))
    }

    /// The base pages of the file that these pages map.
    pub(super) fn file_pages(&self, pages: PageRange) -> PageRange {
        let base = self.region.page_bytes / PAGE_BYTES;
        PageRange::at(PageIndex(self.region.offset / PAGE_BYTES + pages.start().0 * base), pages.len() * base)
    }

    pub(super) fn addresses(&self, pages: PageRange) -> AddressRange {
        let at = |page: PageIndex| self.region.address + page.0 * self.region.page_bytes;
        AddressRange { start: at(pages.start()), end: at(pages.end()) }
    }

    /// All addresses of the mapping.
    pub(super) fn all_addresses(&self) -> AddressRange {
        self.addresses(PageRange::first(self.missing.len))
    }

    /// The page at an address of the mapping.
    pub(super) fn page_at(&self, address: u64) -> Option<PageIndex> {
        let page = address.checked_sub(self.region.address)? / self.region.page_bytes;
        (page < self.missing.len).then_some(PageIndex(page))
    }

    pub(super) fn need(&self, page: PageIndex) -> Need {
        if self.damaged.get(page.0) {
            Need::Damaged
        } else if self.missing.get(page.0) {
            Need::Content
        } else {
            Need::Zero
        }
    }

    /// The pages without content at and after `from`, before `end`: the first run of them.
    pub(super) fn missing_run(&self, from: PageIndex, end: PageIndex) -> Option<PageRange> {
        let end = end.0.min(self.missing.len);
        let start = self.missing.next(from.0, true).filter(|start| *start < end)?;
        range(start, self.missing.next(start, false).unwrap_or(end).min(end))
    }

    /// The addresses of all pages that lack content, whether it can be read or not.
    pub(super) fn lacking(&self) -> Vec<AddressRange> {
        let of = |bits: &Bits| bits.runs().map(|run| self.addresses(run)).collect::<Vec<_>>();
        [of(&self.missing), of(&self.damaged)].concat()
    }

    /// A page without content, with those around it that also lack it, inside the part of `count` pages that has it.
    pub(super) fn neighbours(&self, page: PageIndex, count: u64) -> PageRange {
        let begin = page.0 - page.0 % count;
        let end = PageIndex(begin.saturating_add(count));
        let mut at = PageIndex(begin);
        while let Some(run) = self.missing_run(at, end) {
            if run.contains(page) {
                return run;
            }
            at = run.end();
        }
        PageRange::at(page, 1)
    }

    /// The pages need no content any more. Returns the number of those that did.
    pub(super) fn settle(&mut self, pages: PageRange) -> u64 {
        let before = self.missing.count;
        self.missing.change(pages, false);
        before - self.missing.count
    }

    /// The process removed the pages of an address range: they are zero.
    pub(super) fn remove(&mut self, addresses: AddressRange) -> u64 {
        let shared = addresses.intersect(self.all_addresses());
        let unit = self.region.page_bytes;
        let [start, end] = [shared.start, shared.end].map(|at| at.saturating_sub(self.region.address));
        let Some(pages) = range(start / unit, end.div_ceil(unit)).filter(|pages| !pages.is_empty()) else {
            return 0;
        };
        self.damaged.change(pages, false);
        self.settle(pages)
    }

    /// The content of the pages cannot be read.
    pub(super) fn damage(&mut self, pages: PageRange) {
        self.missing.change(pages, false);
        self.damaged.change(pages, true);
    }
}

fn range(start: u64, end: u64) -> Option<PageRange> {
    PageRange::new(PageIndex(start), PageIndex(end))
}

/// A set of small numbers.
#[derive(Debug)]
struct Bits {
    words: Vec<u64>,
    len: u64,
    /// Members of the set.
    count: u64,
}

impl Bits {
    fn with_len(len: u64) -> Self {
        Self { words: vec![0; to_usize(len.div_ceil(64))], len, count: 0 }
    }

    fn get(&self, at: u64) -> bool {
        self.words.get(to_usize(at / 64)).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    fn change(&mut self, range: PageRange, value: bool) {
        let (mut at, end) = (range.start().0, range.end().0.min(self.len));
        while at < end {
            let bits = (64 - at % 64).min(end - at);
            let mask = u64::MAX >> (64 - bits) << (at % 64);
            let word = &mut self.words[to_usize(at / 64)];
            let before = u64::from(word.count_ones());
            if value {
                *word |= mask;
            } else {
                *word &= !mask;
            }
            self.count = self.count - before + u64::from(word.count_ones());
            at += bits;
        }
    }

    /// The first number at or after `from` that is in the set, or is not.
    fn next(&self, from: u64, value: bool) -> Option<u64> {
        let mut skipped = from % 64;
        for (number, word) in self.words.iter().enumerate().skip(to_usize(from / 64)) {
            let word = if value { *word } else { !*word };
            let word = word >> skipped << skipped;
            if word != 0 {
                let at = to_u64(number) * 64 + u64::from(word.trailing_zeros());
                return (at < self.len).then_some(at);
            }
            skipped = 0;
        }
        None
    }

    /// The runs of numbers that are in the set.
    fn runs(&self) -> impl Iterator<Item = PageRange> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, true)?;
            at = self.next(start, false).unwrap_or(self.len);
            range(start, at)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START: u64 = 0x10_0000;

    fn region(page_bytes: u64, pages: u64, offset: u64) -> LazyRegion {
        LazyRegion { address: START, bytes: pages * page_bytes, offset, page_bytes }
    }

    fn base(start: u64, end: u64) -> PageRange {
        range(start, end).unwrap()
    }

    #[test]
    fn pages_of_a_mapping_are_those_of_the_file_at_its_offset() {
        let stored = [base(2, 5), base(9, 40)];
        let pages = RegionPages::new(region(PAGE_BYTES, 8, 4 * PAGE_BYTES), stored.into_iter());
        assert_eq!(pages.missing_pages(), 1 + 3);
        let needs: Vec<_> = (0..8).map(|page| pages.need(PageIndex(page)) == Need::Content).collect();
        assert_eq!(needs, [true, false, false, false, false, true, true, true]);
        assert_eq!(pages.file_pages(base(5, 8)), base(9, 12));
        assert_eq!(pages.page_at(START + 5 * PAGE_BYTES + 1), Some(PageIndex(5)));
        assert_eq!(pages.page_at(START + 8 * PAGE_BYTES), None);
        assert_eq!(pages.page_at(START - 1), None);
        assert_eq!(pages.missing_run(PageIndex(1), PageIndex(8)), Some(base(5, 8)));
        assert_eq!(pages.missing_run(PageIndex(1), PageIndex(5)), None);
        assert_eq!(pages.neighbours(PageIndex(6), 2), base(6, 8));
        assert_eq!(pages.neighbours(PageIndex(6), 16), base(5, 8));
    }

    #[test]
    fn huge_page_with_one_stored_page_needs_content() {
        let huge = 512 * PAGE_BYTES;
        let pages = RegionPages::new(
            region(huge, 3, huge),
            [base(512 + 511, 512 + 512), base(1537, 1538)].into_iter(),
        );
        assert_eq!(pages.missing_pages(), 2);
        assert_eq!(
            [0, 1, 2].map(|page| pages.need(PageIndex(page))),
            [Need::Content, Need::Zero, Need::Content]
        );
        assert_eq!(pages.file_pages(base(2, 3)), base(1536, 2048));
    }

    #[test]
    fn removed_and_damaged_pages_need_no_content() {
        let mut pages = RegionPages::new(region(PAGE_BYTES, 8, 0), std::iter::once(base(0, 8)));
        pages.damage(base(1, 2));
        assert_eq!((pages.missing_pages(), pages.has_damaged()), (7, true));
        let addresses = |start, end| pages.addresses(base(start, end));
        assert_eq!(pages.lacking(), [addresses(0, 1), addresses(2, 8), addresses(1, 2)]);
        // Half of the range is outside of the mapping.
        let removed = AddressRange { start: START - PAGE_BYTES, end: START + 3 * PAGE_BYTES };
        assert_eq!(pages.remove(removed), 2);
        assert_eq!((pages.missing_pages(), pages.has_damaged()), (5, false));
        assert_eq!(pages.remove(AddressRange { start: 0, end: START }), 0);
        let end = START + 8 * PAGE_BYTES;
        assert_eq!(pages.remove(AddressRange { start: end, end: end + PAGE_BYTES }), 0);
        assert_eq!(pages.settle(base(2, 5)), 2);
        assert_eq!(pages.missing_pages(), 3);
    }

    proptest! {
        #[test]
        fn bits_agree_with_a_vector(changes in proptest::collection::vec((0_u64..200, 0_u64..80, any::<bool>()), 0..20), from in 0_u64..200) {
            let mut bits = Bits::with_len(190);
            let mut reference = [false; 190];
            for (start, len, value) in changes {
                bits.change(base(start, start + len), value);
                for at in start..(start + len).min(190) {
                    reference[usize::try_from(at).unwrap()] = value;
                }
            }
            prop_assert_eq!(bits.count, reference.iter().filter(|one| **one).count() as u64);
            for value in [true, false] {
                let expected = (from..190).find(|at| reference[usize::try_from(*at).unwrap()] == value);
                prop_assert_eq!(bits.next(from, value), expected);
            }
            prop_assert!((0..190).all(|at| bits.get(at) == reference[usize::try_from(at).unwrap()]));
        }
    }
}
