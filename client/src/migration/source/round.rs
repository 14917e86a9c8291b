//! The pages that one round sends.

use fdmap_proto::units::to_u64;
use fdmap_proto::{PageIndex, PageRange, PageState};

use super::super::digest::PageHashes;
use crate::image::dump::{Base, DumpSource, Extent, Packed, batches, plan};
use crate::image::{ImageError, PAGE_BYTES, PageSet};

/// Pages of a round.
#[derive(Debug)]
pub(super) struct RoundContent {
    pub(super) size_bytes: u64,
    /// Pages to read.
    pub(super) batches: Vec<Vec<Extent>>,
    /// Pages without data, of which the destination has data.
    pub(super) zero: Vec<PageRange>,
    pub(super) pages: u64,
}

impl RoundContent {
    /// `changed`: pages that were written since the last round; `None`: all. `sent`: the pages at the destination.
    pub(super) fn prepare(
        source: &DumpSource,
        changed: Option<PageSet>,
        sent: &PageHashes,
    ) -> Result<Self, ImageError> {
        let size_bytes = source.current_info()?.size_bytes;
        let file = PageRange::first(size_bytes.div_ceil(PAGE_BYTES));
        let base = changed.map(|changed| Base { changed, stored: PageSet::default() });
        let (mut extents, mut zero) = (Vec::new(), Vec::new());
        source.scan(|runs| {
            extents.extend(plan(runs, file, base.as_ref()));
            let holes = runs.iter().filter(|run| run.state == PageState::Hole);
            zero.extend(holes.flat_map(|run| sent.present(run.range.intersect(file))));
        })?;
        let pages = extents.iter().map(|extent| extent.range.len()).sum();
        Ok(Self { size_bytes, batches: batches(&extents), zero, pages })
    }
}

/// Pages of `batch` that have content in `packed`, and those that are zero.
pub(super) fn sorted(batch: &[Extent], packed: &Packed) -> (Vec<PageRange>, PageSet) {
    let mut content: Vec<PageRange> = Vec::new();
    for (range, _) in &packed.ranges {
        match content.last_mut().filter(|last| last.end() == range.start()) {
            Some(last) => *last = PageRange::at(last.start(), last.len() + range.len()),
            None => content.push(*range),
        }
    }
    let with_content: PageSet = content.iter().copied().collect();
    let all: PageSet = batch.iter().map(|extent| extent.range).collect();
    let zero = all.ranges().iter().flat_map(|range| with_content.split(*range).collect::<Vec<_>>());
    let zero = zero.filter(|(_, has_content)| !has_content).map(|(range, _)| range).collect();
    (content, zero)
}

/// Each page of `content` with its hash.
pub(super) fn hashed<'a>(
    content: &'a [PageRange],
    packed: &'a Packed,
) -> impl Iterator<Item = (PageIndex, [u8; 16])> + 'a {
    debug_assert_eq!(content.iter().map(|range| range.len()).sum::<u64>(), to_u64(packed.page_digests.len()));
    let pages = content.iter().flat_map(|range| (range.start().0..range.end().0).map(PageIndex));
    pages.zip(packed.page_digests.iter().copied())
}
