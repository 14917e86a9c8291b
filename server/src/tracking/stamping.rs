//! Stamping and persistence: what the next process of the service needs.

use fdmap_proto::file::FileInfo;
use fdmap_proto::tracking::CoverageGap;
use fdmap_proto::units::PageRange;

use super::classify::{self, Findings, RedirtyUpdate};
use super::error::TrackingError;
use super::observe::{PinScan, PinnedPages};
use super::ranges;
use super::state::State;
use super::tracker::Tracker;
use crate::store::StoredFd;
use crate::watchdog::{self, Phase};

impl Tracker {
    /// All pages of `suspect` that hold data or were ever written. A page that was written and punched is a hole now, and its
    /// content changed.
    pub(super) fn suspect_pages(
        &self,
        state: &State,
        mut suspect: Vec<PageRange>,
    ) -> Result<Vec<PageRange>, TrackingError> {
        ranges::normalize(&mut suspect);
        if suspect.is_empty() {
            return Ok(Vec::new());
        }
        let mut pages = self.observer.data_pages(&suspect)?;
        pages.extend(suspect.iter().flat_map(|range| state.generations.stamps().ever(*range)));
        ranges::normalize(&mut pages);
        Ok(pages)
    }

    /// Updates the redirty set. Members are pages of the old set, and pages just stamped, that are pinned now: they may be written
    /// at any time without a trace, so they count in the next generation too. Returns the gaps of the pins.
    pub(super) fn update_redirty(
        &self,
        state: &mut State,
        file_pages: u64,
        stamped: &[PageRange],
    ) -> Result<Vec<CoverageGap>, TrackingError> {
        let mut candidates = state.redirty.pages();
        candidates.extend(stamped);
        if state.history.devices.may_pin() {
            // A device can pin pages that no one wrote to.
            candidates.extend(self.observer.data_pages(&[PageRange::first(file_pages)])?);
        }
        ranges::normalize(&mut candidates);
        let mut scan = self.observer.scan_pins(&candidates, file_pages);
        let drained = matches!(&scan, PinScan::Found(found) if state.redirty.may_be_batched(found));
        if drained {
            scan = self.observer.scan_pins_drained(&candidates, file_pages);
        }
        if scan.found_none() {
            state.history.devices.no_page_is_pinned();
        }
        let (update, gaps) = classify::pins(scan, state.redirty.by_reason());
        match update {
            RedirtyUpdate::Keep => {
                // Any of them may be pinned.
                state.redirty.replace(PinnedPages { dma: candidates, referenced: Vec::new() }, false);
                state.generations.stamp_next(&state.redirty.pages())?;
            }
            RedirtyUpdate::Replace(found) => {
                state.redirty.replace(found, drained);
                state.generations.stamp_redirty(&state.redirty.pages())?;
            }
        }
        Ok(gaps)
    }

    /// Stamps what a harvest between two checkpoints found.
    pub(super) fn stamp_between_checkpoints(
        &self,
        state: &mut State,
        findings: Findings,
    ) -> Result<(), TrackingError> {
        watchdog::enter(Phase::Stamping);
        let Findings { observed, suspect, mut gaps, mut inherited } = findings;
        state.generations.stamp_observed(&observed)?;
        let mut conservative = self.suspect_pages(state, suspect)?;
        conservative.append(&mut inherited);
        ranges::normalize(&mut conservative);
        state.generations.stamp_conservative(&conservative)?;
        let file_pages = self.observer.inode()?.pages;
        let mut stamped = observed;
        stamped.extend(conservative);
        gaps.extend(self.update_redirty(state, file_pages, &stamped)?);
        state.generations.add_gaps(gaps);
        Ok(())
    }

    /// Writes what changes rarely to the journal.
    pub(super) fn save_record(&self, state: &mut State) -> Result<(), TrackingError> {
        watchdog::enter(Phase::Journal);
        let store = self.observer.sources().store();
        // The descriptors are stored before the record refers to them.
        if let Some(store) = store {
            state.spaces.store_descriptors(store, state.settings.file.id);
        }
        let record = state.record(store.is_some());
        Ok(state.generations.write_record(&record.encode())?)
    }

    /// Removes all descriptors of a deleted file from the descriptor store.
    pub fn drop_stored_descriptors(&self) {
        let Some(store) = self.observer.sources().store() else { return };
        let state = &mut *self.lock();
        let file = state.settings.file.id;
        state.spaces.drop_stored_descriptors(store, file);
        store.remove(file, StoredFd::Journal);
    }

    /// Records changed rights of the file.
    ///
    /// # Errors
    /// [`TrackingError::Journal`]
    pub fn update_file_info(&self, file: FileInfo) -> Result<(), TrackingError> {
        let mut state = self.lock();
        let before = std::mem::replace(&mut state.settings.file, file);
        let saved = self.save_record(&mut state);
        if saved.is_err() {
            state.settings.file = before;
        }
        saved
    }
}
