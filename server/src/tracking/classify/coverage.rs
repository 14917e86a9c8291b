//! Which writers exist now that are not observed. Checkpoint and GetCoverage use the same [`coverage`] function.

use fdmap_proto::tracking::{CoverageGap, CoveragePolicy, GapKind};
use fdmap_proto::units::{PageRange, to_u64};
use fdmap_sys::address::AddressRange;

use super::{Findings, bits, gap, pins_not_observed};
use crate::tracking::observe::{Mapper, MapperAudit};
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

/// Addresses at which a tracked process maps the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrackedRange {
    pub(crate) pid: u32,
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

/// The writable mappings that are not tracked, with one gap each.
pub(crate) fn coverage(census: WriterCensus<'_>, policy: CoveragePolicy) -> (UntrackedMappings, Findings) {
    let WriterCensus { audit, tracked, writable_vmas } = census;
    let mut untracked = UntrackedMappings::default();
    let mut findings = Findings::default();
    for mapper in audit.mappers.iter().filter(|mapper| !is_tracked(mapper, tracked)) {
        untracked.pages.push(mapper.pages);
        let detail = format!("mapped at {} by process {}", mapper.range, mapper.pid);
        let gap = gap(GapKind::UntrackedMapping, Some(mapper.pid), Some(mapper.pages), detail);
        findings.add_by_policy(policy, mapper.pages, gap);
    }
    let found = to_u64(audit.mappers.len());
    untracked.unknown = writable_vmas.map_or(audit.incomplete, |writable| writable > found);
    if untracked.unknown {
        let detail = "processes map the file that were not found";
        findings.add_by_policy(policy, ALL_PAGES, gap(GapKind::UnknownMappers, None, None, detail));
    }
    ranges::normalize(&mut untracked.pages);
    (untracked, findings)
}

/// True if tracked ranges cover the whole VMA. Adjacent tracked mappings can share one VMA.
fn is_tracked(mapper: &Mapper, tracked: &[TrackedRange]) -> bool {
    let own = tracked.iter().filter(|tracked| tracked.pid == mapper.pid);
    let mut own: Vec<_> = own.map(|tracked| tracked.range).collect();
    own.sort_unstable_by_key(|range| range.start);
    let covered_to = own
        .iter()
        .fold(mapper.range.start, |at, range| if range.start <= at { at.max(range.end) } else { at });
    covered_to >= mapper.range.end
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
mod tests {
    use fdmap_proto::tracking::Effect;
    use fdmap_proto::units::PageIndex;

    use super::*;

    const fn range(start: u64, end: u64) -> AddressRange {
        AddressRange { start, end }
    }

    fn mapper(pid: u32, start: u64, end: u64) -> Mapper {
        let pages = PageRange::at(PageIndex(start / 0x1000), (end - start) / 0x1000);
        Mapper { pid, range: range(start, end), pages }
    }

    fn kinds(findings: &Findings) -> Vec<GapKind> {
        findings.gaps.iter().map(|gap| gap.kind).collect()
    }

    fn coverage_of(
        mappers: &[Mapper],
        tracked: &[(u32, AddressRange)],
        writable_vmas: Option<u64>,
        incomplete: bool,
    ) -> (UntrackedMappings, Findings) {
        let audit = MapperAudit { mappers: mappers.to_vec(), incomplete };
        let tracked: Vec<_> =
            tracked.iter().map(|(pid, range)| TrackedRange { pid: *pid, range: *range }).collect();
        coverage(
            WriterCensus { audit: &audit, tracked: &tracked, writable_vmas },
            CoveragePolicy::Conservative,
        )
    }

    #[test]
    fn mapping_is_tracked_only_if_ranges_of_its_own_process_cover_it() {
        let vma = [mapper(7, 0x1000, 0x5000)];
        for (tracked, covered) in [
            (vec![(7, range(0x1000, 0x5000))], true),
            (vec![(7, range(0x3000, 0x5000)), (7, range(0x1000, 0x3000))], true),
            (vec![(7, range(0x0, 0x9000))], true),
            (vec![(7, range(0x1000, 0x2000)), (7, range(0x3000, 0x5000))], false),
            (vec![(7, range(0x1000, 0x4000))], false),
            (vec![(8, range(0x1000, 0x5000))], false),
            (vec![], false),
        ] {
            let (untracked, findings) = coverage_of(&vma, &tracked, Some(1), false);
            assert_eq!(untracked.is_empty(), covered, "{tracked:?}");
            assert_eq!(kinds(&findings), if covered { vec![] } else { vec![GapKind::UntrackedMapping] });
            assert_eq!(findings.suspect, if covered { vec![] } else { vec![vma[0].pages] });
        }
    }

    #[test]
    fn mappers_are_unknown_if_the_kernel_counts_more_or_processes_are_hidden() {
        let vma = [mapper(7, 0x1000, 0x2000)];
        let tracked = [(7, range(0x1000, 0x2000))];
        for (writable, incomplete, unknown) in [
            (Some(1), false, false),
            (Some(1), true, false),
            (Some(0), false, false),
            (Some(2), false, true),
            (None, false, false),
            (None, true, true),
        ] {
            let (untracked, findings) = coverage_of(&vma, &tracked, writable, incomplete);
            assert_eq!(untracked.unknown, unknown, "{writable:?}, {incomplete}");
            assert_eq!(findings.suspect, if unknown { vec![ALL_PAGES] } else { vec![] });
            assert_eq!(kinds(&findings), if unknown { vec![GapKind::UnknownMappers] } else { vec![] });
        }
    }

    #[test]
    fn policy_decides_whether_gaps_are_conservative_or_ignored() {
        let audit = MapperAudit { mappers: vec![mapper(7, 0x1000, 0x2000)], incomplete: true };
        let census = WriterCensus { audit: &audit, tracked: &[], writable_vmas: None };
        let (untracked, findings) = coverage(census, CoveragePolicy::Ignore);
        assert!(!untracked.is_empty() && untracked.unknown);
        assert!(findings.suspect.is_empty());
        assert!(findings.gaps.iter().all(|gap| gap.effect == Effect::Ignored));
        for policy in [CoveragePolicy::Conservative, CoveragePolicy::Refuse] {
            let (_, findings) = coverage(census, policy);
            assert_eq!(findings.gaps.len(), 2);
            assert!(findings.gaps.iter().all(|gap| gap.effect == Effect::Conservative));
            assert_eq!(findings.suspect.len(), 2);
        }
    }

    #[test]
    fn limits_list_each_missing_signal() {
        let all = CoverageLimits {
            mappings_intact: true,
            writers_sealed: false,
            calls_traced: true,
            taken_bits_observed: true,
            pins_supported: true,
        };
        let kinds = |some| limits(some).iter().map(|gap| gap.kind).collect::<Vec<_>>();
        assert!(kinds(all).is_empty());
        assert_eq!(kinds(CoverageLimits { mappings_intact: false, ..all }), [GapKind::EndedMapping]);
        let untraced = CoverageLimits { calls_traced: false, ..all };
        assert_eq!(kinds(untraced), [GapKind::DescriptorWrite]);
        assert!(kinds(CoverageLimits { writers_sealed: true, ..untraced }).is_empty());
        assert_eq!(kinds(CoverageLimits { taken_bits_observed: false, ..all }), [GapKind::BitsTaken]);
        let pins = limits(CoverageLimits { pins_supported: false, ..all });
        assert_eq!((pins[0].kind, pins[0].effect), (GapKind::DirectIo, Effect::Ignored));
    }
}
