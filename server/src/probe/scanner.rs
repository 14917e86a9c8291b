//! What one thread needs to scan a file: the loaded walks, and the memory for decoding. A walk by counts (`block_walker`) answers
//! for most blocks; the others, page attributes, and hugetlb files are for the careful walk (`walker`), which copies each leaf
//! twice.

use std::time::Duration;

use fdmap_proto::provenance::Uncertainty;
use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};

use super::attributes::{AttributeDecoder, FlagTable, MapCounts};
use super::block_decode::decode_block;
use super::block_walker::BlockWalker;
use super::decode::{DecodeError, Decoded, Decoding, Rewalk, Walk, decode};
use super::interface::{ScanError, ScanTarget};
use super::walker::{MAX_ATTRIBUTES, MAX_NODES, MAX_REWALK_NODES, Walker};
use crate::bpf::LoadError;
use crate::bpf::records::{NodeRecord, SLOTS};
use crate::pages::{AttributeMap, Block, BlockBuilder, BlockIndex, BlockRange, ScanOptions};

/// Walks from the head before changing parts are walked again leaf by leaf.
const MAX_RESTARTS: u32 = 8;

/// What the decoding of attributes needs.
#[derive(Debug, Default)]
pub(super) struct AttributeTables {
    pub(super) flags: FlagTable,
    pub(super) counts: MapCounts,
}

/// The state that one scan uses exclusively.
#[derive(Debug)]
pub(super) struct Scanner {
    walker: Walker,
    /// `None` if this host cannot walk by counts.
    by_counts: Option<BlockWalker>,
    builder: BlockBuilder,
}

impl Scanner {
    pub(super) fn load() -> Result<Self, LoadError> {
        let by_counts = BlockWalker::load();
        if let Err(error) = &by_counts {
            tracing::info!(reason = fdmap_proto::error_chain(error), "leaves are not read by their counts");
        }
        Ok(Self { walker: Walker::load()?, by_counts: by_counts.ok(), builder: BlockBuilder::default() })
    }

    /// Walks blocks from the start of `range` on, and returns those that are not all hole, and the block after the last walked
    /// one. `None` if the tree contains entries that a hugetlb file of this order cannot contain.
    pub(super) fn walk(
        &mut self,
        target: &ScanTarget<'_>,
        range: BlockRange,
        options: ScanOptions,
        tables: &AttributeTables,
        map: &mut AttributeMap,
    ) -> Result<Option<(Decoded, BlockIndex)>, ScanError> {
        if !options.attributes
            && target.hugetlb_order.is_none()
            && let Some(walked) = self.walk_by_counts(target, range)?
        {
            return Ok(Some(walked));
        }
        self.walk_carefully(target, range, options, tables, map)
    }

    /// `None` if this host or this file needs the careful walk.
    fn walk_by_counts(
        &mut self,
        target: &ScanTarget<'_>,
        range: BlockRange,
    ) -> Result<Option<(Decoded, BlockIndex)>, ScanError> {
        let Self { walker, by_counts, builder } = self;
        let Some(by_counts) = by_counts else { return Ok(None) };
        let Some(walk) = by_counts.run(target, range)? else { return Ok(None) };
        let end = BlockIndex::of(walk.next);
        if end <= range.start() {
            return Err(no_progress(range, walk.next));
        }
        let mut decoded = Decoded::default();
        for record in walk.blocks {
            let index = BlockIndex::of(PageIndex(record.first));
            let block = match decode_block(record, walk.copies, builder) {
                Some(block) => block,
                None => one_block(walker, builder, target, index, &mut decoded.uncertainty)?,
            };
            if !block.is_hole() {
                decoded.blocks.push((index, block));
            }
        }
        Ok(Some((decoded, end)))
    }

    /// Copies each leaf twice, and starts again if the tree changes during the walk.
    pub(super) fn walk_carefully(
        &mut self,
        target: &ScanTarget<'_>,
        range: BlockRange,
        options: ScanOptions,
        tables: &AttributeTables,
        map: &mut AttributeMap,
    ) -> Result<Option<(Decoded, BlockIndex)>, ScanError> {
        let Self { walker, builder, .. } = self;
        let mut attributes = options.attributes.then_some((tables, map));
        careful(walker, builder, target, range, &mut attributes)
    }
}

/// Walks a block carefully that a walk by counts left out.
fn one_block(
    walker: &Walker,
    builder: &mut BlockBuilder,
    target: &ScanTarget<'_>,
    index: BlockIndex,
    uncertainty: &mut Uncertainty,
) -> Result<Block, ScanError> {
    // Only files on hugetlbfs give None.
    let Some((decoded, _)) = careful(walker, builder, target, index.alone(), &mut None)? else {
        return Ok(Block::uniform(fdmap_proto::state::PageState::Unknown));
    };
    *uncertainty += decoded.uncertainty;
    Ok(decoded.blocks.into_iter().next().map(|(_, block)| block).unwrap_or_default())
}

/// See [`Scanner::walk_carefully`]. `attributes` is `None` if they are not requested.
fn careful(
    walker: &Walker,
    builder: &mut BlockBuilder,
    target: &ScanTarget<'_>,
    range: BlockRange,
    attributes: &mut Option<(&AttributeTables, &mut AttributeMap)>,
) -> Result<Option<(Decoded, BlockIndex)>, ScanError> {
    let pages = range.pages();
    for restart in 0..=MAX_RESTARTS {
        back_off(restart);
        let max_attributes = if attributes.is_some() { MAX_ATTRIBUTES } else { 0 };
        let result = walker.run(target, pages, 0..MAX_NODES, max_attributes)?;
        let end = BlockIndex::of(PageIndex(result.next).min(pages.end()));
        let walked = BlockRange::new(range.start(), end).filter(|walked| !walked.is_empty());
        let walked = walked.ok_or_else(|| no_progress(range, PageIndex(result.next)))?;
        // SAFETY: the kernel writes these records only in runs that request them. No other thread uses this scanner, and
        // while the slices live, runs request only the records after MAX_NODES.
        let records = unsafe { walker.nodes.slice_of(0, count(result.records, MAX_NODES)) };
        // SAFETY: as above; runs while the slice lives request no attributes.
        let read = unsafe { walker.attributes.slice_of(0, count(result.attributes, MAX_ATTRIBUTES)) };
        let decoding = Decoding {
            walk: Walk { head: result.head, head_shift: result.head_shift, records, attributes: read },
            walked: walked.pages(),
            hugetlb_order: target.hugetlb_order,
            rewalk: &mut Rewalker { walker, target },
            attributes: attributes.as_mut().map(|(tables, map)| AttributeDecoder {
                map,
                flags: &tables.flags,
                counts: &tables.counts,
            }),
            last_attempt: restart == MAX_RESTARTS,
        };
        match decode(decoding, builder) {
            Ok(decoded) => return Ok(Some((decoded, end))),
            Err(DecodeError::HugetlbOrder { .. }) if restart == MAX_RESTARTS => return Ok(None),
            Err(DecodeError::Restart | DecodeError::HugetlbOrder { .. }) => {}
            Err(DecodeError::Rewalk(error)) => return Err(error),
        }
    }
    Err(ScanError::Decode("the page cache XArray changed during every walk".to_owned()))
}

fn no_progress(range: BlockRange, next: PageIndex) -> ScanError {
    ScanError::Decode(format!("the walk of pages {} ended at page {next}", range.pages()))
}

/// The number of records that a run wrote, limited to the size of the array.
fn count(records: u32, max: usize) -> usize {
    to_usize(u64::from(records)).min(max)
}

/// Waits before another attempt: first not at all, finally a millisecond.
fn back_off(attempt: u32) {
    match attempt {
        0 => {}
        1..4 => std::thread::yield_now(),
        _ => std::thread::sleep(
            Duration::from_micros(50 << (attempt - 4).min(5)).min(Duration::from_millis(1)),
        ),
    }
}

#[derive(Debug)]
struct Rewalker<'a> {
    walker: &'a Walker,
    target: &'a ScanTarget<'a>,
}

impl Rewalk for Rewalker<'_> {
    fn rewalk(&mut self, leaf: PageIndex, attempt: u32) -> Result<Walk<'_>, ScanError> {
        back_off(attempt);
        let pages = PageRange::at(leaf, to_u64(SLOTS));
        let result = self.walker.run(self.target, pages, MAX_NODES..MAX_NODES + MAX_REWALK_NODES, 0)?;
        let written = count(result.records, MAX_REWALK_NODES);
        let start = MAX_NODES * size_of::<NodeRecord>();
        // SAFETY: only the runs of this function write these records, and the slice borrows self mutably, so it does
        // not live until the next run.
        let records = unsafe { self.walker.nodes.slice_of(start, written) };
        Ok(Walk { head: result.head, head_shift: result.head_shift, records, attributes: &[] })
    }
}
