//! Which writers exist now that are not observed. Checkpoint and GetCoverage use the same [`coverage`] function.

use fdmap_proto::tracking::{CoverageGap, CoveragePolicy, GapKind};
use fdmap_proto::units::{PageRange, to_u64};
use fdmap_sys::address::AddressRange;

use super::{Findings, bits, gap, ignored, pins_not_observed};
use crate::tracking::observe::{Completeness, Mapper, MapperAudit, SpaceIdentity};
use crate::tracking::ranges::{self, ALL_PAGES};

/// The writable mappings of the file that are not tracked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UntrackedMappings {
    /// The pages that known untracked mappings map.
    pub(crate) pages: Vec<PageRange>,
    /// Untracked mappings may exist whose pages are unknown.
    pub(crate) unknown: bool,
}

impl UntrackedMappings {
    #[must_use]
    pub(crate) const fn is_empty(&self) -> bool {
        self.pages.is_empty() && !self.unknown
    }
}

/// Addresses at which a tracked address space maps the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrackedRange {
    /// Identifies mappings that were found in `/proc`.
    pub(crate) pid: u32,
    /// Identifies mappings that a walk found.
    pub(crate) identity: SpaceIdentity,
    pub(crate) range: AddressRange,
}

/// All writers through mappings, as far as they are known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriterCensus<'a> {
    pub(crate) audit: &'a MapperAudit,
    pub(crate) tracked: &'a [TrackedRange],
    /// Writable shared VMAs as the kernel counts them; `None`: the kernel does not report the count.
    pub(crate) writable_vmas: Option<u64>,
}

/// Untracked mappings with a gap of their own. One more gap covers all others.
const MAX_NAMED_MAPPINGS: usize = 64;

/// The writable mappings that are not tracked, with their gaps.
pub(crate) fn coverage(census: WriterCensus<'_>, policy: CoveragePolicy) -> (UntrackedMappings, Findings) {
    let WriterCensus { audit, tracked, writable_vmas } = census;
    let tracked = TrackedIndex::new(tracked);
    let mut mappers: Vec<_> = audit.mappers.iter().filter(|mapper| !tracked.covers(mapper)).collect();
    // A walk returns mappings in no order. Gaps of one generation are compared with those of the last.
    mappers.sort_unstable_by_key(|mapper| (mapper.pid.is_none(), mapper.pid, mapper.range));
    let mut pages: Vec<_> = mappers.iter().map(|mapper| mapper.pages).collect();
    ranges::normalize(&mut pages);
    let mut findings = Findings::default();
    let (named, others) = mappers.split_at(mappers.len().min(MAX_NAMED_MAPPINGS));
    for mapper in named {
        findings.add_by_policy(policy, mapper.pages, untracked_gap(mapper));
    }
    if !others.is_empty() {
        let detail = format!("mapped by more than {MAX_NAMED_MAPPINGS} mappings that are not tracked");
        let gap = gap(GapKind::UntrackedMapping, None, None, detail);
        let hidden = others.iter().map(|mapper| mapper.pages);
        findings.gaps.push(if policy == CoveragePolicy::Ignore { ignored(gap) } else { gap });
        if policy != CoveragePolicy::Ignore {
            findings.suspect.extend(hidden);
        }
    }
    let found = to_u64(audit.mappers.len());
    let unknown = match audit.completeness {
        Completeness::Complete => false,
        // A mapping that was found twice, or is newer than the count, can stand for one that was not found.
        Completeness::Counted { incomplete } => {
            incomplete || writable_vmas.is_some_and(|writable| writable > found)
        }
        Completeness::Unknown => true,
    };
    if unknown {
        let detail = "processes map the file that were not found";
        findings.add_by_policy(policy, ALL_PAGES, gap(GapKind::UnknownMappers, None, None, detail));
    }
    (UntrackedMappings { pages, unknown }, findings)
}

fn untracked_gap(mapper: &Mapper) -> CoverageGap {
    let process = mapper.pid.map_or_else(
        || "a process without a pid in the namespace of fdmapd".to_owned(),
        |pid| format!("process {pid}"),
    );
    let detail = format!("mapped at {} by {process}", mapper.range);
    gap(GapKind::UntrackedMapping, mapper.pid, Some(mapper.pages), detail)
}

/// Tracked ranges by what identifies their address spaces.
struct TrackedIndex {
    by_mm: Vec<TrackedRange>,
    by_pid: Vec<TrackedRange>,
}

impl TrackedIndex {
    fn new(tracked: &[TrackedRange]) -> Self {
        let (mut by_mm, mut by_pid) = (tracked.to_vec(), tracked.to_vec());
        by_mm.sort_unstable_by_key(|tracked| (tracked.identity.mm, tracked.range));
        by_pid.sort_unstable_by_key(|tracked| (tracked.pid, tracked.range));
        Self { by_mm, by_pid }
    }

    /// True if tracked ranges of its address space cover the whole VMA. Adjacent tracked mappings can share one VMA.
    fn covers(&self, mapper: &Mapper) -> bool {
        let own: Box<dyn Iterator<Item = &TrackedRange>> = if mapper.mm.is_some() {
            let first = self.by_mm.partition_point(|tracked| tracked.identity.mm < mapper.mm);
            let same = self.by_mm[first..].iter().take_while(|tracked| tracked.identity.mm == mapper.mm);
            Box::new(same.filter(|tracked| tracked.identity.recognizes(mapper)))
        } else {
            let first = self.by_pid.partition_point(|tracked| Some(tracked.pid) < mapper.pid);
            Box::new(self.by_pid[first..].iter().take_while(|tracked| Some(tracked.pid) == mapper.pid))
        };
        // In ascending order of addresses.
        let covered_to = own.fold(mapper.range.start, |at, tracked| {
            if tracked.range.start <= at { at.max(tracked.range.end) } else { at }
        });
        covered_to >= mapper.range.end
    }
}

/// What the next checkpoint will not observe exactly, whatever is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CoverageLimits {
    /// Every tracked mapping is intact.
    pub(crate) mappings_intact: bool,
    pub(crate) writers_sealed: bool,
    pub(crate) calls_traced: bool,
    /// Calls that take written bits are traced in every tracked address space.
    pub(crate) taken_bits_observed: bool,
    /// The probe can see pins.
    pub(crate) pins_supported: bool,
}

pub(crate) fn limits(limits: CoverageLimits) -> Vec<CoverageGap> {
    let mut gaps = Vec::new();
    if !limits.mappings_intact {
        let detail = "a tracked mapping ended and is not harvested yet";
        gaps.push(gap(GapKind::EndedMapping, None, None, detail));
    }
    if !limits.writers_sealed && !limits.calls_traced {
        let detail = "writes through descriptors are noticed, but their ranges are unknown";
        gaps.push(gap(GapKind::DescriptorWrite, None, None, detail));
    }
    if !limits.taken_bits_observed {
        gaps.push(bits::unobserved_gap());
    }
    if !limits.pins_supported {
        gaps.push(pins_not_observed());
    }
    gaps
}

#[cfg(test)]
mod tests;
