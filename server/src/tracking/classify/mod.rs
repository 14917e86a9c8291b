//! Decides what an observation means: which pages count as written, with which certainty, and which writers were not observed.
//!
//! Everything here is a pure function of an [`Observation`](super::observe::Observation) and of the baseline of the last
//! checkpoint. Nothing here calls the kernel.

mod bits;
mod coverage;
mod kernel_writers;
mod mappings;
mod pins;
mod removals;
mod size;
mod writes;

use fdmap_proto::tracking::{CoverageGap, CoveragePolicy, Effect, GapKind};
use fdmap_proto::units::{Generation, PageRange};

pub(crate) use bits::guarded;
pub(crate) use coverage::{CoverageLimits, TrackedRange, UntrackedMappings, WriterCensus, coverage, limits};
pub(crate) use kernel_writers::{KernelWriterEvidence, kernel_writers, permanently_attached};
pub(crate) use mappings::{MappingHistory, children, harvested, mappings, mappings_came};
pub(crate) use pins::{RedirtyUpdate, pins};
pub(crate) use removals::{RemovalEvidence, unobserved_removals};
pub(crate) use size::resized;
pub(crate) use writes::{
    DescriptorEvidence, IdleEvidence, InFlight, UnrangedCalls, descriptor_findings, idle, judge_descriptors,
    judge_events, traced_writes,
};

/// What is to be stamped, and the coverage gaps of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Pages observed to be written in this generation.
    pub(crate) observed: Vec<PageRange>,
    /// Pages observed to be written in this generation or in an earlier one. They are stamped as conservative.
    pub(crate) inherited: Vec<PageRange>,
    /// Ranges in which every page that holds data, or was ever written, counts as written.
    pub(crate) suspect: Vec<PageRange>,
    pub(crate) gaps: Vec<CoverageGap>,
}

impl Findings {
    pub(crate) fn add_suspect(&mut self, pages: PageRange, gap: CoverageGap) {
        self.suspect.push(pages);
        self.gaps.push(gap);
    }

    /// Adds `gap` and makes `pages` suspect, unless `policy` ignores gaps.
    pub(crate) fn add_by_policy(&mut self, policy: CoveragePolicy, pages: PageRange, gap: CoverageGap) {
        if policy == CoveragePolicy::Ignore {
            self.gaps.push(ignored(gap));
        } else {
            self.add_suspect(pages, gap);
        }
    }

    pub(crate) fn merge(&mut self, mut other: Self) {
        self.observed.append(&mut other.observed);
        self.inherited.append(&mut other.inherited);
        self.suspect.append(&mut other.suspect);
        self.gaps.append(&mut other.gaps);
    }
}

/// A gap whose pages count as written. The gap log enters its generations.
pub(crate) fn gap(
    kind: GapKind,
    pid: Option<u32>,
    range: Option<PageRange>,
    detail: impl Into<String>,
) -> CoverageGap {
    CoverageGap {
        kind,
        effect: Effect::Conservative,
        pid,
        range,
        detail: detail.into(),
        remedy: remedy(kind).to_owned(),
        first: Generation::NONE,
        last: None,
    }
}

/// The same gap, if its writes are left out.
pub(crate) fn ignored(gap: CoverageGap) -> CoverageGap {
    CoverageGap { effect: Effect::Ignored, ..gap }
}

/// The gap of a probe that cannot see pins.
fn pins_not_observed() -> CoverageGap {
    ignored(gap(GapKind::DirectIo, None, None, "direct I/O and DMA are not observed"))
}

/// The gap of blocks that have one stamp for all their pages, because the owner of the file may have no more memory for stamps.
pub(super) fn coarse_stamps() -> CoverageGap {
    let detail =
        "the stamps of the owner's files, or of those of all users, take all the memory that they may have";
    gap(GapKind::CoarseStamps, None, None, detail)
}

/// What closes a gap of this kind.
const fn remedy(kind: GapKind) -> &'static str {
    match kind {
        GapKind::UntrackedMapping => {
            "track the mapping, or seal the writers once every writer has mapped the file"
        }
        GapKind::EndedMapping => "untrack mappings before they end, as the client library does on drop",
        GapKind::DescriptorWrite => {
            "write through tracked mappings, or run the service where it can trace system calls"
        }
        GapKind::UnnotifiedDescriptor => {
            "seal the writers once the file is mapped, or run the service where it can trace system calls"
        }
        GapKind::DirectIo => {
            "run the service with the xarray probe and where it can trace system calls, and track the file before a device gets it"
        }
        GapKind::Pinned => "none needed: the pages are reported in every generation until they are unpinned",
        GapKind::LostEvents => "none needed: the next generation has its own signals",
        GapKind::BitsTaken => {
            "use neither userfaultfd nor PAGEMAP_SCAN nor MREMAP_DONTUNMAP on tracked memory, and trace system calls"
        }
        GapKind::BlockedMapping => "none needed once the process continues; else detach it, or end it",
        GapKind::CoarseStamps => {
            "delete files, or start the service with a higher --max-state-bytes-per-user"
        }
        GapKind::UnknownMappers => "run the service as root and in the pid namespace of the host",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fdmap_proto::units::PageIndex;

    use super::*;

    #[test]
    fn merged_findings_are_those_of_both() {
        let at = |page| vec![PageRange::at(PageIndex(page), 1)];
        let lost = |detail| vec![gap(GapKind::LostEvents, None, None, detail)];
        let mut findings =
            Findings { observed: at(1), inherited: at(3), suspect: at(5), gaps: lost("first") };
        findings.merge(Findings {
            observed: at(11),
            inherited: at(13),
            suspect: at(15),
            gaps: lost("second"),
        });
        let both = Findings {
            observed: [at(1), at(11)].concat(),
            inherited: [at(3), at(13)].concat(),
            suspect: [at(5), at(15)].concat(),
            gaps: [lost("first"), lost("second")].concat(),
        };
        assert_eq!(findings, both);
    }

    #[test]
    fn each_kind_of_gap_has_a_remedy_of_its_own() {
        let kinds = [
            GapKind::UntrackedMapping,
            GapKind::EndedMapping,
            GapKind::DescriptorWrite,
            GapKind::UnnotifiedDescriptor,
            GapKind::DirectIo,
            GapKind::Pinned,
            GapKind::LostEvents,
            GapKind::UnknownMappers,
            GapKind::BitsTaken,
            GapKind::BlockedMapping,
            GapKind::CoarseStamps,
        ];
        let remedies: BTreeSet<_> = kinds.iter().map(|kind| gap(*kind, None, None, "").remedy).collect();
        assert_eq!(remedies.len(), kinds.len(), "{remedies:?}");
    }
}
