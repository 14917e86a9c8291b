//! Runs of pages, and their columns on the wire.

use crate::convert::{ConvertError, state_from_wire};
use crate::state::{PageAttributes, PageState, SwapSlot};
use crate::units::{PageIndex, PageRange};
use crate::v1;

/// Pages that follow one another, alike in state and attributes. If they have slots, these follow one another too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The pages; never empty.
    pub range: PageRange,
    /// Their state.
    pub state: PageState,
    /// The slot of the first page, where the state has one and the probe sees it.
    pub slot: Option<SwapSlot>,
    /// If they were asked for.
    pub attributes: Option<PageAttributes>,
}

impl Run {
    /// The slot of `page`, if the run has slots and the page lies in it.
    #[must_use]
    pub fn slot_of(&self, page: PageIndex) -> Option<SwapSlot> {
        if !self.range.contains(page) {
            return None;
        }
        self.slot?.plus(page.0 - self.range.start().0)
    }
}

/// Pages whose state or slot differs between two snapshots, alike in what they were and are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The pages; never empty.
    pub range: PageRange,
    /// Their state in the older snapshot.
    pub before: PageState,
    /// The slot of the first page then.
    pub slot_before: Option<SwapSlot>,
    /// Their state in the newer snapshot.
    pub after: PageState,
    /// The slot of the first page now.
    pub slot_after: Option<SwapSlot>,
}

/// Puts runs in ascending order into one message.
#[derive(Debug)]
pub struct RunColumns {
    batch: v1::RunBatch,
    next: PageIndex,
    skips: bool,
}

impl RunColumns {
    /// An empty batch that begins at `first`.
    #[must_use]
    pub fn new(first: PageIndex) -> Self {
        let batch = v1::RunBatch { first_page: first.0, ..Default::default() };
        Self { batch, next: first, skips: false }
    }

    /// Adds a run that begins at or after the end of the last one.
    pub fn push(&mut self, run: &Run) {
        let skip = run.range.start().0.saturating_sub(self.next.0);
        self.skips |= skip != 0;
        self.batch.skips.push(skip);
        self.batch.lengths.push(run.range.len());
        self.batch.states.push(v1::PageState::from(run.state).into());
        if let Some(slot) = run.slot {
            self.batch.slots.push(slot.raw());
        }
        if let Some(attributes) = run.attributes {
            self.batch.attributes.push(attributes.into());
        }
        self.next = run.range.end();
    }

    /// Runs so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.batch.lengths.len()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.batch.lengths.is_empty()
    }

    /// The message.
    #[must_use]
    pub fn finish(mut self) -> v1::RunBatch {
        if !self.skips {
            self.batch.skips.clear();
        }
        self.batch
    }
}

/// The runs of one message.
///
/// # Errors
/// [`ConvertError::Columns`] if the columns do not fit one another, [`ConvertError`] for values that have no
/// meaning.
pub fn runs_from_wire(batch: v1::RunBatch) -> Result<Vec<Run>, ConvertError> {
    let count = batch.lengths.len();
    let columns = |column: &'static str, got: usize| ConvertError::Columns { column, got, runs: count };
    if batch.states.len() != count {
        return Err(columns("states", batch.states.len()));
    }
    if !batch.skips.is_empty() && batch.skips.len() != count {
        return Err(columns("skips", batch.skips.len()));
    }
    if !batch.attributes.is_empty() && batch.attributes.len() != count {
        return Err(columns("attributes", batch.attributes.len()));
    }
    let mut slots = SlotColumn::new(&batch.slots);
    let mut attributes = batch.attributes.into_iter();
    let mut runs = Vec::with_capacity(count);
    let mut next = PageIndex(batch.first_page);
    for (i, length) in batch.lengths.into_iter().enumerate() {
        let range = next_range(next, batch.skips.get(i).copied().unwrap_or(0), length)?;
        next = range.end();
        let state = state_from_wire(batch.states[i])?;
        let attributes = attributes.next().map(PageAttributes::try_from).transpose()?;
        runs.push(Run { range, state, slot: slots.next_for(state, length)?, attributes });
    }
    slots.finish()?;
    Ok(runs)
}

/// Puts changes in ascending order into one message.
#[derive(Debug)]
pub struct ChangeColumns {
    batch: v1::DiffBatch,
    next: PageIndex,
}

impl ChangeColumns {
    /// An empty batch that begins at `first`.
    #[must_use]
    pub fn new(first: PageIndex) -> Self {
        Self { batch: v1::DiffBatch { first_page: first.0, ..Default::default() }, next: first }
    }

    /// Adds a change that begins at or after the end of the last one.
    pub fn push(&mut self, change: &Change) {
        self.batch.skips.push(change.range.start().0.saturating_sub(self.next.0));
        self.batch.lengths.push(change.range.len());
        self.batch.before.push(v1::PageState::from(change.before).into());
        self.batch.after.push(v1::PageState::from(change.after).into());
        self.batch.slots_before.extend(change.slot_before.map(SwapSlot::raw));
        self.batch.slots_after.extend(change.slot_after.map(SwapSlot::raw));
        self.next = change.range.end();
    }

    /// Changes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.batch.lengths.len()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.batch.lengths.is_empty()
    }

    /// The message.
    #[must_use]
    pub fn finish(self) -> v1::DiffBatch {
        self.batch
    }
}

/// The changes of one message.
///
/// # Errors
/// As [`runs_from_wire`].
pub fn changes_from_wire(batch: &v1::DiffBatch) -> Result<Vec<Change>, ConvertError> {
    let count = batch.lengths.len();
    for (column, got) in
        [("skips", batch.skips.len()), ("before", batch.before.len()), ("after", batch.after.len())]
    {
        if got != count {
            return Err(ConvertError::Columns { column, got, runs: count });
        }
    }
    let mut slots_before = SlotColumn::new(&batch.slots_before);
    let mut slots_after = SlotColumn::new(&batch.slots_after);
    let mut changes = Vec::with_capacity(count);
    let mut next = PageIndex(batch.first_page);
    for i in 0..count {
        let range = next_range(next, batch.skips[i], batch.lengths[i])?;
        next = range.end();
        let before = state_from_wire(batch.before[i])?;
        let after = state_from_wire(batch.after[i])?;
        changes.push(Change {
            range,
            before,
            slot_before: slots_before.next_for(before, range.len())?,
            after,
            slot_after: slots_after.next_for(after, range.len())?,
        });
    }
    slots_before.finish()?;
    slots_after.finish()?;
    Ok(changes)
}

pub(crate) fn next_range(next: PageIndex, skip: u64, length: u64) -> Result<PageRange, ConvertError> {
    let range = next
        .0
        .checked_add(skip)
        .and_then(|start| PageRange::new(PageIndex(start), PageIndex(start.checked_add(length)?)));
    match range {
        Some(range) if !range.is_empty() => Ok(range),
        _ => Err(ConvertError::Run { start: next.0, skip, length }),
    }
}

/// The slots of a message: none at all, or one for each run in a state that has one.
struct SlotColumn<'a> {
    slots: &'a [u64],
    used: usize,
}

impl<'a> SlotColumn<'a> {
    const fn new(slots: &'a [u64]) -> Self {
        Self { slots, used: 0 }
    }

    fn next_for(&mut self, state: PageState, pages: u64) -> Result<Option<SwapSlot>, ConvertError> {
        if !state.is_swapped() || self.slots.is_empty() {
            return Ok(None);
        }
        let raw = *self.slots.get(self.used).ok_or(ConvertError::Columns {
            column: "slots",
            got: self.slots.len(),
            runs: self.used + 1,
        })?;
        self.used += 1;
        let slot = SwapSlot::from_raw(raw).ok_or(ConvertError::Slot(raw))?;
        // The last slot of the run must be one as well.
        slot.plus(pages.saturating_sub(1)).ok_or(ConvertError::Slot(raw))?;
        Ok(Some(slot))
    }

    const fn finish(self) -> Result<(), ConvertError> {
        if self.used == self.slots.len() {
            Ok(())
        } else {
            Err(ConvertError::Columns { column: "slots", got: self.slots.len(), runs: self.used })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_runs() -> impl Strategy<Value = (u64, Vec<Run>)> {
        let piece = (0_u64..3, 1_u64..100, 0_usize..5, 0_u64..1 << 40);
        (0_u64..1 << 40, proptest::collection::vec(piece, 0..40)).prop_map(|(first, pieces)| {
            let mut next = first;
            let runs = pieces
                .into_iter()
                .map(|(skip, len, state, offset)| {
                    let range = PageRange::at(PageIndex(next + skip), len);
                    next = range.end().0;
                    let state = PageState::ALL[state];
                    let slot = state.is_swapped().then(|| SwapSlot::new(2, offset).unwrap());
                    Run { range, state, slot, attributes: None }
                })
                .collect();
            (first, runs)
        })
    }

    proptest! {
        #[test]
        fn runs_survive_their_columns((first, runs) in any_runs()) {
            let mut columns = RunColumns::new(PageIndex(first));
            runs.iter().for_each(|run| columns.push(run));
            prop_assert_eq!(runs_from_wire(columns.finish()).unwrap(), runs);
        }

        #[test]
        fn changes_survive_their_columns((first, runs) in any_runs()) {
            let mut columns = ChangeColumns::new(PageIndex(first));
            let changes: Vec<_> = runs.iter().map(|run| Change {
                range: run.range, before: run.state, slot_before: run.slot,
                after: PageState::Resident, slot_after: None,
            }).collect();
            changes.iter().for_each(|change| columns.push(change));
            prop_assert_eq!(changes_from_wire(&columns.finish()).unwrap(), changes);
        }

        #[test]
        fn any_columns_are_runs_or_refused(
            first in any::<u64>(), skips in proptest::collection::vec(any::<u64>(), 0..4),
            lengths in proptest::collection::vec(any::<u64>(), 0..4),
            states in proptest::collection::vec(-1_i32..8, 0..4),
            slots in proptest::collection::vec(any::<u64>(), 0..4),
        ) {
            let batch = v1::RunBatch { first_page: first, skips, lengths, states, slots, attributes: vec![] };
            if let Ok(runs) = runs_from_wire(batch.clone()) {
                prop_assert_eq!(runs.len(), batch.lengths.len());
                prop_assert!(runs.windows(2).all(|w| w[0].range.end() <= w[1].range.start()));
            }
        }
    }

    #[test]
    fn empty_run_is_refused() {
        let batch = v1::RunBatch { lengths: vec![0], states: vec![1], ..Default::default() };
        assert!(matches!(runs_from_wire(batch), Err(ConvertError::Run { .. })));
    }
}
