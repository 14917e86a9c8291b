//! Moves of memory that overlap in time: where content can lack after them. Pure.
//!
//! A thread raises the event of a move or a fork after the change, when it has released the lock of the address space, so another thread can raise
//! the event of a later change first. As long as a change is in progress, the order of the events says nothing about the order of the
//! changes. What lacks content then is a superset: all that can be reached by the moves in any order, each of them any number of times. At
//! the new addresses it is exact if there was one move, or if each of several moves was to addresses that no other one had.

use fdmap_sys::address::AddressRange;

use super::lacking::{Lacking, LackingPart, translated};

/// Most moves whose results are combined, and most times that each of them is. After more, all pages at their new addresses count as such
/// that lack content. A thread that moves memory in a loop has many where its pauses between two moves are not noticed.
const MAX_MOVES: usize = 256;
const MAX_ROUNDS: usize = 8;

/// Memory that the process moved, over what was at the new address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub(super) source: AddressRange,
    pub(super) target: AddressRange,
    pub(super) page_bytes: u64,
}

impl Move {
    /// `len` bytes from one address to another one. `None` if they exceed the address space.
    pub(super) fn new(from: u64, to: u64, len: u64, page_bytes: u64) -> Option<Self> {
        Some(Self { source: AddressRange::at(from, len)?, target: AddressRange::at(to, len)?, page_bytes })
    }

    /// A part of the source, at its new address.
    fn arrived(&self, part: LackingPart) -> LackingPart {
        LackingPart { range: translated(part.range, self.source.start, self.target.start), ..part }
    }
}

/// The changes since the last moment at which none was in progress.
#[derive(Debug, Default)]
pub(super) struct Changes {
    moves: Vec<Move>,
    /// What lacked content at addresses that were unmapped, or that a move concerned.
    departed: Lacking,
}

impl Changes {
    pub(super) fn is_empty(&self) -> bool {
        self.moves.is_empty() && self.departed.is_empty()
    }

    /// The process unmapped these parts, which lacked content.
    pub(super) fn unmap(&mut self, parts: Vec<LackingPart>) {
        self.departed.merge(parts);
    }

    /// All that lacked content at some moment, if `known` does now.
    pub(super) fn ever(&self, mut known: Lacking) -> Lacking {
        known.merge(self.departed.parts());
        known
    }

    /// The process moved memory. Changes `sets`, which have what lacks content and follow the memory; `others` lacks content, too, and the
    /// caller removes from it what the move concerns. Returns what was added.
    pub(super) fn relocate(&mut self, moved: Move, others: &Lacking, sets: [&mut Lacking; 2]) -> Lacking {
        if self.moves.len() > MAX_MOVES {
            // All pages at its new address were added before.
            self.moves.remove(0);
        }
        self.moves.push(moved);
        let mut added = Lacking::default();
        let mut departed = Vec::new();
        for set in sets {
            let mut known = self.ever(set.clone());
            known.merge(others.parts());
            let arrived = self.arrivals(known);
            departed.extend([moved.source, moved.target].iter().flat_map(|range| set.within(*range)));
            if self.moves.len() == 1 {
                set.remove(moved.source);
                set.remove(moved.target);
            }
            set.merge(arrived.parts());
            added.merge(arrived.parts());
        }
        departed.extend([moved.source, moved.target].iter().flat_map(|range| others.within(*range)));
        self.departed.merge(departed);
        added
    }

    /// What can lack content at the new addresses, if `known` lacked it before.
    fn arrivals(&self, mut known: Lacking) -> Lacking {
        let mut arrived = Lacking::default();
        let rounds = if self.moves.len() > MAX_MOVES { 0 } else { MAX_ROUNDS };
        for _ in 0..rounds {
            let before = arrived.bytes();
            for moved in &self.moves {
                let parts: Vec<_> =
                    known.within(moved.source).into_iter().map(|part| moved.arrived(part)).collect();
                known.merge(parts.clone());
                arrived.merge(parts);
            }
            if arrived.bytes() == before {
                return arrived;
            }
        }
        let whole = |moved: &Move| LackingPart { range: moved.target, page_bytes: moved.page_bytes };
        arrived.merge(self.moves.iter().map(whole).collect());
        arrived
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 64;

    type Pages = BTreeSet<u64>;

    fn lacking_of(pages: &Pages) -> Lacking {
        let mut lacking = Lacking::default();
        pages.iter().for_each(|page| lacking.add(AddressRange::at(*page, 1).unwrap(), 1));
        lacking
    }

    fn pages_of(lacking: &Lacking) -> Pages {
        (0..2 * PAGES).filter(|page| lacking.covers(*page)).collect()
    }

    /// What lacks content after a move, which unmaps the old addresses.
    fn after(pages: &Pages, moved: &Move) -> Pages {
        let (source, target) = (moved.source, moved.target);
        let left = pages.iter().copied().filter(|page| !source.contains(*page) && !target.contains(*page));
        let came = pages.iter().filter(|page| source.contains(**page));
        left.chain(came.map(|page| page - source.start + target.start)).collect()
    }

    fn moves() -> impl Strategy<Value = Vec<Move>> {
        let one = (0..PAGES, 0..PAGES, 1_u64..20).prop_map(|(from, to, len)| {
            // The kernel moves no memory over itself.
            Move::new(from, to, len.min(from.abs_diff(to)), 1).unwrap()
        });
        proptest::collection::vec(one, 1..6)
    }

    fn pages() -> impl Strategy<Value = Pages> {
        proptest::collection::btree_set(0..PAGES, 0..20)
    }

    /// What is known after events of moves: of memory that lacks content, of what was refused, and of a child.
    struct Followed {
        lacking: Lacking,
        refused: Lacking,
        child: Lacking,
    }

    /// As the filler does: `stays` is in mappings that stay where they are, the rest is in memory that was moved before. The event of a fork
    /// comes after so many others.
    fn follow(moves: &[Move], stays: &Pages, moved_before: &Pages, before_fork: usize) -> Followed {
        let mut changes = Changes::default();
        let (mut others, mut lacking, mut refused) =
            (lacking_of(stays), lacking_of(moved_before), lacking_of(moved_before));
        let mut child = None;
        let known = |lacking: &Lacking, others: &Lacking| {
            let mut known = lacking.clone();
            known.merge(others.parts());
            known
        };
        for (at, moved) in moves.iter().enumerate() {
            if at == before_fork {
                child = Some(changes.ever(known(&lacking, &others)));
            }
            let mut concerned = Lacking::default();
            concerned.merge(others.within(moved.source));
            concerned.merge(others.within(moved.target));
            let added = changes.relocate(*moved, &concerned, [&mut lacking, &mut refused]);
            if let Some(child) = &mut child {
                child.merge(added.parts());
            }
            others.remove(moved.source);
            others.remove(moved.target);
        }
        let lacking = known(&lacking, &others);
        let child = child.unwrap_or_else(|| changes.ever(lacking.clone()));
        Followed { lacking, refused, child }
    }

    proptest! {
        #[test]
        fn what_lacks_content_after_moves_in_any_order_is_known(
            (moves, events) in moves().prop_flat_map(|moves| {
                let events = Just(moves.clone()).prop_shuffle();
                (Just(moves), events)
            }),
            stays in pages(),
            moved_before in pages(),
            (moves_before_fork, events_before_fork) in (0_usize..6, 0_usize..6),
        ) {
            let known = follow(&events, &stays, &moved_before, events_before_fork);
            let mut truth: Pages = stays.union(&moved_before).copied().collect();
            for (at, moved) in moves.iter().enumerate() {
                let is_known = truth.is_subset(&pages_of(&known.child));
                prop_assert!(at != moves_before_fork || is_known, "in a child: {truth:?} {:?}", known.child);
                truth = after(&truth, moved);
            }
            prop_assert!(truth.is_subset(&pages_of(&known.lacking)), "{truth:?} {:?}", known.lacking);
            let is_known = truth.is_subset(&pages_of(&known.child));
            prop_assert!(moves_before_fork < moves.len() || is_known, "in the last child");
        }

        #[test]
        fn what_lacks_content_after_one_move_is_exact(
            moves in moves(), stays in pages(), moved_before in pages(),
        ) {
            let known = follow(&moves[..1], &stays, &moved_before, 0);
            let truth: Pages = stays.union(&moved_before).copied().collect();
            prop_assert_eq!(pages_of(&known.lacking), after(&truth, &moves[0]));
            prop_assert!(pages_of(&known.refused).is_subset(&pages_of(&known.lacking)));
        }
    }

    #[test]
    fn unmapped_memory_can_have_been_moved_before() {
        let mut changes = Changes::default();
        assert!(changes.is_empty());
        changes.unmap(vec![LackingPart { range: AddressRange { start: 10, end: 12 }, page_bytes: 1 }]);
        assert!(!changes.is_empty());
        let (mut lacking, mut refused) = (Lacking::default(), Lacking::default());
        let moved = Move::new(8, 28, 4, 1).unwrap();
        changes.relocate(moved, &Lacking::default(), [&mut lacking, &mut refused]);
        assert_eq!((pages_of(&lacking), pages_of(&refused)), ([30, 31].into(), [30, 31].into()));
        assert_eq!(pages_of(&changes.ever(lacking)), [10, 11, 30, 31].into());
    }

    /// As of a thread that moves a buffer again and again. Its first address is unmapped then, and the others are not used again.
    #[test]
    fn moves_to_new_addresses_are_exact() {
        let mut changes = Changes::default();
        let others = lacking_of(&[1, 3].into());
        let (mut lacking, mut refused) = (Lacking::default(), Lacking::default());
        for at in 0..u64::try_from(MAX_MOVES).unwrap() {
            let moved = Move::new(at * 4, (at + 1) * 4, 4, 1).unwrap();
            let others = if at == 0 { &others } else { &Lacking::default() };
            changes.relocate(moved, others, [&mut lacking, &mut refused]);
            let last: Vec<_> = (0..4).filter(|page| lacking.covers((at + 1) * 4 + page)).collect();
            assert_eq!(last, [1, 3]);
        }
    }

    #[test]
    fn all_pages_of_many_moves_count() {
        let mut changes = Changes::default();
        let (mut lacking, mut refused) = (Lacking::default(), Lacking::default());
        let most = u64::try_from(MAX_MOVES).unwrap();
        for at in 0..2 * most {
            assert_eq!(lacking.bytes(), if at > most { at } else { 0 });
            let moved = Move::new(1000, at * 2, 1, 1).unwrap();
            changes.relocate(moved, &Lacking::default(), [&mut lacking, &mut refused]);
        }
        assert_eq!((lacking.bytes(), refused.bytes()), (2 * most, 2 * most));
        assert_eq!(changes.moves.len(), MAX_MOVES + 1);
    }

    /// Each round moves one more page back by one.
    #[test]
    fn moves_with_results_without_end_count_with_all_pages() {
        let mut changes = Changes::default();
        let mut lacking = lacking_of(&[40].into());
        for (from, to) in [(0, 100), (101, 0)] {
            let moved = Move::new(from, to, 41, 1).unwrap();
            changes.relocate(moved, &Lacking::default(), [&mut lacking, &mut Lacking::default()]);
        }
        assert_eq!(pages_of(&lacking), (0..41).chain(100..128).collect());
        assert_eq!(lacking.bytes(), 82);
    }
}
