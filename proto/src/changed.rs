//! Runs of pages that were written, and their columns on the wire.

use crate::convert::ConvertError;
use crate::runs::next_range;
use crate::state::PageAttributes;
use crate::units::{PageIndex, PageRange};
use crate::v1;

/// Pages that follow one another and were written, alike in how that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedRun {
    /// The pages; never empty.
    pub range: PageRange,
    /// They are told as written though nobody saw it.
    pub conservative: bool,
}

/// Such a run with what its pages are now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedPages {
    /// The pages.
    pub run: ChangedRun,
    /// If they were asked for.
    pub attributes: Option<PageAttributes>,
}

/// Puts runs in ascending order into one message.
#[derive(Debug)]
pub struct ChangedColumns {
    batch: v1::ChangedRuns,
    next: PageIndex,
}

impl ChangedColumns {
    /// An empty batch that begins at `first`.
    #[must_use]
    pub fn new(first: PageIndex) -> Self {
        Self { batch: v1::ChangedRuns { first_page: first.0, ..Default::default() }, next: first }
    }

    /// Adds a run that begins at or after the end of the last one, with attributes either for each run or for none.
    pub fn push(&mut self, run: ChangedRun, attributes: Option<PageAttributes>) {
        self.batch.skips.push(run.range.start().0.saturating_sub(self.next.0));
        self.batch.lengths.push(run.range.len());
        self.batch.conservative.push(run.conservative);
        self.batch.attributes.extend(attributes.map(v1::PageAttributes::from));
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
    pub fn finish(self) -> v1::ChangedRuns {
        self.batch
    }
}

/// The runs of one message.
///
/// # Errors
/// [`ConvertError::Columns`] if the columns do not fit one another, [`ConvertError`] for values that have no
/// meaning.
pub fn changed_from_wire(batch: v1::ChangedRuns) -> Result<Vec<ChangedPages>, ConvertError> {
    let v1::ChangedRuns { first_page, skips, lengths, conservative, attributes } = batch;
    let count = lengths.len();
    for (column, got) in [("skips", skips.len()), ("conservative", conservative.len())] {
        if got != count {
            return Err(ConvertError::Columns { column, got, runs: count });
        }
    }
    if !attributes.is_empty() && attributes.len() != count {
        return Err(ConvertError::Columns { column: "attributes", got: attributes.len(), runs: count });
    }
    let mut attributes = attributes.into_iter();
    let mut changed = Vec::with_capacity(count);
    let mut next = PageIndex(first_page);
    for ((skip, length), conservative) in skips.into_iter().zip(lengths).zip(conservative) {
        let range = next_range(next, skip, length)?;
        next = range.end();
        let attributes = attributes.next().map(PageAttributes::try_from).transpose()?;
        changed.push(ChangedPages { run: ChangedRun { range, conservative }, attributes });
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_changes() -> impl Strategy<Value = (u64, Vec<ChangedPages>)> {
        let piece = (0_u64..3, 1_u64..100, any::<bool>(), 0_u8..10);
        let pieces = proptest::collection::vec(piece, 0..40);
        (0_u64..1 << 40, any::<bool>(), pieces).prop_map(|(first, attributed, pieces)| {
            let mut next = first;
            let runs = pieces
                .into_iter()
                .map(|(skip, len, conservative, order)| {
                    let range = PageRange::at(PageIndex(next + skip), len);
                    next = range.end().0;
                    let attributes = PageAttributes { order: Some(order), ..Default::default() };
                    let run = ChangedRun { range, conservative };
                    ChangedPages { run, attributes: attributed.then_some(attributes) }
                })
                .collect();
            (first, runs)
        })
    }

    proptest! {
        #[test]
        fn changes_survive_their_columns((first, changed) in any_changes()) {
            let mut columns = ChangedColumns::new(PageIndex(first));
            changed.iter().for_each(|pages| columns.push(pages.run, pages.attributes));
            prop_assert_eq!((columns.len(), columns.is_empty()), (changed.len(), changed.is_empty()));
            prop_assert_eq!(changed_from_wire(columns.finish()).unwrap(), changed);
        }

        #[test]
        fn any_columns_are_changes_or_refused(
            first_page in any::<u64>(), skips in proptest::collection::vec(any::<u64>(), 0..4),
            lengths in proptest::collection::vec(any::<u64>(), 0..4),
            conservative in proptest::collection::vec(any::<bool>(), 0..4),
            attributes in 0_usize..4,
        ) {
            let attributes = vec![v1::PageAttributes::default(); attributes];
            let batch = v1::ChangedRuns { first_page, skips, lengths, conservative, attributes };
            if let Ok(changed) = changed_from_wire(batch.clone()) {
                prop_assert_eq!(changed.len(), batch.lengths.len());
                prop_assert_eq!(changed.len(), batch.conservative.len());
                prop_assert!(changed.windows(2).all(|w| w[0].run.range.end() <= w[1].run.range.start()));
            }
        }
    }

    #[test]
    fn columns_of_other_lengths_are_refused() {
        let whole = v1::ChangedRuns {
            skips: vec![0],
            lengths: vec![1],
            conservative: vec![true],
            ..Default::default()
        };
        assert_eq!(changed_from_wire(whole.clone()).unwrap().len(), 1);
        for column in ["skips", "conservative", "attributes"] {
            let mut cut = whole.clone();
            match column {
                "skips" => cut.skips.clear(),
                "conservative" => cut.conservative.clear(),
                _ => cut.attributes = vec![v1::PageAttributes::default(); 2],
            }
            let refused = changed_from_wire(cut).unwrap_err();
            assert!(matches!(refused, ConvertError::Columns { column: c, .. } if c == column), "{refused}");
        }
    }

    #[test]
    fn empty_and_endless_runs_are_refused() {
        for (first_page, skip, length) in [(0, 0, 0), (u64::MAX, 1, 1), (0, 5, u64::MAX)] {
            let (skips, lengths, conservative) = (vec![skip], vec![length], vec![false]);
            let batch = v1::ChangedRuns { first_page, skips, lengths, conservative, attributes: vec![] };
            assert!(matches!(changed_from_wire(batch), Err(ConvertError::Run { .. })));
        }
    }
}
