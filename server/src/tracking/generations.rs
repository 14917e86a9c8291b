//! The generations of one file: which pages were written in which generation, in memory and in the journal.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fdmap_proto::CheckpointEvent;
use fdmap_proto::tracking::{Coverage, CoverageGap};
use fdmap_proto::units::{Generation, PageRange};

use super::baseline::InodeBaseline;
use super::classify;
use super::dirty_stamp::DirtyStamp;
use super::error::TrackingError;
use super::gap_log::GapLog;
use super::journal::{CheckpointReply, Journal, JournalError, JournalHeader, RecoveredJournal};
use super::stamp_budget::{Admitted, StampBudget, StampCharges};
use super::stamps::{Counts, StampMap};

/// Flag of the journal header: the writers were sealed at the last checkpoint.
const WRITERS_SEALED: u64 = 1;
/// Flag of the journal header: untracked mappings existed at the last checkpoint.
const UNTRACKED_MAPPINGS: u64 = 2;
/// Flag of the journal header: at least one closed generation has a coverage gap.
const HAS_GAPS: u64 = 4;
/// Flag of the journal header: at least one closed generation left writes out.
const HAS_IGNORED: u64 = 8;

/// Flag of the journal header: the file ended at the end of a page at the last checkpoint.
const WHOLE_PAGES: u64 = 16;

#[derive(Debug)]
pub(crate) struct Generations {
    open: Generation,
    stamps: StampMap,
    journal: Journal,
    budget: StampBudget,
    /// Pages were stamped since the last generation was closed.
    stamped: bool,
    /// What the journal stores at every checkpoint.
    header: JournalHeader,
    /// Gaps of closed generations.
    gaps: GapLog,
    /// Gaps of the open generation so far.
    open_gaps: Vec<CoverageGap>,
    last_closed: Option<(Instant, SystemTime)>,
}

/// What the journal header holds about the last checkpoint of the previous process of the service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastCheckpoint {
    pub(crate) baseline: InodeBaseline,
    /// Untracked mappings existed.
    pub(crate) untracked: bool,
    /// False: the process ended before it opened the first generation.
    pub(crate) initialized: bool,
    /// Pages that were being harvested when the process ended.
    pub(crate) intent: Option<PageRange>,
}

impl Generations {
    /// Opens the first generation.
    pub(crate) fn new(journal: Journal, charges: Arc<dyn StampCharges>) -> Self {
        let budget = StampBudget::new(charges, journal.dense());
        Self {
            budget,
            open: Generation::FIRST,
            stamps: StampMap::default(),
            journal,
            stamped: false,
            header: JournalHeader { open: Generation::FIRST, ..JournalHeader::default() },
            gaps: GapLog::default(),
            open_gaps: Vec::new(),
            last_closed: None,
        }
    }

    /// Continues with the generation that was open when the previous process of the service ended.
    pub(crate) fn recover(
        journal: Journal,
        recovered: RecoveredJournal,
        charges: Arc<dyn StampCharges>,
    ) -> (Self, LastCheckpoint) {
        let RecoveredJournal { header, stamps, intent, .. } = recovered;
        let initialized = !header.open.is_none();
        let mut generations = Self::new(journal, charges);
        generations.open = if initialized { header.open } else { Generation::FIRST };
        generations.header = header;
        generations.stamps = stamps;
        generations.stamped = true;
        if header.flags & HAS_GAPS != 0 {
            generations.gaps.add_dropped(generations.closed(), header.flags & HAS_IGNORED != 0);
        }
        let baseline = InodeBaseline {
            ctime: header.ctime,
            atime: (0, 0),
            ctime_recent: true,
            atime_recent: true,
            pages: header.pages,
            partial_page: header.flags & WHOLE_PAGES == 0,
            writers_sealed: header.flags & WRITERS_SEALED != 0,
        };
        let untracked = header.flags & UNTRACKED_MAPPINGS != 0;
        let intent = intent.map(|(range, _)| range);
        (generations, LastCheckpoint { baseline, untracked, initialized, intent })
    }

    /// The user who is charged for the file: see [`StampCharges::owner`].
    pub(crate) fn owner(&self) -> u32 {
        self.budget.owner()
    }

    pub(crate) const fn open(&self) -> Generation {
        self.open
    }

    /// The last closed generation, or [`Generation::NONE`].
    pub(crate) fn closed(&self) -> Generation {
        self.open.previous()
    }

    pub(crate) const fn stamps(&self) -> &StampMap {
        &self.stamps
    }

    pub(crate) const fn gaps(&self) -> &GapLog {
        &self.gaps
    }

    pub(crate) fn open_gaps(&self) -> &[CoverageGap] {
        &self.open_gaps
    }

    /// True if pages were stamped since the last generation was closed.
    pub(crate) const fn stamped_since_closed(&self) -> bool {
        self.stamped
    }

    /// Adds gaps to the open generation.
    pub(crate) fn add_gaps(&mut self, gaps: impl IntoIterator<Item = CoverageGap>) {
        self.open_gaps.extend(gaps);
    }

    /// Records in the journal that the written bits of `range` are about to be cleared. If the service is killed before
    /// [`Self::settle`], recovery stamps the range.
    pub(crate) fn intend(&mut self, range: PageRange) {
        self.journal.intend(range, self.open);
    }

    pub(crate) fn settle(&mut self) {
        self.journal.settle();
    }

    /// Stamps pages whose writes were observed in the open generation.
    ///
    /// # Errors
    /// The journal is full or damaged; part of the pages may be stamped in the journal.
    pub(crate) fn stamp_observed(&mut self, pages: &[PageRange]) -> Result<(), JournalError> {
        self.stamp(pages, DirtyStamp::new(self.open, false))
    }

    /// Stamps pages that may have been written in the open generation.
    ///
    /// # Errors
    /// As [`Self::stamp_observed`].
    pub(crate) fn stamp_conservative(&mut self, pages: &[PageRange]) -> Result<(), JournalError> {
        self.stamp(pages, DirtyStamp::new(self.open, true))
    }

    /// Stamps pages that may be written in the generation after the open one.
    ///
    /// # Errors
    /// [`TrackingError::NoMoreGenerations`], or as [`Self::stamp_observed`].
    pub(crate) fn stamp_next(&mut self, pages: &[PageRange]) -> Result<(), TrackingError> {
        if pages.is_empty() {
            return Ok(());
        }
        let next = self.open.next().ok_or(TrackingError::NoMoreGenerations)?;
        Ok(self.stamp(pages, DirtyStamp::new(next, true))?)
    }

    /// Stamps the redirty set with the next generation. The pages were stamped with the open generation before, so this does not
    /// count as a new stamp.
    ///
    /// # Errors
    /// As [`Self::stamp_next`].
    pub(crate) fn stamp_redirty(&mut self, pages: &[PageRange]) -> Result<(), TrackingError> {
        let stamped = self.stamped;
        self.stamp_next(pages)?;
        self.stamped = stamped;
        Ok(())
    }

    /// Stamps the journal first: on an error, memory has no stamp that the journal lacks.
    fn stamp(&mut self, pages: &[PageRange], stamp: DirtyStamp) -> Result<(), JournalError> {
        if pages.is_empty() {
            return Ok(());
        }
        let journal = &self.journal;
        match self.budget.admit(pages, |index| journal.is_uniform_before(index, stamp)) {
            None => self.put(pages, stamp)?,
            Some(Admitted { exact, coarse }) => {
                self.add_gaps([classify::coarse_stamps()]);
                self.put(&coarse, DirtyStamp::new(stamp.generation(), true))?;
                self.put(&exact, stamp)?;
            }
        }
        self.budget.settle(self.journal.dense());
        self.stamped = true;
        Ok(())
    }

    fn put(&mut self, pages: &[PageRange], stamp: DirtyStamp) -> Result<(), JournalError> {
        self.journal.stamp_all(pages, stamp)?;
        self.stamps.stamp_all(pages, stamp);
        Ok(())
    }

    /// The result that was recorded for an idempotency key.
    pub(crate) fn recorded_result(&self, key: u64) -> Option<CheckpointReply> {
        self.header.reply_to(key)
    }

    /// Records that the checkpoint with this key closed no generation.
    pub(crate) fn record_unchanged(&mut self, key: u64) {
        self.header.add_reply(CheckpointReply {
            idempotency_key: key,
            generation: self.closed(),
            unchanged: true,
        });
    }

    /// Closes the open generation, and records it as the result of `idempotency_key`. One store in the journal does both.
    ///
    /// # Errors
    /// [`TrackingError::NoMoreGenerations`]; nothing is closed then.
    pub(crate) fn close(
        &mut self,
        idempotency_key: Option<u64>,
        baseline: &InodeBaseline,
        untracked: bool,
    ) -> Result<CheckpointEvent, TrackingError> {
        let closing = self.open;
        let next = closing.next().ok_or(TrackingError::NoMoreGenerations)?;
        let gaps = std::mem::take(&mut self.open_gaps);
        self.gaps.add(closing, gaps);
        self.open = next;
        self.stamped = false;
        if let Some(idempotency_key) = idempotency_key {
            self.header.add_reply(CheckpointReply { idempotency_key, generation: closing, unchanged: false });
        }
        self.write_header(baseline, untracked);
        let counts = self.count_pages_of(closing, baseline.pages);
        let since_last = self.since_last_closed();
        let event = CheckpointEvent {
            generation: closing,
            observed_pages: counts.exact,
            conservative_pages: counts.conservative,
            time: SystemTime::now(),
            since_last,
            pages_per_second: since_last.map_or(0.0, |window| counts.per_second(window)),
        };
        self.last_closed = Some((Instant::now(), event.time));
        Ok(event)
    }

    /// The number of pages that were or may have been written in a closed generation. Of the last one, this includes the redirty
    /// set, which the next generation has stamped already. Of an earlier one, pages that were written later do not count.
    pub(crate) fn count_pages_of(&self, generation: Generation, file_pages: u64) -> Counts {
        let until = (generation != self.closed()).then_some(generation);
        self.stamps.count(generation.previous(), until, PageRange::first(file_pages))
    }

    fn since_last_closed(&self) -> Option<Duration> {
        self.last_closed.map(|(at, _)| at.elapsed())
    }

    /// Writes what changes at every checkpoint to the journal.
    pub(crate) fn write_header(&mut self, baseline: &InodeBaseline, untracked: bool) {
        self.header.open = self.open;
        self.header.pages = baseline.pages;
        self.header.ctime = baseline.ctime;
        let flag = |is: bool, flag: u64| if is { flag } else { 0 };
        self.header.flags = flag(baseline.writers_sealed, WRITERS_SEALED)
            | flag(!baseline.partial_page, WHOLE_PAGES)
            | flag(untracked, UNTRACKED_MAPPINGS)
            | flag(self.gaps.has_gaps(), HAS_GAPS)
            | flag(self.gaps.has_ignored(), HAS_IGNORED);
        self.journal.write_header(&self.header);
    }

    /// Writes what changes rarely to the journal.
    ///
    /// # Errors
    /// The record is too long, or no memory is left.
    pub(crate) fn write_record(&mut self, record: &[u8]) -> Result<(), JournalError> {
        self.journal.write_record(record)
    }

    pub(crate) fn journal_fd(&self) -> BorrowedFd<'_> {
        self.journal.fd()
    }

    /// Coverage of the generations after `since`, up to `until`.
    pub(crate) fn coverage(
        &self,
        since: Generation,
        until: Generation,
        tracked_mappings: u64,
        granularity_pages: u64,
    ) -> Coverage {
        self.gaps.coverage(since, until, tracked_mappings, granularity_pages)
    }
}

#[cfg(test)]
mod tests {
    use fdmap_proto::tracking::GapKind;
    use fdmap_proto::units::{PageIndex, PageSize};

    use super::super::ranges::{self, ALL_PAGES};
    use super::super::stamp_budget::tests::{AtMost, Unlimited};
    use super::*;

    fn journal(name: &str) -> Journal {
        Journal::create(name, PageSize::new(4096).unwrap()).unwrap()
    }

    fn of_pages(pages: u64) -> InodeBaseline {
        InodeBaseline { pages, ..InodeBaseline::default() }
    }

    /// The pages of a generation, and how many of them are conservative.
    fn reported(generations: &Generations, since: Generation) -> (Vec<PageRange>, u64) {
        let changed = generations.stamps().changed(since, ALL_PAGES);
        let mut pages: Vec<_> = changed.map(|run| run.range).collect();
        ranges::normalize(&mut pages);
        (pages, generations.stamps().count(since, None, ALL_PAGES).conservative)
    }

    #[test]
    fn blocks_beyond_the_limit_are_reported_as_a_whole_and_no_write_is_lost() {
        let charges = Arc::new(AtMost::new(2 * 49152));
        let mut generations = Generations::new(journal("budget"), Arc::clone(&charges) as Arc<_>);
        let page = |block: u64, page| PageRange::at(PageIndex(block * 4096 + page), 1);
        let written = [page(0, 7), page(5, 0), page(9, 4095), page(11, 1)];
        generations.stamp_observed(&written).unwrap();
        let whole = |block: u64| PageRange::at(PageIndex(block * 4096), 4096);
        let expected = (vec![page(0, 7), page(5, 0), whole(9), whole(11)], 2 * 4096);
        assert_eq!(reported(&generations, Generation::NONE), expected);
        let gap = &generations.open_gaps()[0];
        assert_eq!((gap.kind, generations.open_gaps().len()), (GapKind::CoarseStamps, 1));
        // The file ends within the last block.
        let event = generations.close(None, &of_pages(11 * 4096 + 2), false).unwrap();
        assert_eq!((event.observed_pages, event.conservative_pages), (2, 4096 + 2));
        // Dense blocks cost no more, whole ones nothing, and a further one has to be coarse.
        let since = generations.closed();
        generations.stamp_observed(&[page(0, 8), page(0, 10), whole(9), page(12, 3)]).unwrap();
        let expected = (vec![page(0, 8), page(0, 10), whole(9), whole(12)], 4096);
        assert_eq!(reported(&generations, since), expected);
        // A block that becomes uniform makes room.
        generations.stamp_observed(&[whole(0)]).unwrap();
        assert_eq!(charges.bytes(), 49152);
        generations.close(None, &InodeBaseline::default(), false).unwrap();
        let since = generations.closed();
        generations.stamp_observed(&[page(13, 3)]).unwrap();
        assert_eq!(reported(&generations, since), (vec![page(13, 3)], 0));
    }

    #[test]
    fn redirty_pages_count_in_the_generation_that_closes() {
        let mut generations = Generations::new(journal("counts"), Arc::new(Unlimited));
        let pages = [PageRange::at(PageIndex(3), 2)];
        generations.stamp_observed(&pages).unwrap();
        generations.stamp_redirty(&[PageRange::at(PageIndex(4), 1)]).unwrap();
        let event = generations.close(None, &of_pages(8), false).unwrap();
        assert_eq!((event.observed_pages, event.conservative_pages), (1, 1), "page 4 may be written again");
        generations.stamp_observed(&pages).unwrap();
        generations.close(None, &of_pages(8), false).unwrap();
        let counts = generations.count_pages_of(generations.closed().previous(), 8);
        assert_eq!((counts.exact, counts.conservative), (0, 0), "both pages were written later");
    }
}
