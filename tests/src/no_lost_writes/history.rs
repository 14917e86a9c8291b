//! The record of one consumer: its checkpoints in order, and the pages reported after each of them. Pure.

use std::collections::BTreeSet;

use fdmap_proto::GapKind;

use super::pages::PageSet;

/// A checkpoint, and the answer to the `changes(since)` request that followed it.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Nanoseconds of CLOCK_MONOTONIC before the checkpoint was requested.
    pub called: u64,
    /// The time after the checkpoint was answered.
    pub returned: u64,
    /// The time after the changes were listed.
    pub listed: u64,
    /// `force_scan` of the request.
    pub exact: bool,
    /// The generation that the checkpoint closed or, with `unchanged`, the last closed generation.
    pub generation: u64,
    /// The checkpoint closed no generation.
    pub unchanged: bool,
    /// All reported pages.
    pub changed: PageSet,
    /// The reported pages that are conservative.
    pub conservative: PageSet,
    /// `Coverage.exact` of the answer.
    pub coverage_exact: bool,
    /// The kinds of its coverage gaps.
    pub gaps: BTreeSet<GapKind>,
}

impl Checkpoint {
    /// True if every write that ended before the call belongs to `generation` or an earlier one. A checkpoint that
    /// answers `unchanged` without a scan guarantees less: a write shortly before the call may belong to the next
    /// generation.
    #[must_use]
    pub const fn is_boundary(&self) -> bool {
        !self.unchanged || self.exact
    }
}

/// All checkpoints of one consumer of one file. Each answer covers the generations after that of the previous
/// checkpoint. The first answer covers all generations.
#[derive(Clone, Debug)]
pub struct History {
    checkpoints: Vec<Checkpoint>,
    pages: u64,
    granularity: u64,
}

/// Answers that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// A consumer waits for each answer.
    #[error("the times of checkpoint {0} are not in order")]
    Times(usize),
    /// Generation numbers grow.
    #[error(
        "checkpoint {at} answered generation {answered}, unchanged {unchanged}, after generation {before}"
    )]
    Generation {
        /// Index of the checkpoint.
        at: usize,
        /// The answered generation.
        answered: u64,
        /// The checkpoint answered that it closed no generation.
        unchanged: bool,
        /// The generation of the previous checkpoint.
        before: u64,
    },
    /// Conservative pages are reported pages.
    #[error("checkpoint {0} has conservative pages that it does not report")]
    Marks(usize),
}

impl History {
    /// `pages` is the size of the file; writes are distinguished by units of `granularity` pages.
    ///
    /// # Errors
    /// [`HistoryError`] if the answers contradict each other.
    pub fn new(checkpoints: Vec<Checkpoint>, pages: u64, granularity: u64) -> Result<Self, HistoryError> {
        let (mut time, mut before) = (0, 0);
        for (at, checkpoint) in checkpoints.iter().enumerate() {
            let Checkpoint { called, returned, listed, generation, unchanged, .. } = *checkpoint;
            if !(time <= called && called <= returned && returned <= listed) {
                return Err(HistoryError::Times(at));
            }
            // Other clients close generations too, so that `unchanged` may name a new one.
            if generation < before || (generation == before && !unchanged) {
                return Err(HistoryError::Generation { at, answered: generation, unchanged, before });
            }
            if checkpoint.conservative.without(&checkpoint.changed).count() != 0 {
                return Err(HistoryError::Marks(at));
            }
            (time, before) = (listed, generation);
        }
        Ok(Self { checkpoints, pages, granularity: granularity.max(1) })
    }

    /// The checkpoints, in order.
    #[must_use]
    pub fn checkpoints(&self) -> &[Checkpoint] {
        &self.checkpoints
    }

    /// The generation after which the answer of a checkpoint reports changes.
    #[must_use]
    pub fn since(&self, at: usize) -> u64 {
        at.checked_sub(1).map_or(0, |before| self.checkpoints[before].generation)
    }

    /// Pages of the file.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of pages by which writes are distinguished: 1, or those of a hugetlb page.
    #[must_use]
    pub const fn granularity(&self) -> u64 {
        self.granularity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(called: u64, generation: u64, unchanged: bool) -> Checkpoint {
        let (changed, conservative) = (PageSet::of(10), PageSet::of(10));
        let (returned, listed) = (called + 1, called + 2);
        let (exact, coverage_exact) = (false, true);
        Checkpoint {
            called,
            returned,
            listed,
            exact,
            generation,
            unchanged,
            changed,
            conservative,
            coverage_exact,
            gaps: BTreeSet::new(),
        }
    }

    #[test]
    fn generations_grow_unless_nothing_changed() {
        let valid = vec![checkpoint(0, 1, false), checkpoint(5, 1, true), checkpoint(9, 4, false)];
        let history = History::new(valid.clone(), 10, 1).unwrap();
        assert_eq!([history.since(0), history.since(1), history.since(2)], [0, 1, 1]);
        for (at, bad) in [(1, checkpoint(5, 1, false)), (2, checkpoint(9, 0, true))] {
            let mut all = valid.clone();
            all[at] = bad;
            assert!(
                matches!(History::new(all, 10, 1), Err(HistoryError::Generation { at: there, .. }) if there == at)
            );
        }
    }

    #[test]
    fn contradictory_histories_are_refused() {
        let early = vec![checkpoint(5, 1, false), checkpoint(6, 2, false)];
        assert_eq!(History::new(early, 10, 1).unwrap_err(), HistoryError::Times(1));
        let mut marked = checkpoint(0, 1, false);
        marked.conservative.insert(3);
        assert_eq!(History::new(vec![marked.clone()], 10, 1).unwrap_err(), HistoryError::Marks(0));
        marked.changed.insert(3);
        assert!(History::new(vec![marked], 10, 1).is_ok());
    }
}
