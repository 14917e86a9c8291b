//! A file as a plain list of pages, and the snapshot that a probe would have made of it.

use std::time::UNIX_EPOCH;

use arbitrary::{Arbitrary, Unstructured};
use fdmap_proto::provenance::{Moment, Uncertainty};
use fdmap_proto::state::{PageState, SwapSlot};
use fdmap_proto::units::{PageIndex, PageRange, to_u64, to_usize};
use fdmap_server::pages::{
    AttributeMap, BLOCK_LEAVES, BLOCK_PAGES, BlockBuilder, BlockIndex, BlockRange, LEAF_PAGES,
    PackedAttributes, Scanned, Snapshot, ScanStamp,
};

use crate::draft::rarely;

/// Pages of a list: enough for more runs than fit into one message.
const MAX_PAGES: u64 = 20_000;
/// Files end at 2^63 bytes, which is this many pages of 4 KiB.
const MAX_FILE_PAGES: u64 = 1 << 51;

/// One page: its state and its slot.
pub(super) type Page = (PageState, Option<SwapSlot>);

const HOLE: Page = (PageState::Hole, None);

/// A file in few bytes: pieces, repeated until there are pages enough.
#[derive(Arbitrary, Debug)]
pub(super) struct ModelDraft {
    /// The probe sees slots.
    slots: bool,
    /// It told swap-cached from swapped.
    distinguish_swap_cached: bool,
    /// Pages in the list.
    pages: u16,
    /// Where the list begins in the file.
    first: Number,
    /// Pages of the file behind the list.
    tail: Number,
    attributes: Vec<AttributeDraft>,
    pieces: Vec<Piece>,
}

/// A number, mostly a small one.
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
struct Piece {
    #[arbitrary(with = |u: &mut Unstructured<'_>| Ok(*u.choose(&PageState::ALL)?))]
    state: PageState,
    pages: u8,
    long: bool,
    swap_type: u8,
    offset: Number,
    /// From one page's slot to the next one's: mostly 1, since slots that do not follow one another make runs of one page.
    #[arbitrary(with = |u: &mut Unstructured<'_>| if rarely(u)? { u.arbitrary() } else { Ok(1) })]
    step: u8,
}

/// Attributes of some pages of one leaf.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct AttributeDraft {
    leaf: u8,
    /// Which of eight pages that follow one another, and of the next eight, and so on.
    pages: u8,
    flags: u8,
    known_flags: u8,
    map_count: u8,
    order: u8,
    known: u8,
}

/// The file; every page that is not in the list is a hole.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) first: u64,
    pages: Vec<Page>,
    pub(super) file_pages: u64,
    pub(super) distinguish_swap_cached: bool,
    slots: bool,
    attributes: Vec<PackedAttributes>,
}

impl Model {
    pub(super) fn new(draft: ModelDraft) -> Self {
        let first = draft.first.get() % (MAX_FILE_PAGES - MAX_PAGES);
        let pages = list(&draft);
        let end = first + to_u64(pages.len());
        let mut attributes = vec![PackedAttributes::default(); pages.len()];
        for of in draft.attributes {
            let start = to_usize(u64::from(of.leaf) * LEAF_PAGES) % pages.len().max(1);
            for (bit, page) in attributes.iter_mut().skip(start).take(to_usize(LEAF_PAGES)).enumerate() {
                if of.pages >> (bit % 8) & 1 == 1 {
                    // Of the 64 flags the first and the last ones.
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

    /// The same file later, when the blocks of `changed` were read again, and which blocks these are.
    pub(super) fn changed(&self, later: ModelDraft, changed: (u8, u8)) -> (Self, BlockRange) {
        // One service has one probe.
        let later =
            ModelDraft { slots: self.slots, distinguish_swap_cached: self.distinguish_swap_cached, ..later };
        let mut fresh = list(&later);
        let mut pages = self.pages.clone();
        let len = pages.len().max(fresh.len());
        fresh.resize(len, HOLE);
        pages.resize(len, HOLE);
        let file_pages = self.file_pages.max(self.first + to_u64(len));
        let start = BlockIndex::of(PageIndex(self.first)).0 + u64::from(changed.0 % 6);
        let read = BlockRange::new(BlockIndex(start), BlockIndex(start + u64::from(changed.1 % 6)));
        let read = read.unwrap_or_default();
        for (nth, page) in pages.iter_mut().enumerate() {
            if read.pages().contains(PageIndex(self.first + to_u64(nth))) {
                *page = fresh[nth];
            }
        }
        let attributes = vec![PackedAttributes::default(); len];
        let Self { first, distinguish_swap_cached, slots, .. } = *self;
        (Self { first, pages, file_pages, distinguish_swap_cached, slots, attributes }, read)
    }

    /// The pages in the list.
    pub(super) fn window(&self) -> PageRange {
        PageRange::at(PageIndex(self.first), to_u64(self.pages.len()))
    }

    /// The blocks of the file, as the service reads them: of an empty one the first.
    pub(super) fn whole_blocks(&self) -> BlockRange {
        BlockRange::around(PageRange::first(self.file_pages.max(1)))
    }

    /// What page `page` is.
    pub(super) fn page(&self, page: u64, distinguish_swap_cached: bool) -> Page {
        let nth = page.checked_sub(self.first).and_then(|nth| self.pages.get(to_usize(nth)));
        let (state, slot) = *nth.unwrap_or(&HOLE);
        (if distinguish_swap_cached { state } else { state.folded() }, slot)
    }

    /// The attributes of page `page`.
    pub(super) fn attributes_of(&self, page: u64) -> PackedAttributes {
        let nth = page.checked_sub(self.first).and_then(|nth| self.attributes.get(to_usize(nth)));
        nth.copied().unwrap_or_default()
    }

    /// The attributes, as a probe brings them.
    pub(super) fn attribute_map(&self) -> AttributeMap {
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

    /// All of the file, read at once.
    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot::default().with(self.scanned(self.whole_blocks(), 1))
    }

    /// What a probe brings for the blocks of `range`.
    pub(super) fn scanned(&self, range: BlockRange, at: u64) -> Scanned {
        let moment = Moment { monotonic_ns: at, wall: UNIX_EPOCH };
        let (distinguish_swap_cached, uncertainty) = (self.distinguish_swap_cached, Uncertainty::default());
        let stamp = ScanStamp { begin: moment, end: moment, distinguish_swap_cached, uncertainty, opaque: false };
        let held = BlockRange::around(self.window());
        let (start, end) = (held.start().0.max(range.start().0), held.end().0.min(range.end().0));
        let blocks = (start..end).filter_map(|index| self.block(BlockIndex(index))).collect();
        Scanned { range, blocks, stamp, file_pages: self.file_pages }
    }

    fn block(&self, index: BlockIndex) -> Option<(BlockIndex, fdmap_server::pages::Block)> {
        let mut builder = BlockBuilder::default();
        let mut cached = [0_u64; BLOCK_LEAVES];
        let first = index.first_page().0;
        let mut start = 0;
        // In runs, as the probes do it; the builder does not ask that they be as long as can be.
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
    let most = to_usize(u64::from(draft.pages) % (MAX_PAGES + 1));
    let mut pages = Vec::new();
    for piece in draft.pieces.iter().cycle() {
        if pages.len() == most {
            break;
        }
        // Some cover whole blocks.
        let len = u64::from(piece.pages) * if piece.long { 40 } else { 1 } + 1;
        let state = if draft.distinguish_swap_cached { piece.state } else { piece.state.folded() };
        for nth in 0..len.min(to_u64(most - pages.len())) {
            let offset = piece.offset.get().wrapping_add(nth * u64::from(piece.step)) % SwapSlot::MAX_OFFSET;
            let slot = SwapSlot::new(piece.swap_type % SwapSlot::MAX_TYPES, offset);
            pages.push((state, slot.filter(|_| draft.slots && state.is_swapped())));
        }
    }
    pages
}
