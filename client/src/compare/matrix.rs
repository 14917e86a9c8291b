//! Compares pagemap entries with the states of the file's pages. Performs no I/O.

use std::collections::HashSet;

use fdmap_proto::units::to_usize;
use fdmap_proto::{PageIndex, PageRange, PageState, PagemapEntry, Run, SwapSlot, VariantArray as _};

/// Kind of a pagemap entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// No page.
    None,
    /// A present page.
    Present,
    /// A swap entry.
    Swap,
}

impl EntryKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::None, Self::Present, Self::Swap];

    /// Swap type 31 is not a swap area; the entry is a marker of the kernel (`SWP_PTE_MARKER`).
    const MARKER_TYPE: u64 = 31;

    /// Classifies an entry of `/proc/PID/pagemap`.
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

    /// Name for display and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Present => "present",
            Self::Swap => "swap",
        }
    }

    /// Returns true if the entry misreports a page in `state`: no page although it holds data, present although it is not in
    /// memory, or swapped although it is not in swap. An unknown state is never misreported.
    #[must_use]
    pub const fn misreports(self, state: PageState) -> bool {
        match (self, state) {
            (_, PageState::Unknown) => false,
            (Self::None, state) => state.is_data(),
            (Self::Present, state) => !matches!(state, PageState::Resident | PageState::SwapCached),
            (Self::Swap, state) => !state.is_swapped(),
        }
    }
}

/// Number of pages per pagemap entry and page state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matrix {
    counts: [[u64; 5]; 3],
}

impl Matrix {
    /// Number of pages in `state` whose pagemap entry is `entry`.
    #[must_use]
    pub fn get(&self, entry: EntryKind, state: PageState) -> u64 {
        self.counts[Self::row(entry)][Self::column(state)]
    }

    /// Number of compared pages.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().flatten().sum()
    }

    /// Number of pages that pagemap misreports.
    #[must_use]
    pub fn misreported(&self) -> u64 {
        let cells = EntryKind::ALL
            .into_iter()
            .flat_map(|entry| PageState::VARIANTS.iter().map(move |state| (entry, *state)));
        cells
            .filter(|(entry, state)| entry.misreports(*state))
            .map(|(entry, state)| self.get(entry, state))
            .sum()
    }

    /// Sum of two matrices.
    #[must_use]
    pub fn sum(&self, other: &Self) -> Self {
        let mut sum = *self;
        for (row, others) in sum.counts.iter_mut().zip(&other.counts) {
            row.iter_mut().zip(others).for_each(|(cell, other)| *cell += other);
        }
        sum
    }

    fn count(&mut self, entry: EntryKind, state: PageState) {
        self.counts[Self::row(entry)][Self::column(state)] += 1;
    }

    const fn row(entry: EntryKind) -> usize {
        match entry {
            EntryKind::None => 0,
            EntryKind::Present => 1,
            EntryKind::Swap => 2,
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

/// Comparison with a kernel that has the patch of 2021 "pagemap: swap location for shared pages". The patch looks up the
/// file's XArray if a page table exists but has no entry for the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PatchVerdict {
    /// Entries that the patched kernel would report.
    pub equal: u64,
    /// Entries that the patched kernel would not report.
    pub differ: u64,
    /// Swapped pages in an empty page table. The patched kernel reports them only if the page table exists, which is not
    /// visible from outside.
    pub undecided: u64,
}

impl PatchVerdict {
    /// Sum of two verdicts.
    #[must_use]
    pub const fn sum(self, other: Self) -> Self {
        Self {
            equal: self.equal + other.equal,
            differ: self.differ + other.differ,
            undecided: self.undecided + other.undecided,
        }
    }
}

/// A page that pagemap misreports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MisreportedPage {
    /// Page of the file.
    pub page: PageIndex,
    /// Virtual page number: address / page size.
    pub virtual_page: u64,
    /// pagemap entry.
    pub entry: PagemapEntry,
    /// State of the page.
    pub state: PageState,
    /// Swap slot of the page.
    pub slot: Option<SwapSlot>,
}

/// Result of a comparison.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Number of pages per pagemap entry and page state.
    pub matrix: Matrix,
    /// Comparison with the 2021 patch.
    pub patch: PatchVerdict,
    /// Pages that changed during each attempt; not compared.
    pub moving: u64,
    /// First misreported pages, at most the number given to [`Comparison::new`].
    pub first_misreported: Vec<MisreportedPage>,
    max_listed: usize,
    finds_swap_cached: bool,
}

impl Comparison {
    /// Starts a comparison that lists the first `max_listed` misreported pages. Unless `finds_swap_cached` is set, the states
    /// are those of a probe that reports swap-cached pages as resident: such a page with a swap entry counts as unknown.
    #[must_use]
    pub fn new(max_listed: usize, finds_swap_cached: bool) -> Self {
        Self {
            matrix: Matrix::default(),
            patch: PatchVerdict::default(),
            moving: 0,
            first_misreported: Vec::new(),
            max_listed,
            finds_swap_cached,
        }
    }

    /// Compares the pages of `piece`, which start at virtual page `first_virtual`. `runs` has the states and `entries` the
    /// pagemap entries of all pages; pages in `moved` are not compared. A page table has `table_pages` entries.
    pub fn add(
        &mut self,
        piece: PageRange,
        runs: &[Run],
        moved: &HashSet<u64>,
        entries: &[PagemapEntry],
        first_virtual: u64,
        table_pages: u64,
    ) {
        // Page tables with an entry for any page.
        let tables: Vec<bool> = {
            let first_table = first_virtual / table_pages;
            let mut tables = Vec::new();
            for (nth, entry) in (0_u64..).zip(entries) {
                let table = to_usize((first_virtual + nth) / table_pages - first_table);
                tables.resize(tables.len().max(table + 1), false);
                // Entries of absent page tables have the soft-dirty bit, too, if their mapping does (VM_SOFTDIRTY).
                tables[table] |= entry.0 & !PagemapEntry::SOFT_DIRTY != 0;
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
            let kind = EntryKind::of(*entry);
            let state = match (kind, state) {
                (EntryKind::Swap, PageState::Resident) if !self.finds_swap_cached => PageState::Unknown,
                _ => state,
            };
            self.matrix.count(kind, state);
            self.patch = self.patch.sum(judge(*entry, state, slot, tables[table]));
            if kind.misreports(state) && self.first_misreported.len() < self.max_listed {
                self.first_misreported.push(MisreportedPage {
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

/// Compares one entry with the patch. `table`: the page table has an entry for some page, so it exists.
fn judge(entry: PagemapEntry, state: PageState, slot: Option<SwapSlot>, table: bool) -> PatchVerdict {
    let equal = PatchVerdict { equal: 1, ..PatchVerdict::default() };
    let differ = PatchVerdict { differ: 1, ..PatchVerdict::default() };
    let undecided = PatchVerdict { undecided: 1, ..PatchVerdict::default() };
    match (EntryKind::of(entry), state) {
        (_, PageState::Unknown) => undecided,
        // The patch does not change entries of mapped pages.
        (EntryKind::Present, _) => equal,
        (EntryKind::Swap, state) if state.is_swapped() => {
            // The kernel hides the slot from unprivileged readers.
            if entry.slot().is_none() || slot.is_none() || entry.slot() == slot { equal } else { differ }
        }
        (EntryKind::Swap, _) => differ,
        (EntryKind::None, state) if state.is_swapped() => {
            if table {
                differ
            } else {
                undecided
            }
        }
        (EntryKind::None, _) => equal,
    }
}

/// Pages whose state or slot differs between two scans of the same range.
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
        let mut comparison = Comparison::new(10, true);
        let piece = PageRange::first(entries.len() as u64);
        comparison.add(piece, runs, &HashSet::new(), entries, 5 * TABLE, TABLE);
        comparison
    }

    #[test]
    fn swapped_page_without_an_entry_is_misreported() {
        let runs = [run(0, 1, PageState::Resident, None), run(1, 2, PageState::Swapped, Some(40))];
        let stock = compare(&runs, &[PRESENT, NONE, NONE]);
        assert_eq!(stock.matrix.get(EntryKind::None, PageState::Swapped), 2);
        assert_eq!((stock.matrix.misreported(), stock.matrix.total()), (2, 3));
        assert_eq!(stock.patch, PatchVerdict { equal: 1, differ: 2, undecided: 0 });
        let pages: Vec<_> =
            stock.first_misreported.iter().map(|page| (page.page.0, page.virtual_page)).collect();
        assert_eq!(pages, [(1, 5 * TABLE + 1), (2, 5 * TABLE + 2)]);

        let patched = compare(&runs, &[PRESENT, swap(40), swap(41)]);
        assert_eq!((patched.matrix.misreported(), patched.patch.equal, patched.patch.differ), (0, 3, 0));
        let elsewhere = compare(&runs, &[PRESENT, swap(40), swap(50)]);
        assert_eq!(elsewhere.patch.differ, 1, "another slot");
    }

    #[test]
    fn untouched_resident_page_is_misreported_even_with_the_patch() {
        let got = compare(&[run(0, 2, PageState::Resident, None)], &[NONE, PRESENT]);
        assert_eq!((got.matrix.misreported(), got.patch.equal), (1, 2));
    }

    #[test]
    fn swapped_pages_of_an_empty_page_table_are_undecided() {
        let entries: Vec<_> = (0..2 * TABLE).map(|nth| if nth == 3 { PRESENT } else { NONE }).collect();
        let runs =
            [run(0, 3, PageState::Swapped, Some(9)), run(3, 2 * TABLE - 3, PageState::Swapped, Some(100))];
        let got = compare(&runs, &entries);
        assert_eq!(got.patch.undecided, TABLE, "the second table");
        assert_eq!(got.patch.differ, TABLE - 1, "the rest of the first");
    }

    #[test]
    fn soft_dirty_bit_is_no_proof_of_a_page_table() {
        let runs = [run(0, TABLE, PageState::Swapped, Some(9))];
        let soft_dirty = vec![PagemapEntry(PagemapEntry::SOFT_DIRTY); to_usize(TABLE)];
        assert_eq!(compare(&runs, &soft_dirty).patch.undecided, TABLE);
        let mut present = soft_dirty;
        present[7] = PRESENT;
        assert_eq!(compare(&runs, &present).patch.differ, TABLE - 1);
    }

    #[test]
    fn swap_entry_of_a_resident_page_is_undecided_if_the_probe_does_not_find_swap_cached_pages() {
        let runs = [run(0, 3, PageState::Resident, None)];
        for (finds_swap_cached, misreported, unknown) in [(true, 2, 0), (false, 1, 1)] {
            let mut got = Comparison::new(10, finds_swap_cached);
            got.add(PageRange::first(3), &runs, &HashSet::new(), &[swap(40), NONE, PRESENT], 0, TABLE);
            assert_eq!(got.matrix.misreported(), misreported);
            assert_eq!(got.matrix.get(EntryKind::Swap, PageState::Unknown), unknown);
        }
    }

    #[test]
    fn marker_entry_is_not_a_swap_entry() {
        assert_eq!(EntryKind::of(PagemapEntry(PagemapEntry::SWAP | 31)), EntryKind::None);
        assert_eq!(EntryKind::of(swap(9)), EntryKind::Swap);
    }

    #[test]
    fn swap_entry_without_a_location_equals_any_slot() {
        let got = compare(&[run(0, 1, PageState::Swapped, Some(40))], &[PagemapEntry(PagemapEntry::SWAP)]);
        assert_eq!(got.patch.equal, 1);
    }

    proptest! {
        #[test]
        fn moved_pages_equal_the_oracle(
            before in proptest::collection::vec((0_usize..4, 1_u64..9), 1..20),
            after in proptest::collection::vec((0_usize..4, 1_u64..9), 1..20),
        ) {
            let expand = |pieces: &[(usize, u64)]| -> Vec<(PageState, Option<u64>)> {
                pieces.iter().flat_map(|(state, len)| {
                    let state = PageState::VARIANTS[*state];
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
