//! What is asked of a tracker besides checkpoints: how things stand, policies, cursors.

use fdmap_proto::tracking::{Coverage, CoveragePolicy, Cursor, Effect, GapKind, TrackedMapping};
use fdmap_proto::units::Generation;

use super::coverage::GapLog;
use super::cursors::{CursorUser, FrozenSet};
use super::observed::Observed;
use super::stamps::Counts;
use super::tracker::{Tracker, all_pages};
use super::{TrackingError, collect};

/// How a file stands.
#[derive(Clone, Debug)]
pub struct Standing {
    /// Of the last closed generation, and of what is seen now.
    pub coverage: Coverage,
    /// What is tracked.
    pub mappings: Vec<TrackedMapping>,
    /// What is done about what is not.
    pub policy: CoveragePolicy,
    /// The last closed generation.
    pub closed_generation: Generation,
    /// Nobody new can write.
    pub writers_sealed: bool,
}

impl Tracker {
    /// Who could write now, and how much of that is observed. It takes no marks.
    ///
    /// # Errors
    /// [`TrackingError`]
    pub fn coverage_report(&self) -> Result<Standing, TrackingError> {
        let mut state = self.lock();
        let marks = self.marks()?;
        let standing = self.standing(&state);
        let writable = self.writable_now();
        let mut missed = state.open_gaps.clone();
        if writable.is_none() || writable != standing {
            let mut found = collect::Found::default();
            let untracked = self.untracked_now(&mut state, writable, &mut found, false);
            missed.append(&mut found.missed);
            if untracked.unknown {
                let detail = "not all processes that map the file were found";
                missed.push(collect::missed(GapKind::UnknownMappers, None, None, detail));
            }
        }
        if standing.is_none() {
            let detail = "a tracked mapping ended and is not harvested yet";
            missed.push(collect::missed(GapKind::EndedMapping, None, None, detail));
        }
        if !marks.closed && self.followed.is_none() {
            let detail = "writes through descriptors are noticed, their ranges are not";
            missed.push(collect::missed(GapKind::DescriptorWrite, None, None, detail));
        }
        if !self.probe.attributes().maybe_pinned {
            let gap = collect::missed(GapKind::DirectIo, None, None, "direct I/O and DMA: not observed");
            missed.push(super::coverage::Missed { effect: Effect::Ignored, ..gap });
        }
        let mut now = GapLog::default();
        now.add(state.open, missed);
        let coverage = now.coverage(Generation::NONE, state.open, state.pieces(), self.granularity());
        Ok(Standing {
            coverage,
            mappings: state.observed.iter().flat_map(Observed::told).collect(),
            policy: state.policy,
            closed_generation: state.open.previous(),
            writers_sealed: marks.closed,
        })
    }

    /// What to do about writers that are not observed.
    ///
    /// # Errors
    /// [`TrackingError::Journal`]
    pub fn set_coverage_policy(&self, policy: CoveragePolicy) -> Result<(), TrackingError> {
        let mut state = self.lock();
        state.policy = policy;
        self.save_record(&mut state)
    }

    /// Pages that were written after a generation.
    #[must_use]
    pub fn count(&self, since: Generation) -> Counts {
        let view = self.view();
        view.stamps.count(since, Some(view.closed), all_pages())
    }

    /// A new cursor.
    ///
    /// # Errors
    /// [`TrackingError::NotClosed`] if it is to begin at a generation that is not closed, [`TrackingError`]
    pub fn create_cursor(
        &self,
        name: &str,
        at: Generation,
        user: CursorUser,
    ) -> Result<Cursor, TrackingError> {
        let mut state = self.lock();
        let closed = state.open.previous();
        if at > closed {
            return Err(TrackingError::NotClosed { asked: at, closed });
        }
        let cursor = state.cursors.create(name, at, user)?;
        self.save_record(&mut state)?;
        Ok(cursor)
    }

    /// The user's cursors.
    #[must_use]
    pub fn cursors(&self, user: CursorUser) -> Vec<Cursor> {
        self.lock().cursors.list(user)
    }

    /// Forgets a cursor.
    ///
    /// # Errors
    /// [`TrackingError`]
    pub fn delete_cursor(&self, name: &str, user: CursorUser) -> Result<(), TrackingError> {
        let mut state = self.lock();
        state.cursors.delete(name, user)?;
        self.save_record(&mut state)
    }

    /// Takes a checkpoint and freezes what a cursor has not dealt with; one that has begun stays as it is.
    ///
    /// # Errors
    /// [`TrackingError`]
    pub fn begin_cursor(
        &self,
        name: &str,
        user: CursorUser,
        exact: bool,
    ) -> Result<(Cursor, Counts, Coverage), TrackingError> {
        let begun = self.lock().cursors.get(name, user)?.1.is_some();
        if !begun {
            self.checkpoint(exact, None)?;
        }
        let view = self.view();
        let mut state = self.lock();
        let (cursor, frozen) = state.cursors.begin(name, user, |since| FrozenSet {
            since,
            until_generation: view.closed,
            stamps: view.stamps.clone(),
            coverage: self.coverage(&view, since),
            pages: view.pages,
        })?;
        let counts = frozen.stamps.count(frozen.since, None, all_pages());
        Ok((cursor, counts, frozen.coverage.clone()))
    }

    /// What a cursor has frozen.
    ///
    /// # Errors
    /// [`TrackingError::Cursor`]
    pub fn frozen(&self, name: &str, user: CursorUser) -> Result<FrozenSet, TrackingError> {
        let state = self.lock();
        let (_, frozen) = state.cursors.get(name, user)?;
        let not_begun = || super::CursorError::NotBegun(name.to_owned());
        Ok(frozen.cloned().ok_or_else(not_begun)?)
    }

    /// A cursor's frozen set was dealt with.
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
        let cursor = state.cursors.commit(name, user, generation)?;
        self.save_record(&mut state)?;
        Ok(cursor)
    }

    /// A cursor lets go of its frozen set.
    ///
    /// # Errors
    /// [`TrackingError::Cursor`]
    pub fn abort_cursor(&self, name: &str, user: CursorUser) -> Result<Cursor, TrackingError> {
        Ok(self.lock().cursors.abort(name, user)?)
    }
}
