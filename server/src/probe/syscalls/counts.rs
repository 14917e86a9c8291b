//! Finds swapped pages by cachestat, which counts pages in memory and in swap, and takes no lock that a client can hold.
//!
//! For each block, mincore is read first. In each run of pages that are not in memory, the counts show whether all of them are swapped,
//! all are in the page cache, or none is either. Else each half of the run is counted. Pages that came into memory meanwhile are read
//! again. So each page has the state that it had at one moment of the scan:
//!
//! ```text
//!   mincore         cachestat     mincore
//!   in memory                                    resident
//!   not in memory   swapped                      swapped
//!   not in memory   none                         hole
//!   not in memory   in the cache  in memory      resident: it was swapped in, or written
//!   not in memory   in the cache  not in memory  read again: it may be swapped. If that repeats, it was allocated and never written:
//!                                                a hole, as for SEEK_DATA
//! ```

use std::os::fd::BorrowedFd;

use fdmap_proto::units::PageRange;
use fdmap_sys::SyscallError;
use fdmap_sys::cachestat::{self, CacheCounts};

use super::{in_core, is_offset, set};
use crate::pages::{BLOCK_LEAVES, BLOCK_PAGES, Bits, BlockBuilder, BlockIndex, BlockRange, Plane};
use crate::probe::interface::{ScanError, ScanOutput, ScanTarget};

/// Limit on the readings of a page that cachestat finds in the page cache, and mincore does not find in memory. After it, the page counts
/// as allocated and never written. One that was swapped in and out again during each reading would be misreported.
const MAX_READINGS: usize = 3;

/// A part of a file with more blocks is counted as a whole first: most of it has no data.
const MAX_PART_BLOCKS: u64 = 1 << 16;

const NONE: Plane = [0; BLOCK_LEAVES];

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
    let mut builder = BlockBuilder::default();
    // The first part last.
    let mut parts = vec![range];
    while let Some(part) = parts.pop() {
        if part.len() > MAX_PART_BLOCKS {
            if count(target, part.pages())? != CacheCounts::default() {
                let halves: Vec<_> = part.parts(part.len().div_ceil(2)).collect();
                parts.extend(halves.into_iter().rev());
            }
            continue;
        }
        for index in (part.start().0..part.end().0).map(BlockIndex) {
            if is_cancelled() {
                return Err(ScanError::Cancelled);
            }
            read_block(target, index, &mut builder)?;
            out.blocks.extend(builder.finish().map(|block| (index, block)));
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
    let pages = index.pages().intersect(PageRange::first(target.file_pages));
    if count(target, pages)? == CacheCounts::default() {
        return Ok(());
    }
    let mut resident = in_core(target, index)?;
    let mut missing = NONE;
    set(&mut missing, 0, pages.len());
    missing = and_not(&missing, &resident);
    let mut swapped = NONE;
    for _ in 0..MAX_READINGS {
        let found = find(target, index, &missing)?;
        swapped = or(&swapped, &found.swapped);
        if found.cached == NONE {
            break;
        }
        let now = in_core(target, index)?;
        missing = and_not(&found.cached, &now);
        resident = or(&resident, &and_not(&found.cached, &missing));
    }
    for leaf in 0..BLOCK_LEAVES {
        builder.leaf(leaf, resident[leaf] | swapped[leaf], swapped[leaf], 0);
    }
    Ok(())
}

/// Pages of a block that mincore does not find in memory. Those in neither set are holes.
struct MissingPages {
    swapped: Plane,
    /// In the page cache.
    cached: Plane,
}

/// Finds the `missing` pages of a block.
fn find(target: &ScanTarget<'_>, index: BlockIndex, missing: &Plane) -> Result<MissingPages, SyscallError> {
    let mut found = MissingPages { swapped: NONE, cached: NONE };
    // Parts of runs, as pages of the block.
    let mut parts = runs(missing);
    while let Some((start, end)) = parts.pop() {
        let len = end - start;
        let CacheCounts { cached, evicted } =
            count(target, PageRange::at(index.first_page().plus(start), len))?;
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

fn or(one: &Plane, other: &Plane) -> Plane {
    std::array::from_fn(|leaf| one[leaf] | other[leaf])
}

fn and_not(one: &Plane, other: &Plane) -> Plane {
    std::array::from_fn(|leaf| one[leaf] & !other[leaf])
}
