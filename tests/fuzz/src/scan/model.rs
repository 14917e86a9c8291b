//! A file as a list of single pages, and the snapshot that a probe would make of it.

use std::time::UNIX_EPOCH;

use arbitrary::{Arbitrary, Unstructured};
use fdmap_proto::provenance::{Moment, Uncertainty};
use fdmap_proto::state::{PageState, SwapSlot};
use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};
use fdmap_server::pages::{
    AttributeMap, BLOCK_LEAVES, BLOCK_PAGES, BlockBuilder, BlockIndex, BlockRange, LEAF_PAGES,
    PackedAttributes, ScanStamp, Scanned, Snapshot,
};

use crate::draft::rarely;
use fdmap_proto::VariantArray as _;

/// Pages in the list: enough for more runs than one message holds.
const MAX_PAGES: u64 = 20_000;
/// The size of a file is at most 2^63 bytes: this many pages of 4 KiB.
const MAX_FILE_PAGES: u64 = 1 << 51;

/// State and swap slot of a page.
pub(crate) type Page = (PageState, Option<SwapSlot>);

const HOLE: Page = (PageState::Hole, None);

/// A file in a few input bytes: a sequence of segments, repeated up to the number of pages.
#[derive(Arbitrary, Debug)]
pub(crate) struct ModelDraft {
    /// The probe reports slots.
    slots: bool,
    /// The scan distinguished swap-cached from swapped pages.
    distinguish_swap_cached: bool,
    /// Pages in the list.
    pages: u16,
    /// The page of the file where the list starts.
    first: Number,
    /// Pages of the file after the list.
    tail: Number,
    attributes: Vec<AttributeDraft>,
    segments: Vec<Segment>,
}

/// A number, mostly small.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Number {
    Small(u16),
    Any(u64),
}

impl Number {
    fn get(self) -> u64 {
        match self {
            Self::Small(number) => u64::from(number),
            Self::Any(number) => number,
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Segment {
    #[arbitrary(with = |u: &mut Unstructured<'_>| Ok(*u.choose(PageState::VARIANTS)?))]
    state: PageState,
    pages: u8,
    long: bool,
    swap_type: u8,
    offset: Number,
    /// Distance between the slots of adjacent pages: mostly 1, because other distances make runs of one page.
    #[arbitrary(with = |u: &mut Unstructured<'_>| if rarely(u)? { u.arbitrary() } else { Ok(1) })]
    step: u8,
}

/// Attributes of some pages of one leaf.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct AttributeDraft {
    leaf: u8,
    /// A bitmap of eight pages, repeated over the leaf.
    pages: u8,
    flags: u8,
    known_flags: u8,
    map_count: u8,
    order: u8,
    known: u8,
}

/// The file. Pages outside the list are holes.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) first: u64,
    pages: Vec<Page>,
    pub(crate) file_pages: u64,
    pub(crate) distinguish_swap_cached: bool,
    slots: bool,
    attributes: Vec<PackedAttributes>,
}

impl Model {
    pub(crate) fn new(draft: ModelDraft) -> Self {
        let first = draft.first.get() % (MAX_FILE_PAGES - MAX_PAGES);
        let pages = list(&draft);
        let end = first + to_u64(pages.len());
        let mut attributes = vec![PackedAttributes::default(); pages.len()];
        for of in draft.attributes {
            let start = to_usize(u64::from(of.leaf) * LEAF_PAGES) % pages.len().max(1);
            for (bit, page) in attributes.iter_mut().skip(start).take(to_usize(LEAF_PAGES)).enumerate() {
                if of.pages >> (bit % 8) & 1 == 1 {
                    // Use the first and the last four of the 64 flags.
                    let spread = |flags: u8| u64::from(flags & 0xf) | u64::from(flags >> 4) << 60;
                    *page = PackedAttributes {
                        flags: spread(of.flags & of.known_flags),
                        known_flags: spread(of.known_flags),
                        map_count: u32::from(of.map_count),
                        order: of.order,
                        known: of.known,
                    };
                }
            }
        }
        let file_pages = end + draft.tail.get() % (MAX_FILE_PAGES - end + 1);
        Self {
            first,
            pages,
            file_pages,
            distinguish_swap_cached: draft.distinguish_swap_cached,
            slots: draft.slots,
            attributes,
        }
    }

    /// The same file after another scan of the blocks of `changed`, and the range of these blocks.
    pub(crate) fn changed(&self, later: ModelDraft, changed: (u8, u8)) -> (Self, BlockRange) {
        // All scans of a service use the same probe.
        let later =
            ModelDraft { slots: self.slots, distinguish_swap_cached: self.distinguish_swap_cached, ..later };
        let mut later_pages = list(&later);
        let mut pages = self.pages.clone();
        let len = pages.len().max(later_pages.len());
        later_pages.resize(len, HOLE);
        pages.resize(len, HOLE);
        let file_pages = self.file_pages.max(self.first + to_u64(len));
        let start = BlockIndex::of(PageIndex(self.first)).0 + u64::from(changed.0 % 6);
        let scanned = BlockRange::new(BlockIndex(start), BlockIndex(start + u64::from(changed.1 % 6)));
        let scanned = scanned.unwrap_or_default();
        for (nth, page) in pages.iter_mut().enumerate() {
            if scanned.pages().contains(PageIndex(self.first + to_u64(nth))) {
                *page = later_pages[nth];
            }
        }
        let attributes = vec![PackedAttributes::default(); len];
        let Self { first, distinguish_swap_cached, slots, .. } = *self;
        (Self { first, pages, file_pages, distinguish_swap_cached, slots, attributes }, scanned)
    }

    /// The pages in the list.
    pub(crate) fn window(&self) -> PageRange {
        PageRange::at(PageIndex(self.first), to_u64(self.pages.len()))
    }

    /// All blocks of the file. An empty file has one.
    pub(crate) fn whole_blocks(&self) -> BlockRange {
        BlockRange::around(PageRange::first(self.file_pages.max(1)))
    }

    /// State and slot of page `page`.
    pub(crate) fn page(&self, page: u64, distinguish_swap_cached: bool) -> Page {
        let nth = page.checked_sub(self.first).and_then(|nth| self.pages.get(to_usize(nth)));
        let (state, slot) = *nth.unwrap_or(&HOLE);
        (if distinguish_swap_cached { state } else { state.folded() }, slot)
    }

    /// The attributes of page `page`.
    pub(crate) fn attributes_of(&self, page: u64) -> PackedAttributes {
        let nth = page.checked_sub(self.first).and_then(|nth| self.attributes.get(to_usize(nth)));
        nth.copied().unwrap_or_default()
    }

    /// The attributes in the form of a probe's result.
    pub(crate) fn attribute_map(&self) -> AttributeMap {
        let mut map = AttributeMap::default();
        let end = self.first + to_u64(self.attributes.len());
        for first in (self.first / LEAF_PAGES * LEAF_PAGES..end).step_by(to_usize(LEAF_PAGES)) {
            let values: [_; 64] = std::array::from_fn(|nth| self.attributes_of(first + to_u64(nth)));
            let is_known = |nth: &usize| values[*nth] != PackedAttributes::default();
            let known = (0..values.len()).filter(is_known).fold(0, |known, nth| known | 1 << nth);
            map.put_leaf(PageIndex(first), known, &values);
        }
        map
    }

    /// The snapshot after one scan of the file.
    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot::default().with(self.scanned(self.whole_blocks(), 1))
    }

    /// The result of a scan of the blocks of `range`.
    pub(crate) fn scanned(&self, range: BlockRange, at: u64) -> Scanned {
        let moment = Moment { monotonic_ns: at, wall: UNIX_EPOCH };
        let (distinguish_swap_cached, uncertainty) = (self.distinguish_swap_cached, Uncertainty::default());
        let stamp =
            ScanStamp { begin: moment, end: moment, distinguish_swap_cached, uncertainty, opaque: false };
        let window = BlockRange::around(self.window());
        let (start, end) = (window.start().0.max(range.start().0), window.end().0.min(range.end().0));
        let blocks = (start..end).filter_map(|index| self.block(BlockIndex(index))).collect();
        Scanned { range, blocks, stamp, file_pages: self.file_pages }
    }

    fn block(&self, index: BlockIndex) -> Option<(BlockIndex, fdmap_server::pages::Block)> {
        let mut builder = BlockBuilder::default();
        let mut cached = [0_u64; BLOCK_LEAVES];
        let first = index.first_page().0;
        let mut start = 0;
        // Fill runs, as the probes do. The builder also accepts runs that are not maximal.
        for page in 0..BLOCK_PAGES {
            let (state, slot) = self.page(first + page, true);
            if state == PageState::SwapCached {
                cached[to_usize(page / LEAF_PAGES)] |= 1 << (page % LEAF_PAGES);
            }
            let next = (page + 1 < BLOCK_PAGES).then(|| self.page(first + page + 1, true));
            let follows = slot.and_then(|slot| slot.plus(1));
            if next != Some((state, follows)) {
                builder.fill(start, page + 1, state, self.page(first + start, true).1);
                start = page + 1;
            }
        }
        builder.finish().map(|block| (index, block.with_cached(&cached)))
    }
}

fn list(draft: &ModelDraft) -> Vec<Page> {
    let max_pages = to_usize(u64::from(draft.pages) % (MAX_PAGES + 1));
    let mut pages = Vec::new();
    for segment in draft.segments.iter().cycle() {
        if pages.len() == max_pages {
            break;
        }
        // Long segments cover whole blocks.
        let len = u64::from(segment.pages) * if segment.long { 40 } else { 1 } + 1;
        let state = if draft.distinguish_swap_cached { segment.state } else { segment.state.folded() };
        for nth in 0..len.min(to_u64(max_pages - pages.len())) {
            let offset =
                segment.offset.get().wrapping_add(nth * u64::from(segment.step)) % SwapSlot::MAX_OFFSET;
            let slot = SwapSlot::new(segment.swap_type % SwapSlot::MAX_TYPES, offset);
            pages.push((state, slot.filter(|_| draft.slots && state.is_swapped())));
        }
    }
    pages
}
