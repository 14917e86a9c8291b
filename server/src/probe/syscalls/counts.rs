//! Finds swapped pages by cachestat, which counts pages in the page cache and in swap, and takes no lock that a client can hold.
//!
//! mincore reads which pages of a block are in memory. Each run of other pages is counted: if all of them are in the same state, that is
//! known, else each half of the run is counted. So each page has a state that it had at one moment of the scan:
//!
//! ```text
//!   mincore         cachestat           state
//!   in memory                           resident
//!   not in memory   in swap             swapped
//!   not in memory   in the page cache   resident: it came into memory, or was allocated and never written
//!   not in memory   neither             hole
//! ```

use std::os::fd::BorrowedFd;

use fdmap_proto::units::PageRange;
use fdmap_sys::SyscallError;
use fdmap_sys::cachestat::{self, CacheCounts};

use super::{in_core, is_offset, set};
use crate::pages::{BLOCK_LEAVES, BLOCK_PAGES, Bits, BlockBuilder, BlockIndex, BlockRange, Plane};
use crate::probe::interface::{ScanError, ScanOutput, ScanTarget};

/// Blocks that one call counts. It visits each of their pages that holds data, some 30 ns each.
const MAX_COUNTED_BLOCKS: u64 = 256;

/// Blocks with more pages on average are read one by one: to count their halves first would take as long as mincore.
const DENSE_PAGES: u64 = BLOCK_PAGES / 8;

/// True if cachestat counts the pages of this file.
pub(super) fn are_available(fd: BorrowedFd<'_>) -> bool {
    cachestat::count(fd, 0, 1).is_ok()
}

pub(super) fn scan(
    target: &ScanTarget<'_>,
    range: BlockRange,
    is_cancelled: &(dyn Fn() -> bool + Sync),
    out: &mut ScanOutput,
) -> Result<(), ScanError> {
    let go_on = || if is_cancelled() { Err(ScanError::Cancelled) } else { Ok(()) };
    let mut builder = BlockBuilder::default();
    for counted in range.parts(MAX_COUNTED_BLOCKS) {
        // The first part last.
        let mut parts = vec![counted];
        while let Some(part) = parts.pop() {
            go_on()?;
            let CacheCounts { cached, evicted } = count(target, part.pages())?;
            let pages = cached + evicted;
            if pages == 0 {
                continue;
            }
            if part.len() > 1 && pages < part.len() * DENSE_PAGES {
                let halves: Vec<_> = part.parts(part.len().div_ceil(2)).collect();
                parts.extend(halves.into_iter().rev());
                continue;
            }
            for index in (part.start().0..part.end().0).map(BlockIndex) {
                go_on()?;
                read_block(target, index, &mut builder)?;
                out.blocks.extend(builder.finish().map(|block| (index, block)));
            }
        }
    }
    Ok(())
}

/// Adds the pages of a block to the builder.
fn read_block(
    target: &ScanTarget<'_>,
    index: BlockIndex,
    builder: &mut BlockBuilder,
) -> Result<(), ScanError> {
    let first = index.first_page();
    let mut in_file = [0; BLOCK_LEAVES];
    set(&mut in_file, 0, index.pages().intersect(PageRange::first(target.file_pages)).len());
    let in_memory = in_core(target, index)?;
    let missing = std::array::from_fn(|leaf| in_file[leaf] & !in_memory[leaf]);
    let missing = find(&missing, |start, end| count(target, PageRange::at(first.plus(start), end - start)))?;
    for leaf in 0..BLOCK_LEAVES {
        let resident = in_file[leaf] & in_memory[leaf] | missing.cached[leaf];
        builder.leaf(leaf, resident | missing.swapped[leaf], missing.swapped[leaf], 0);
    }
    Ok(())
}

/// Pages of a block that mincore does not find in memory. Those in neither set are holes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MissingPages {
    pub(super) swapped: Plane,
    /// In the page cache.
    pub(super) cached: Plane,
}

/// Finds the states of the `missing` pages of a block. `count` counts the pages from the first to before the second one of the block.
/// Pure except for `count`.
pub(super) fn find(
    missing: &Plane,
    mut count: impl FnMut(u64, u64) -> Result<CacheCounts, SyscallError>,
) -> Result<MissingPages, SyscallError> {
    let mut found = MissingPages { swapped: [0; BLOCK_LEAVES], cached: [0; BLOCK_LEAVES] };
    let mut parts = runs(missing);
    while let Some((start, end)) = parts.pop() {
        let len = end - start;
        let CacheCounts { cached, evicted } = count(start, end)?;
        if evicted >= len {
            set(&mut found.swapped, start, end);
        } else if cached >= len {
            set(&mut found.cached, start, end);
        } else if cached + evicted > 0 {
            // One page is not both.
            let middle = start + len / 2;
            parts.extend([(start, middle), (middle, end)]);
        }
    }
    Ok(found)
}

/// The runs of pages whose bits are set.
pub(super) fn runs(plane: &Plane) -> Vec<(u64, u64)> {
    let bits = Bits::new(plane);
    let (mut runs, mut start) = (Vec::new(), 0);
    while start < BLOCK_PAGES {
        let end = bits.run_end(start);
        if bits.get(start) {
            runs.push((start, end));
        }
        start = end;
    }
    runs
}

fn count(target: &ScanTarget<'_>, pages: PageRange) -> Result<CacheCounts, SyscallError> {
    let offset = target.page_size.offset_of(pages.start()).filter(|offset| is_offset(*offset));
    match offset {
        // cachestat takes a length of 0 as up to the end of the file.
        Some(offset) if !pages.is_empty() => {
            cachestat::count(target.fd, offset, pages.len().saturating_mul(target.page_size.bytes()))
        }
        _ => Ok(CacheCounts::default()),
    }
}
