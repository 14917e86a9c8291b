//! The redirty set: pages that count as written in the next generation too, because a device or the kernel may write to them
//! without a page table.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fdmap_proto::units::{PageIndex, PageRange};

use super::observe::PinnedPages;
use super::ranges;

/// A page with an extra reference stays in the set for at least this many checkpoints, and for at least
/// [`MIN_REFERENCE_TIME`]. A short reference, such as that of a write through `/proc/PID/mem`, is dropped long before. A page
/// that waits in an LRU batch can look referenced for long, and must not stay in the set for ever.
const MIN_REFERENCE_CHECKPOINTS: u8 = 4;
/// See [`MIN_REFERENCE_CHECKPOINTS`].
const MIN_REFERENCE_TIME: Duration = Duration::from_secs(1);
/// Referenced pages that are timed one by one.
const MAX_REFERENCED_PAGES: usize = 1 << 16;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RedirtySet {
    /// Pinned for DMA.
    pinned: Vec<PageRange>,
    /// Pages with an extra reference, by page index.
    referenced: BTreeMap<u64, ExtraReference>,
}

/// Since when a page has had an extra reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExtraReference {
    checkpoints: u8,
    since: Instant,
}

impl RedirtySet {
    /// A set of pages that may be pinned for DMA.
    #[must_use]
    pub(crate) fn of_pinned(pinned: Vec<PageRange>) -> Self {
        Self { pinned, referenced: BTreeMap::new() }
    }

    #[must_use]
    pub(crate) fn pages(&self) -> Vec<PageRange> {
        let mut pages = self.pinned.clone();
        pages.extend(self.referenced.keys().map(|page| PageRange::at(PageIndex(*page), 1)));
        ranges::normalize(&mut pages);
        pages
    }

    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.pinned.is_empty() && self.referenced.is_empty()
    }

    /// Replaces the set by the pages that are pinned or referenced at `now`. A page whose reference is old enough leaves the
    /// set, and enters it again only after the reference was dropped.
    pub(crate) fn replace(&mut self, found: PinnedPages, now: Instant) {
        let PinnedPages { dma, referenced } = found;
        let before = std::mem::take(&mut self.referenced);
        for page in referenced.iter().flat_map(|range| range.start().0..range.end().0) {
            let first = ExtraReference { checkpoints: 0, since: now };
            let reference = before.get(&page).map_or(first, |reference| ExtraReference {
                checkpoints: reference.checkpoints.saturating_add(1),
                ..*reference
            });
            let recent = now.duration_since(reference.since) < MIN_REFERENCE_TIME;
            if reference.checkpoints < MIN_REFERENCE_CHECKPOINTS || recent {
                self.referenced.insert(page, reference);
            }
        }
        self.pinned = dma;
        // So many references are not short ones: the set keeps the pages as ranges, which take less memory.
        if self.referenced.len() > MAX_REFERENCED_PAGES {
            self.referenced.clear();
            self.pinned.extend(referenced);
            ranges::normalize(&mut self.pinned);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(dma: &[(u64, u64)], referenced: &[(u64, u64)]) -> PinnedPages {
        let ranges = |pairs: &[(u64, u64)]| {
            pairs.iter().map(|(start, len)| PageRange::at(PageIndex(*start), *len)).collect()
        };
        PinnedPages { dma: ranges(dma), referenced: ranges(referenced) }
    }

    #[test]
    fn referenced_page_leaves_the_set_after_enough_checkpoints_and_time() {
        let begun = Instant::now();
        let late = begun + MIN_REFERENCE_TIME;
        let mut set = RedirtySet::default();
        for _ in 0..=MIN_REFERENCE_CHECKPOINTS {
            set.replace(found(&[], &[(7, 1)]), begun);
            assert!(!set.is_empty(), "the time is not over");
        }
        set.replace(found(&[], &[(7, 1)]), late);
        assert!(set.is_empty());
    }

    #[test]
    fn pinned_page_stays_in_the_set_while_it_is_pinned() {
        let begun = Instant::now();
        let mut set = RedirtySet::default();
        for round in 0..20 {
            set.replace(found(&[(3, 2)], &[(4, 1)]), begun + MIN_REFERENCE_TIME * round);
            assert!(set.pages().contains(&PageRange::at(PageIndex(3), 2)));
        }
        set.replace(PinnedPages::default(), begun);
        assert!(set.is_empty());
    }

    #[test]
    fn large_number_of_references_is_kept_as_ranges() {
        let many = MAX_REFERENCED_PAGES as u64 + 1;
        let mut set = RedirtySet::default();
        set.replace(found(&[(0, 1)], &[(0, many)]), Instant::now());
        assert!(set.referenced.is_empty());
        assert_eq!(set.pages(), [PageRange::first(many)]);
    }
}
