//! The swap slots of a block's swapped pages, in the order of the pages, in the shortest of four forms.

use fdmap_proto::state::SwapSlot;
use fdmap_proto::units::{low_u32, to_u64, to_usize};

/// The slots of the swapped pages of one block, by rank: the `n`th swapped page has the `n`th slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Slots {
    /// The probe does not see slots, or nothing is swapped.
    #[default]
    Unseen,
    /// Few runs of slots that follow one another.
    Runs(Box<[SlotRun]>),
    /// One word each, less than 2^32 apart.
    Near { base: u64, offsets: Box<[u32]> },
    /// One word each.
    Far(Box<[u64]>),
}

/// Slots that follow one another: that of rank `rank` is `raw`, the next one `raw + 1`, up to the next run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRun {
    rank: u32,
    raw: u64,
}

impl Slots {
    /// `raw` holds a slot for each swapped page.
    pub(super) fn new(raw: &[u64]) -> Self {
        let Some(&first) = raw.first() else {
            return Self::Unseen;
        };
        let breaks: usize = raw.windows(2).map(|pair| usize::from(pair[0].wrapping_add(1) != pair[1])).sum();
        // A run takes 16 bytes, a word of its own 4.
        if (breaks + 1) * 4 <= raw.len() {
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

    /// The first rank after `rank`, and at most `limit`, whose slot does not follow that of the rank before it.
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

    /// Appends the slots of the ranks `from` up to `to`, as raw words; nothing if they are not seen.
    pub(super) fn copy(&self, from: u64, to: u64, out: &mut Vec<u64>) {
        let range = to_usize(from)..to_usize(to);
        match self {
            Self::Unseen => {}
            Self::Runs(_) => {
                let mut rank = from;
                while rank < to {
                    let end = self.run_end(rank, to);
                    let Some(first) = self.get(rank) else { return };
                    out.extend((0..end - rank).map(|i| first.raw() + i));
                    rank = end;
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

    /// Bytes beyond the enum itself.
    pub(super) const fn heap_bytes(&self) -> usize {
        match self {
            Self::Unseen => 0,
            Self::Runs(runs) => size_of_val::<[SlotRun]>(runs),
            Self::Near { offsets, .. } => size_of_val::<[u32]>(offsets),
            Self::Far(words) => size_of_val::<[u64]>(words),
        }
    }
}

fn runs(raw: &[u64], first: u64, breaks: usize) -> Box<[SlotRun]> {
    let mut runs = Vec::with_capacity(breaks + 1);
    runs.push(SlotRun { rank: 0, raw: first });
    for (nth, pair) in raw.windows(2).enumerate() {
        if pair[0].wrapping_add(1) != pair[1] {
            runs.push(SlotRun { rank: low_u32(to_u64(nth + 1)), raw: pair[1] });
        }
    }
    runs.into_boxed_slice()
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "of numbers that are known here")]
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
        fn every_form_gives_back_what_went_in(raw in raw_slots(), near in any::<bool>()) {
            // Near slots: as if all lay in one small area.
            let raw: Vec<u64> = raw.into_iter().map(|word| if near { word & 0xffff_ffff } else { word }).collect();
            let slots = Slots::new(&raw);
            prop_assert_eq!(slots.are_seen(), !raw.is_empty());
            for (rank, word) in raw.iter().enumerate() {
                prop_assert_eq!(slots.get(rank as u64).map(SwapSlot::raw), Some(*word));
            }
            let mut copied = Vec::new();
            let half = raw.len() as u64 / 2;
            slots.copy(0, half, &mut copied);
            slots.copy(half, raw.len() as u64, &mut copied);
            prop_assert_eq!(&copied, &raw);

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

    #[test]
    fn slots_that_follow_one_another_take_little_room() {
        let raw: Vec<u64> = (1000..5096).collect();
        assert_eq!(Slots::new(&raw).heap_bytes(), size_of::<SlotRun>());
    }
}
