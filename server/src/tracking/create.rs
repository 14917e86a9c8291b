//! Creation of a tracker for a file that has none.

use std::sync::Arc;
use std::time::Instant;

use fdmap_proto::file::FileInfo;
use fdmap_proto::tracking::CoveragePolicy;
use fdmap_proto::units::PageRange;
use fdmap_sys::ownership::Ownership;

use super::baseline::UnnotifiedWrites;
use super::cursors::Cursors;
use super::error::TrackingError;
use super::generations::Generations;
use super::journal::Journal;
use super::observe::{EventSources, Observer};
use super::stamp_budget::StampCharges;
use super::state::{FileSettings, State};
use super::tracker::Tracker;
use crate::probe::Probe;
use crate::scan::ScanCoalescer;
use crate::store::StoredFd;
use crate::watchdog::{self, Operation, Phase};

/// Constructor options of a tracker.
pub struct TrackerOptions {
    /// Scans of the file.
    pub scans: Arc<ScanCoalescer>,
    pub probe: Arc<dyn Probe>,
    pub event_sources: Arc<EventSources>,
    pub file: FileInfo,
    /// The memfd was created outside the service: descriptors may exist whose writes raise no event.
    pub unnotified_descriptors: bool,
    /// Owner and mode of the inode before the file was adopted.
    pub original_owner: Option<Ownership>,
    /// Charged for the memory of the stamps.
    pub stamp_charges: Arc<dyn StampCharges>,
}

impl TrackerOptions {
    /// Starts the observer, which receives signals from here on.
    pub(super) fn observe(
        self,
        policy: CoveragePolicy,
        cursors: Cursors,
    ) -> Result<(Observer, FileSettings), TrackingError> {
        let Self { scans, probe, event_sources, file, unnotified_descriptors, original_owner, .. } = self;
        let observer = Observer::new(scans, probe, event_sources, &file, unnotified_descriptors)?;
        Ok((observer, FileSettings { file, original_owner, policy, cursors }))
    }
}

impl Tracker {
    /// Opens generation 1. All data in the file counts as written in it.
    ///
    /// # Errors
    /// [`TrackingError`]
    pub fn create(options: TrackerOptions) -> Result<Arc<Self>, TrackingError> {
        let unnotified_descriptors = options.unnotified_descriptors;
        let charges = Arc::clone(&options.stamp_charges);
        let (observer, settings) = options.observe(CoveragePolicy::Conservative, Cursors::default())?;
        let _operation = Operation::begin("start of tracking", observer.file_name(), Phase::CallSearch);
        observer.find_earlier_calls();
        let journal = Journal::create(&settings.file.name, observer.file().page_size)?;
        let history = observer.initial_history(observer.loop_device_has_open());
        let tracker = Self::new(observer, State::new(settings, Generations::new(journal, charges), history));
        tracker.stamp_initial_data(unnotified_descriptors)?;
        Ok(tracker)
    }

    fn stamp_initial_data(&self, unnotified_descriptors: bool) -> Result<(), TrackingError> {
        let state = &mut *self.lock();
        state.baseline = self.observer.inode()?;
        let file_pages = state.baseline.pages;
        watchdog::enter(Phase::Stamping);
        let data = self.suspect_pages(state, vec![PageRange::first(file_pages)])?;
        let untraced = !self.observer.traces_calls();
        if untraced && state.baseline.changed_recently() && (unnotified_descriptors || !data.is_empty()) {
            // A write may be in progress whose end raises no signal.
            state.unnotified_writes = UnnotifiedWrites::begun(Instant::now(), false);
        }
        state.generations.stamp_conservative(&data)?;
        // The first checkpoint reports the gap, if it still exists.
        let _ = self.update_redirty(state, file_pages, &data)?;
        // True until the first checkpoint has looked for mappers.
        state.untracked.unknown = self.observer.writable_vmas() != Some(0);
        state.write_header();
        if let Some(store) = self.observer.sources().store() {
            store.add(state.settings.file.id, StoredFd::Journal, state.generations.journal_fd());
        }
        self.save_record(state)?;
        self.publish(state);
        Ok(())
    }
}
