//! Finds data by SEEK_DATA and SEEK_HOLE, which wait for the lock of the inode: a client can hold it for ever. Used where cachestat is
//! not available, as before Linux 6.5.
//!
//! There are two ways to find data. SEEK_HOLE walks to the end of an extent, however far that is, so [`by_extent`]
//! passes over a large part of a file once. For a small part of a file, [`by_page`] calls SEEK_DATA for each page that
//! is not in memory. Both take three readings. A page that is in memory at one reading is resident, and a page without
//! data at one reading is a hole: it had that state at that moment. A page is swapped if it has data before and after a
//! reading that does not find it in memory. That is wrong only for a page that was punched out and written again in
//! between, so the result is not exact if the file's ctime changed during the scan.

use std::collections::BTreeMap;

use fdmap_proto::units::{PageIndex, to_u64, to_usize};
use fdmap_sys::{SyscallError, seek};

use super::{in_core, is_offset, set};
use crate::pages::{BLOCK_LEAVES, BLOCK_PAGES, Block, BlockBuilder, BlockIndex, BlockRange, Plane};
use crate::probe::interface::{ScanError, ScanOutput, ScanTarget};

/// Cost of SEEK_DATA for one page, in pages that SEEK_HOLE passes.
const PAGE_COST: u64 = 12;

pub(super) fn scan(
    target: &ScanTarget<'_>,
    range: BlockRange,
    is_cancelled: &(dyn Fn() -> bool + Sync),
    out: &mut ScanOutput,
) -> Result<(), ScanError> {
    let before = ctime(target)?;
    let to_end = target.file_pages.saturating_sub(range.start().first_page().0);
    let first = out.blocks.len();
    if range.pages().len().saturating_mul(PAGE_COST) < to_end {
        by_page(target, range, is_cancelled, out)?;
    } else {
        by_extent(target, range, is_cancelled, out)?;
    }
    if ctime(target)? != before {
        let swapped_leaves =
            |block: &Block| (0..BLOCK_LEAVES).filter(|leaf| block.swapped_word(*leaf) != 0).count();
        let leaves: usize = out.blocks[first..].iter().map(|(_, block)| swapped_leaves(block)).sum();
        out.uncertainty.unsettled_leaves += to_u64(leaves);
    }
    Ok(())
}

/// The ctime of the file. Every hole punch, truncation and write() changes it, and so do most first writes through a
/// mapping.
fn ctime(target: &ScanTarget<'_>) -> Result<(i64, i64), SyscallError> {
    let stat = fdmap_sys::fd::stat(target.fd)?;
    Ok((stat.st_ctime, stat.st_ctime_nsec))
}

/// Reads data extents, then residency, then data extents again, each for the whole range.
pub(super) fn by_extent(
    target: &ScanTarget<'_>,
    range: BlockRange,
    is_cancelled: &(dyn Fn() -> bool + Sync),
    out: &mut ScanOutput,
) -> Result<(), ScanError> {
    let before = data_in(target, range, is_cancelled)?;
    let mut residency = Vec::with_capacity(before.len());
    for index in before.keys() {
        if is_cancelled() {
            return Err(ScanError::Cancelled);
        }
        residency.push(in_core(target, *index)?);
    }
    let after = data_in(target, range, is_cancelled)?;
    let mut builder = BlockBuilder::default();
    for ((index, before), in_core) in before.iter().zip(&residency) {
        let after = after.get(index).map_or(&[0; BLOCK_LEAVES], |plane| &**plane);
        for leaf in 0..BLOCK_LEAVES {
            let data = before[leaf] & after[leaf];
            builder.leaf(leaf, data, data & !in_core[leaf], 0);
        }
        out.blocks.extend(builder.finish().map(|block| (*index, block)));
    }
    Ok(())
}

/// Reads residency, then data of the non-resident pages, then residency again, block by block.
pub(super) fn by_page(
    target: &ScanTarget<'_>,
    range: BlockRange,
    is_cancelled: &(dyn Fn() -> bool + Sync),
    out: &mut ScanOutput,
) -> Result<(), ScanError> {
    let mut builder = BlockBuilder::default();
    let mut next = range.start();
    // Skip to the next block with data.
    while let Some(page) = next_data(target, next.first_page())? {
        let index = BlockIndex::of(page);
        if index >= range.end() {
            break;
        }
        if is_cancelled() {
            return Err(ScanError::Cancelled);
        }
        let before = in_core(target, index)?;
        let data = data_elsewhere(target, index, &before)?;
        let after = in_core(target, index)?;
        for leaf in 0..BLOCK_LEAVES {
            let resident = before[leaf] | after[leaf];
            let swapped = data[leaf] & !resident;
            builder.leaf(leaf, resident | swapped, swapped, 0);
        }
        out.blocks.extend(builder.finish().map(|block| (index, block)));
        next = BlockIndex(index.0 + 1);
    }
    Ok(())
}

/// The first page of data at or after `page`.
fn next_data(target: &ScanTarget<'_>, page: PageIndex) -> Result<Option<PageIndex>, SyscallError> {
    let Some(offset) = target.page_size.offset_of(page).filter(|offset| is_offset(*offset)) else {
        return Ok(None);
    };
    Ok(seek::next_data(target.fd, offset)?.map(|offset| target.page_size.page_at(offset)))
}

/// The pages with data, for each block that has any.
fn data_in(
    target: &ScanTarget<'_>,
    range: BlockRange,
    is_cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<BTreeMap<BlockIndex, Box<Plane>>, ScanError> {
    let mut planes: BTreeMap<BlockIndex, Box<Plane>> = BTreeMap::new();
    let end = range.pages().end();
    let mut page = range.start().first_page();
    while let Some(first) = next_data(target, page)?.filter(|first| *first < end) {
        if is_cancelled() {
            return Err(ScanError::Cancelled);
        }
        let offset = target.page_size.offset_of(first).unwrap_or(u64::MAX);
        // The file may have been truncated before this page. Its size need not be a multiple of the page size.
        let Some(hole) = seek::next_hole(target.fd, offset)? else {
            break;
        };
        let extent_end = PageIndex(target.page_size.pages_in(hole)).min(end);
        let mut at = first;
        while at < extent_end {
            let index = BlockIndex::of(at);
            let upto = extent_end.min(index.pages().end());
            let plane = planes.entry(index).or_insert_with(|| Box::new([0; BLOCK_LEAVES]));
            set(plane, at.0 % BLOCK_PAGES, upto.0 - index.first_page().0);
            at = upto;
        }
        // If the page became a hole between the two calls, the extent is empty.
        page = extent_end.max(first.plus(1));
    }
    Ok(planes)
}

/// The pages of a block that hold data and are not in memory.
fn data_elsewhere(
    target: &ScanTarget<'_>,
    index: BlockIndex,
    in_core: &Plane,
) -> Result<Plane, SyscallError> {
    let mut plane = [0; BLOCK_LEAVES];
    let mut page = 0;
    while page < BLOCK_PAGES {
        if in_core[to_usize(page / 64)] >> (page % 64) & 1 == 1 {
            page += 1;
            continue;
        }
        let Some(found) = next_data(target, index.first_page().plus(page))? else {
            break;
        };
        let found = found.0 - index.first_page().0;
        if found == page {
            set(&mut plane, page, page + 1);
        }
        page = found.max(page + 1);
    }
    Ok(plane)
}
