//! Going on where another process of the service ended.
//!
//! Page tables kept their marks meanwhile, since somebody held the userfaultfds; stamps and generations are in the journal.
//! What is lost are signals of writes through descriptors, mappings that came and went, and forks: if the file was not closed,
//! or was written unseen before, the first generation is conservative.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use fdmap_proto::file::FileInfo;
use fdmap_proto::tracking::GapKind;
use fdmap_proto::units::{FileId, Generation, PageRange};
use fdmap_sys::maps::Maps;
use fdmap_sys::memfd;
use fdmap_sys::ownership::Ownership;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;

use super::children::Child;
use super::collect::missed;
use super::cursors::Cursors;
use super::forked::Held;
use super::journal::{Journal, JournalError, RecoveredJournal};
use super::observed::{Mapped, Observed};
use super::ranges;
use super::record::{ObservedRecord, Record, RecordError};
use super::start::{TrackerOptions, fresh, recent};
use super::state::{HAD_GAPS, HAD_IGNORED, Marks, WAS_CLOSED, WAS_UNTRACKED};
use super::tracker::{Parts, Tracker, all_pages};
use super::{PageStamp, TrackingError};
use crate::store::StoredFd;

/// A file whose descriptors were kept.
#[derive(Debug)]
pub struct RecoveredFile {
    /// The memfd.
    pub file: OwnedFd,
    /// What is known of it.
    pub info: FileInfo,
    journal: Journal,
    recovered: RecoveredJournal,
    record: Record,
    others: BTreeMap<StoredFd, OwnedFd>,
}

/// Why kept descriptors are of no use.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// Without the file there is nothing.
    #[error("there is no {0} among them")]
    Missing(&'static str),
    /// The journal.
    #[error("the journal")]
    Journal(#[from] JournalError),
    /// Its record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// They are of different files.
    #[error("the journal is that of file {0}")]
    OtherFile(FileId),
}

impl RecoveredFile {
    /// Makes sense of the descriptors that were kept for a file.
    ///
    /// # Errors
    /// [`RecoveryError`]
    pub fn new(
        id: FileId,
        mut kept: BTreeMap<StoredFd, OwnedFd>,
        page_size: fdmap_proto::units::PageSize,
    ) -> Result<Self, RecoveryError> {
        let file = kept.remove(&StoredFd::File).ok_or(RecoveryError::Missing("memfd"))?;
        let journal = kept.remove(&StoredFd::Journal).ok_or(RecoveryError::Missing("journal"))?;
        let (journal, recovered) = Journal::open(journal, page_size)?;
        let record = Record::decode(&recovered.record)?;
        let info = record.file.clone();
        if info.id != id {
            return Err(RecoveryError::OtherFile(info.id));
        }
        Ok(Self { file, info, journal, recovered, record, others: kept })
    }
}

impl RecoveredFile {
    /// Whose the inode was before it was adopted.
    #[must_use]
    pub const fn before(&self) -> Option<Ownership> {
        self.record.before
    }
}

impl Tracker {
    /// Goes on with what remains of a file's generations.
    ///
    /// # Errors
    /// [`TrackingError`]
    pub fn recover(beginning: TrackerOptions, remains: RecoveredFile) -> Result<Arc<Self>, TrackingError> {
        let RecoveredFile { journal, recovered, record, mut others, .. } = remains;
        let TrackerOptions {
            scans,
            probe,
            event_sources,
            file,
            unnotified_descriptors: silent,
            original_owner: before,
        } = beginning;
        let reach = memfd::origin(scans.source().fd.as_fd())?;
        let (watch, signals) = event_sources.watch(scans.source().fd.as_fd())?;
        let mapped = Mapped { device: file.device, inode: file.inode, page_size: scans.source().page_size };
        let RecoveredJournal { header: hot, stamps, intent, .. } = recovered;
        let mut state = fresh(file, before, journal);
        // A journal that was killed at birth has no generation yet.
        let begun = !hot.open.is_none();
        state.open = if begun { hot.open } else { Generation::FIRST };
        state.hot = hot;
        state.stamps = stamps;
        state.stamped = true;
        state.policy = record.policy;
        state.cursors = Cursors::restore(record.cursors);
        state.marks = Marks { ctime: hot.ctime, pages: hot.pages, ..Marks::default() };
        state.marks.closed = hot.flags & WAS_CLOSED != 0;
        state.untracked.unknown = hot.flags & WAS_UNTRACKED != 0 || !begun;
        if !state.marks.closed && recent(hot.ctime) {
            // A write whose end gives no signal may have begun before the last checkpoint, and go on.
            state.marks.silent_since = Some((Instant::now(), true));
        }
        if hot.flags & HAD_GAPS != 0 {
            state.gaps.forget(state.open.previous(), hot.flags & HAD_IGNORED != 0);
        }
        if let Some((range, _)) = intent {
            let detail = "the service ended while it looked at these pages";
            state.open_gaps.push(missed(GapKind::LostEvents, None, Some(range), detail));
        }
        // Stamped ahead of time were those that were pinned: they may be still.
        let ahead = state.stamps.changed(state.open.previous(), all_pages());
        state.sticky.pinned = ahead.map(|run| run.range).collect();
        for record in record.observed {
            let pages = pages_of(&record, mapped);
            match observed(record, &mut others) {
                Some(observed) => state.observed.push(observed),
                // Its marks went with the last descriptor.
                None => {
                    state.children.push(Child { ancestor: 0, pieces: Vec::new(), pages, userfaultfd: None });
                }
            }
        }
        signals.put_back((false, true));
        state.kept = state.observed.iter().map(|observed| observed.key).collect();
        if let Some(store) = event_sources.store() {
            // What no mapping refers to was on its way when the process was killed.
            others.keys().for_each(|kept| store.remove(state.file.id, *kept));
        }
        let parts = Parts { scans, probe, event_sources, mapped, silent, reach, watch, signals };
        let tracker = Self::assemble(parts, state);
        let mut state = tracker.lock();
        let mut suspect = intent.map_or_else(Vec::new, |(range, _)| vec![range]);
        if !begun {
            suspect.push(PageRange::first(tracker.marks()?.pages));
        }
        let doubtful = tracker.doubtful_pages(&state, &mut suspect)?;
        let open = state.open;
        state.stamp(&doubtful, PageStamp::new(open, true))?;
        state.journal.settle();
        state.save();
        tracker.save_record(&mut state)?;
        tracker.publish(&state);
        drop(state);
        Ok(tracker)
    }
}

fn pages_of(record: &ObservedRecord, mapped: Mapped) -> Vec<PageRange> {
    let pieces = record.mappings.iter().flat_map(|mapping| &mapping.pieces);
    let mut pages: Vec<_> = pieces.map(|piece| piece.pages(mapped.page_size)).collect();
    ranges::normalize(&mut pages);
    pages
}

/// `None` if a descriptor is missing, or is not what it should be.
fn observed(record: ObservedRecord, kept: &mut BTreeMap<StoredFd, OwnedFd>) -> Option<Observed> {
    let ObservedRecord { key, pid, mappings } = record;
    let (uffd, pagemap, maps) = (
        kept.remove(&StoredFd::Userfaultfd(key))?,
        kept.remove(&StoredFd::Pagemap(key))?,
        kept.remove(&StoredFd::Maps(key))?,
    );
    Some(Observed {
        key,
        pid,
        pagemap: Pagemap::from_fd(pagemap).ok()?,
        maps: Maps::from_fd(maps).ok()?,
        userfaultfd: Held::new(Userfaultfd::from_fd(uffd).ok()?),
        mappings,
        inherited: false,
        forks: None,
        // Whoever ended while nobody looked counts.
        reaped: u64::MAX,
    })
}
