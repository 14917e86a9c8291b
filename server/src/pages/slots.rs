//! The swap slots of a block's swapped pages, in page order, in the most compact of four forms.

use fdmap_proto::state::SwapSlot;
use fdmap_proto::units::{low_u32, to_u64, to_usize};

/// The slots of the swapped pages of one block, by rank: the `n`th swapped page has the `n`th slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Slots {
    /// The probe reports no slots, or no page is swapped.
    #[default]
    Unseen,
    /// Runs of contiguous slots.
    Runs(Box<[SlotRun]>),
    /// One 32-bit word each, relative to a base.
    Near { base: u64, offsets: Box<[u32]> },
    /// One 64-bit word each.
    Far(Box<[u64]>),
}

/// Contiguous slots: rank `rank` has slot `raw`, the next rank `raw + 1`, and so on up to the next run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRun {
    rank: u32,
    raw: u64,
}

impl Slots {
    /// `raw` contains a slot for each swapped page.
    pub(super) fn new(raw: &[u64]) -> Self {
        let Some(&first) = raw.first() else {
            return Self::Unseen;
        };
        let breaks = breaks(raw);
        if is_shorter_in_runs(breaks + 1, raw.len()) {
            return Self::Runs(runs(raw, first, breaks));
        }
        let (min, max) = raw.iter().fold((first, first), |(min, max), &word| (min.min(word), max.max(word)));
        if max - min <= u64::from(u32::MAX) {
            return Self::Near { base: min, offsets: raw.iter().map(|word| low_u32(word - min)).collect() };
        }
        Self::Far(raw.into())
    }

    /// The slot of rank `rank`, which must be below the number of swapped pages.
    pub(super) fn get(&self, rank: u64) -> Option<SwapSlot> {
        let nth = to_usize(rank);
        let raw = match self {
            Self::Unseen => return None,
            Self::Runs(runs) => {
                let run = runs[runs.partition_point(|run| u64::from(run.rank) <= rank).checked_sub(1)?];
                run.raw + (rank - u64::from(run.rank))
            }
            Self::Near { base, offsets } => base + u64::from(*offsets.get(nth)?),
            Self::Far(words) => *words.get(nth)?,
        };
        SwapSlot::from_raw(raw)
    }

    /// The first rank after `rank`, at most `limit`, whose slot is not contiguous with its predecessor.
    pub(super) fn run_end(&self, rank: u64, limit: u64) -> u64 {
        let (from, to) = (to_usize(rank), to_usize(limit));
        match self {
            Self::Unseen => limit,
            Self::Runs(runs) => {
                let next = runs.partition_point(|run| u64::from(run.rank) <= rank);
                runs.get(next).map_or(limit, |run| u64::from(run.rank).min(limit))
            }
            Self::Near { offsets, .. } => {
                let end = offsets
                    .get(from..to)
                    .unwrap_or(&[])
                    .windows(2)
                    .position(|w| w[0].wrapping_add(1) != w[1]);
                end.map_or(limit, |at| rank + to_u64(at) + 1)
            }
            Self::Far(words) => {
                let end =
                    words.get(from..to).unwrap_or(&[]).windows(2).position(|w| w[0].wrapping_add(1) != w[1]);
                end.map_or(limit, |at| rank + to_u64(at) + 1)
            }
        }
    }

    /// Appends the slots of the ranks `from..to` as raw words; nothing if the slots are unknown.
    pub(super) fn copy(&self, from: u64, to: u64, out: &mut Vec<u64>) {
        let range = to_usize(from)..to_usize(to);
        match self {
            Self::Unseen => {}
            Self::Runs(runs) => {
                let first = runs.partition_point(|run| u64::from(run.rank) <= from).saturating_sub(1);
                let mut next = runs[first..].iter().skip(1).map(|run| u64::from(run.rank));
                for run in &runs[first..] {
                    let begin = u64::from(run.rank);
                    let end = next.next().unwrap_or(to).min(to);
                    if begin.max(from) >= end {
                        break;
                    }
                    out.extend((begin.max(from)..end).map(|rank| run.raw + (rank - begin)));
                }
            }
            Self::Near { base, offsets } => {
                out.extend(offsets[range].iter().map(|offset| base + u64::from(*offset)));
            }
            Self::Far(words) => out.extend_from_slice(&words[range]),
        }
    }

    /// True if the slots are known.
    pub(super) const fn are_seen(&self) -> bool {
        !matches!(self, Self::Unseen)
    }

    /// Heap memory in bytes.
    pub(super) const fn heap_bytes(&self) -> usize {
        match self {
            Self::Unseen => 0,
            Self::Runs(runs) => size_of_val::<[SlotRun]>(runs),
            Self::Near { offsets, .. } => size_of_val::<[u32]>(offsets),
            Self::Far(words) => size_of_val::<[u64]>(words),
        }
    }
}

/// Collects the slots of a block in rank order.
#[derive(Debug, Default)]
pub(super) struct SlotCollector {
    /// The runs, while few runs suffice.
    runs: Vec<SlotRun>,
    /// All slots, once runs are not compact any more.
    raw: Vec<u64>,
    len: usize,
}

impl SlotCollector {
    pub(super) fn push(&mut self, raw: &[u64]) {
        let Some(&first) = raw.first() else { return };
        if self.raw.is_empty() && is_contiguous(raw) {
            self.push_run(first, raw.len());
            return;
        }
        self.expand();
        self.raw.extend_from_slice(raw);
        self.len += raw.len();
    }

    /// Adds contiguous slots.
    pub(super) fn push_run(&mut self, first: u64, len: usize) {
        if len == 0 {
            return;
        }
        if self.raw.is_empty() {
            let rank = low_u32(to_u64(self.len));
            let continues = |run: &SlotRun| run.raw + u64::from(rank - run.rank) == first;
            if !self.runs.last().is_some_and(continues) {
                self.runs.push(SlotRun { rank, raw: first });
            }
        } else {
            self.raw.extend((0..to_u64(len)).map(|nth| first + nth));
        }
        self.len += len;
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) fn clear(&mut self) {
        self.runs.clear();
        self.raw.clear();
        self.len = 0;
    }

    /// Returns the slots in the most compact form.
    pub(super) fn finish(&mut self) -> Slots {
        if self.raw.is_empty() && !self.runs.is_empty() && is_shorter_in_runs(self.runs.len(), self.len) {
            return Slots::Runs(self.runs.as_slice().into());
        }
        self.expand();
        Slots::new(&self.raw)
    }

    fn expand(&mut self) {
        let ends = self.runs.iter().skip(1).map(|run| run.rank).chain([low_u32(to_u64(self.len))]);
        for (run, end) in self.runs.iter().zip(ends) {
            self.raw.extend((0..u64::from(end - run.rank)).map(|nth| run.raw + nth));
        }
        self.runs.clear();
    }
}

/// A run takes 16 bytes, a single slot 4.
const fn is_shorter_in_runs(runs: usize, slots: usize) -> bool {
    runs * 4 <= slots
}

/// Slots that are compared at once. Mostly all of them are contiguous.
const PIECE: usize = 64;

/// True if the slots are contiguous. Branch-free, so that the compiler vectorizes the loop.
fn is_contiguous(piece: &[u64]) -> bool {
    let [first, rest @ ..] = piece else { return true };
    if rest.first().is_some_and(|next| is_break(*first, *next)) {
        return false;
    }
    let odd = |odd: u64, (nth, word): (usize, &u64)| odd | (word ^ first.wrapping_add(to_u64(nth)));
    piece.iter().enumerate().fold(0, odd) == 0
}

const fn is_break(before: u64, after: u64) -> bool {
    before.wrapping_add(1) != after
}

/// Number of slots that are not contiguous with their predecessor.
fn breaks(raw: &[u64]) -> usize {
    pieces(raw)
        .filter(|(_, piece)| !is_contiguous(piece))
        .map(|(_, piece)| piece.windows(2).map(|pair| usize::from(is_break(pair[0], pair[1]))).sum::<usize>())
        .sum()
}

/// Chunks with the rank of their first slot, which is also the last slot of the previous chunk.
fn pieces(raw: &[u64]) -> impl Iterator<Item = (usize, &[u64])> {
    let starts = (0..raw.len().saturating_sub(1)).step_by(PIECE);
    starts.map(|start| (start, &raw[start..raw.len().min(start + PIECE + 1)]))
}

fn runs(raw: &[u64], first: u64, breaks: usize) -> Box<[SlotRun]> {
    let mut runs = Vec::with_capacity(breaks + 1);
    runs.push(SlotRun { rank: 0, raw: first });
    for (start, piece) in pieces(raw).filter(|(_, piece)| !is_contiguous(piece)) {
        for (nth, pair) in piece.windows(2).enumerate().filter(|(_, pair)| is_break(pair[0], pair[1])) {
            runs.push(SlotRun { rank: low_u32(to_u64(start + nth + 1)), raw: pair[1] });
        }
    }
    runs.into_boxed_slice()
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "the tests use small numbers")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn raw_slots() -> impl Strategy<Value = Vec<u64>> {
        let piece = (0_u64..4, 0_u64..1 << 40, 1_u64..60);
        proptest::collection::vec(piece, 0..60).prop_map(|pieces| {
            let words = pieces
                .into_iter()
                .flat_map(|(area, offset, len)| (0..len).map(move |i| (area << 58) + offset + i));
            words.take(4096).collect()
        })
    }

    proptest! {
        #[test]
        fn slots_round_trip_in_every_form(
            raw in raw_slots(), near in any::<bool>(), cut in 0_usize..3000, len in 0_usize..3000,
        ) {
            // Slots of one small swap area.
            let raw: Vec<u64> = raw.into_iter().map(|word| if near { word & 0xffff_ffff } else { word }).collect();
            let slots = Slots::new(&raw);
            prop_assert_eq!(slots.are_seen(), !raw.is_empty());
            for (rank, word) in raw.iter().enumerate() {
                prop_assert_eq!(slots.get(rank as u64).map(SwapSlot::raw), Some(*word));
            }
            let (from, to) = (cut.min(raw.len()), (cut + len).min(raw.len()));
            let mut copied = Vec::new();
            slots.copy(from as u64, to as u64, &mut copied);
            prop_assert_eq!(&copied, &raw[from..to]);
            let oracle = raw.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count();
            prop_assert_eq!(breaks(&raw), oracle);

            let mut rank = 0;
            while rank < raw.len() as u64 {
                let end = slots.run_end(rank, raw.len() as u64);
                prop_assert!(end > rank);
                let inside = &raw[rank as usize..end as usize];
                prop_assert!(inside.windows(2).all(|w| w[0] + 1 == w[1]));
                prop_assert!(end == raw.len() as u64 || raw[end as usize - 1] + 1 != raw[end as usize]);
                rank = end;
            }
        }
    }

    proptest! {
        #[test]
        fn slots_pushed_in_pieces_equal_slots_pushed_at_once(
            pieces in proptest::collection::vec((0_u64..4, 0_u64..1 << 40, 1_u64..60, 0..4), 0..60),
        ) {
            let mut collector = SlotCollector::default();
            collector.push_run(7, 3);
            collector.clear();
            let mut raw: Vec<u64> = Vec::new();
            for (area, offset, len, kind) in pieces {
                // Runs, runs that continue the last one, single slots, and slots that are not contiguous.
                let first = match (kind, raw.last()) {
                    (1, Some(last)) => last + 1,
                    _ => (area << 58) + offset,
                };
                let len = if kind == 2 { 1 } else { len };
                let piece: Vec<u64> = (0..len).map(|i| first + if kind == 3 { i * i } else { i }).collect();
                if kind == 0 { collector.push_run(first, piece.len()) } else { collector.push(&piece) }
                raw.extend(piece);
            }
            prop_assert_eq!(collector.len(), raw.len());
            prop_assert_eq!(collector.finish(), Slots::new(&raw));
        }
    }

    #[test]
    fn contiguous_slots_are_compact() {
        let raw: Vec<u64> = (1000..5096).collect();
        assert_eq!(Slots::new(&raw).heap_bytes(), size_of::<SlotRun>());
    }
}
