//! Where a file's generations begin.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fdmap_proto::file::FileInfo;
use fdmap_proto::tracking::CoveragePolicy;
use fdmap_proto::units::{Generation, PageRange};
use fdmap_sys::memfd;
use fdmap_sys::ownership::Ownership;

use super::TrackingError;
use super::calls::Others;
use super::coverage::GapLog;
use super::cursors::Cursors;
use super::event_sources::EventSources;
use super::evidence::SILENT_WRITE;
use super::journal::{CheckpointReply, Journal, JournalHeader, MAX_REPLIES};
use super::observed::{Mapped, Regions};
use super::stamps::StampMap;
use super::state::{State, Sticky, Untracked};
use super::tracker::{Parts, Tracker};
use crate::probe::Probe;
use crate::scan::ScanCoalescer;
use crate::store::StoredFd;

/// The file whose generations begin.
pub struct TrackerOptions {
    /// Its pages.
    pub scans: Arc<ScanCoalescer>,
    /// How they are read.
    pub probe: Arc<dyn Probe>,
    /// What all trackers share.
    pub event_sources: Arc<EventSources>,
    /// The file, as the service tells it.
    pub file: FileInfo,
    /// There may be descriptors whose writes raise no signal: the memfd was made elsewhere.
    pub unnotified_descriptors: bool,
    /// Whose the inode was before it was adopted.
    pub original_owner: Option<Ownership>,
}

impl Tracker {
    /// Begins with generation 1 open. Whatever the file holds counts as written in it.
    ///
    /// # Errors
    /// [`TrackingError`]
    pub fn create(beginning: TrackerOptions) -> Result<Arc<Self>, TrackingError> {
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
        let page_size = scans.source().page_size;
        let mapped = Mapped { device: file.device, inode: file.inode, page_size };
        let journal = Journal::create(&file.name, page_size)?;
        let state = fresh(file, before, journal);
        let parts = Parts { scans, probe, event_sources, mapped, silent, reach, watch, signals };
        let tracker = Self::assemble(parts, state);
        let mut state = tracker.lock();
        state.marks = tracker.marks()?;
        let mut all = vec![PageRange::first(state.marks.pages)];
        let data = tracker.doubtful_pages(&state, &mut all)?;
        let recently = recent(state.marks.ctime);
        if recently && (silent || !data.is_empty()) {
            // A write may be under way whose end will give no signal.
            state.marks.silent_since = Some((Instant::now(), true));
        }
        let open = state.open;
        state.stamp(&data, super::PageStamp::new(open, true))?;
        let mut gaps = Vec::new();
        let pages = state.marks.pages;
        tracker.judge_pins(&mut state, pages, Instant::now(), &data, &mut gaps)?;
        let writable = tracker.writable_now();
        state.untracked.unknown = writable != Some(0);
        state.save();
        if let Some(store) = tracker.event_sources.store() {
            store.add(state.file.id, StoredFd::Journal, state.journal.fd());
        }
        tracker.save_record(&mut state)?;
        tracker.publish(&state);
        drop(state);
        Ok(tracker)
    }
}

/// True if the inode changed so lately that who changed it may not be done.
pub(super) fn recent(ctime: (i64, i64)) -> bool {
    let (Ok(seconds), Ok(nanos)) = (u64::try_from(ctime.0), u32::try_from(ctime.1)) else { return true };
    let changed = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos);
    changed.elapsed().map_or(true, |elapsed| elapsed < SILENT_WRITE)
}

/// With nothing in it but its file.
pub(super) fn fresh(file: FileInfo, before: Option<Ownership>, journal: Journal) -> State {
    State {
        open: Generation::FIRST,
        stamps: StampMap::default(),
        journal,
        file,
        before,
        observed: Vec::new(),
        children: Vec::new(),
        spare: Vec::new(),
        sticky: Sticky::default(),
        marks: Default::default(),
        // Until the first checkpoint has looked.
        untracked: Untracked { pages: Vec::new(), unknown: false },
        policy: CoveragePolicy::Conservative,
        gaps: GapLog::default(),
        open_gaps: Vec::new(),
        stamped: false,
        hot: JournalHeader {
            open: Generation::FIRST,
            pages: 0,
            ctime: (0, 0),
            flags: 0,
            replies: [CheckpointReply::default(); MAX_REPLIES],
        },
        cursors: Cursors::default(),
        last_made: None,
        kept: BTreeSet::new(),
        last_pid: None,
        others: Others::default(),
        doubt: false,
        regions: Regions::default(),
    }
}
