//! Which events of a tracked address space happened since the last harvest.

use fdmap_sys::address::AddressRange;

use super::guarded_ranges::GuardedRanges;
use super::holder::HeldSpace;
use super::space_counts::SpaceCounts;
use super::space_events::SpaceSubscription;

/// Whether written bits were taken by a call that was not the service's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum BitsTaken {
    /// No such call was in progress since the last harvest.
    No,
    /// Calls that may have taken bits were in progress, or it is unknown whether any was.
    Possibly,
    /// Calls are not traced.
    #[default]
    Unobserved,
}

impl BitsTaken {
    /// Of two harvests.
    pub(crate) const fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Possibly, _) | (_, Self::Possibly) => Self::Possibly,
            (Self::Unobserved, _) | (_, Self::Unobserved) => Self::Unobserved,
            (Self::No, Self::No) => Self::No,
        }
    }
}

/// The events of one address space, and the counts at the last harvest.
#[derive(Debug, Default)]
pub(crate) struct SpaceHistory {
    /// `None`: events are not traced.
    events: Option<SpaceSubscription>,
    /// Before the last harvest; `None`: what happened before the next harvest is unknown.
    harvested: Option<SpaceCounts>,
    /// `copies` when [`Self::forked`] was last called; `None`: forks before the next call are unknown.
    copies: Option<u64>,
    /// Counts at the last [`Self::note_read_only`]; `None`: it was not called, or a call that is not counted may be in progress.
    counts_at_read_only: Option<SpaceCounts>,
    /// `None`: guard regions are not served.
    guards: Option<GuardedRanges>,
}

impl SpaceHistory {
    /// Starts with what happens from now on. Written bits are complete at this moment.
    pub(crate) fn starting_now(events: Option<SpaceSubscription>) -> Self {
        let copies = events.as_ref().map(|events| events.counts().copies);
        let mut history = Self { events, copies, ..Self::default() };
        history.harvested = history.complete_counts();
        history
    }

    /// The address space existed, with written bits, before its events were traced.
    pub(crate) fn unknown_until_now(events: Option<SpaceSubscription>) -> Self {
        Self { events, ..Self::default() }
    }

    fn counts(&self) -> Option<SpaceCounts> {
        self.events.as_ref().map(SpaceSubscription::counts)
    }

    /// The counts now, before a harvest; `None`: a call that began before the address space was followed may be in progress, which
    /// is not counted.
    pub(crate) fn complete_counts(&self) -> Option<SpaceCounts> {
        self.events.as_ref().and_then(SpaceSubscription::complete_counts)
    }

    /// Lets calls return that install guard regions in the tracked ranges of the address space.
    pub(crate) fn serve_guards(&mut self, userfaultfd: &HeldSpace, tracked: Vec<AddressRange>) {
        if let Some(events) = &mut self.events {
            let guards = GuardedRanges::new(userfaultfd.clone(), tracked);
            events.serve_guards(guards.clone());
            self.guards = Some(guards);
        }
    }

    /// Ranges with guard regions, which are not tracked. In ascending order, without overlap.
    pub(crate) fn guarded(&self) -> Vec<AddressRange> {
        self.guards.as_ref().map(GuardedRanges::ranges).unwrap_or_default()
    }

    /// A harvest write-protected pages of ranges that became guarded meanwhile: removes the protection again.
    pub(crate) fn unprotect_guarded_since(&self, before: &[AddressRange]) {
        let Some(events) = &self.events else { return };
        for range in self.guarded().into_iter().filter(|range| !before.contains(range)) {
            events.unprotect_again(range);
        }
    }

    /// True if events are traced.
    pub(crate) const fn is_traced(&self) -> bool {
        self.events.is_some()
    }

    /// Starts the period that [`Self::made_writable`] reports on. Returns true if a call may have made a shared mapping writable in
    /// the previous period.
    pub(crate) fn note_read_only(&mut self) -> bool {
        let now = self.complete_counts();
        let before = std::mem::replace(&mut self.counts_at_read_only, now);
        self.events.is_some() && !now.is_some_and(|now| stayed_read_only(before, now))
    }

    /// True if a call may have made a shared mapping writable since [`Self::note_read_only`]. False if calls are not traced.
    pub(crate) fn made_writable(&self) -> bool {
        self.counts().is_some_and(|now| !stayed_read_only(self.counts_at_read_only, now))
    }

    /// True if a child may have got a copy of the address space since the last call. False if events are not traced.
    pub(crate) fn forked(&mut self) -> bool {
        let Some(now) = self.counts() else { return false };
        self.copies.replace(now.copies) != Some(now.copies)
    }

    /// Whether written bits were taken until now, since the last harvest.
    pub(crate) fn bits_taken(&self) -> BitsTaken {
        match self.counts() {
            Some(now) => judge(self.harvested, now),
            None => BitsTaken::Unobserved,
        }
    }

    /// Whether written bits were taken until now, since the last harvest but one. `before`: the counts before the last harvest.
    pub(crate) fn after_harvest(&mut self, before: Option<SpaceCounts>) -> BitsTaken {
        let taken = self.bits_taken();
        self.harvested = before;
        taken
    }
}

/// True if no call made a shared mapping writable since `noted`. A call that was in progress then may have done so later.
fn stayed_read_only(noted: Option<SpaceCounts>, now: SpaceCounts) -> bool {
    noted.is_some_and(|noted| {
        noted.protect_begun == noted.protect_ended && noted.protect_begun == now.protect_begun
    })
}

/// A call that was in progress at the last harvest may have taken bits after it.
fn judge(harvested: Option<SpaceCounts>, now: SpaceCounts) -> BitsTaken {
    match harvested {
        Some(harvested) if harvested.begun == harvested.ended && harvested.begun == now.begun => {
            BitsTaken::No
        }
        _ => BitsTaken::Possibly,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_complete_only_if_no_call_was_in_progress() {
        let counts = |begun, ended| SpaceCounts { begun, ended, ..SpaceCounts::default() };
        for (harvested, now, taken) in [
            (Some(counts(4, 4)), counts(4, 4), BitsTaken::No),
            (Some(counts(4, 4)), counts(5, 4), BitsTaken::Possibly),
            (Some(counts(4, 4)), counts(5, 5), BitsTaken::Possibly),
            (Some(counts(5, 4)), counts(5, 4), BitsTaken::Possibly),
            (Some(counts(5, 4)), counts(5, 5), BitsTaken::Possibly),
            (None, counts(4, 4), BitsTaken::Possibly),
        ] {
            assert_eq!(judge(harvested, now), taken, "{harvested:?}, {now:?}");
        }
    }

    #[test]
    fn mappings_stay_read_only_unless_a_call_was_in_progress_or_began() {
        let counts = |begun, ended| SpaceCounts {
            protect_begun: begun,
            protect_ended: ended,
            ..SpaceCounts::default()
        };
        for (noted, now, stayed) in [
            (Some(counts(4, 4)), counts(4, 4), true),
            (Some(counts(4, 4)), counts(5, 5), false),
            (Some(counts(5, 4)), counts(5, 5), false),
            (None, counts(4, 4), false),
        ] {
            assert_eq!(stayed_read_only(noted, now), stayed, "{noted:?}, {now:?}");
        }
    }

    #[test]
    fn untraced_address_space_is_unobserved() {
        let mut history = SpaceHistory::starting_now(None);
        assert_eq!(history.bits_taken(), BitsTaken::Unobserved);
        assert_eq!(history.after_harvest(None), BitsTaken::Unobserved);
    }
}
