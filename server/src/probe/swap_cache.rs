//! Finds swapped pages that are in the swap cache: `mincore` reports them in memory while the XArray holds a swap slot.
//! The two sources are read one after the other, so a page counts only if its slot was the same before and after
//! `mincore`. Pure except for the two callbacks.

use fdmap_proto::units::to_u64;

use super::interface::ScanError;
use crate::pages::{BLOCK_LEAVES, Block, BlockIndex, LEAF_PAGES, Plane};

/// Attempts for a block whose swapped pages move during the comparison.
const MAX_ATTEMPTS: u32 = 3;

/// Marks the swap-cached pages of `block`, and replaces it by its last scan. Returns the number of pages whose slot
/// changed in every attempt.
///
/// # Errors
/// The errors of the callbacks.
pub(super) fn distinguish(
    index: BlockIndex,
    block: &mut Block,
    in_core: &mut dyn FnMut(BlockIndex) -> Result<Plane, ScanError>,
    reread: &mut dyn FnMut(BlockIndex) -> Result<Block, ScanError>,
) -> Result<u64, ScanError> {
    let mut moved = 0;
    for _ in 0..MAX_ATTEMPTS {
        if !block.has_swapped() {
            return Ok(0);
        }
        let in_core = in_core(index)?;
        if (0..BLOCK_LEAVES).all(|leaf| in_core[leaf] & block.swapped_word(leaf) == 0) {
            return Ok(0);
        }
        let again = reread(index)?;
        let mut cached = [0; BLOCK_LEAVES];
        moved = 0;
        for leaf in 0..BLOCK_LEAVES {
            let mut candidates = in_core[leaf] & block.swapped_word(leaf) & again.swapped_word(leaf);
            while candidates != 0 {
                let bit = candidates.trailing_zeros();
                candidates &= candidates - 1;
                let page = to_u64(leaf) * LEAF_PAGES + u64::from(bit);
                if block.slot(page) == again.slot(page) {
                    cached[leaf] |= 1 << bit;
                } else {
                    moved += 1;
                }
            }
        }
        *block = again.with_cached(&cached);
        if moved == 0 {
            break;
        }
    }
    Ok(moved)
}

#[cfg(test)]
mod tests {
    use fdmap_proto::state::{PageState, SwapSlot};

    use super::*;
    use crate::pages::BlockBuilder;

    /// Pages 0 to 9 are in swap slots `first` and up.
    fn swapped(first: u64) -> Block {
        let mut builder = BlockBuilder::default();
        builder.fill(0, 10, PageState::Swapped, SwapSlot::new(0, first));
        builder.finish().unwrap()
    }

    fn in_core(bits: u64) -> impl FnMut(BlockIndex) -> Result<Plane, ScanError> {
        move |_| {
            let mut plane = [0; BLOCK_LEAVES];
            plane[0] = bits;
            Ok(plane)
        }
    }

    #[test]
    fn page_in_memory_with_a_slot_is_swap_cached() {
        let mut block = swapped(100);
        let moved =
            distinguish(BlockIndex(0), &mut block, &mut in_core(0b1100_0000_0110), &mut |_| Ok(swapped(100)));
        assert_eq!(moved.unwrap(), 0);
        let states: Vec<_> = (0..4).map(|page| block.state(page)).collect();
        use PageState::{SwapCached, Swapped};
        assert_eq!(states, [Swapped, SwapCached, SwapCached, Swapped]);
        assert_eq!(block.state(10), PageState::Hole, "in memory but not swapped");
        assert_eq!(block.slot(1), SwapSlot::new(0, 101));
    }

    #[test]
    fn page_that_is_swapped_in_meanwhile_is_resident() {
        let mut block = swapped(100);
        let mut reread = |_| Ok(Block::uniform(PageState::Resident));
        let moved = distinguish(BlockIndex(0), &mut block, &mut in_core(0b1), &mut reread);
        assert_eq!((moved.unwrap(), block.state(0)), (0, PageState::Resident));
    }

    #[test]
    fn page_that_always_moves_stays_swapped_and_is_counted() {
        let mut block = swapped(100);
        let mut next = 200;
        let mut reread = |_| {
            next += 100;
            Ok(swapped(next))
        };
        let moved = distinguish(BlockIndex(0), &mut block, &mut in_core(0b1), &mut reread);
        assert_eq!((moved.unwrap(), block.state(0)), (1, PageState::Swapped));
    }

    #[test]
    fn block_without_swapped_pages_needs_no_callback() {
        let mut block = Block::uniform(PageState::Resident);
        let moved =
            distinguish(BlockIndex(0), &mut block, &mut |_| panic!("mincore was called"), &mut |_| {
                panic!("the block was scanned again")
            });
        assert_eq!(moved.unwrap(), 0);
    }
}
