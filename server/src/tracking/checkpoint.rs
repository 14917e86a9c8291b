//! A checkpoint: observe; if not idle, harvest, stamp what was observed, classify the rest, stamp it, commit.

use std::time::{Instant, SystemTime};

use fdmap_proto::Checkpoint;
use fdmap_proto::tracking::{CoverageGap, CoveragePolicy, GapKind};
use fdmap_proto::units::Generation;
use fdmap_sys::memfd::FileOrigin;

use super::baseline::PendingWrite;
use super::classify::{self, DescriptorEvidence, Findings, IdleEvidence, InFlight, MappingHistory};
use super::classify::{
    KernelWriterEvidence, RemovalEvidence, TrackedRange, UnrangedCalls, UntrackedMappings, WriterCensus,
};
use super::error::TrackingError;
use super::gap_log::with_gaps;
use super::observe::{ChildHarvest, MapperAudit, Observation};
use super::ranges::{self, ALL_PAGES};
use super::stamps::Counts;
use super::state::State;
use super::tracker::Tracker;
use crate::watchdog::{self, Phase};

impl Tracker {
    /// Closes the open generation, unless nothing was written in it. `force_scan`: harvest all mappings and close the generation
    /// in any case. `idempotency_key`: a retry with the same key returns the recorded result.
    ///
    /// # Errors
    /// [`TrackingError::Fenced`]; [`TrackingError`]. No generation is closed then, and what was found is stamped in the open one.
    pub fn checkpoint(
        &self,
        force_scan: bool,
        idempotency_key: Option<u64>,
    ) -> Result<Checkpoint, TrackingError> {
        let began = Instant::now();
        let _operation = self.begin("Checkpoint");
        let state = &mut *self.lock();
        if let Some(result) = idempotency_key.and_then(|key| state.generations.recorded_result(key)) {
            return Ok(self.result(state, result.generation, result.unchanged, began));
        }
        if let Some(reason) = &state.settings.file.fence {
            return Err(TrackingError::Fenced(reason.clone()));
        }
        watchdog::enter(Phase::Observation);
        let mut seen = self.observer.observe(&mut state.spaces, &mut state.history, &state.baseline)?;
        seen.judge_remaps(state.untracked.is_empty());
        let unchanged = !force_scan && self.is_idle(state, &seen);
        if unchanged {
            if let Some(key) = idempotency_key {
                state.generations.record_unchanged(key);
                state.write_header();
            }
        } else {
            self.harvest_and_stamp(state, &seen)?;
            state.history.remaps.add(state.spaces.known());
            self.commit(state, idempotency_key)?;
        }
        Ok(self.result(state, state.generations.closed(), unchanged, began))
    }

    fn is_idle(&self, state: &State, seen: &Observation) -> bool {
        let (baseline, traits) = (&state.baseline, self.observer.traits());
        let sealed = seen.inode.writers_sealed && baseline.writers_sealed;
        let idle = classify::idle(&IdleEvidence {
            hugetlb: traits.hugetlb,
            unnotified_descriptors: traits.unnotified_descriptors && !sealed,
            ctime_changed: seen.ctime_may_have_changed(baseline),
            modified: !seen.modifiers.is_empty() || seen.signals_lost,
            unnotified_write_pending: self.pending_write(state, seen).is_some(),
            traced_writes: seen.has_traced_writes(),
            loop_device: seen.loop_device,
            redirty_pages: !state.redirty.is_empty() || state.history.devices.may_pin(),
            permanently_attached: seen.permanently_attached,
            untracked_mappings: !seen.all_writers_tracked()
                || !state.untracked.is_empty()
                || state.spaces.has_unidentified_children()
                || state.spaces.has_late()
                || seen.bits_taken
                || !seen.forked.is_empty()
                || seen.child_reaped
                || seen.forks_possible
                || classify::mappings_came(seen, baseline, traits.origin),
            mappings_intact: seen.intact_vmas.is_some(),
            same_size: seen.inode.pages == baseline.pages,
            stamped_since: state.generations.stamped_since_closed(),
        });
        // Every file has at least one closed generation after its first checkpoint.
        idle && !state.generations.closed().is_none()
    }

    /// Harvests all mappings, and stamps everything that was or may have been written with the open generation.
    ///
    /// # Errors
    /// [`TrackingError`]. What was harvested is stamped, or the next checkpoint relies on no signal.
    fn harvest_and_stamp(&self, state: &mut State, seen: &Observation) -> Result<(), TrackingError> {
        let stamped = self
            .harvest(state, seen)
            .and_then(|(findings, in_flight)| self.stamp(state, seen, findings, &in_flight));
        if stamped.is_err() {
            // The signals were taken, and written bits may have been cleared.
            self.interrupt(state);
        }
        stamped
    }

    fn harvest(&self, state: &mut State, seen: &Observation) -> Result<(Findings, InFlight), TrackingError> {
        let file = self.observer.file();
        state.generations.intend(ranges::hull(&state.spaces.pages(file.page_size)));
        watchdog::enter(Phase::Harvest);
        let mut findings = classify::harvested(state.spaces.harvest(file, |_| true));
        state.spaces.check_announced_ends(file);
        let harvested = !findings.observed.is_empty() || state.take_harvested_writes();
        let untracked_before = !state.untracked.is_empty();
        let size = seen.inode.pages.max(state.baseline.pages);
        let in_flight = classify::traced_writes(seen.calls.as_ref(), size, &mut findings);
        // The harvested pages are stamped before anything else can fail.
        state.generations.stamp_observed(&findings.observed)?;
        // Children that were forked meanwhile are harvested too.
        self.observer.receive_forks(&mut state.spaces);
        findings.merge(self.classify_mappings(state, seen));
        let untracked = untracked_before
            || !state.untracked.is_empty()
            || classify::mappings_came(seen, &state.baseline, self.observer.traits().origin);
        findings.merge(self.classify_descriptors(state, seen, harvested || untracked));
        findings.merge(classify::permanently_attached(seen.permanently_attached, state.settings.policy));
        findings.suspect.extend(classify::resized(&state.baseline, &seen.inode));
        if state.take_interrupted() {
            let detail = "an earlier harvest was interrupted";
            findings.add_suspect(ALL_PAGES, classify::gap(GapKind::LostEvents, None, None, detail));
        }
        Ok((findings, in_flight))
    }

    /// Judges the mappings that exist now, and those that existed since the last checkpoint.
    fn classify_mappings(&self, state: &mut State, seen: &Observation) -> Findings {
        let policy = state.settings.policy;
        let before = std::mem::take(&mut state.untracked);
        // No search for mappers finds children that have exited, and they are in the way of others.
        let unidentified = self.observer.remove_exited_children(&mut state.spaces);
        let exited = classify::children(ChildHarvest { unidentified, ..ChildHarvest::default() });
        let writable_vmas = self.observer.writable_vmas();
        let all_tracked = seen.all_writers_tracked()
            && seen.intact_vmas == Some(state.spaces.extent_count())
            && writable_vmas == seen.writable_vmas;
        let (untracked, more) = if all_tracked && !state.spaces.has_unidentified_children() {
            (UntrackedMappings::default(), Findings::default())
        } else {
            watchdog::enter(Phase::MapperWalk);
            let audit = self.observer.find_mappers(state.generations.owner());
            watchdog::enter(Phase::Audit);
            let (file, objects) = (self.observer.file(), self.observer.kernel_objects());
            let sources = self.observer.sources();
            let children = state.spaces.identify_children(sources, file, &audit.mappers, objects);
            let mut findings = classify::children(children);
            let (untracked, more) = census(state, &audit, writable_vmas.max(seen.writable_vmas));
            findings.merge(more);
            (untracked, findings)
        };
        let mut findings = exited;
        findings.merge(more);
        findings.merge(classify::mappings(
            MappingHistory {
                untracked_before: &before,
                mappings_came: classify::mappings_came(seen, &state.baseline, self.observer.traits().origin),
                forked: &seen.forked,
                child_reaped: seen.child_reaped,
                forks_possible: seen.forks_possible,
                tracked_pages: &state.spaces.pages(self.observer.file().page_size),
            },
            policy,
        ));
        state.spaces.drop_exited_children(untracked.is_empty());
        state.untracked = untracked;
        findings
    }

    fn classify_descriptors(&self, state: &mut State, seen: &Observation, mapped_writes: bool) -> Findings {
        let traits = self.observer.traits();
        let calls = seen.calls.as_ref();
        let verdict = classify::judge_descriptors(&DescriptorEvidence {
            writers_sealed: seen.inode.writers_sealed && state.baseline.writers_sealed,
            unnotified_descriptors: traits.unnotified_descriptors,
            ctime_changed: self.ctime_changed(state, seen),
            events: classify::judge_events(&seen.modifiers, calls, traits.origin == FileOrigin::Mounted),
            signals_lost: seen.signals_lost,
            mapped_writes,
            traced_calls: seen.has_traced_writes(),
            unranged: calls.map(|calls| UnrangedCalls {
                unmatched: calls.other.unmatched,
                requests: calls.other.requests,
            }),
            loop_device: seen.loop_device,
            pending: self.pending_write(state, seen),
        });
        let begun = verdict.unnotified_write.then_some(PendingWrite { only_possible: verdict.only_possible });
        let calls_traced = self.observer.traces_calls();
        state.unnotified_writes = state.unnotified_writes.after_checkpoint(begun, seen.time, calls_traced);
        let mut findings = classify::descriptor_findings(verdict, state.settings.policy);
        let removals = RemovalEvidence {
            hugetlb: traits.hugetlb,
            unnotified_descriptors: traits.unnotified_descriptors,
            writers_sealed: seen.inode.writers_sealed && state.baseline.writers_sealed,
            calls_traced,
        };
        findings.merge(classify::unobserved_removals(removals, state.settings.policy));
        findings.gaps.extend(self.kernel_writers(seen.inode.writers_sealed && state.baseline.writers_sealed));
        findings
    }

    /// The gaps of writers that no signal shows.
    pub(super) fn kernel_writers(&self, writers_sealed: bool) -> Vec<CoverageGap> {
        let [now, before] = self.observer.kernel_writers();
        let calls_traced = self.observer.traces_calls();
        let skipped_requests = self.observer.requests_were_skipped();
        classify::kernel_writers(KernelWriterEvidence {
            now,
            before,
            calls_traced,
            writers_sealed,
            skipped_requests,
        })
    }

    /// True if a writer may have changed the ctime that raises no event and makes no traced call. Only the service made
    /// descriptors of a memfd that it created and whose calls are traced: then a change within the tick of the last one is known.
    fn ctime_changed(&self, state: &State, seen: &Observation) -> bool {
        let traits = self.observer.traits();
        let all_known =
            seen.calls.is_some() && !traits.unnotified_descriptors && traits.origin != FileOrigin::Mounted;
        if all_known {
            seen.ctime_changed(&state.baseline)
        } else {
            seen.ctime_may_have_changed(&state.baseline)
        }
    }

    fn pending_write(&self, state: &State, seen: &Observation) -> Option<PendingWrite> {
        state.unnotified_writes.pending(seen.time, self.observer.traces_calls())
    }

    /// Stamps findings, and makes the observed inode the next baseline.
    fn stamp(
        &self,
        state: &mut State,
        seen: &Observation,
        findings: Findings,
        in_flight: &InFlight,
    ) -> Result<(), TrackingError> {
        watchdog::enter(Phase::Stamping);
        let Findings { observed, mut inherited, suspect, mut gaps } = findings;
        let mut conservative = self.suspect_pages(state, suspect)?;
        conservative.append(&mut inherited);
        ranges::normalize(&mut conservative);
        state.generations.stamp_conservative(&conservative)?;
        // What calls in progress write after this point belongs to the next generation.
        state.generations.stamp_next(in_flight)?;
        let mut stamped = observed;
        stamped.extend(conservative);
        gaps.extend(self.update_redirty(state, seen.inode.pages, &stamped)?);
        state.settle(self.observer.file().page_size);
        state.generations.add_gaps(gaps);
        if state.spaces.has_stale_descriptors() {
            self.save_record(state)?;
        }
        state.baseline = seen.inode;
        if state.settings.policy == CoveragePolicy::Refuse && !state.untracked.is_empty() {
            return Err(TrackingError::Refused(untracked_writer(state)));
        }
        Ok(())
    }

    /// Closes the open generation and publishes it.
    fn commit(&self, state: &mut State, idempotency_key: Option<u64>) -> Result<(), TrackingError> {
        watchdog::enter(Phase::Journal);
        let untracked = !state.untracked.is_empty();
        let event = state.generations.close(idempotency_key, &state.baseline, untracked)?;
        self.publish(state);
        // Fails if there is no subscriber.
        let _ = self.checkpoints.send(event);
        Ok(())
    }

    fn result(&self, state: &State, generation: Generation, unchanged: bool, began: Instant) -> Checkpoint {
        let since = if unchanged { generation } else { generation.previous() };
        let counts = if unchanged {
            Counts::default()
        } else {
            state.generations.count_pages_of(generation, state.baseline.pages)
        };
        let tracked = state.spaces.extent_count();
        let mut coverage = state.generations.coverage(since, generation, tracked, self.granularity());
        if unchanged {
            // The file looks unchanged, but these writers leave no sign.
            coverage = with_gaps(coverage, self.kernel_writers(state.baseline.writers_sealed));
        }
        let (duration, time) = (began.elapsed(), SystemTime::now());
        Checkpoint {
            generation,
            unchanged,
            observed_pages: counts.exact,
            conservative_pages: counts.conservative,
            coverage,
            duration,
            time,
        }
    }
}

/// The writable mappings that are not tracked; `writable_vmas`: how many writable mappings there are in all.
pub(super) fn census(
    state: &State,
    audit: &MapperAudit,
    writable_vmas: Option<u64>,
) -> (UntrackedMappings, Findings) {
    let tracked = state.spaces.ranges().map(|(space, range)| TrackedRange {
        pid: space.pid,
        identity: space.identity,
        range,
    });
    let tracked: Vec<_> = tracked.collect();
    let census = WriterCensus { audit, tracked: &tracked, writable_vmas };
    classify::coverage(census, state.settings.policy)
}

/// The first untracked writer, for the error of a refused checkpoint.
fn untracked_writer(state: &State) -> String {
    let mut gaps = state.generations.open_gaps().iter();
    let known = gaps.find(|gap| gap.kind == GapKind::UntrackedMapping && gap.pid.is_some());
    known.map_or_else(
        || "processes map the file that cannot be found".to_owned(),
        |gap| match gap.range {
            Some(range) => format!("pages {range} are {}", gap.detail),
            None => gap.detail.clone(),
        },
    )
}
