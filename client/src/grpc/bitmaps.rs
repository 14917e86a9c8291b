//! Bitmaps of page states, and the runs that they describe.

use bytes::Bytes;
use fdmap_proto::convert::ConvertError;
use fdmap_proto::units::{to_u64, to_usize};
use fdmap_proto::{PageIndex, PageRange, PageState, Run, SwapSlot, v1};

use crate::ClientError;

/// Pages in one message of bitmaps: as many as a service sends.
const MAX_PAGES: u64 = 1 << 18;

/// Bitmaps of consecutive pages: bit p % 8 of byte p / 8 belongs to the `p`th page. An empty bitmap has no bit set.
#[derive(Clone, Debug)]
pub struct Bitmaps {
    /// Pages of the bitmaps.
    pub range: PageRange,
    /// Pages in state [`PageState::Hole`].
    pub hole: Bytes,
    /// Pages in state `Resident`.
    pub resident: Bytes,
    /// Pages in state `SwapCached`.
    pub swap_cached: Bytes,
    /// Pages in state `Swapped`.
    pub swapped: Bytes,
    /// Pages in state `Unknown`.
    pub unknown: Bytes,
    /// Little-endian 64-bit swap slots of the pages in `swap_cached` or `swapped`, in page order; empty unless requested.
    pub slots: Bytes,
}

impl TryFrom<v1::BitmapBatch> for Bitmaps {
    type Error = ClientError;

    fn try_from(batch: v1::BitmapBatch) -> Result<Self, ClientError> {
        let v1::BitmapBatch { first_page, pages, hole, resident, swap_cached, swapped, unknown, slots } =
            batch;
        if pages > MAX_PAGES {
            return Err(ConvertError::Number { field: "pages", value: pages }.into());
        }
        for bitmap in [&hole, &resident, &swap_cached, &swapped, &unknown] {
            if !bitmap.is_empty() && to_u64(bitmap.len()) != pages.div_ceil(8) {
                return Err(ClientError::Unexpected("bitmap has the wrong length"));
            }
        }
        let ones = |bitmap: &Bytes| bitmap.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>();
        if !slots.is_empty() && to_u64(slots.len()) != 8 * (ones(&swap_cached) + ones(&swapped)) {
            return Err(ClientError::Unexpected("number of slots differs from the number of swapped pages"));
        }
        let end =
            first_page.checked_add(pages).ok_or(ConvertError::Number { field: "pages", value: pages })?;
        let range = PageRange::new(PageIndex(first_page), PageIndex(end)).unwrap_or_default();
        Ok(Self { range, hole, resident, swap_cached, swapped, unknown, slots })
    }
}

impl Bitmaps {
    /// Appends the runs of the bitmaps to `runs`, and extends its last one where they continue it. `complete`: each page must have a state.
    ///
    /// # Errors
    /// [`ClientError::Unexpected`] if a page has two states, or none where it must have one.
    pub(super) fn runs(&self, complete: bool, runs: &mut Vec<Run>) -> Result<(), ClientError> {
        let planes = [
            (PageState::Hole, &self.hole),
            (PageState::Resident, &self.resident),
            (PageState::SwapCached, &self.swap_cached),
            (PageState::Swapped, &self.swapped),
            (PageState::Unknown, &self.unknown),
        ];
        let mut slots = self.slots.as_chunks::<8>().0.iter();
        for nth in 0..self.range.len().div_ceil(64) {
            let start = self.range.start().plus(nth * 64);
            let pages = (self.range.len() - nth * 64).min(64);
            let words = planes.map(|(state, bitmap)| (state, word(bitmap, to_usize(nth))));
            let mut seen = 0;
            for (_, word) in words {
                if seen & word != 0 {
                    return Err(ClientError::Unexpected("page has two states"));
                }
                seen |= word;
            }
            let valid = u64::MAX >> (64 - pages);
            if seen & !valid != 0 || (complete && seen != valid) {
                return Err(ClientError::Unexpected("pages and bitmaps differ"));
            }
            let mut at = 0;
            while at < pages {
                let Some((state, word)) = words.iter().find(|(_, word)| word >> at & 1 == 1) else {
                    at += u64::from((seen >> at).trailing_zeros()).min(pages - at);
                    continue;
                };
                let len = u64::from((word >> at).trailing_ones());
                push_pages(runs, PageRange::at(start.plus(at), len), *state, &mut slots)?;
                at += len;
            }
        }
        Ok(())
    }
}

/// The bits of the `nth` 64 pages.
fn word(bitmap: &Bytes, nth: usize) -> u64 {
    let bytes = bitmap.get(nth * 8..).unwrap_or(&[]);
    bytes.iter().take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// Appends pages of one state. Each swapped page takes the next one of `slots`, if the bitmaps have slots.
fn push_pages(
    runs: &mut Vec<Run>,
    range: PageRange,
    state: PageState,
    slots: &mut std::slice::Iter<'_, [u8; 8]>,
) -> Result<(), ClientError> {
    if !state.is_swapped() || slots.len() == 0 {
        push_run(runs, Run { range, state, slot: None, attributes: None });
        return Ok(());
    }
    for (page, raw) in (range.start().0..range.end().0).zip(slots) {
        let raw = u64::from_le_bytes(*raw);
        let slot = Some(SwapSlot::from_raw(raw).ok_or(ConvertError::Slot(raw))?);
        push_run(runs, Run { range: PageRange::at(PageIndex(page), 1), state, slot, attributes: None });
    }
    Ok(())
}

/// Appends a run, or extends the last one by it.
pub(super) fn push_run(runs: &mut Vec<Run>, run: Run) {
    if !runs.last_mut().is_some_and(|last| last.append(&run)) {
        runs.push(run);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Page = (Option<PageState>, Option<SwapSlot>);

    /// A batch of `pages` from page `first` on, with `slots` or without.
    fn batch(first: u64, pages: &[Page], with_slots: bool) -> v1::BitmapBatch {
        let bitmap = |of: PageState| {
            let mut bytes = vec![0_u8; pages.len().div_ceil(8)];
            for (nth, _) in pages.iter().enumerate().filter(|(_, (state, _))| *state == Some(of)) {
                bytes[nth / 8] |= 1 << (nth % 8);
            }
            if bytes.iter().all(|byte| *byte == 0) { Bytes::new() } else { bytes.into() }
        };
        let slots = pages.iter().filter(|_| with_slots).filter_map(|(_, slot)| *slot);
        v1::BitmapBatch {
            first_page: first,
            pages: to_u64(pages.len()),
            hole: bitmap(PageState::Hole),
            resident: bitmap(PageState::Resident),
            swap_cached: bitmap(PageState::SwapCached),
            swapped: bitmap(PageState::Swapped),
            unknown: bitmap(PageState::Unknown),
            slots: slots.flat_map(|slot| slot.raw().to_le_bytes()).collect::<Vec<_>>().into(),
        }
    }

    fn runs(batch: v1::BitmapBatch, complete: bool) -> Result<Vec<Run>, ClientError> {
        let mut runs = Vec::new();
        Bitmaps::try_from(batch)?.runs(complete, &mut runs)?;
        Ok(runs)
    }

    /// Pages in stretches of one state, with slots that mostly follow each other.
    fn any_pages() -> impl Strategy<Value = Vec<Page>> {
        let stretch = (0..6_usize, 1..90_u64, 0..1_u64 << 40);
        proptest::collection::vec(stretch, 0..12).prop_map(|stretches| {
            let states = [
                None,
                Some(PageState::Hole),
                Some(PageState::Resident),
                Some(PageState::SwapCached),
                Some(PageState::Swapped),
                Some(PageState::Unknown),
            ];
            let pages = stretches.into_iter().flat_map(|(state, len, offset)| {
                let state = states[state];
                (0..len).map(move |nth| {
                    let swapped = state.is_some_and(PageState::is_swapped);
                    (state, swapped.then(|| SwapSlot::new(1, offset + nth)).flatten())
                })
            });
            pages.collect()
        })
    }

    proptest! {
        #[test]
        fn runs_are_those_of_the_pages(pages in any_pages(), first in 0..1_u64 << 40, with_slots: bool, cut in 0..1000_usize) {
            // The answer comes in two batches.
            let (front, back) = pages.split_at(cut.min(pages.len()));
            let mut runs = Vec::new();
            for (first, pages) in [(first, front), (first + to_u64(front.len()), back)] {
                Bitmaps::try_from(batch(first, pages, with_slots)).unwrap().runs(false, &mut runs).unwrap();
            }
            let mut expected: Vec<Run> = Vec::new();
            for (nth, (state, slot)) in pages.iter().enumerate() {
                let Some(state) = *state else { continue };
                let range = PageRange::at(PageIndex(first + to_u64(nth)), 1);
                let slot = slot.filter(|_| with_slots);
                match expected.last_mut() {
                    Some(last)
                        if last.range.end() == range.start()
                            && last.state == state
                            && last.slot.and_then(|first| first.plus(last.range.len())) == slot =>
                    {
                        last.range = PageRange::at(last.range.start(), last.range.len() + 1);
                    }
                    _ => expected.push(Run { range, state, slot, attributes: None }),
                }
            }
            prop_assert_eq!(runs, expected);
        }
    }

    #[test]
    fn contradictory_bitmaps_are_refused() {
        let resident: Vec<Page> = vec![(Some(PageState::Resident), None); 70];
        let good = batch(5, &resident, true);
        assert_eq!(runs(good.clone(), true).unwrap().len(), 1);
        let byte = |byte: u8| Bytes::from(vec![byte; 9]);
        for bad in [
            v1::BitmapBatch { hole: byte(1), ..good.clone() },
            v1::BitmapBatch { resident: byte(0xff), ..good.clone() },
            v1::BitmapBatch { resident: byte(0x3f), ..good.clone() },
            v1::BitmapBatch { resident: Bytes::from_static(&[0xff; 8]), ..good.clone() },
            v1::BitmapBatch { pages: u64::MAX, ..good.clone() },
            v1::BitmapBatch { first_page: u64::MAX, ..good.clone() },
            v1::BitmapBatch { slots: Bytes::from_static(&[0; 8]), ..good },
        ] {
            assert!(runs(bad.clone(), true).is_err(), "{bad:?}");
        }
        let swapped: Vec<Page> = vec![(Some(PageState::Swapped), SwapSlot::new(0, 9)); 2];
        let slots = batch(0, &swapped, true);
        assert_eq!(runs(slots.clone(), true).unwrap().len(), 2);
        let wrong = v1::BitmapBatch { slots: slots.slots.slice(1..9), ..slots.clone() };
        assert!(runs(wrong, true).is_err(), "one slot for two pages");
        let no_slot = v1::BitmapBatch { slots: Bytes::from_static(&[0xff; 16]), ..slots };
        assert!(runs(no_slot, true).is_err(), "not a slot");
    }

    #[test]
    fn page_without_a_state_is_refused_if_all_were_requested() {
        let pages = [(Some(PageState::Hole), None), (None, None)];
        assert!(runs(batch(0, &pages, true), true).is_err());
        assert_eq!(runs(batch(0, &pages, true), false).unwrap().len(), 1);
        let empty = v1::BitmapBatch { pages: MAX_PAGES, ..Default::default() };
        assert!(runs(empty.clone(), true).is_err());
        assert_eq!(runs(empty.clone(), false).unwrap(), []);
        assert!(runs(v1::BitmapBatch { pages: MAX_PAGES + 1, ..empty }, false).is_err(), "too many pages");
    }
}
