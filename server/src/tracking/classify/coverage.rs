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
        Completeness::Counted { incomplete } => writable_vmas.map_or(incomplete, |writable| writable > found),
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
mod tests {
    use fdmap_proto::tracking::Effect;
    use fdmap_proto::units::PageIndex;

    use super::*;
    use crate::probe::KernelAddress;

    const fn range(start: u64, end: u64) -> AddressRange {
        AddressRange { start, end }
    }

    fn mapper(pid: u32, start: u64, end: u64) -> Mapper {
        let pages = PageRange::at(PageIndex(start / 0x1000), (end - start) / 0x1000);
        Mapper { pid: Some(pid), range: range(start, end), pages, mm: None, userfaultfd: None }
    }

    /// The same mapping, as a walk finds it.
    fn walked(mm: u64, userfaultfd: u64, mapper: Mapper) -> Mapper {
        Mapper { mm: KernelAddress::new(mm), userfaultfd: KernelAddress::new(userfaultfd), ..mapper }
    }

    fn tracked(pid: u32, mm: u64, userfaultfd: u64, range: AddressRange) -> TrackedRange {
        let identity =
            SpaceIdentity { mm: KernelAddress::new(mm), userfaultfd: KernelAddress::new(userfaultfd) };
        TrackedRange { pid, identity, range }
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
        let audit =
            MapperAudit { mappers: mappers.to_vec(), completeness: Completeness::Counted { incomplete } };
        let tracked: Vec<_> =
            tracked.iter().map(|(pid, range)| super::tests::tracked(*pid, 1, 1, *range)).collect();
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
    fn walked_mapping_is_tracked_only_by_its_address_space_and_userfaultfd() {
        let vma = mapper(7, 0x1000, 0x5000);
        let whole = range(0x1000, 0x5000);
        let (first, second) = (range(0x1000, 0x3000), range(0x3000, 0x5000));
        for (name, vma, ranges, covered) in [
            ("same", walked(1, 2, vma), vec![tracked(7, 1, 2, whole)], true),
            ("other pid", walked(1, 2, vma), vec![tracked(8, 1, 2, whole)], true),
            ("no pid", walked(1, 2, Mapper { pid: None, ..vma }), vec![tracked(7, 1, 2, whole)], true),
            ("parts", walked(1, 2, vma), vec![tracked(7, 1, 2, second), tracked(7, 1, 2, first)], true),
            ("unknown userfaultfd", walked(1, 2, vma), vec![tracked(7, 1, 0, whole)], true),
            ("being created", walked(9, 2, vma), vec![tracked(7, 1, 2, whole)], false),
            ("replaced", walked(1, 0, vma), vec![tracked(7, 1, 2, whole)], false),
            ("other userfaultfd", walked(1, 3, vma), vec![tracked(7, 1, 2, whole)], false),
            (
                "parts of two",
                walked(1, 2, vma),
                vec![tracked(7, 1, 2, first), tracked(7, 9, 2, second)],
                false,
            ),
            ("unregistered part", walked(1, 2, vma), vec![tracked(7, 1, 2, first)], false),
            ("unknown address space", walked(1, 2, vma), vec![tracked(7, 0, 2, whole)], false),
        ] {
            let audit = MapperAudit { mappers: vec![vma], completeness: Completeness::Complete };
            let census = WriterCensus { audit: &audit, tracked: &ranges, writable_vmas: Some(1) };
            let (untracked, findings) = coverage(census, CoveragePolicy::Conservative);
            assert_eq!(untracked.is_empty(), covered, "{name}");
            assert_eq!(
                kinds(&findings),
                if covered { vec![] } else { vec![GapKind::UntrackedMapping] },
                "{name}"
            );
            assert!(findings.gaps.iter().all(|gap| gap.pid == vma.pid), "{name}");
        }
    }

    #[test]
    fn accepted_walk_is_complete_and_a_rejected_one_is_not_whatever_the_count_is() {
        for (completeness, unknown) in [(Completeness::Complete, false), (Completeness::Unknown, true)] {
            for writable_vmas in [None, Some(0), Some(1), Some(9)] {
                let audit = MapperAudit { mappers: vec![mapper(7, 0x1000, 0x2000)], completeness };
                let census = WriterCensus { audit: &audit, tracked: &[], writable_vmas };
                let (untracked, _) = coverage(census, CoveragePolicy::Conservative);
                assert_eq!(untracked.unknown, unknown, "{completeness:?} {writable_vmas:?}");
                assert_eq!(untracked.pages, [audit.mappers[0].pages]);
            }
        }
    }

    #[test]
    fn many_mappings_are_suspect_but_not_all_are_named() {
        let count = to_u64(MAX_NAMED_MAPPINGS) + 10;
        let mappers: Vec<_> = (0..count).map(|nth| mapper(7, nth * 0x2000, nth * 0x2000 + 0x1000)).collect();
        let audit = MapperAudit { mappers, completeness: Completeness::Complete };
        let census = WriterCensus { audit: &audit, tracked: &[], writable_vmas: None };
        let (untracked, findings) = coverage(census, CoveragePolicy::Conservative);
        assert_eq!(findings.gaps.len(), MAX_NAMED_MAPPINGS + 1);
        assert_eq!((to_u64(untracked.pages.len()), to_u64(findings.suspect.len())), (count, count));
        let (untracked, findings) = coverage(census, CoveragePolicy::Ignore);
        assert_eq!((to_u64(untracked.pages.len()), findings.suspect.len()), (count, 0));
        assert!(findings.gaps.iter().all(|gap| gap.effect == Effect::Ignored));
    }

    #[test]
    fn policy_decides_whether_gaps_are_conservative_or_ignored() {
        let completeness = Completeness::Counted { incomplete: true };
        let audit = MapperAudit { mappers: vec![mapper(7, 0x1000, 0x2000)], completeness };
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
