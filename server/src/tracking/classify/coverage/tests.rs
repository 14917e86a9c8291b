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
    let identity = SpaceIdentity { mm: KernelAddress::new(mm), userfaultfd: KernelAddress::new(userfaultfd) };
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
    let audit = MapperAudit { mappers: mappers.to_vec(), completeness: Completeness::Counted { incomplete } };
    let tracked: Vec<_> =
        tracked.iter().map(|(pid, range)| super::tests::tracked(*pid, 1, 1, *range)).collect();
    coverage(WriterCensus { audit: &audit, tracked: &tracked, writable_vmas }, CoveragePolicy::Conservative)
}

#[test]
fn mapping_is_tracked_only_if_ranges_of_its_own_process_cover_it() {
    let vma = [mapper(7, 0x1000, 0x5000)];
    for (tracked, covered) in [
        (vec![(7, range(0x1000, 0x5000))], true),
        (vec![(7, range(0x3000, 0x5000)), (7, range(0x1000, 0x3000))], true),
        (vec![(7, range(0x0, 0x9000))], true),
        (vec![(7, range(0x1000, 0x5000)), (7, range(0x2000, 0x3000))], true),
        (vec![(7, range(0x1000, 0x2000)), (7, range(0x3000, 0x5000))], false),
        (vec![(7, range(0x1000, 0x4000))], false),
        (vec![(8, range(0x1000, 0x5000))], false),
        (vec![(8, vma[0].range), (7, vma[0].range), (6, vma[0].range)], true),
        (vec![(6, range(0x1000, 0x3000)), (7, range(0x3000, 0x5000))], false),
        (vec![(7, range(0x1000, 0x3000)), (8, range(0x3000, 0x5000))], false),
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
        (Some(1), true, true),
        (Some(0), false, false),
        (Some(2), false, true),
        (None, false, false),
        (None, true, true),
    ] {
        let (untracked, findings) = coverage_of(&vma, &tracked, writable, incomplete);
        assert_eq!(untracked.unknown, unknown, "{writable:?}, {incomplete}");
        assert_eq!(untracked.is_empty(), !unknown, "{writable:?}, {incomplete}");
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
        ("among others", walked(5, 2, vma), [9, 5, 1].map(|mm| tracked(7, mm, 2, whole)).to_vec(), true),
        ("being created", walked(9, 2, vma), vec![tracked(7, 1, 2, whole)], false),
        ("replaced", walked(1, 0, vma), vec![tracked(7, 1, 2, whole)], false),
        ("other userfaultfd", walked(1, 3, vma), vec![tracked(7, 1, 2, whole)], false),
        ("parts of two", walked(1, 2, vma), vec![tracked(7, 1, 2, first), tracked(7, 9, 2, second)], false),
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
    for policy in [CoveragePolicy::Conservative, CoveragePolicy::Refuse] {
        let (untracked, findings) = coverage(census, policy);
        assert_eq!(findings.gaps.len(), MAX_NAMED_MAPPINGS + 1);
        let conservative_gaps = findings
            .gaps
            .iter()
            .filter(|gap| (gap.kind, gap.effect) == (GapKind::UntrackedMapping, Effect::Conservative));
        assert_eq!(conservative_gaps.count(), findings.gaps.len(), "{policy:?}");
        assert_eq!((to_u64(untracked.pages.len()), to_u64(findings.suspect.len())), (count, count));
    }
    let (untracked, findings) = coverage(census, CoveragePolicy::Ignore);
    assert_eq!((to_u64(untracked.pages.len()), findings.suspect.len()), (count, 0));
    assert!(findings.gaps.iter().all(|gap| gap.effect == Effect::Ignored));
}

#[test]
fn gaps_and_pages_do_not_depend_on_the_order_of_the_walk() {
    let without_pid = Mapper { pid: None, ..mapper(0, 0x1000, 0x2000) };
    let mut mappers =
        [mapper(7, 0x1000, 0x3000), mapper(7, 0x8000, 0x9000), mapper(8, 0x2000, 0x4000), without_pid];
    let expected = mappers.map(|mapper| (mapper.pid, Some(mapper.pages)));
    for _ in 0..2 {
        let (untracked, findings) = coverage_of(&mappers, &[], None, false);
        let gaps: Vec<_> = findings.gaps.iter().map(|gap| (gap.pid, gap.range)).collect();
        assert_eq!(gaps, expected);
        assert_eq!(untracked.pages, [mapper(0, 0x1000, 0x4000).pages, mapper(0, 0x8000, 0x9000).pages]);
        mappers.reverse();
    }
}

#[test]
fn gap_of_a_mapping_names_its_process_and_addresses() {
    let known = mapper(7, 0x1000, 0x2000);
    for (mapper, process) in
        [(known, "process 7"), (Mapper { pid: None, ..known }, "a process without a pid")]
    {
        let detail = untracked_gap(&mapper).detail;
        assert!(detail.starts_with(&format!("mapped at {} by {process}", known.range)), "{detail}");
    }
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
    let untraced = CoverageLimits { calls_traced: false, ..all };
    for (some, expected) in [
        (all, None),
        (
            CoverageLimits { mappings_intact: false, ..all },
            Some((GapKind::EndedMapping, Effect::Conservative)),
        ),
        (untraced, Some((GapKind::DescriptorWrite, Effect::Conservative))),
        (CoverageLimits { writers_sealed: true, ..untraced }, None),
        (CoverageLimits { taken_bits_observed: false, ..all }, Some((GapKind::BitsTaken, Effect::Ignored))),
        (CoverageLimits { pins_supported: false, ..all }, Some((GapKind::DirectIo, Effect::Ignored))),
    ] {
        let gaps: Vec<_> = limits(some).iter().map(|gap| (gap.kind, gap.effect)).collect();
        assert_eq!(gaps, Vec::from_iter(expected), "{some:?}");
    }
}
