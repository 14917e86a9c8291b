//! The redirty set: pages that count as written in the next generation too, because a device or the kernel may write to them
//! without a page table.

use fdmap_proto::units::PageRange;

use super::observe::PinnedPages;
use super::ranges;

/// Pages that were referenced at so many checkpoints in a row may be in an LRU batch, where no write is in progress. The kernel
/// empties a batch when it is full, which on an idle processor may take for ever.
const MAX_UNDRAINED_CHECKPOINTS: u8 = 4;

/// A page stays in the set until a checkpoint finds it neither pinned nor referenced, however long that takes: the reference may
/// be that of a write in progress.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RedirtySet {
    pages: PinnedPages,
    /// Number of checkpoints in a row that found a referenced page which the checkpoint before had found too, since the LRU
    /// batches were drained.
    undrained: u8,
}

impl RedirtySet {
    /// A set of pages that may be pinned for DMA.
    #[must_use]
    pub(crate) fn of_pinned(dma: Vec<PageRange>) -> Self {
        Self { pages: PinnedPages { dma, referenced: Vec::new() }, undrained: 0 }
    }

    /// All pages. Normalized.
    #[must_use]
    pub(crate) fn pages(&self) -> Vec<PageRange> {
        let mut pages = [self.pages.dma.as_slice(), &self.pages.referenced].concat();
        ranges::normalize(&mut pages);
        pages
    }

    /// The pages by the reason for which they are in the set.
    #[must_use]
    pub(crate) const fn by_reason(&self) -> &PinnedPages {
        &self.pages
    }

    #[must_use]
    pub(crate) const fn is_empty(&self) -> bool {
        self.pages.dma.is_empty() && self.pages.referenced.is_empty()
    }

    /// True if the LRU batches should be drained, and the pages looked at again, before `found` replaces the set.
    #[must_use]
    pub(crate) fn may_be_batched(&self, found: &PinnedPages) -> bool {
        self.undrained >= MAX_UNDRAINED_CHECKPOINTS && self.keeps_references(found)
    }

    /// Replaces the set by the pages that are pinned or referenced now; `drained`: LRU batches hold none of the references.
    pub(crate) fn replace(&mut self, found: PinnedPages, drained: bool) {
        let kept = !drained && self.keeps_references(&found);
        self.undrained = if kept { self.undrained.saturating_add(1) } else { 0 };
        self.pages = found;
    }

    fn keeps_references(&self, found: &PinnedPages) -> bool {
        !ranges::intersection(&self.pages.referenced, &found.referenced).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use fdmap_proto::units::PageIndex;

    use super::*;

    fn found(dma: &[(u64, u64)], referenced: &[(u64, u64)]) -> PinnedPages {
        let ranges = |pairs: &[(u64, u64)]| {
            pairs.iter().map(|(start, len)| PageRange::at(PageIndex(*start), *len)).collect()
        };
        PinnedPages { dma: ranges(dma), referenced: ranges(referenced) }
    }

    #[test]
    fn page_stays_in_the_set_while_it_is_pinned_or_referenced() {
        let mut set = RedirtySet::default();
        for round in 0..1000 {
            set.replace(found(&[(3, 2)], &[(5, 1)]), round % 7 == 0);
            assert_eq!(set.pages(), [PageRange::at(PageIndex(3), 3)]);
        }
        set.replace(PinnedPages::default(), false);
        assert!(set.is_empty() && set.pages().is_empty());
    }

    #[test]
    fn batches_are_drained_again_after_so_many_checkpoints_with_the_same_reference() {
        let referenced = found(&[], &[(7, 1)]);
        let mut set = RedirtySet::default();
        for _ in 0..3 {
            let mut checkpoints = 0;
            while !set.may_be_batched(&referenced) {
                set.replace(referenced.clone(), false);
                checkpoints += 1;
            }
            assert!((MAX_UNDRAINED_CHECKPOINTS..=MAX_UNDRAINED_CHECKPOINTS + 1).contains(&checkpoints));
            set.replace(referenced.clone(), true);
        }
    }

    #[test]
    fn new_references_and_pins_are_not_reasons_to_drain() {
        let mut set = RedirtySet::default();
        for round in 0..20 {
            let found = found(&[(3, 1)], &[(7 + round, 1)]);
            assert!(!set.may_be_batched(&found), "round {round}");
            set.replace(found, false);
        }
    }
}
