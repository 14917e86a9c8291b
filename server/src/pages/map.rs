//! Snapshots: the persistent map of a file's blocks.

use std::sync::{Arc, LazyLock};

use fdmap_proto::provenance::{ProbeKind, Provenance, Uncertainty};
use fdmap_proto::state::{PageState, SwapSlot};
use fdmap_proto::units::{PageIndex, PageRange};
use im::OrdMap;

use super::block::Block;
use super::blocks::{BLOCK_PAGES, BlockIndex, BlockRange};
use super::spans::{ScanStamp, Spans};

/// A block of which nothing is known.
static UNKNOWN: LazyLock<Arc<Block>> = LazyLock::new(|| Arc::new(Block::uniform(PageState::Unknown)));

/// The known states of a file's pages. Cloning is O(1), and a clone never changes.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Blocks that are not all hole. Opaque ranges have no blocks.
    blocks: OrdMap<BlockIndex, Arc<Block>>,
    spans: Arc<Spans>,
    file_pages: u64,
}

/// The result of scanning one range.
#[derive(Debug)]
pub struct Scanned {
    pub range: BlockRange,
    /// Blocks of `range` that are not all hole, in ascending order; empty if the stamp is opaque.
    pub blocks: Vec<(BlockIndex, Block)>,
    pub stamp: ScanStamp,
    /// Size of the file in pages before the scan.
    pub file_pages: u64,
}

impl Snapshot {
    /// This snapshot, updated by a scan. Both snapshots share unchanged blocks.
    #[must_use]
    pub fn with(&self, scanned: Scanned) -> Self {
        let mut next = self.clone();
        next.put(scanned);
        next
    }

    /// Updates this snapshot by a scan. Clones are not affected.
    pub fn put(&mut self, scanned: Scanned) {
        let mut fresh = scanned.blocks.into_iter().peekable();
        let old: Vec<BlockIndex> = self.known(scanned.range).map(|(index, _)| index).collect();
        for index in old {
            while let Some((before, block)) = fresh.next_if(|(fresh, _)| *fresh < index) {
                self.blocks.insert(before, Arc::new(block));
            }
            match fresh.next_if(|(fresh, _)| *fresh == index) {
                Some((_, block)) => {
                    if self.blocks.get(&index).is_none_or(|old| **old != block) {
                        self.blocks.insert(index, Arc::new(block));
                    }
                }
                None => {
                    self.blocks.remove(&index);
                }
            }
        }
        for (index, block) in fresh {
            self.blocks.insert(index, Arc::new(block));
        }
        Arc::make_mut(&mut self.spans).put(scanned.range, scanned.stamp);
        self.file_pages = scanned.file_pages;
    }

    /// This snapshot without its oldest stamps, if there are many. States without a stamp remain, but count as stale.
    #[must_use]
    pub fn with_few_stamps(&self) -> Self {
        let mut next = self.clone();
        Arc::make_mut(&mut next.spans).forget_oldest();
        next
    }

    /// Size of the file in pages at the last scan.
    #[must_use]
    pub const fn file_pages(&self) -> u64 {
        self.file_pages
    }

    /// The block, or `None` if all of it is hole.
    #[must_use]
    pub fn block(&self, index: BlockIndex) -> Option<&Arc<Block>> {
        let opaque = || self.opaque(index.alone()).next().map(|_| &*UNKNOWN);
        self.blocks.get(&index).or_else(opaque)
    }

    /// The blocks of `range` that are not all hole, in ascending order. Looks up each block, so the range should be
    /// short.
    pub fn range(&self, range: BlockRange) -> impl Iterator<Item = (BlockIndex, &Arc<Block>)> {
        let mut known = self.known(range).peekable();
        let mut opaque = self.opaque(range).flat_map(|range| range.start().0..range.end().0).peekable();
        std::iter::from_fn(move || match opaque.peek() {
            Some(index) if known.peek().is_none_or(|(known, _)| *index < known.0) => {
                opaque.next().map(|index| (BlockIndex(index), &*UNKNOWN))
            }
            _ => known.next(),
        })
    }

    fn known(&self, range: BlockRange) -> impl Iterator<Item = (BlockIndex, &Arc<Block>)> {
        self.blocks.range(range.start()..range.end()).map(|(index, block)| (*index, block))
    }

    /// The opaque parts of `range`: all their pages are unknown, and they have no blocks.
    pub(super) fn opaque(&self, range: BlockRange) -> impl Iterator<Item = BlockRange> {
        self.spans.opaque(range)
    }

    pub(super) const fn blocks(&self) -> &OrdMap<BlockIndex, Arc<Block>> {
        &self.blocks
    }

    /// Number of blocks with data or unknown pages.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// The state of one page. A page beyond the end of the file is a hole.
    #[must_use]
    pub fn state(&self, page: PageIndex) -> PageState {
        self.block(BlockIndex::of(page)).map_or(PageState::Hole, |block| block.state(page.0 % BLOCK_PAGES))
    }

    /// The swap slot of one page, if it has one and the probe reports slots.
    #[must_use]
    pub fn slot(&self, page: PageIndex) -> Option<SwapSlot> {
        self.block(BlockIndex::of(page))?.slot(page.0 % BLOCK_PAGES)
    }

    /// The parts of `range` whose stamps do not satisfy `fresh`, or that have none.
    #[must_use]
    pub fn stale(&self, range: BlockRange, fresh: impl Fn(&ScanStamp) -> bool) -> Vec<BlockRange> {
        self.spans.stale(range, fresh)
    }

    /// Provenance of the states of `ranges`; `None` unless all of them have stamps.
    #[must_use]
    pub fn provenance(&self, ranges: &[PageRange], probe: ProbeKind, instance: u64) -> Option<Provenance> {
        let mut whole: Option<ScanStamp> = None;
        let mut unknown_pages = 0;
        for range in ranges {
            let stamp = self.spans.over(BlockRange::around(*range))?;
            whole = Some(whole.map_or(stamp, |whole| whole.joined(&stamp)));
            unknown_pages += self.unknown_pages(*range);
        }
        let ScanStamp { begin, end, distinguish_swap_cached, uncertainty, opaque: _ } = whole?;
        let uncertainty = Uncertainty { unknown_pages, ..uncertainty };
        Some(Provenance {
            probe,
            begin,
            end,
            uncertainty,
            swap_cached_distinguished: distinguish_swap_cached,
            instance,
        })
    }

    fn unknown_pages(&self, range: PageRange) -> u64 {
        let around = BlockRange::around(range);
        let mut pages = self.opaque(around).map(|opaque| opaque.pages().intersect(range).len()).sum();
        for (index, block) in self.known(around) {
            let inside = index.pages().intersect(range);
            let first = index.first_page().0;
            pages +=
                block.unknown.rank(inside.end().0 - first) - block.unknown.rank(inside.start().0 - first);
        }
        pages
    }

    /// Memory of the blocks in bytes, including blocks that are shared with other snapshots.
    #[must_use]
    pub fn bytes(&self) -> usize {
        // A node of the map is about half full.
        let place = 2 * size_of::<(BlockIndex, Arc<Block>)>();
        self.blocks.values().map(|block| block.bytes() + place).sum()
    }
}
