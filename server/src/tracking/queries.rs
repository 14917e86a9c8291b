//! Requests other than checkpoints: coverage, policy, cursors.

use fdmap_proto::FileCoverage;
use fdmap_proto::tracking::{Coverage, CoverageGap, CoveragePolicy, Cursor, Effect};
use fdmap_proto::units::{Generation, PageRange};

use super::checkpoint::census;
use super::classify::{self, CoverageLimits, MappingHistory};
use super::cursors::{CursorError, CursorUser, FrozenSet};
use super::error::TrackingError;
use super::gap_log::{GapLog, with_gaps};
use super::observe::Charge;
use super::stamps::{Counts, StampMap};
use super::state::State;
use super::tracker::Tracker;
use crate::watchdog::{self, Phase};

impl Tracker {
    /// Which writers can write now, and which of them are not observed. Harvests nothing.
    ///
    /// # Errors
    /// [`TrackingError`]
    pub fn file_coverage(&self) -> Result<FileCoverage, TrackingError> {
        let _operation = self.begin("GetCoverage");
        let state = &*self.lock();
        watchdog::enter(Phase::Observation);
        let inode = self.observer.inode()?;
        let intact_vmas = state.spaces.intact_vmas(self.observer.file());
        let writable_vmas = self.observer.writable_vmas();
        let mut gaps = state.generations.open_gaps().to_vec();
        if writable_vmas.is_none() || writable_vmas != intact_vmas {
            watchdog::enter(Phase::MapperWalk);
            let (_, findings) =
                census(state, &self.observer.find_mappers(state.generations.owner()), writable_vmas);
            gaps.extend(findings.gaps);
        }
        gaps.extend(ignored_writers(state));
        let page_size = self.observer.file().page_size;
        gaps.extend(classify::guarded(state.spaces.guarded(page_size)).gaps);
        gaps.extend(classify::limits(CoverageLimits {
            mappings_intact: intact_vmas.is_some(),
            writers_sealed: inode.writers_sealed,
            calls_traced: self.observer.traces_calls(),
            taken_bits_observed: state.spaces.observes_taken_bits(),
            pins_supported: self.observer.sees_pins(),
        }));
        gaps.extend(self.kernel_writers(inode.writers_sealed));
        let attached = self.observer.is_permanently_attached();
        gaps.extend(classify::permanently_attached(attached, state.settings.policy).gaps);
        let open = state.generations.open();
        let mut now = GapLog::default();
        now.add(open, gaps);
        let tracked = state.spaces.extent_count();
        Ok(FileCoverage {
            coverage: now.coverage(Generation::NONE, open, tracked, self.granularity()),
            mappings: state.spaces.list(),
            policy: state.settings.policy,
            generation: state.generations.closed(),
            writers_sealed: inode.writers_sealed,
        })
    }

    /// Sets what checkpoints do about writers that are not observed.
    ///
    /// # Errors
    /// [`TrackingError::Journal`]
    pub fn set_coverage_policy(&self, policy: CoveragePolicy) -> Result<(), TrackingError> {
        let mut state = self.lock();
        state.settings.policy = policy;
        self.save_record(&mut state)
    }

    /// The number of pages written after generation `since`.
    #[must_use]
    pub fn count(&self, since: Generation) -> Counts {
        let view = self.view();
        view.stamps.count(since, None, PageRange::first(view.pages))
    }

    /// Creates a cursor at generation `at`.
    ///
    /// # Errors
    /// [`TrackingError::NotClosed`] if the generation is not closed; [`TrackingError`]
    pub fn create_cursor(
        &self,
        name: &str,
        at: Generation,
        user: CursorUser,
    ) -> Result<Cursor, TrackingError> {
        let mut state = self.lock();
        let closed = state.generations.closed();
        if at > closed {
            return Err(TrackingError::NotClosed { generation: at, last_closed: closed });
        }
        let cursor = state.settings.cursors.create(name, at, user)?;
        self.save_record(&mut state)?;
        Ok(cursor)
    }

    /// The cursors of a user.
    #[must_use]
    pub fn cursors(&self, user: CursorUser) -> Vec<Cursor> {
        self.lock().settings.cursors.list(user)
    }

    /// # Errors
    /// [`TrackingError`]
    pub fn delete_cursor(&self, name: &str, user: CursorUser) -> Result<(), TrackingError> {
        let mut state = self.lock();
        state.settings.cursors.delete(name, user)?;
        self.save_record(&mut state)
    }

    /// Takes a checkpoint and freezes the changes after the cursor's generation. A cursor that has begun keeps its frozen set. `charge`
    /// charges the caller for the memory of a new set, until that is dropped.
    ///
    /// # Errors
    /// [`TrackingError`]
    pub fn begin_cursor(
        &self,
        name: &str,
        user: CursorUser,
        force_scan: bool,
        charge: impl FnOnce(&StampMap) -> Result<Charge, TrackingError>,
    ) -> Result<(Cursor, Counts, Coverage), TrackingError> {
        let begun = self.lock().settings.cursors.get(name, user)?.1.is_some();
        let checkpoint = if begun { None } else { Some(self.checkpoint(force_scan, None)?) };
        // Gaps of a checkpoint that closed no generation belong to none.
        let unlogged = checkpoint.filter(|checkpoint| checkpoint.unchanged);
        let unlogged = unlogged.map(|checkpoint| checkpoint.coverage.gaps).unwrap_or_default();
        let view = self.view();
        let memory = if begun { None } else { Some(charge(&view.stamps)?) };
        let mut state = self.lock();
        let (cursor, frozen) = state.settings.cursors.begin(name, user, |since| FrozenSet {
            since,
            until_generation: view.closed,
            stamps: view.stamps.clone(),
            coverage: with_gaps(self.coverage(&view, since), unlogged),
            pages: view.pages,
            memory,
        })?;
        let counts = frozen.stamps.count(frozen.since, None, PageRange::first(frozen.pages));
        Ok((cursor, counts, frozen.coverage.clone()))
    }

    /// The frozen set of a cursor that has begun.
    ///
    /// # Errors
    /// [`TrackingError::Cursor`]
    pub fn frozen(&self, name: &str, user: CursorUser) -> Result<FrozenSet, TrackingError> {
        let state = self.lock();
        let (_, frozen) = state.settings.cursors.get(name, user)?;
        let not_begun = || CursorError::NotBegun(name.to_owned());
        Ok(frozen.cloned().ok_or_else(not_begun)?)
    }

    /// Moves a cursor to the generation of its frozen set, and drops the set.
    ///
    /// # Errors
    /// [`TrackingError`]
    pub fn commit_cursor(
        &self,
        name: &str,
        user: CursorUser,
        generation: Generation,
    ) -> Result<Cursor, TrackingError> {
        let mut state = self.lock();
        let cursor = state.settings.cursors.commit(name, user, generation)?;
        self.save_record(&mut state)?;
        Ok(cursor)
    }

    /// Drops the frozen set of a cursor. The cursor stays at its generation.
    ///
    /// # Errors
    /// [`TrackingError::Cursor`]
    pub fn abort_cursor(&self, name: &str, user: CursorUser) -> Result<Cursor, TrackingError> {
        Ok(self.lock().settings.cursors.abort(name, user)?)
    }
}

/// Gaps of untracked writers since the last checkpoint, which may be gone by now. The next checkpoint leaves their writes out
/// under the policy `Ignore`, and stamps them conservatively under the others.
fn ignored_writers(state: &State) -> Vec<CoverageGap> {
    let history = MappingHistory {
        untracked_before: &state.untracked,
        mappings_came: false,
        forked: &[],
        child_reaped: false,
        forks_possible: false,
        tracked_pages: &[],
    };
    let mut gaps = classify::mappings(history, state.settings.policy).gaps;
    gaps.retain(|gap| gap.effect == Effect::Ignored);
    gaps
}
