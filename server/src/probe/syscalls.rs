//! The `syscalls` probe: SEEK_DATA and SEEK_HOLE tell data from holes, mincore tells what of it is in memory. No slots, no
//! attributes, and of hugetlb files nothing.
//!
//! There are two ways to find the data. SEEK_HOLE runs to the end of the data it begins in, however far that is, so it is
//! used once around for a large part of a file ([`by_extent`]); for a small part each page that is not in memory is asked
//! for by SEEK_DATA ([`by_page`]). Both look three times. A page in memory at a look is resident, and one without data is a
//! hole, for it was so at that moment. A page is swapped if it had data before and after it was not in memory: that is
//! wrong only for a page that was punched out and written again in between, so if the file's ctime changed meanwhile, the
//! answer counts as not exact.

use std::collections::BTreeMap;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};
use fdmap_sys::mincore::ResidencyWindow;
use fdmap_sys::{SyscallError, seek};

use super::{Probe, ScanError, ScanOptions, ScanOutput, Target};
use crate::pages::{BLOCK_LEAVES, BLOCK_PAGES, Block, BlockBuilder, BlockIndex, BlockRange, Plane};

/// A page asked for by itself costs about as much as this many passed by SEEK_HOLE.
const PAGE_COST: u64 = 12;

/// Reads page states by system calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct SyscallsProbe;

impl Probe for SyscallsProbe {
    fn kind(&self) -> ProbeKind {
        ProbeKind::Syscalls
    }

    fn attributes(&self) -> AttributeSet {
        AttributeSet::NONE
    }

    fn sees_slots(&self) -> bool {
        false
    }

    fn scan(
        &self,
        target: &Target<'_>,
        range: BlockRange,
        _wants: ScanOptions,
        given_up: &(dyn Fn() -> bool + Sync),
        out: &mut ScanOutput,
    ) -> Result<(), ScanError> {
        let in_file = range.pages().intersect(PageRange::first(target.file_pages));
        let range = BlockRange::around(in_file);
        if target.hugetlb_order.is_some() {
            out.blind = true;
            return Ok(());
        }
        let before = changed_at(target)?;
        let to_end = target.file_pages.saturating_sub(range.start().first_page().0);
        let first = out.blocks.len();
        if in_file.len().saturating_mul(PAGE_COST) < to_end {
            by_page(target, range, given_up, out)?;
        } else {
            by_extent(target, range, given_up, out)?;
        }
        if changed_at(target)? != before {
            let swapped_leaves =
                |block: &Block| (0..BLOCK_LEAVES).filter(|leaf| block.swapped_word(*leaf) != 0).count();
            let leaves: usize = out.blocks[first..].iter().map(|(_, block)| swapped_leaves(block)).sum();
            out.uncertainty.unsettled_leaves += to_u64(leaves);
        }
        Ok(())
    }
}

/// The file's ctime: every punch, truncation and write(2) changes it, and so do most first writes through a mapping.
fn changed_at(target: &Target<'_>) -> Result<(i64, i64), SyscallError> {
    let stat = fdmap_sys::fd::stat(target.fd)?;
    Ok((stat.st_ctime, stat.st_ctime_nsec))
}

/// Once around the range for data, once for memory, once more for data.
fn by_extent(
    target: &Target<'_>,
    range: BlockRange,
    given_up: &(dyn Fn() -> bool + Sync),
    out: &mut ScanOutput,
) -> Result<(), ScanError> {
    let before = data_in(target, range, given_up)?;
    let mut cores = Vec::with_capacity(before.len());
    for index in before.keys() {
        if given_up() {
            return Err(ScanError::GivenUp);
        }
        cores.push(in_core(target, *index)?);
    }
    let after = data_in(target, range, given_up)?;
    let mut builder = BlockBuilder::default();
    for ((index, before), core) in before.iter().zip(&cores) {
        let after = after.get(index).map_or(&[0; BLOCK_LEAVES], |plane| &**plane);
        for leaf in 0..BLOCK_LEAVES {
            let data = before[leaf] & after[leaf];
            builder.leaf(leaf, data, data & !core[leaf], 0);
        }
        out.blocks.extend(builder.finish().map(|block| (*index, block)));
    }
    Ok(())
}

/// Each block by itself: once for memory, once for the data of the rest, once more for memory.
fn by_page(
    target: &Target<'_>,
    range: BlockRange,
    given_up: &(dyn Fn() -> bool + Sync),
    out: &mut ScanOutput,
) -> Result<(), ScanError> {
    let mut builder = BlockBuilder::default();
    let mut next = range.start();
    // Straight to the next block with data.
    while let Some(page) = next_data(target, next.first_page())? {
        let index = BlockIndex::of(page);
        if index >= range.end() {
            break;
        }
        if given_up() {
            return Err(ScanError::GivenUp);
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
fn next_data(target: &Target<'_>, page: PageIndex) -> Result<Option<PageIndex>, SyscallError> {
    let Some(offset) = target.page_size.offset_of(page).filter(|offset| is_offset(*offset)) else {
        return Ok(None);
    };
    Ok(seek::next_data(target.fd, offset)?.map(|offset| target.page_size.page_at(offset)))
}

/// The pages of data of the blocks that have any.
fn data_in(
    target: &Target<'_>,
    range: BlockRange,
    given_up: &(dyn Fn() -> bool + Sync),
) -> Result<BTreeMap<BlockIndex, Box<Plane>>, ScanError> {
    let mut planes: BTreeMap<BlockIndex, Box<Plane>> = BTreeMap::new();
    let end = range.pages().end();
    let mut page = range.start().first_page();
    while let Some(first) = next_data(target, page)?.filter(|first| *first < end) {
        if given_up() {
            return Err(ScanError::GivenUp);
        }
        let offset = target.page_size.offset_of(first).unwrap_or(u64::MAX);
        // The file may have been cut before this page meanwhile; its end need not be the end of a page.
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

/// The pages of a block that hold data, of those that are not in memory.
fn data_elsewhere(target: &Target<'_>, index: BlockIndex, in_core: &Plane) -> Result<Plane, SyscallError> {
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

fn set(plane: &mut Plane, start: u64, end: u64) {
    let mut page = start;
    while page < end {
        let upto = end.min((page / 64 + 1) * 64);
        plane[to_usize(page / 64)] |= (u64::MAX >> (64 - (upto - page))) << (page % 64);
        page = upto;
    }
}

/// The pages of a block that are in memory.
pub(super) fn in_core(target: &Target<'_>, index: BlockIndex) -> Result<Plane, ScanError> {
    let page_size = to_usize(target.page_size.bytes());
    let pages = to_usize(BLOCK_PAGES);
    let offset = target.page_size.offset_of(index.first_page()).filter(|offset| is_offset(*offset));
    let Some(offset) = offset else {
        return Ok([0; BLOCK_LEAVES]);
    };
    let window = ResidencyWindow::open(target.fd, offset, pages * page_size, page_size)?;
    let mut bytes = vec![0; pages];
    window.read(0, &mut bytes)?;
    let (leaves, _) = bytes.as_chunks::<64>();
    Ok(std::array::from_fn(|leaf| {
        leaves[leaf].iter().enumerate().fold(0, |word, (bit, byte)| word | u64::from(byte & 1) << bit)
    }))
}

/// Files end at 2^63 bytes at the latest.
const fn is_offset(offset: u64) -> bool {
    offset <= i64::MAX.cast_unsigned()
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "of numbers that are known here")]
mod tests;
