//! The `syscalls` probe: mincore distinguishes resident pages from others, and cachestat swapped ones from holes: [`counts`]. Where
//! cachestat is unavailable, as before Linux 6.5, SEEK_DATA and SEEK_HOLE do that: [`seek`]. The probe reports no slots and no attributes, and cannot read hugetlb files.

mod counts;
mod seek;

use std::sync::Arc;

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::units::{PageRange, to_usize};
use fdmap_sys::mincore::ResidencyWindow;

use super::interface::{Probe, ProbeEntry, ScanError, ScanOutput, ScanTarget};
use crate::pages::{BLOCK_LEAVES, BLOCK_PAGES, BlockIndex, BlockRange, Plane, ScanOptions};

pub(super) const ENTRY: ProbeEntry = ProbeEntry {
    kind: ProbeKind::Syscalls,
    description: "Use mincore(), and cachestat() or lseek(SEEK_DATA, SEEK_HOLE)",
    capability: "mincore-and-seek",
    impact: "the syscalls probe, and swap-cached pages",
    load: || Ok(Arc::new(SyscallsProbe)),
};

#[derive(Clone, Copy, Debug, Default)]
pub struct SyscallsProbe;

impl Probe for SyscallsProbe {
    fn kind(&self) -> ProbeKind {
        ProbeKind::Syscalls
    }

    fn attributes(&self) -> AttributeSet {
        AttributeSet::NONE
    }

    fn reports_slots(&self) -> bool {
        false
    }

    fn scan(
        &self,
        target: &ScanTarget<'_>,
        range: BlockRange,
        _wants: ScanOptions,
        is_cancelled: &(dyn Fn() -> bool + Sync),
        out: &mut ScanOutput,
    ) -> Result<(), ScanError> {
        let in_file = range.pages().intersect(PageRange::first(target.file_pages));
        let range = BlockRange::around(in_file);
        if target.hugetlb_order.is_some() {
            out.opaque = true;
            return Ok(());
        }
        if counts::are_available(target.fd) {
            counts::scan(target, range, is_cancelled, out)
        } else {
            seek::scan(target, range, is_cancelled, out)
        }
    }
}

fn set(plane: &mut Plane, start: u64, end: u64) {
    let mut page = start;
    while page < end {
        let upto = end.min((page / 64 + 1) * 64);
        plane[to_usize(page / 64)] |= (u64::MAX >> (64 - (upto - page))) << (page % 64);
        page = upto;
    }
}

/// The pages of a block that are in memory, by mincore.
pub(super) fn in_core(target: &ScanTarget<'_>, index: BlockIndex) -> Result<Plane, ScanError> {
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

/// File offsets are below 2^63.
const fn is_offset(offset: u64) -> bool {
    offset <= i64::MAX.cast_unsigned()
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "the tests use small numbers")]
mod tests;
