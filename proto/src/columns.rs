//! Batches of runs as columns: parallel arrays with one element per run.
//!
//! All batches start with the same three columns, `first_page`, `skips` and `lengths`; [`Columns`] builds and [`decode`]
//! checks them. The remaining columns are defined by the [`ColumnBatch`] of each message.

use crate::attributes::PageAttributes;
use crate::convert::{ConvertError, state_from_wire};
use crate::runs::{Change, ChangedPages, ChangedRun, Run};
use crate::state::{PageState, SwapSlot};
use crate::units::{PageIndex, PageRange};
use crate::v1;

/// A message that stores runs as columns.
pub trait ColumnBatch: Default {
    /// Type of one run.
    type Run;

    /// An empty `skips` column means that all skips are 0.
    const SKIPS_ARE_OPTIONAL: bool;

    /// Pages of a run.
    fn range(run: &Self::Run) -> PageRange;

    /// The columns `first_page`, `skips` and `lengths`.
    fn layout(&mut self) -> (&mut u64, &mut Vec<u64>, &mut Vec<u64>);

    /// Appends the values of a run to the remaining columns.
    fn push_values(&mut self, run: &Self::Run);

    /// Combines the ranges of the runs with the remaining columns.
    ///
    /// # Errors
    /// [`ConvertError`] if a column has the wrong length or an invalid value.
    fn decode_values(self, ranges: Vec<PageRange>) -> Result<Vec<Self::Run>, ConvertError>;
}

/// Builds a batch from runs in ascending page order.
#[derive(Debug)]
pub struct Columns<B> {
    batch: B,
    next: PageIndex,
    runs: usize,
    skipped: bool,
}

impl<B: ColumnBatch> Columns<B> {
    /// Starts a batch at page `first`.
    #[must_use]
    pub fn new(first: PageIndex) -> Self {
        let mut batch = B::default();
        *batch.layout().0 = first.0;
        Self { batch, next: first, runs: 0, skipped: false }
    }

    /// Appends a run. It must start at or after the end of the previous run.
    pub fn push(&mut self, run: &B::Run) {
        let range = B::range(run);
        let skip = range.start().0.saturating_sub(self.next.0);
        let (_, skips, lengths) = self.batch.layout();
        skips.push(skip);
        lengths.push(range.len());
        self.batch.push_values(run);
        self.skipped |= skip != 0;
        self.runs += 1;
        self.next = range.end();
    }

    /// Number of runs in the batch.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.runs
    }

    /// Returns true if the batch has no runs.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.runs == 0
    }

    /// Returns the message.
    #[must_use]
    pub fn finish(mut self) -> B {
        if B::SKIPS_ARE_OPTIONAL && !self.skipped {
            self.batch.layout().1.clear();
        }
        self.batch
    }
}

/// Decodes the runs of a batch. They are in ascending order, do not overlap and are not empty.
///
/// # Errors
/// [`ConvertError::Columns`] if a column has the wrong length, [`ConvertError`] if a value is invalid.
pub fn decode<B: ColumnBatch>(mut batch: B) -> Result<Vec<B::Run>, ConvertError> {
    let (first, skips, lengths) = batch.layout();
    let (first, skips, lengths) = (*first, std::mem::take(skips), std::mem::take(lengths));
    if !(skips.is_empty() && B::SKIPS_ARE_OPTIONAL) {
        check_length("skips", skips.len(), lengths.len())?;
    }
    let mut ranges = Vec::with_capacity(lengths.len());
    let mut next = PageIndex(first);
    for (nth, length) in lengths.into_iter().enumerate() {
        let range = next_range(next, skips.get(nth).copied().unwrap_or(0), length)?;
        next = range.end();
        ranges.push(range);
    }
    batch.decode_values(ranges)
}

fn check_length(column: &'static str, got: usize, runs: usize) -> Result<(), ConvertError> {
    if got == runs { Ok(()) } else { Err(ConvertError::Columns { column, got, runs }) }
}

fn next_range(next: PageIndex, skip: u64, length: u64) -> Result<PageRange, ConvertError> {
    let range = next
        .0
        .checked_add(skip)
        .and_then(|start| PageRange::new(PageIndex(start), PageIndex(start.checked_add(length)?)));
    match range {
        Some(range) if !range.is_empty() => Ok(range),
        _ => Err(ConvertError::Run { start: next.0, skip, length }),
    }
}

impl ColumnBatch for v1::RunBatch {
    type Run = Run;

    const SKIPS_ARE_OPTIONAL: bool = true;

    fn range(run: &Run) -> PageRange {
        run.range
    }

    fn layout(&mut self) -> (&mut u64, &mut Vec<u64>, &mut Vec<u64>) {
        (&mut self.first_page, &mut self.skips, &mut self.lengths)
    }

    fn push_values(&mut self, run: &Run) {
        self.states.push(v1::PageState::from(run.state).into());
        self.slots.extend(run.slot.map(SwapSlot::raw));
        self.attributes.extend(run.attributes.map(v1::PageAttributes::from));
    }

    fn decode_values(self, ranges: Vec<PageRange>) -> Result<Vec<Run>, ConvertError> {
        check_length("states", self.states.len(), ranges.len())?;
        let mut attributes = AttributeColumn::new(self.attributes, ranges.len())?;
        let mut slots = SlotColumn::new(&self.slots);
        let mut runs = Vec::with_capacity(ranges.len());
        for (range, state) in ranges.into_iter().zip(self.states) {
            let state = state_from_wire(state)?;
            let slot = slots.next_for(state, range.len())?;
            runs.push(Run { range, state, slot, attributes: attributes.next()? });
        }
        slots.finish()?;
        Ok(runs)
    }
}

impl ColumnBatch for v1::DiffBatch {
    type Run = Change;

    const SKIPS_ARE_OPTIONAL: bool = false;

    fn range(change: &Change) -> PageRange {
        change.range
    }

    fn layout(&mut self) -> (&mut u64, &mut Vec<u64>, &mut Vec<u64>) {
        (&mut self.first_page, &mut self.skips, &mut self.lengths)
    }

    fn push_values(&mut self, change: &Change) {
        self.before.push(v1::PageState::from(change.before).into());
        self.after.push(v1::PageState::from(change.after).into());
        self.slots_before.extend(change.slot_before.map(SwapSlot::raw));
        self.slots_after.extend(change.slot_after.map(SwapSlot::raw));
    }

    fn decode_values(self, ranges: Vec<PageRange>) -> Result<Vec<Change>, ConvertError> {
        check_length("before", self.before.len(), ranges.len())?;
        check_length("after", self.after.len(), ranges.len())?;
        let mut slots_before = SlotColumn::new(&self.slots_before);
        let mut slots_after = SlotColumn::new(&self.slots_after);
        let mut changes = Vec::with_capacity(ranges.len());
        for ((range, before), after) in ranges.into_iter().zip(self.before).zip(self.after) {
            let (before, after) = (state_from_wire(before)?, state_from_wire(after)?);
            let slot_before = slots_before.next_for(before, range.len())?;
            let slot_after = slots_after.next_for(after, range.len())?;
            changes.push(Change { range, before, slot_before, after, slot_after });
        }
        slots_before.finish()?;
        slots_after.finish()?;
        Ok(changes)
    }
}

impl ColumnBatch for v1::ChangedRuns {
    type Run = ChangedPages;

    const SKIPS_ARE_OPTIONAL: bool = false;

    fn range(pages: &ChangedPages) -> PageRange {
        pages.run.range
    }

    fn layout(&mut self) -> (&mut u64, &mut Vec<u64>, &mut Vec<u64>) {
        (&mut self.first_page, &mut self.skips, &mut self.lengths)
    }

    fn push_values(&mut self, pages: &ChangedPages) {
        self.conservative.push(pages.run.conservative);
        self.attributes.extend(pages.attributes.map(v1::PageAttributes::from));
    }

    fn decode_values(self, ranges: Vec<PageRange>) -> Result<Vec<ChangedPages>, ConvertError> {
        check_length("conservative", self.conservative.len(), ranges.len())?;
        let mut attributes = AttributeColumn::new(self.attributes, ranges.len())?;
        let runs = ranges.into_iter().zip(self.conservative);
        runs.map(|(range, conservative)| {
            let run = ChangedRun { range, conservative };
            Ok(ChangedPages { run, attributes: attributes.next()? })
        })
        .collect()
    }
}

/// Column `attributes`: empty, or one element per run.
struct AttributeColumn(std::vec::IntoIter<v1::PageAttributes>);

impl AttributeColumn {
    fn new(attributes: Vec<v1::PageAttributes>, runs: usize) -> Result<Self, ConvertError> {
        if !attributes.is_empty() {
            check_length("attributes", attributes.len(), runs)?;
        }
        Ok(Self(attributes.into_iter()))
    }

    fn next(&mut self) -> Result<Option<PageAttributes>, ConvertError> {
        self.0.next().map(PageAttributes::try_from).transpose()
    }
}

/// Column of swap slots: empty, or one element per run in a swapped state.
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
        // The slot of the last page must be valid too.
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
mod tests;
