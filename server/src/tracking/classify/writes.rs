//! Writes that no page table shows.
//!
//! The signals, and what each proves (`docs/write-tracking.md` has the measurements):
//!
//! - *ctime* of the inode changes before a write through a descriptor copies its bytes, in every case, and when a
//!   write-protected page is written through a mapping. An unchanged ctime proves that neither happened.
//! - *FAN_MODIFY* or *IN_MODIFY* arrives at the end of a write through a descriptor that was opened by path, as all descriptors
//!   are that the service hands out. The first names the thread. Native AIO, loop devices and descriptors made by `memfd_create`
//!   do not raise it.
//! - *Traced* system calls give the exact range, the thread, and whether the call is in progress, for every descriptor.
//!   io_uring requests are only counted.
//!
//! Each signal needs an explanation of its own: an event is explained by a traced call of the same thread, unless that thread
//! also made calls that may have written to the file without naming it.

use fdmap_proto::tracking::{CoveragePolicy, GapKind};
use fdmap_proto::units::PageRange;

use super::{Findings, gap};
use crate::tracking::baseline::PendingWrite;
use crate::tracking::observe::{CallWrites, Modifiers};
use crate::tracking::ranges::{self, ALL_PAGES};

/// Pages that calls in progress may still write after the checkpoint. Normalized.
pub(crate) type InFlight = Vec<PageRange>;

/// Adds the writes of traced calls to `findings`; `size` is the larger size of the file, before or now, in pages.
pub(crate) fn traced_writes(calls: Option<&CallWrites>, size: u64, findings: &mut Findings) -> InFlight {
    let Some(calls) = calls else { return Vec::new() };
    let file = PageRange::first(size);
    findings.observed.extend(ranges::within(&calls.ended, file));
    ranges::normalize(&mut findings.observed);
    findings.suspect.extend(&calls.imprecise);
    findings.suspect.extend(&calls.in_flight);
    ranges::within(&calls.in_flight, file)
}

/// The events of writes through descriptors since the last checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModifyVerdict {
    None,
    /// Traced calls explain all events.
    Explained,
    Unexplained,
}

/// Judges events by the traced calls; `None`: calls are not traced. `mounted`: the file is reachable by path in a file system, so
/// that the kernel itself may write to it on behalf of a thread.
#[must_use]
pub(crate) fn judge_events(
    modifiers: &Modifiers,
    calls: Option<&CallWrites>,
    mounted: bool,
) -> ModifyVerdict {
    if modifiers.is_empty() {
        return ModifyVerdict::None;
    }
    let Some(calls) = calls else { return ModifyVerdict::Unexplained };
    let other = &calls.other;
    let unnamed =
        !modifiers.unnamed || (!calls.threads.is_empty() && !other.paths && !other.stacked && !mounted);
    let is_explained = |thread| calls.threads.contains(thread) && !other.threads.contains(thread);
    if unnamed && modifiers.threads.iter().all(is_explained) {
        ModifyVerdict::Explained
    } else {
        ModifyVerdict::Unexplained
    }
}

/// Calls that do not name the file, as far as they concern it whatever the events are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnrangedCalls {
    /// As in [`OtherCalls`](crate::tracking::observe::OtherCalls).
    pub(crate) unmatched: bool,
    /// As in [`OtherCalls`](crate::tracking::observe::OtherCalls).
    pub(crate) requests: bool,
}

/// What is known about writes through descriptors since the last checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DescriptorEvidence {
    /// Seals exclude writes through descriptors, and did when the last generation was closed.
    pub(crate) writers_sealed: bool,
    /// Descriptors may exist whose writes raise no event.
    pub(crate) unnotified_descriptors: bool,
    /// The ctime differs from its value before the harvest of the last checkpoint.
    pub(crate) ctime_changed: bool,
    pub(crate) events: ModifyVerdict,
    /// Signals were lost, or the service was not running.
    pub(crate) signals_lost: bool,
    /// The harvest found written pages, or untracked mappings exist or existed: they explain a change of ctime.
    pub(crate) mapped_writes: bool,
    /// Traced calls changed the inode, or may have: they explain a change of ctime.
    pub(crate) traced_calls: bool,
    /// `None`: system calls are not traced.
    pub(crate) unranged: Option<UnrangedCalls>,
    /// A loop device may have written.
    pub(crate) loop_device: bool,
    /// An unnotified write may be in progress, or may have ended since the last checkpoint.
    pub(crate) pending: Option<PendingWrite>,
}

/// What follows from the evidence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DescriptorVerdict {
    /// All pages with data count as written, for this reason.
    pub(crate) conservative: Option<GapKind>,
    /// The write is only possible: the policy may ignore it.
    pub(crate) only_possible: bool,
    /// An unnotified write may be in progress.
    pub(crate) unnotified_write: bool,
}

/// Judges writes through descriptors. Writes that traced calls do not explain make all pages with data suspect.
#[must_use]
pub(crate) fn judge_descriptors(evidence: &DescriptorEvidence) -> DescriptorVerdict {
    let certain = |kind, unnotified_write| DescriptorVerdict {
        conservative: Some(kind),
        only_possible: false,
        unnotified_write,
    };
    if evidence.writers_sealed {
        return DescriptorVerdict::default();
    }
    // An unchanged ctime does not prove that no write ended: it changes before the write ends.
    if evidence.signals_lost {
        return certain(GapKind::LostEvents, true);
    }
    if evidence.events == ModifyVerdict::Unexplained {
        // One event can stand for several writes, some of which may be unnotified and in progress.
        return certain(GapKind::DescriptorWrite, evidence.unnotified_descriptors && evidence.ctime_changed);
    }
    // These count when they begin and when they end, so that no write of theirs is in progress unnoticed.
    if evidence.unranged.is_some_and(|calls| calls.unmatched || calls.requests) {
        return certain(GapKind::DescriptorWrite, false);
    }
    if evidence.loop_device {
        return certain(GapKind::UnnotifiedDescriptor, false);
    }
    if let Some(only_possible) = unexplained_ctime(evidence) {
        let kind = GapKind::UnnotifiedDescriptor;
        return DescriptorVerdict { conservative: Some(kind), only_possible, unnotified_write: true };
    }
    evidence.pending.map_or_else(DescriptorVerdict::default, |pending| DescriptorVerdict {
        only_possible: pending.only_possible,
        ..certain(GapKind::UnnotifiedDescriptor, false)
    })
}

/// `Some` if an unnotified write may have changed the ctime; `Some(true)`: mapped writes may explain the change as well.
fn unexplained_ctime(evidence: &DescriptorEvidence) -> Option<bool> {
    if !evidence.ctime_changed {
        return None;
    }
    if evidence.unranged.is_none() {
        // Nothing explains the change, or mapped writes do and another write may have happened as well.
        return Some(evidence.mapped_writes && !evidence.unnotified_descriptors);
    }
    let no_known_writer = !evidence.mapped_writes && !evidence.traced_calls;
    no_known_writer.then_some(false)
}

/// The findings of a verdict.
pub(crate) fn descriptor_findings(verdict: DescriptorVerdict, policy: CoveragePolicy) -> Findings {
    let mut findings = Findings::default();
    let Some(kind) = verdict.conservative else { return findings };
    let detail = match kind {
        GapKind::LostEvents => "write signals were lost, or the service was not running",
        GapKind::DescriptorWrite => "the file was written or punched through descriptors",
        _ if verdict.only_possible => {
            "the inode changed: an unobserved writer may have written, in addition to mappings"
        }
        _ => "the inode changed, and no writer was observed",
    };
    let gap = gap(kind, None, None, detail);
    if verdict.only_possible {
        findings.add_by_policy(policy, ALL_PAGES, gap);
    } else {
        findings.add_suspect(ALL_PAGES, gap);
    }
    findings
}

/// What a checkpoint compares before it decides to skip the harvest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IdleEvidence {
    /// Write faults do not change ctime.
    pub(crate) hugetlb: bool,
    /// As in [`DescriptorEvidence`].
    pub(crate) unnotified_descriptors: bool,
    /// As in [`DescriptorEvidence`].
    pub(crate) ctime_changed: bool,
    /// Events of writes arrived, or signals were lost.
    pub(crate) modified: bool,
    /// As in [`DescriptorEvidence`].
    pub(crate) unnotified_write_pending: bool,
    /// Traced calls wrote, or may have.
    pub(crate) traced_writes: bool,
    /// As in [`DescriptorEvidence`].
    pub(crate) loop_device: bool,
    /// The redirty set is not empty, or a device may pin pages.
    pub(crate) redirty_pages: bool,
    /// The file was passed to iommufd or FUSE passthrough.
    pub(crate) permanently_attached: bool,
    /// Untracked writable mappings exist, existed at the last checkpoint, or may have existed in between.
    pub(crate) untracked_mappings: bool,
    /// Every tracked mapping is intact.
    pub(crate) mappings_intact: bool,
    /// The size of the file did not change.
    pub(crate) same_size: bool,
    /// Pages were stamped after the last generation was closed.
    pub(crate) stamped_since: bool,
}

/// True if nothing was written since the last generation was closed, or a later checkpoint finds what was.
///
/// An idle checkpoint closes no generation. A fault makes a page writable a moment before it changes ctime: a write in that
/// moment appears in the generation that is still open.
#[must_use]
pub(crate) const fn idle(evidence: &IdleEvidence) -> bool {
    !evidence.hugetlb
        && !evidence.unnotified_descriptors
        && !evidence.ctime_changed
        && !evidence.modified
        && !evidence.unnotified_write_pending
        && !evidence.traced_writes
        && !evidence.loop_device
        && !evidence.redirty_pages
        && !evidence.permanently_attached
        && !evidence.untracked_mappings
        && evidence.mappings_intact
        && evidence.same_size
        && !evidence.stamped_since
}

#[cfg(test)]
mod tests;
