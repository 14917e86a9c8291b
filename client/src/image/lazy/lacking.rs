//! Address ranges that lack their content and get none: accesses to them are to raise SIGBUS. Pure.

use std::collections::BTreeMap;

use fdmap_sys::address::AddressRange;

/// Pages of one size that follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LackingPart {
    /// Not empty.
    pub(super) range: AddressRange,
    pub(super) page_bytes: u64,
}

/// Disjoint parts in ascending order, by their start.
#[derive(Clone, Debug, Default)]
pub(super) struct Lacking(BTreeMap<u64, LackingPart>);

impl Lacking {
    /// Adds a part, over what is known of its addresses.
    pub(super) fn add(&mut self, range: AddressRange, page_bytes: u64) {
        self.remove(range);
        self.insert(range, page_bytes);
    }

    fn insert(&mut self, range: AddressRange, page_bytes: u64) {
        if !range.is_empty() {
            self.0.insert(range.start, LackingPart { range, page_bytes });
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sum of the lengths.
    pub(super) fn bytes(&self) -> u64 {
        self.0.values().map(|part| part.range.len()).sum()
    }

    pub(super) fn first(&self) -> Option<LackingPart> {
        self.0.values().next().copied()
    }

    /// Takes a part.
    pub(super) fn pop(&mut self) -> Option<LackingPart> {
        self.0.pop_first().map(|(_, part)| part)
    }

    /// The first bytes of the first part are done.
    pub(super) fn settle(&mut self, bytes: u64) {
        if let Some(LackingPart { range, page_bytes }) = self.pop() {
            let start = range.start.saturating_add(bytes).min(range.end);
            self.insert(AddressRange { start, end: range.end }, page_bytes);
        }
    }

    pub(super) fn covers(&self, address: u64) -> bool {
        self.page_bytes_at(address).is_some()
    }

    /// The page size of the part that has the address.
    pub(super) fn page_bytes_at(&self, address: u64) -> Option<u64> {
        let (_, part) = self.0.range(..=address).next_back()?;
        part.range.contains(address).then_some(part.page_bytes)
    }

    /// Removes all of a range. Returns the parts that were among it.
    pub(super) fn remove(&mut self, range: AddressRange) -> Vec<LackingPart> {
        let cut = self.within(range);
        for part in &cut {
            // The part that it was cut out of begins at its start or before.
            let Some((&start, &whole)) = self.0.range(..=part.range.start).next_back() else { continue };
            self.0.remove(&start);
            self.insert(AddressRange { start, end: part.range.start }, whole.page_bytes);
            self.insert(AddressRange { start: part.range.end, end: whole.range.end }, whole.page_bytes);
        }
        cut
    }

    /// Adds parts, over what is known of their addresses.
    pub(super) fn merge(&mut self, parts: Vec<LackingPart>) {
        parts.into_iter().for_each(|part| self.add(part.range, part.page_bytes));
    }

    pub(super) fn parts(&self) -> Vec<LackingPart> {
        self.0.values().copied().collect()
    }

    /// The parts inside a range.
    pub(super) fn within(&self, range: AddressRange) -> Vec<LackingPart> {
        let first = self.0.range(..range.start).next_back().map_or(range.start, |(start, _)| *start);
        let inside =
            self.0.range(first..).map(|(_, part)| part).take_while(|part| part.range.start < range.end);
        let cut = inside.map(|part| LackingPart { range: part.range.intersect(range), ..*part });
        cut.filter(|part| !part.range.is_empty()).collect()
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

    proptest! {
        #[test]
        fn ranges_follow_removals_and_additions_like_a_set_of_pages(
            changes in proptest::collection::vec((any::<bool>(), 0_u64..60, 0_u64..20), 0..12),
            (start, len) in (0_u64..60, 0_u64..20),
        ) {
            let mut lacking = Lacking::default();
            let mut oracle = BTreeSet::new();
            for (is_added, start, len) in changes {
                if is_added {
                    oracle.extend(start..start + len);
                    lacking.merge(vec![LackingPart { range: at(start, len), page_bytes: 1 }]);
                } else {
                    let expected = (start..start + len).filter(|page| oracle.remove(page)).count();
                    let cut: u64 = lacking.remove(at(start, len)).iter().map(|part| part.range.len()).sum();
                    prop_assert_eq!(cut, expected as u64);
                }
            }
            for page in 0..150 {
                prop_assert_eq!(lacking.covers(page), oracle.contains(&page));
            }
            let inside: u64 = lacking.within(at(start, len)).iter().map(|part| part.range.len()).sum();
            prop_assert_eq!(inside, oracle.range(start..start + len).count() as u64);
            let mut pages = 0;
            while let Some(part) = lacking.first() {
                pages += part.range.len();
                lacking.settle(part.range.len());
            }
            prop_assert_eq!(pages, oracle.len() as u64, "no page is listed twice");
        }
    }
}
