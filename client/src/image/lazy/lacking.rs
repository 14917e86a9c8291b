//! Address ranges that lack their content and get none: accesses to them are to raise SIGBUS. Pure.

use std::collections::VecDeque;

use fdmap_sys::address::AddressRange;

/// Pages of one size that follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LackingPart {
    /// Not empty.
    pub(super) range: AddressRange,
    pub(super) page_bytes: u64,
}

/// The ranges that still have to be poisoned. They follow the memory when the process moves it, and end when the process removes it.
#[derive(Clone, Debug, Default)]
pub(super) struct Lacking(VecDeque<LackingPart>);

impl Lacking {
    pub(super) fn add(&mut self, range: AddressRange, page_bytes: u64) {
        if !range.is_empty() {
            self.0.push_back(LackingPart { range, page_bytes });
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn first(&self) -> Option<LackingPart> {
        self.0.front().copied()
    }

    /// Takes a part.
    pub(super) fn pop(&mut self) -> Option<LackingPart> {
        self.0.pop_front()
    }

    /// The first bytes of the first part are done.
    pub(super) fn settle(&mut self, bytes: u64) {
        if let Some(part) = self.0.front_mut() {
            part.range.start = part.range.start.saturating_add(bytes);
            if part.range.is_empty() {
                self.0.pop_front();
            }
        }
    }

    pub(super) fn covers(&self, address: u64) -> bool {
        self.page_bytes_at(address).is_some()
    }

    /// The page size of the part that has the address.
    pub(super) fn page_bytes_at(&self, address: u64) -> Option<u64> {
        let found = self.0.iter().find(|part| part.range.contains(address))?;
        Some(found.page_bytes)
    }

    /// The process removed the pages of the range. Returns the parts that were among them.
    pub(super) fn remove(&mut self, removed: AddressRange) -> Vec<LackingPart> {
        let mut cut = Vec::new();
        if removed.is_empty() || self.0.iter().all(|part| part.range.intersect(removed).is_empty()) {
            return cut;
        }
        for LackingPart { range, page_bytes } in std::mem::take(&mut self.0) {
            let inside = range.intersect(removed);
            if inside.is_empty() {
                self.add(range, page_bytes);
                continue;
            }
            self.add(AddressRange { start: range.start, end: inside.start }, page_bytes);
            self.add(AddressRange { start: inside.end, end: range.end }, page_bytes);
            cut.push(LackingPart { range: inside, page_bytes });
        }
        cut
    }

    /// The process moved `len` bytes of memory from one address to another one, over what was there.
    pub(super) fn relocate(&mut self, from: u64, to: u64, len: u64) {
        let (Some(source), Some(target)) = (AddressRange::at(from, len), AddressRange::at(to, len)) else {
            return;
        };
        let moved = self.remove(source);
        self.remove(target);
        for part in moved {
            self.add(translated(part.range, from, to), part.page_bytes);
        }
    }
}

/// A range of the memory that was moved, at its new address.
pub(super) const fn translated(range: AddressRange, from: u64, to: u64) -> AddressRange {
    AddressRange { start: range.start - from + to, end: range.end - from + to }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn at(start: u64, len: u64) -> AddressRange {
        AddressRange::at(start, len).unwrap()
    }

    #[test]
    fn settled_bytes_are_those_of_the_first_part() {
        let mut lacking = Lacking::default();
        lacking.add(at(100, 0), 1);
        lacking.add(at(100, 4), 1);
        lacking.add(at(200, 2), 2);
        lacking.settle(3);
        assert_eq!(lacking.first(), Some(LackingPart { range: at(103, 1), page_bytes: 1 }));
        lacking.settle(1);
        assert_eq!(lacking.first(), Some(LackingPart { range: at(200, 2), page_bytes: 2 }));
        assert!(lacking.covers(201) && !lacking.covers(202) && !lacking.covers(103));
        lacking.settle(9);
        assert!(lacking.is_empty());
    }

    #[derive(Clone, Copy, Debug)]
    enum Change {
        Remove(u64, u64),
        Move(u64, u64, u64),
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            (0_u64..60, 0_u64..20).prop_map(|(start, len)| Change::Remove(start, len)),
            (0_u64..60, 0_u64..80, 0_u64..20).prop_map(|(from, to, len)| Change::Move(from, to, len)),
        ]
    }

    proptest! {
        #[test]
        fn ranges_follow_moves_and_removals_like_a_set_of_pages(
            starts in proptest::collection::btree_set(0_u64..12, 0..6),
            changes in proptest::collection::vec(change(), 0..12),
        ) {
            let mut lacking = Lacking::default();
            let mut oracle = BTreeSet::new();
            for start in starts {
                lacking.add(at(start * 5, 3), 1);
                oracle.extend(start * 5..start * 5 + 3);
            }
            for change in changes {
                match change {
                    Change::Remove(start, len) => {
                        let expected = (start..start + len).filter(|page| oracle.remove(page)).count();
                        let cut: u64 = lacking.remove(at(start, len)).iter().map(|part| part.range.len()).sum();
                        prop_assert_eq!(cut, expected as u64);
                    }
                    Change::Move(from, to, len) => {
                        let moved: Vec<_> = (from..from + len).filter(|page| oracle.remove(page)).collect();
                        oracle.retain(|page| !(to..to + len).contains(page));
                        oracle.extend(moved.iter().map(|page| page - from + to));
                        lacking.relocate(from, to, len);
                    }
                }
            }
            for page in 0..150 {
                prop_assert_eq!(lacking.covers(page), oracle.contains(&page));
            }
            let mut pages = 0;
            while let Some(part) = lacking.first() {
                pages += part.range.len();
                lacking.settle(part.range.len());
            }
            prop_assert_eq!(pages, oracle.len() as u64, "no page is listed twice");
        }
    }
}
