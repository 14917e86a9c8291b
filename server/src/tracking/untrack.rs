//! The end of tracking: Untrack by the owner of the mappings, Detach from outside.

use fdmap_proto::units::MappingId;
use fdmap_sys::pidfd::PidFd;

use super::classify;
use super::error::TrackingError;
use super::ranges;
use super::state::State;
use super::tracker::Tracker;
use crate::watchdog::{self, Phase};

impl Tracker {
    /// Harvests mappings that are about to end. Their end loses no write then. Only process `pid`, their owner, may call this:
    /// it must not write through them any more, and has made them read-only. A mapping that is still writable is tracked until it
    /// is unmapped, which is a coverage gap.
    ///
    /// # Errors
    /// [`TrackingError::NoMapping`] if an id is not a mapping of that process; [`TrackingError::Exited`]; [`TrackingError`]
    pub fn untrack(&self, pid: u32, process: &PidFd, ids: &[MappingId]) -> Result<(), TrackingError> {
        let _operation = self.begin("Untrack");
        let state = &mut *self.lock();
        check_process(pid, process)?;
        check_mappings(state, pid, ids)?;
        watchdog::enter(Phase::Observation);
        state.spaces.note_read_only(pid);
        // A mapping that becomes read-only only after the harvest may have been written after it.
        let read_only = state.spaces.read_only_mappings(self.observer.file(), pid, ids);
        self.harvest_process(state, pid)?;
        state.spaces.announce_end(self.observer.file(), pid, &read_only);
        state.settle(self.observer.file().page_size);
        self.save_record(state)?;
        self.publish(state);
        Ok(())
    }

    /// Harvests mappings of process `pid` and stops tracking them; all mappings of the process if `ids` is empty. They are
    /// untracked mappings from then on. Returns the number of mappings.
    ///
    /// # Errors
    /// As [`Self::untrack`].
    pub fn detach(&self, pid: u32, process: &PidFd, ids: &[MappingId]) -> Result<usize, TrackingError> {
        let _operation = self.begin("Detach");
        let state = &mut *self.lock();
        check_process(pid, process)?;
        let file = self.observer.file();
        check_mappings(state, pid, ids)?;
        watchdog::enter(Phase::Observation);
        // Children of the process are identified later by what it has mapped now.
        self.observer.wait_for_forks(&mut state.spaces);
        self.observer.receive_forks(&mut state.spaces);
        self.harvest_process(state, pid)?;
        let chosen = |id: MappingId| ids.is_empty() || ids.contains(&id);
        let detached = state.spaces.detach(file, pid, |mapping| chosen(mapping.id));
        // Writes after the harvest set no written bit, and later writes are not observed.
        let extents = detached.iter().flat_map(|mapping| &mapping.extents);
        state.untracked.pages.extend(extents.map(|extent| extent.pages(file.page_size)));
        ranges::normalize(&mut state.untracked.pages);
        state.write_header();
        state.settle(self.observer.file().page_size);
        self.save_record(state)?;
        self.publish(state);
        Ok(detached.len())
    }

    /// Harvests and stamps all mappings of process `pid` between two checkpoints. The caller settles the journal.
    fn harvest_process(&self, state: &mut State, pid: u32) -> Result<(), TrackingError> {
        let file = self.observer.file();
        state.generations.intend(ranges::hull(&state.spaces.pages(file.page_size)));
        watchdog::enter(Phase::Harvest);
        let harvest = state.spaces.harvest(file, |space| space.pid == pid);
        if !harvest.written.is_empty() {
            state.note_harvested_writes();
        }
        let stamped = self.stamp_between_checkpoints(state, classify::harvested(harvest));
        if stamped.is_err() {
            self.interrupt(state);
        }
        stamped
    }
}

/// Checks, with the tracker locked, that no other process can have this pid and be tracked: the request may have waited, and its process
/// may have exited meanwhile.
fn check_process(pid: u32, process: &PidFd) -> Result<(), TrackingError> {
    if process.exited()? { Err(TrackingError::Exited(pid)) } else { Ok(()) }
}

fn check_mappings(state: &State, pid: u32, ids: &[MappingId]) -> Result<(), TrackingError> {
    match ids.iter().find(|id| !state.spaces.contains(pid, **id)) {
        Some(id) => Err(TrackingError::NoMapping { id: *id, pid }),
        None => Ok(()),
    }
}
