//! Encodings of page states: bitmaps, 64-bit pagemap entries, and 2-bit states.

use fdmap_proto::pagemap_entry::PagemapEntry;
use fdmap_proto::shared_snapshot::state_bits;
use fdmap_proto::state::{PageState, StateSet};
use fdmap_proto::units::{PageIndex, PageRange, low_u8, to_u64, to_usize};

use super::block::Block;
use super::blocks::{BLOCK_LEAVES, BLOCK_PAGES, BlockIndex, BlockRange, LEAF_PAGES};
use super::map::Snapshot;
use fdmap_proto::VariantArray as _;

/// Bitmaps of a range of pages: bit p % 8 of byte p / 8 stands for page p of the range.
#[derive(Debug, Default)]
pub struct Bitmaps {
    /// One for each state, in the order of [`PageState`]. Empty if no bit is set or the state was not requested.
    pub states: [Vec<u8>; 5],
    /// Little-endian slots of the pages whose bit is set in swap-cached or swapped.
    pub slots: Vec<u8>,
}

/// Encodes the states in `states` as bitmaps.
#[must_use]
pub fn bitmaps(
    snapshot: &Snapshot,
    range: PageRange,
    states: StateSet,
    distinguish_swap_cached: bool,
    slots: bool,
) -> Bitmaps {
    let mut out = Bitmaps::default();
    for (bitmap, state) in out.states.iter_mut().zip(PageState::VARIANTS.iter().copied()) {
        if states.has(state) && (distinguish_swap_cached || state != PageState::SwapCached) {
            *bitmap = bitmap_of(snapshot, range, state, distinguish_swap_cached);
        }
    }
    if slots {
        let swapped = states.has(PageState::Swapped);
        let cached = if distinguish_swap_cached { states.has(PageState::SwapCached) } else { swapped };
        if swapped || cached {
            out.slots = slots_of(snapshot, range, [swapped, cached]);
        }
    }
    out
}

/// Little-endian slots of the swapped and of the swap-cached pages, if requested.
fn slots_of(snapshot: &Snapshot, range: PageRange, wanted @ [swapped, cached]: [bool; 2]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut raw = Vec::new();
    for (index, block) in snapshot.range(BlockRange::around(range)) {
        let inside = index.pages().intersect(range);
        copy_slots(block, index, inside, &mut raw);
        if wanted != [true, true] {
            let first = index.first_page().0;
            let pages =
                (inside.start().0 - first..inside.end().0 - first).filter(|page| block.swapped.get(*page));
            let mut keep = pages.map(|page| if block.cached.get(page) { cached } else { swapped });
            raw.retain(|_| keep.next().unwrap_or(false));
        }
        let start = out.len();
        out.resize(start + raw.len() * 8, 0);
        let (words, _) = out[start..].as_chunks_mut::<8>();
        words.iter_mut().zip(&raw).for_each(|(word, raw)| *word = raw.to_le_bytes());
    }
    out
}

/// Replaces `raw` by the slots of the swapped pages of `inside`, which is in the block. Empty if the probe reports no
/// slots.
fn copy_slots(block: &Block, index: BlockIndex, inside: PageRange, raw: &mut Vec<u64>) {
    let first = index.first_page().0;
    raw.clear();
    block.slots.copy(
        block.swapped.rank(inside.start().0 - first),
        block.swapped.rank(inside.end().0 - first),
        raw,
    );
}

fn bitmap_of(
    snapshot: &Snapshot,
    range: PageRange,
    state: PageState,
    distinguish_swap_cached: bool,
) -> Vec<u8> {
    let bytes = to_usize(range.len().div_ceil(8));
    let mut bitmap = if state == PageState::Hole { vec![0xff; bytes] } else { Vec::new() };
    for (index, block) in snapshot.range(BlockRange::around(range)) {
        let inside = index.pages().intersect(range);
        let skipped = inside.start().0 - range.start().0;
        let ends_a_byte = inside.len().is_multiple_of(8) || inside.end() == range.end();
        if let (Some(all), true) = (block.is_all(state), skipped.is_multiple_of(8) && ends_a_byte) {
            // No bit of another block is in these bytes.
            if all || state == PageState::Hole {
                bitmap.resize(bytes, 0);
                let end = to_usize((skipped + inside.len()).div_ceil(8));
                bitmap[to_usize(skipped / 8)..end].fill(if all { 0xff } else { 0 });
            }
            continue;
        }
        for leaf in 0..BLOCK_LEAVES {
            let first = index.first_page().plus(to_u64(leaf) * LEAF_PAGES);
            if PageRange::at(first, LEAF_PAGES).intersect(range).is_empty() {
                continue;
            }
            let word = block.state_word(leaf, state, distinguish_swap_cached);
            // The bits of holes are set already; those of other states are clear.
            if (state == PageState::Hole && word == u64::MAX) || (state != PageState::Hole && word == 0) {
                continue;
            }
            bitmap.resize(bytes, 0);
            put_word(&mut bitmap, range, first, word);
        }
    }
    let spare = range.len() % 8;
    if let (Some(last), true) = (bitmap.last_mut(), spare != 0) {
        *last &= (1 << spare) - 1;
    }
    if bitmap.iter().all(|byte| *byte == 0) { Vec::new() } else { bitmap }
}

/// Sets the bits of the 64 pages from `first` on in the bitmap of `range`.
pub(crate) fn put_word(bitmap: &mut [u8], range: PageRange, first: PageIndex, word: u64) {
    if first >= range.start() && (first.0 - range.start().0).is_multiple_of(8) {
        let at = to_usize((first.0 - range.start().0) / 8);
        let bytes = word.to_le_bytes();
        let count = bitmap.len().saturating_sub(at).min(8);
        bitmap[at..at + count].copy_from_slice(&bytes[..count]);
        return;
    }
    for bit in 0..LEAF_PAGES {
        let page = first.plus(bit);
        if range.contains(page) {
            let nth = page.0 - range.start().0;
            let byte = &mut bitmap[to_usize(nth / 8)];
            let mask = 1 << (nth % 8);
            if word >> bit & 1 == 1 {
                *byte |= mask;
            } else {
                *byte &= !mask;
            }
        }
    }
}

/// Appends the little-endian pagemap entries of a range of pages to `out`.
pub fn entries(snapshot: &Snapshot, range: PageRange, out: &mut Vec<u8>) {
    const HOLE: [u8; 8] = PagemapEntry::encode(PageState::Hole, None).0.to_le_bytes();
    let start = out.len();
    out.resize(start + to_usize(range.len()) * 8, 0);
    let (words, _) = out[start..].as_chunks_mut::<8>();
    debug_assert_eq!(HOLE, [0; 8], "what is not written is a hole");
    let mut raw = Vec::new();
    for (index, block) in snapshot.range(BlockRange::around(range)) {
        let inside = index.pages().intersect(range);
        copy_slots(block, index, inside, &mut raw);
        let at = to_usize(inside.start().0 - range.start().0);
        let words = &mut words[at..at + to_usize(inside.len())];
        block_entries(block, inside.start().0 % BLOCK_PAGES, &raw, words);
    }
}

/// Writes the entries of a block from page `first` on, whose slots are `raw`. Entries of holes are left unchanged.
fn block_entries(block: &Block, first: u64, raw: &[u64], words: &mut [[u8; 8]]) {
    let mut raw = raw;
    let mut page = first;
    let mut rest = words;
    while !rest.is_empty() {
        let (leaf, bit) = (to_usize(page / LEAF_PAGES), page % LEAF_PAGES);
        let count = rest.len().min(to_usize(LEAF_PAGES - bit));
        let (now, later) = rest.split_at_mut(count);
        let all = u64::MAX >> (LEAF_PAGES - to_u64(count));
        let states = [&block.data, &block.swapped, &block.unknown].map(|bits| bits.word(leaf) >> bit & all);
        let (slots, behind) = raw.split_at(raw.len().min(to_usize(u64::from(states[1].count_ones()))));
        raw = behind;
        leaf_entries(states, all, slots, now);
        page += to_u64(count);
        rest = later;
    }
}

/// Writes the entries of the pages of one leaf, limited to the pages in `all`.
fn leaf_entries([data, swapped, unknown]: [u64; 3], all: u64, slots: &[u64], words: &mut [[u8; 8]]) {
    let entry = |state| PagemapEntry::encode(state, None).0;
    let in_swap = |raw: u64| entry(PageState::Swapped) | frame_of(raw);
    if data | unknown == 0 {
        return;
    }
    if data == all && swapped == 0 {
        words.fill(entry(PageState::Resident).to_le_bytes());
        return;
    }
    if swapped == all && slots.len() == words.len() {
        words.iter_mut().zip(slots).for_each(|(word, raw)| *word = in_swap(*raw).to_le_bytes());
        return;
    }
    for (i, word) in words.iter_mut().enumerate() {
        // Branch-free, because the pattern of resident pages is unpredictable.
        let [data, unknown] = [data, unknown].map(|bits| (bits >> i & 1).wrapping_neg());
        *word = (data & entry(PageState::Resident) | unknown & entry(PageState::Unknown)).to_le_bytes();
    }
    let mut rest = swapped;
    let mut slots = slots.iter();
    while rest != 0 {
        let slot = slots.next().copied().unwrap_or(0);
        words[to_usize(u64::from(rest.trailing_zeros()))] = in_swap(slot).to_le_bytes();
        rest &= rest - 1;
    }
}

/// Converts type << 58 | offset to the frame bits of a pagemap swap entry, offset << 5 | type.
const fn frame_of(raw: u64) -> u64 {
    (raw & ((1 << 58) - 1)) << 5 | raw >> 58
}

/// 2-bit states of a range of pages, four to a byte.
#[must_use]
pub fn state_words(snapshot: &Snapshot, range: PageRange) -> Vec<u8> {
    let mut out = vec![0; to_usize(range.len().div_ceil(4))];
    for (index, block) in snapshot.range(BlockRange::around(range)) {
        for leaf in 0..BLOCK_LEAVES {
            let pages = PageRange::at(index.first_page().plus(to_u64(leaf) * LEAF_PAGES), LEAF_PAGES);
            let inside = pages.intersect(range);
            if inside.is_empty() {
                continue;
            }
            let all = u64::MAX >> (LEAF_PAGES - inside.len()) << (inside.start().0 - pages.start().0);
            let (mut low, mut high) = (0, 0);
            for state in [PageState::Resident, PageState::Swapped, PageState::Unknown] {
                let word = block.state_word(leaf, state, false) & all;
                low |= word * u64::from(state_bits(state) & 1);
                high |= word * u64::from(state_bits(state) >> 1);
            }
            let skipped = inside.start().0 - pages.start().0;
            let pairs = spread(low >> skipped) | spread(high >> skipped) << 1;
            let nth = inside.start().0 - range.start().0;
            put_pairs(&mut out[to_usize(nth / 4)..], pairs, 2 * (nth % 4));
        }
    }
    out
}

/// ORs 64 bit pairs into `out`, starting at bit `shift`. Pairs beyond the end must be 0.
fn put_pairs(out: &mut [u8], pairs: u128, shift: u64) {
    let (now, carried) = (pairs << shift, if shift == 0 { 0 } else { pairs >> (128 - shift) });
    out.iter_mut().zip(now.to_le_bytes()).for_each(|(byte, more)| *byte |= more);
    if let Some(byte) = out.get_mut(16) {
        *byte |= low_u8(u64::try_from(carried).unwrap_or(0));
    }
}

/// Moves bit n of `word` to bit 2n.
const fn spread(word: u64) -> u128 {
    const fn half(mut word: u64) -> u128 {
        word = (word | word << 16) & 0x0000_ffff_0000_ffff;
        word = (word | word << 8) & 0x00ff_00ff_00ff_00ff;
        word = (word | word << 4) & 0x0f0f_0f0f_0f0f_0f0f;
        word = (word | word << 2) & 0x3333_3333_3333_3333;
        word = (word | word << 1) & 0x5555_5555_5555_5555;
        word as u128
    }
    half(word & 0xffff_ffff) | half(word >> 32) << 64
}
