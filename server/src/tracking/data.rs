//! Which pages hold data, for stamping those that may have been written unseen.

use std::os::fd::AsFd as _;

use fdmap_proto::units::{PageIndex, PageRange};

use super::ranges;
use crate::pages::{BlockRange, ScanOptions};
use crate::probe::{Probe, ScanError, ScanOutput, ScanTarget};
use crate::scan::ScanSource;

/// Blocks that are read at once: 4 GiB of a file, so that what is found takes little room.
const AT_ONCE: u64 = 256;

/// The pages of `wanted`, sorted ranges, that hold data or may.
///
/// # Errors
/// The probe's.
pub fn data_pages(
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
    for part in blocks.iter().flat_map(|range| range.parts(AT_ONCE)) {
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
    Ok(intersection(&data, &wanted))
}

/// The pages that both have; both are normalized.
fn intersection(a: &[PageRange], b: &[PageRange]) -> Vec<PageRange> {
    let mut both = Vec::new();
    let (mut i, mut j) = (0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        let part = x.intersect(*y);
        if !part.is_empty() {
            both.push(part);
        }
        if x.end() <= y.end() { i += 1 } else { j += 1 }
    }
    both
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn set(ranges: &[PageRange]) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| range.start().0..range.end().0).collect()
    }

    fn some_ranges() -> impl Strategy<Value = Vec<PageRange>> {
        prop::collection::vec((0..80_u64, 0..9_u64), 0..10).prop_map(|pairs| {
            let mut ranges =
                pairs.into_iter().map(|(start, len)| PageRange::at(PageIndex(start), len)).collect();
            ranges::normalize(&mut ranges);
            ranges
        })
    }

    proptest! {
        #[test]
        fn intersection_is_what_a_naive_set_says(a in some_ranges(), b in some_ranges()) {
            let naive: BTreeSet<u64> = set(&a).intersection(&set(&b)).copied().collect();
            prop_assert_eq!(set(&intersection(&a, &b)), naive);
        }
    }
}
