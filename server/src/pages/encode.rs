//! Pages as bitmaps, as 64-bit entries and as 2-bit states.

use fdmap_proto::entry::PagemapEntry;
use fdmap_proto::layout::state_bits;
use fdmap_proto::state::{PageState, StateSet};
use fdmap_proto::units::{PageIndex, PageRange, to_usize};

use super::map::Snapshot;
use super::runs::{RunOptions, Runs};
use super::{BLOCK_PAGES, BlockRange, LEAF_PAGES};

/// The bitmaps of a range of pages: bit p % 8 of byte p / 8 belongs to the `p`th page of the range.
#[derive(Debug, Default)]
pub struct Bitmaps {
    /// One for each state, in the order of [`PageState::ALL`]; empty if no bit is set or it was not asked for.
    pub states: [Vec<u8>; 5],
    /// Little-endian slots of the pages whose bit is set in swap-cached or swapped.
    pub slots: Vec<u8>,
}

/// The bitmaps of the states in `states`.
#[must_use]
pub fn bitmaps(
    snapshot: &Snapshot,
    range: PageRange,
    states: StateSet,
    told_apart: bool,
    slots: bool,
) -> Bitmaps {
    let mut out = Bitmaps::default();
    for (bitmap, state) in out.states.iter_mut().zip(PageState::ALL) {
        if states.contains(state) && (told_apart || state != PageState::SwapCached) {
            *bitmap = bitmap_of(snapshot, range, state, told_apart);
        }
    }
    if slots {
        let options = RunOptions { states: only_swapped(states), told_apart, ..RunOptions::default() };
        for run in Runs::new(snapshot.clone(), None, range, options) {
            let Some(first) = run.slot else { continue };
            for nth in 0..run.range.len() {
                out.slots.extend_from_slice(&(first.raw() + nth).to_le_bytes());
            }
        }
    }
    out
}

fn only_swapped(states: StateSet) -> StateSet {
    [PageState::SwapCached, PageState::Swapped]
        .into_iter()
        .filter(|state| states.contains(*state))
        .fold(StateSet::NONE, StateSet::with)
}

fn bitmap_of(snapshot: &Snapshot, range: PageRange, state: PageState, told_apart: bool) -> Vec<u8> {
    let bytes = to_usize(range.len().div_ceil(8));
    let mut bitmap = if state == PageState::Hole { vec![0xff; bytes] } else { Vec::new() };
    for (index, block) in snapshot.range(BlockRange::around(range)) {
        for leaf in 0..super::BLOCK_LEAVES {
            let first = index.first_page().plus(fdmap_proto::units::to_u64(leaf) * LEAF_PAGES);
            if PageRange::at(first, LEAF_PAGES).intersect(range).is_empty() {
                continue;
            }
            let word = block.state_word(leaf, state, told_apart);
            // A hole's bits are set already; every other state's are clear.
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

/// Puts the bits of the 64 pages from `first` on into the bitmap of `range`.
fn put_word(bitmap: &mut [u8], range: PageRange, first: PageIndex, word: u64) {
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

/// Little-endian pagemap entries of a range of pages, appended to `out`.
pub fn entries(snapshot: &Snapshot, range: PageRange, out: &mut Vec<u8>) {
    const HOLE: [u8; 8] = PagemapEntry::encode(PageState::Hole, None).0.to_le_bytes();
    let start = out.len();
    out.resize(start + to_usize(range.len()) * 8, 0);
    let (words, _) = out[start..].as_chunks_mut::<8>();
    debug_assert_eq!(HOLE, [0; 8], "what is not written is a hole");
    let mut raw = Vec::new();
    for (index, block) in snapshot.range(BlockRange::around(range)) {
        let inside = index.pages().intersect(range);
        raw.clear();
        block.slots.copy(
            block.swapped.rank(inside.start().0 - index.first_page().0),
            block.swapped.rank(inside.end().0 - index.first_page().0),
            &mut raw,
        );
        let at = to_usize(inside.start().0 - range.start().0);
        let words = &mut words[at..at + to_usize(inside.len())];
        block_entries(block, inside.start().0 % BLOCK_PAGES, &raw, words);
    }
}

fn block_entries(block: &super::Block, first: u64, raw: &[u64], words: &mut [[u8; 8]]) {
    let resident = PagemapEntry::encode(PageState::Resident, None).0;
    let unknown = PagemapEntry::encode(PageState::Unknown, None).0;
    let swapped = PagemapEntry::encode(PageState::Swapped, None).0;
    let mut slots = raw.iter();
    let mut page = first;
    let mut rest = words;
    while !rest.is_empty() {
        let (leaf, bit) = (to_usize(page / LEAF_PAGES), page % LEAF_PAGES);
        let count = rest.len().min(to_usize(LEAF_PAGES - bit));
        let (now, later) = rest.split_at_mut(count);
        let data = block.data.word(leaf) >> bit;
        let in_swap = block.swapped.word(leaf) >> bit;
        let blind = block.unknown.word(leaf) >> bit;
        for (i, word) in now.iter_mut().enumerate() {
            let entry = if in_swap >> i & 1 == 1 {
                swapped | slots.next().map_or(0, |raw| frame_of(*raw))
            } else if data >> i & 1 == 1 {
                resident
            } else if blind >> i & 1 == 1 {
                unknown
            } else {
                0
            };
            *word = entry.to_le_bytes();
        }
        page += fdmap_proto::units::to_u64(count);
        rest = later;
    }
}

/// The frame bits of a swap entry: offset << 5 | type, from type << 58 | offset.
const fn frame_of(raw: u64) -> u64 {
    (raw & ((1 << 58) - 1)) << 5 | raw >> 58
}

/// 2-bit states of a range of pages, four to a byte.
#[must_use]
pub fn state_words(snapshot: &Snapshot, range: PageRange) -> Vec<u8> {
    let mut out = vec![0; to_usize(range.len().div_ceil(4))];
    let options = RunOptions { slots: false, ..RunOptions::default() };
    for run in Runs::new(snapshot.clone(), None, range, options) {
        let bits = state_bits(run.state);
        if bits == 0 {
            continue;
        }
        let four = bits * 0b0101_0101;
        let (mut nth, end) = (run.range.start().0 - range.start().0, run.range.end().0 - range.start().0);
        while nth < end {
            if nth % 4 == 0 && end - nth >= 4 {
                let whole = (end - nth) / 4;
                out[to_usize(nth / 4)..to_usize(nth / 4 + whole)].fill(four);
                nth += whole * 4;
            } else {
                out[to_usize(nth / 4)] |= bits << (2 * (nth % 4));
                nth += 1;
            }
        }
    }
    out
}
