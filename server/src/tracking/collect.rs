//! The second half of a checkpoint: taking marks, judging what has none, and stamping.

use std::os::fd::AsFd as _;
use std::time::Instant;

use fdmap_proto::tracking::{CoveragePolicy, Effect, GapKind};
use fdmap_proto::units::{PageIndex, PageRange};
use fdmap_sys::address::AddressRange;
use fdmap_sys::uffd::Userfaultfd;

use super::TrackingError;
use super::audit::{Audit, audit};
use super::coverage::Missed;
use super::data::data_pages;
use super::evidence::{DescriptorEvidence, judge_descriptors};
use super::forked::Held;
use super::look::Look;
use super::observed::{Harvest, Observed};
use super::ranges;
use super::stamp::PageStamp;
use super::state::{State, Untracked};
use super::tracker::{Tracker, all_pages};
use crate::probe::{PinKind, ScanTarget};

/// Userfaultfds that are kept without knowing whose they are.
const SPARE: usize = 1024;

/// What is to be stamped, as it is gathered.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Seen to be written.
    pub(super) exact: Vec<PageRange>,
    /// Seen to be written in this generation or before.
    pub(super) told: Vec<PageRange>,
    /// All data in these pages counts as written.
    pub(super) suspect: Vec<PageRange>,
    /// Why.
    pub(super) missed: Vec<Missed>,
}

impl Found {
    pub(super) fn suspect(&mut self, pages: PageRange, missed: Missed) {
        self.suspect.push(pages);
        self.missed.push(missed);
    }
}

pub(super) fn missed(
    kind: GapKind,
    pid: Option<u32>,
    range: Option<PageRange>,
    detail: impl Into<String>,
) -> Missed {
    Missed { kind, effect: Effect::Conservative, pid, range, detail: detail.into() }
}

impl Tracker {
    /// Takes all marks and stamps them, and what is not known, with the open generation.
    ///
    /// # Errors
    /// [`TrackingError`]. What was taken is stamped all the same, or is in doubt at the next checkpoint.
    pub(super) fn collect(&self, state: &mut State, look: &Look) -> Result<(), TrackingError> {
        let collected = self.collect_and_stamp(state, look);
        if collected.is_err() {
            // Signals were used up, and who knows what else.
            self.doubt(state);
        }
        collected
    }

    fn collect_and_stamp(&self, state: &mut State, look: &Look) -> Result<(), TrackingError> {
        let open = state.open;
        let mut found = Found::default();
        let hull = ranges::hull(&state.observed_pages(self.mapped.page_size));
        state.journal.intend(hull, open);
        self.harvest(state, &mut found, |_| true);
        let mapped_writes = !found.exact.is_empty();
        let in_flight = self.add_calls(state, look, &mut found);
        // What was taken is stamped before anything else can fail.
        state.stamp(&found.exact, PageStamp::new(open, false))?;
        // Of children that came meanwhile the marks are taken too.
        self.hear_of_forks(state);
        self.judge_mappings(state, look, &mut found);
        self.judge_descriptors(state, look, mapped_writes, &mut found);
        self.judge_size(state, look, &mut found);
        if std::mem::take(&mut state.doubt) {
            let detail = "a look at the file was cut short";
            found.suspect(all_pages(), missed(GapKind::LostEvents, None, None, detail));
        }
        let mut conservative = self.doubtful_pages(state, &mut found.suspect)?;
        conservative.append(&mut found.told);
        ranges::normalize(&mut conservative);
        state.stamp(&conservative, PageStamp::new(open, true))?;
        if !in_flight.is_empty() {
            // Whatever they write after this belongs to the next generation.
            let next = open.next().ok_or(TrackingError::NoMoreGenerations)?;
            state.stamp(&in_flight, PageStamp::new(next, true))?;
        }
        let mut stamped = std::mem::take(&mut found.exact);
        stamped.extend(conservative);
        self.judge_pins(state, look.marks.pages, look.now, &stamped, &mut found.missed)?;
        state.journal.settle();
        state.open_gaps.append(&mut found.missed);
        if state.kept.len() > state.observed.len() {
            self.save_record(state)?;
        }
        let refused = state.policy == CoveragePolicy::Refuse && !state.untracked.is_empty();
        let silent_since = state.marks.silent_since;
        state.marks = look.marks;
        state.marks.silent_since = silent_since;
        if refused { Err(self.refusal(state)) } else { Ok(()) }
    }

    /// Takes the marks of those that are `chosen`, and lets go of what has ended.
    pub(super) fn harvest(&self, state: &mut State, found: &mut Found, chosen: impl Fn(&Observed) -> bool) {
        let page_size = self.mapped.page_size;
        let State { observed, regions, .. } = state;
        for observed in observed {
            if !chosen(observed) {
                continue;
            }
            let before = observed.pages(page_size);
            let Harvest { written, lost } = match observed.harvest(self.mapped, regions) {
                Ok(harvest) => harvest,
                Err(error) => {
                    tracing::warn!(
                        pid = observed.pid,
                        error = fdmap_proto::error_chain(&error),
                        "harvesting mappings"
                    );
                    Harvest { written: Vec::new(), lost: before }
                }
            };
            found.exact.extend(written);
            for range in lost {
                let ended = missed(
                    GapKind::EndedMapping,
                    Some(observed.pid),
                    Some(range),
                    "a tracked mapping ended before it was harvested",
                );
                found.suspect(range, ended);
            }
        }
        state.drop_ended();
        ranges::normalize(&mut found.exact);
    }

    /// Mappings that are not tracked, were not at the last checkpoint, or came and went.
    fn judge_mappings(&self, state: &mut State, look: &Look, found: &mut Found) {
        let before = std::mem::take(&mut state.untracked);
        let after = self.writable_now();
        let counted = look.all_tracked() && look.standing == Some(state.pieces()) && after == look.writable;
        let now = if counted && state.children.is_empty() {
            Untracked::default()
        } else {
            self.untracked_now(state, after.max(look.writable), found, true)
        };
        let ignore = state.policy == CoveragePolicy::Ignore;
        if look.processes_started {
            let detail = "forks are not told: children that nobody waited for may have come and gone";
            let gap = missed(GapKind::UnknownMappers, None, None, detail);
            found.missed.push(Missed { effect: Effect::Ignored, ..gap });
        }
        let mut suspect = |pages: PageRange, mut missed: Missed| {
            if ignore {
                missed.effect = Effect::Ignored;
                found.missed.push(missed);
            } else {
                found.suspect(pages, missed);
            }
        };
        let kind = GapKind::UntrackedMapping;
        for pages in &before.pages {
            suspect(*pages, missed(kind, None, Some(*pages), "was mapped at the checkpoint before"));
        }
        if before.unknown {
            suspect(
                all_pages(),
                missed(GapKind::UnknownMappers, None, None, "unknown at the checkpoint before"),
            );
        }
        if look.mappings_came(state, self.reach) {
            let detail = "somebody mapped the file since the checkpoint before";
            suspect(all_pages(), missed(kind, None, None, detail));
        }
        if look.lost_children {
            for pages in state.observed_pages(self.mapped.page_size) {
                let detail = "a child of a tracked process has ended, and forks are not told";
                suspect(pages, missed(GapKind::EndedMapping, None, Some(pages), detail));
            }
        }
        if now.unknown {
            let detail = "not all processes that map the file were found";
            suspect(all_pages(), missed(GapKind::UnknownMappers, None, None, detail));
        }
        if !ignore {
            found.suspect.extend(&now.pages);
        }
        if now.is_empty() {
            // All that maps the file is tracked: children that were not found have ended.
            let ended = state.children.drain(..).filter_map(|child| child.userfaultfd);
            state.spare.extend(ended);
        }
        let lives = |held: &Held| held.with(Userfaultfd::address_space_exists).unwrap_or(false);
        state.spare.retain(|(held, _)| lives(held));
        let many = state.spare.len().saturating_sub(SPARE);
        // One of these is that of a child that lives: its mapping counts as ended.
        state.spare.drain(..many);
        state.untracked = now;
    }

    /// Looks for writable mappings that are not tracked; `writable` is how many there are in all.
    /// With `children`, those that a fork made are tracked from now on.
    pub(super) fn untracked_now(
        &self,
        state: &mut State,
        writable: Option<u64>,
        found: &mut Found,
        children: bool,
    ) -> Untracked {
        let Audit { mappers, closed_to_us } = audit(self.mapped);
        if children {
            self.find_children(state, &mappers, found);
        }
        let mut untracked = Untracked::default();
        // Neighbours may be one VMA.
        let tracked = |pid: u32, range: AddressRange| {
            let own = state.observed.iter().filter(|observed| observed.pid == pid);
            let mut pieces: Vec<_> = own.flat_map(Observed::pieces).map(|piece| piece.range).collect();
            pieces.sort_unstable_by_key(|piece| piece.start);
            let at = pieces
                .iter()
                .fold(range.start, |at, piece| if piece.start <= at { at.max(piece.end) } else { at });
            at >= range.end
        };
        let effect =
            if state.policy == CoveragePolicy::Ignore { Effect::Ignored } else { Effect::Conservative };
        for mapper in mappers.iter().filter(|mapper| !tracked(mapper.pid, mapper.range)) {
            untracked.pages.push(mapper.pages);
            let detail = format!("mapped at {} by process {}", mapper.range, mapper.pid);
            found.missed.push(Missed {
                effect,
                ..missed(GapKind::UntrackedMapping, Some(mapper.pid), Some(mapper.pages), detail)
            });
        }
        let seen = fdmap_proto::units::to_u64(mappers.len());
        untracked.unknown = match writable {
            Some(writable) => writable > seen,
            None => closed_to_us > 0 || fdmap_sys::pidfd::last_pid().is_err(),
        };
        ranges::normalize(&mut untracked.pages);
        untracked
    }

    /// Adds what traced calls wrote. Gives what calls under way may be writing, now or after this checkpoint.
    fn add_calls(&self, state: &State, look: &Look, found: &mut Found) -> Vec<PageRange> {
        let Some(calls) = &look.calls else { return Vec::new() };
        let all = PageRange::first(look.marks.pages.max(state.marks.pages));
        found.exact.extend(ranges::within(&calls.ended, all));
        ranges::normalize(&mut found.exact);
        found.suspect.extend(&calls.vague);
        found.suspect.extend(&calls.in_flight);
        ranges::within(&calls.in_flight, all)
    }

    fn judge_descriptors(&self, state: &mut State, look: &Look, mapped_writes: bool, found: &mut Found) {
        let ctime_changed = look.ctime_changed(state);
        let verdict = judge_descriptors(&DescriptorEvidence {
            closed: look.marks.closed && state.marks.closed,
            silent: self.silent,
            ctime_changed,
            modified: look.modified,
            lost: look.lost,
            mapped_writes,
            traced_writes: look.calls.as_ref().is_some_and(|calls| !calls.are_none()),
            traced: look.calls.as_ref().map(|calls| calls.left_open),
            loop_device: ctime_changed
                && self.event_sources.loop_device_on(self.mapped.device, self.mapped.inode),
            silent_write_pending: state.marks.silent_write_pending(look.now),
        });
        state.marks.silent_since = match state.marks.silent_since {
            _ if verdict.silent_write => Some((look.now, true)),
            Some((since, _)) if state.marks.silent_write_pending(look.now) => Some((since, false)),
            _ => None,
        };
        let Some(kind) = verdict.conservative else { return };
        let detail = match kind {
            GapKind::LostEvents => "signals of writes were lost, or the service was away",
            GapKind::DescriptorWrite => "the file was written or punched through descriptors",
            _ if verdict.only_possible => {
                "the inode changed: native AIO or a loop device may have, besides mappings"
            }
            _ => "the inode changed, and nobody was seen to write",
        };
        let gap = missed(kind, None, None, detail);
        if verdict.only_possible && state.policy == CoveragePolicy::Ignore {
            found.missed.push(Missed { effect: Effect::Ignored, ..gap });
        } else {
            found.suspect(all_pages(), gap);
        }
    }

    /// What was cut off, or came anew, changed.
    fn judge_size(&self, state: &State, look: &Look, found: &mut Found) {
        let (before, now) = (state.marks.pages, look.marks.pages);
        if before != now {
            found.suspect.extend(PageRange::new(PageIndex(before.min(now)), PageIndex(before.max(now))));
        }
    }

    /// All pages of `suspect` that hold data, or were ever seen to be written: one that was punched is a hole now, and changed.
    pub(super) fn doubtful_pages(
        &self,
        state: &State,
        suspect: &mut Vec<PageRange>,
    ) -> Result<Vec<PageRange>, TrackingError> {
        ranges::normalize(suspect);
        if suspect.is_empty() {
            return Ok(Vec::new());
        }
        let mut pages = data_pages(&*self.probe, self.scans.source(), suspect)?;
        pages.extend(suspect.iter().flat_map(|range| state.stamps.ever(*range)));
        ranges::normalize(&mut pages);
        Ok(pages)
    }

    /// Pages that are pinned now may be written at any time without a trace: they count for the next generation as well.
    pub(super) fn judge_pins(
        &self,
        state: &mut State,
        file_pages: u64,
        now: Instant,
        stamped: &[PageRange],
        gaps: &mut Vec<Missed>,
    ) -> Result<(), TrackingError> {
        let mut candidates = state.sticky.pages();
        candidates.extend(stamped);
        ranges::normalize(&mut candidates);
        let source = self.scans.source();
        let target = ScanTarget {
            fd: source.fd.as_fd(),
            page_size: source.page_size,
            file_pages,
            hugetlb_order: source.hugetlb_order,
        };
        let candidates = ranges::within(&candidates, PageRange::first(file_pages));
        let mut pins = Vec::new();
        if candidates.is_empty() {
            state.sticky.renew(Vec::new(), &[], now);
            return Ok(());
        }
        let seen = match self.probe.pins(&target, &candidates, &mut pins) {
            Ok(seen) => seen,
            Err(error) => {
                tracing::warn!(error = fdmap_proto::error_chain(&error), "looking for pinned pages");
                false
            }
        };
        if !seen {
            gaps.push(Missed {
                effect: Effect::Ignored,
                ..missed(GapKind::DirectIo, None, None, "direct I/O and DMA: not observed")
            });
            if self.probe.attributes().maybe_pinned {
                // They were pinned when they could be looked at last.
                let sticky = state.sticky.pages();
                let next = state.open.next().ok_or(TrackingError::NoMoreGenerations)?;
                state.stamp(&sticky, PageStamp::new(next, true))?;
            } else {
                state.sticky.renew(Vec::new(), &[], now);
            }
            return Ok(());
        }
        let of = |kind| {
            let mut pages: Vec<_> = pins.iter().filter(|pin| pin.kind == kind).map(|pin| pin.range).collect();
            ranges::normalize(&mut pages);
            pages
        };
        let pinned = of(PinKind::Dma);
        let hull = ranges::hull(&pinned);
        if !hull.is_empty() {
            let detail = format!("{} pages may be pinned for DMA", ranges::pages(&pinned));
            gaps.push(missed(GapKind::Pinned, None, Some(hull), detail));
        }
        state.sticky.renew(pinned, &of(PinKind::ExtraReference), now);
        let sticky = state.sticky.pages();
        let next = state.open.next().ok_or(TrackingError::NoMoreGenerations)?;
        let stamped = state.stamped;
        state.stamp(&sticky, PageStamp::new(next, true))?;
        state.stamped = stamped;
        Ok(())
    }

    fn refusal(&self, state: &State) -> TrackingError {
        let who =
            state.open_gaps.iter().find(|gap| gap.kind == GapKind::UntrackedMapping && gap.pid.is_some());
        let detail = who.map_or_else(
            || "processes that cannot be found map the file".to_owned(),
            |gap| {
                gap.range
                    .map_or_else(|| gap.detail.clone(), |range| format!("pages {range} are {}", gap.detail))
            },
        );
        TrackingError::Refused(detail)
    }
}
