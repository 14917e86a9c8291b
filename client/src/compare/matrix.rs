//! Judging pagemap entries by the state of the file's pages. Pure.

use std::collections::HashSet;

use fdmap_proto::units::to_usize;
use fdmap_proto::{PageIndex, PageRange, PageState, PagemapEntry, Run, SwapSlot};

/// What a pagemap entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing: no page.
    None,
    /// In memory.
    Present,
    /// In swap.
    Swap,
}

impl Entry {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::None, Self::Present, Self::Swap];

    /// Type 31 is no swap area: such an entry is a marker that the kernel left in place of a page (`SWP_PTE_MARKER`).
    const MARKER_TYPE: u64 = 31;

    /// Of a word of `/proc/PID/pagemap`.
    #[must_use]
    pub const fn of(entry: PagemapEntry) -> Self {
        if entry.is_present() {
            Self::Present
        } else if entry.is_swap() && entry.0 & 0x1f != Self::MARKER_TYPE {
            Self::Swap
        } else {
            Self::None
        }
    }

    /// Lower case, one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Present => "present",
            Self::Swap => "swap",
        }
    }

    /// True if this is a wrong statement about a page in `state`: "nothing" of a page that holds data, "in memory" of one
    /// that is not, "in swap" of one that is not. Nothing is wrong about a page whose state is unknown.
    #[must_use]
    pub const fn is_wrong_about(self, state: PageState) -> bool {
        match (self, state) {
            (_, PageState::Unknown) => false,
            (Self::None, state) => state.is_data(),
            (Self::Present, state) => !matches!(state, PageState::Resident | PageState::SwapCached),
            (Self::Swap, state) => !state.is_swapped(),
        }
    }
}

/// Pages by what pagemap says of them and what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matrix {
    counts: [[u64; 5]; 3],
}

impl Matrix {
    /// Pages of which pagemap says `entry` and which are in `state`.
    #[must_use]
    pub fn get(&self, entry: Entry, state: PageState) -> u64 {
        self.counts[Self::row(entry)][Self::column(state)]
    }

    /// All pages in it.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().flatten().sum()
    }

    /// Pages that pagemap tells wrongly.
    #[must_use]
    pub fn wrong(&self) -> u64 {
        let cells = Entry::ALL.into_iter().flat_map(|entry| PageState::ALL.map(|state| (entry, state)));
        cells
            .filter(|(entry, state)| entry.is_wrong_about(*state))
            .map(|(entry, state)| self.get(entry, state))
            .sum()
    }

    /// This matrix and another one.
    #[must_use]
    pub fn sum(&self, other: &Self) -> Self {
        let mut sum = *self;
        for (row, others) in sum.counts.iter_mut().zip(&other.counts) {
            row.iter_mut().zip(others).for_each(|(cell, other)| *cell += other);
        }
        sum
    }

    fn count(&mut self, entry: Entry, state: PageState) {
        self.counts[Self::row(entry)][Self::column(state)] += 1;
    }

    const fn row(entry: Entry) -> usize {
        match entry {
            Entry::None => 0,
            Entry::Present => 1,
            Entry::Swap => 2,
        }
    }

    const fn column(state: PageState) -> usize {
        match state {
            PageState::Hole => 0,
            PageState::Resident => 1,
            PageState::SwapCached => 2,
            PageState::Swapped => 3,
            PageState::Unknown => 4,
        }
    }
}

/// Whether entries are what a kernel with the patch of 2021 ("pagemap: swap location for shared pages") would report.
/// That patch looks up the file's XArray where a page table exists and has nothing for the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PatchVerdict {
    /// They are.
    pub equal: u64,
    /// They are not.
    pub differ: u64,
    /// Swapped pages of which the whole page table says nothing: where there is no page table the patch says nothing
    /// either, and whether there is one cannot be seen from outside.
    pub undecided: u64,
}

impl PatchVerdict {
    fn add(&mut self, other: Self) {
        self.equal += other.equal;
        self.differ += other.differ;
        self.undecided += other.undecided;
    }

    /// This verdict and another one.
    #[must_use]
    pub fn sum(mut self, other: Self) -> Self {
        self.add(other);
        self
    }
}

/// A page that pagemap tells wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// The page of the file.
    pub page: PageIndex,
    /// The page of the address space: address / page size.
    pub virtual_page: u64,
    /// What pagemap says.
    pub entry: PagemapEntry,
    /// What it is.
    pub state: PageState,
    /// Where it lies in swap.
    pub slot: Option<SwapSlot>,
}

/// What came of comparing.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Pages by what pagemap says of them and what they are.
    pub matrix: Matrix,
    /// Against the patch of 2021.
    pub patch: PatchVerdict,
    /// Pages that changed each time they were read; they are not judged.
    pub moving: u64,
    /// The first pages that pagemap tells wrongly.
    pub first_wrong: Vec<Wrong>,
    most_wrong: usize,
}

impl Comparison {
    /// Nothing is compared yet; the first `most_wrong` wrong pages will be remembered.
    #[must_use]
    pub fn new(most_wrong: usize) -> Self {
        Self {
            matrix: Matrix::default(),
            patch: PatchVerdict::default(),
            moving: 0,
            first_wrong: Vec::new(),
            most_wrong,
        }
    }

    /// Compares the pages of `piece`, whose first one is `first_virtual` in the address space. `runs` are all of their
    /// states, `entries` what pagemap says of each, `moved` those that are not to be judged. A page table holds
    /// `table_pages` entries.
    pub fn add(
        &mut self,
        piece: PageRange,
        runs: &[Run],
        moved: &HashSet<u64>,
        entries: &[PagemapEntry],
        first_virtual: u64,
        table_pages: u64,
    ) {
        // Whether any entry of the page table that holds a page says something.
        let tables: Vec<bool> = {
            let first_table = first_virtual / table_pages;
            let mut tables = Vec::new();
            for (nth, entry) in (0_u64..).zip(entries) {
                let table = to_usize((first_virtual + nth) / table_pages - first_table);
                tables.resize(tables.len().max(table + 1), false);
                tables[table] |= entry.0 != 0;
            }
            tables
        };
        let mut runs = runs.iter();
        let mut run = runs.next();
        for (page, entry) in (piece.start().0..piece.end().0).zip(entries) {
            while run.is_some_and(|run| run.range.end().0 <= page) {
                run = runs.next();
            }
            let found = run.filter(|run| run.range.contains(PageIndex(page)));
            let (state, slot) =
                found.map_or((PageState::Unknown, None), |run| (run.state, run.slot_of(PageIndex(page))));
            if moved.contains(&page) {
                self.moving += 1;
                continue;
            }
            let virtual_page = first_virtual + (page - piece.start().0);
            let table = to_usize(virtual_page / table_pages - first_virtual / table_pages);
            let kind = Entry::of(*entry);
            self.matrix.count(kind, state);
            self.patch.add(judge(*entry, state, slot, tables[table]));
            if kind.is_wrong_about(state) && self.first_wrong.len() < self.most_wrong {
                self.first_wrong.push(Wrong {
                    page: PageIndex(page),
                    virtual_page,
                    entry: *entry,
                    state,
                    slot,
                });
            }
        }
    }
}

/// One entry against the patch. `table`: its page table exists, for it says something of some page.
fn judge(entry: PagemapEntry, state: PageState, slot: Option<SwapSlot>, table: bool) -> PatchVerdict {
    let equal = PatchVerdict { equal: 1, ..PatchVerdict::default() };
    let differ = PatchVerdict { differ: 1, ..PatchVerdict::default() };
    let undecided = PatchVerdict { undecided: 1, ..PatchVerdict::default() };
    match (Entry::of(entry), state) {
        (_, PageState::Unknown) => undecided,
        // The patch touches no entry of a page that is mapped.
        (Entry::Present, _) => equal,
        (Entry::Swap, state) if state.is_swapped() => {
            // A reader without privileges sees that it is swapped and not where.
            if entry.slot().is_none() || slot.is_none() || entry.slot() == slot { equal } else { differ }
        }
        (Entry::Swap, _) => differ,
        (Entry::None, state) if state.is_swapped() => {
            if table {
                differ
            } else {
                undecided
            }
        }
        (Entry::None, _) => equal,
    }
}

/// The pages whose state or slot differs between two readings of the same pages.
pub(super) fn moved(before: &[Run], after: &[Run]) -> HashSet<u64> {
    let mut moved = HashSet::new();
    let (mut befores, mut afters) = (before.iter(), after.iter());
    let (mut old, mut new) = (befores.next(), afters.next());
    while let (Some(a), Some(b)) = (old, new) {
        let start = a.range.start().max(b.range.start());
        let end = a.range.end().min(b.range.end());
        if start < end && (a.state != b.state || a.slot_of(start) != b.slot_of(start)) {
            moved.extend(start.0..end.0);
        }
        if a.range.end() <= b.range.end() {
            old = befores.next();
        }
        if b.range.end() <= a.range.end() {
            new = afters.next();
        }
    }
    moved
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TABLE: u64 = 512;

    fn run(start: u64, len: u64, state: PageState, slot: Option<u64>) -> Run {
        let slot = slot.map(|offset| SwapSlot::new(0, offset).unwrap());
        Run { range: PageRange::at(PageIndex(start), len), state, slot, attributes: None }
    }

    fn swap(offset: u64) -> PagemapEntry {
        PagemapEntry(PagemapEntry::SWAP | offset << 5)
    }

    const NONE: PagemapEntry = PagemapEntry(0);
    const PRESENT: PagemapEntry = PagemapEntry(PagemapEntry::PRESENT | 77);

    fn compare(runs: &[Run], entries: &[PagemapEntry]) -> Comparison {
        let mut comparison = Comparison::new(10);
        let piece = PageRange::first(entries.len() as u64);
        comparison.add(piece, runs, &HashSet::new(), entries, 5 * TABLE, TABLE);
        comparison
    }

    #[test]
    fn swapped_page_without_an_entry_is_told_wrongly() {
        let runs = [run(0, 1, PageState::Resident, None), run(1, 2, PageState::Swapped, Some(40))];
        let stock = compare(&runs, &[PRESENT, NONE, NONE]);
        assert_eq!(stock.matrix.get(Entry::None, PageState::Swapped), 2);
        assert_eq!((stock.matrix.wrong(), stock.matrix.total()), (2, 3));
        assert_eq!(stock.patch, PatchVerdict { equal: 1, differ: 2, undecided: 0 });
        let pages: Vec<_> =
            stock.first_wrong.iter().map(|wrong| (wrong.page.0, wrong.virtual_page)).collect();
        assert_eq!(pages, [(1, 5 * TABLE + 1), (2, 5 * TABLE + 2)]);

        let patched = compare(&runs, &[PRESENT, swap(40), swap(41)]);
        assert_eq!((patched.matrix.wrong(), patched.patch.equal, patched.patch.differ), (0, 3, 0));
        let elsewhere = compare(&runs, &[PRESENT, swap(40), swap(50)]);
        assert_eq!(elsewhere.patch.differ, 1, "another slot");
    }

    #[test]
    fn page_in_memory_that_this_process_never_touched_is_told_wrongly_by_the_patch_too() {
        let got = compare(&[run(0, 2, PageState::Resident, None)], &[NONE, PRESENT]);
        assert_eq!((got.matrix.wrong(), got.patch.equal), (1, 2));
    }

    #[test]
    fn table_that_says_nothing_at_all_is_undecided() {
        let entries: Vec<_> = (0..2 * TABLE).map(|nth| if nth == 3 { PRESENT } else { NONE }).collect();
        let runs =
            [run(0, 3, PageState::Swapped, Some(9)), run(3, 2 * TABLE - 3, PageState::Swapped, Some(100))];
        let got = compare(&runs, &entries);
        assert_eq!(got.patch.undecided, TABLE, "the second table");
        assert_eq!(got.patch.differ, TABLE - 1, "the rest of the first");
    }

    #[test]
    fn marker_is_no_swapped_page() {
        assert_eq!(Entry::of(PagemapEntry(PagemapEntry::SWAP | 31)), Entry::None);
        assert_eq!(Entry::of(swap(9)), Entry::Swap);
    }

    #[test]
    fn entry_without_a_location_fits_any_slot() {
        let got = compare(&[run(0, 1, PageState::Swapped, Some(40))], &[PagemapEntry(PagemapEntry::SWAP)]);
        assert_eq!(got.patch.equal, 1);
    }

    proptest! {
        #[test]
        fn moved_pages_are_those_that_differ(
            before in proptest::collection::vec((0_usize..4, 1_u64..9), 1..20),
            after in proptest::collection::vec((0_usize..4, 1_u64..9), 1..20),
        ) {
            let expand = |pieces: &[(usize, u64)]| -> Vec<(PageState, Option<u64>)> {
                pieces.iter().flat_map(|(state, len)| {
                    let state = PageState::ALL[*state];
                    (0..*len).map(move |i| (state, state.is_swapped().then_some(50 + i)))
                }).collect()
            };
            let (mut before, mut after) = (expand(&before), expand(&after));
            let pages = before.len().min(after.len());
            before.truncate(pages);
            after.truncate(pages);
            let runs = |pages: &[(PageState, Option<u64>)]| -> Vec<Run> {
                pages.iter().enumerate().map(|(i, (state, slot))| run(i as u64, 1, *state, *slot)).collect()
            };
            let expected: HashSet<u64> = (0..pages).filter(|i| before[*i] != after[*i]).map(|i| i as u64).collect();
            prop_assert_eq!(moved(&runs(&before), &runs(&after)), expected);
        }
    }
}
