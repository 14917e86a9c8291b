//! The limit on the memory that the stamps of a file take.
//!
//! One stamped page among 4095 others costs an array of 16 KiB in the journal and as much in memory, which stays when the page is
//! punched. So a user could make the service hold any amount by writing one page of each block. Beyond the limit a block gets one stamp
//! for all its pages: they are all reported, conservatively.

use std::fmt::Debug;
use std::sync::Arc;

use fdmap_proto::units::PageRange;

use super::split::by_block;
use super::stamps::covers;
use crate::pages::{BLOCK_PAGES, BlockIndex};

/// Charges the owner of a file for the memory of its stamps.
pub trait StampCharges: Debug + Send + Sync {
    /// The user who is charged: of a subordinate user id, its owner.
    fn owner(&self) -> u32;

    /// Charges `bytes` in all. False if that is more than the owner may have; then the charge is as before.
    fn set(&self, bytes: u64) -> bool;

    /// Charges `bytes` in all, without regard to the limit.
    fn set_unlimited(&self, bytes: u64);
}

/// Memory of one block whose pages have different stamps: in the journal, in the map, and in the map that readers have.
const DENSE_BYTES: u64 = 3 * 4 * BLOCK_PAGES;

#[derive(Debug)]
pub(crate) struct StampBudget {
    charges: Arc<dyn StampCharges>,
    /// Blocks whose pages have different stamps.
    dense: u64,
}

/// Pages to stamp, divided by what the budget allows.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Admitted {
    /// The pages of blocks that may become or are dense, or that are stamped as a whole.
    pub(super) exact: Vec<PageRange>,
    /// Whole blocks, to be stamped conservatively.
    pub(super) coarse: Vec<PageRange>,
}

impl StampBudget {
    /// With the blocks that are dense already.
    pub(super) fn new(charges: Arc<dyn StampCharges>, dense: u64) -> Self {
        charges.set_unlimited(dense * DENSE_BYTES);
        Self { charges, dense }
    }

    pub(super) fn owner(&self) -> u32 {
        self.charges.owner()
    }

    /// Charges for the blocks of `pages` that become dense. `None`: all of them may. `is_uniform`: the block has one stamp, and the new
    /// one changes it.
    pub(super) fn admit(
        &mut self,
        pages: &[PageRange],
        is_uniform: impl Fn(BlockIndex) -> bool,
    ) -> Option<Admitted> {
        let mut refused: Vec<BlockIndex> = Vec::new();
        for (index, ranges) in by_block(pages) {
            // Ranges that are not sorted can name a block twice.
            if covers(ranges, index) || !is_uniform(index) || refused.last() == Some(&index) {
                continue;
            }
            if self.charges.set((self.dense + 1) * DENSE_BYTES) {
                self.dense += 1;
            } else {
                refused.push(index);
            }
        }
        if refused.is_empty() {
            return None;
        }
        refused.sort_unstable();
        let mut admitted =
            Admitted { exact: Vec::new(), coarse: refused.iter().map(|index| index.pages()).collect() };
        for (index, ranges) in by_block(pages) {
            if refused.binary_search(&index).is_err() {
                admitted.exact.extend(ranges.iter().map(|range| range.intersect(index.pages())));
            }
        }
        admitted.exact.retain(|range| !range.is_empty());
        Some(admitted)
    }

    /// Adjusts the charge to the blocks that are dense now.
    pub(super) fn settle(&mut self, dense: u64) {
        if self.dense != dense {
            self.dense = dense;
            self.charges.set_unlimited(dense * DENSE_BYTES);
        }
    }
}

#[cfg(test)]
pub(in crate::tracking) mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use fdmap_proto::units::PageIndex;
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug)]
    pub(in crate::tracking) struct Unlimited;

    impl StampCharges for Unlimited {
        fn owner(&self) -> u32 {
            0
        }

        fn set(&self, _: u64) -> bool {
            true
        }

        fn set_unlimited(&self, _: u64) {}
    }

    /// Grants up to a number of bytes.
    #[derive(Debug)]
    pub(in crate::tracking) struct AtMost {
        limit: u64,
        bytes: AtomicU64,
    }

    impl AtMost {
        pub(in crate::tracking) const fn new(limit: u64) -> Self {
            Self { limit, bytes: AtomicU64::new(0) }
        }

        pub(in crate::tracking) fn bytes(&self) -> u64 {
            self.bytes.load(Ordering::Relaxed)
        }
    }

    impl StampCharges for AtMost {
        fn owner(&self) -> u32 {
            0
        }

        fn set(&self, bytes: u64) -> bool {
            let fits = bytes <= self.limit;
            if fits {
                self.set_unlimited(bytes);
            }
            fits
        }

        fn set_unlimited(&self, bytes: u64) {
            self.bytes.store(bytes, Ordering::Relaxed);
        }
    }

    proptest! {
        #[test]
        fn each_page_is_stamped_and_the_limit_is_kept(
            runs in proptest::collection::vec((0_u64..40_000, 1_u64..9000), 0..12), blocks in 0_u64..5,
        ) {
            let pages: Vec<_> = runs.iter().map(|(start, len)| PageRange::at(PageIndex(*start), *len)).collect();
            let charges = Arc::new(AtMost::new(blocks * DENSE_BYTES));
            let mut budget = StampBudget::new(Arc::clone(&charges) as Arc<_>, 0);
            let admitted = budget.admit(&pages, |_| true);
            prop_assert!(charges.bytes() <= blocks * DENSE_BYTES);
            if let Some(Admitted { exact, coarse }) = admitted {
                for range in &pages {
                    for page in range.start().0..range.end().0 {
                        let is_in = |ranges: &[PageRange]| ranges.iter().any(|range| range.contains(PageIndex(page)));
                        prop_assert!(is_in(&exact) != is_in(&coarse), "page {}", page);
                    }
                }
                prop_assert!(coarse.iter().all(|range| range.len() == BLOCK_PAGES && range.start().0 % BLOCK_PAGES == 0));
            }
        }
    }
}
