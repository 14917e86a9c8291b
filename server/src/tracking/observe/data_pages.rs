//! Which pages hold data: only these can have been written.

use std::os::fd::AsFd as _;

use fdmap_proto::units::{PageIndex, PageRange};

use crate::pages::{BlockRange, ScanOptions};
use crate::probe::{Probe, ScanError, ScanOutput, ScanTarget};
use crate::scan::ScanSource;
use crate::tracking::ranges;

/// Blocks in one scan: 4 GiB of a file, to bound the memory of the result.
const MAX_SCAN_BLOCKS: u64 = 256;

/// The pages of the normalized set `wanted` that hold data, or may hold data because the probe cannot see them.
///
/// # Errors
/// The error of the probe.
pub(crate) fn data_pages(
    probe: &dyn Probe,
    source: &ScanSource,
    wanted: &[PageRange],
) -> Result<Vec<PageRange>, ScanError> {
    let file_pages = source.file_pages()?;
    let target = ScanTarget {
        fd: source.fd.as_fd(),
        page_size: source.page_size,
        file_pages,
        hugetlb_order: source.hugetlb_order,
    };
    let wanted = ranges::within(wanted, PageRange::first(file_pages));
    let mut blocks: Vec<BlockRange> = wanted.iter().map(|range| BlockRange::around(*range)).collect();
    BlockRange::join(&mut blocks);
    let mut data = Vec::new();
    for part in blocks.iter().flat_map(|range| range.parts(MAX_SCAN_BLOCKS)) {
        let mut out = ScanOutput::default();
        probe.scan(&target, part, ScanOptions::default(), &|| false, &mut out)?;
        if out.opaque {
            ranges::push(&mut data, part.pages());
            continue;
        }
        for (index, block) in &out.blocks {
            let first = index.first_page();
            for (start, end) in block.data_runs() {
                ranges::push(&mut data, PageRange::at(PageIndex(first.0 + start), end - start));
            }
        }
    }
    Ok(ranges::intersection(&data, &wanted))
}
