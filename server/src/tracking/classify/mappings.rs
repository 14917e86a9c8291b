//! Mappings that existed in the generation and were not tracked, or ended before they were harvested.

use fdmap_proto::tracking::{CoverageGap, CoveragePolicy, GapKind};
use fdmap_proto::units::PageRange;
use fdmap_sys::memfd::FileOrigin;

use super::{Findings, UntrackedMappings, bits, gap, ignored};
use crate::tracking::baseline::InodeBaseline;
use crate::tracking::observe::{AddressSpacePages, ChildHarvest, EndedMapping, Harvest, Observation};
use crate::tracking::ranges::{self, ALL_PAGES};

/// True if a writable mapping may have been created, and possibly unmapped, since the last checkpoint.
///
/// A writer-sealed file admits no new writable mapping by mmap, but copies and growth of those that it has. Traced calls count every call that maps the file. Where calls are not
/// traced, only the atime shows it: mapping a file changes its atime, unless the descriptor has O_NOATIME, which takes the
/// rights of the owner, or the mount does not record atime; a second mapping within one tick of the clock leaves it as it is.
#[must_use]
pub(crate) fn mappings_came(seen: &Observation, baseline: &InodeBaseline, origin: FileOrigin) -> bool {
    if seen.inode.writers_sealed && baseline.writers_sealed {
        return seen.calls.as_ref().is_some_and(|calls| calls.remapped);
    }
    if let Some(calls) = &seen.calls {
        // Files of a mounted file system are also mapped through files of stacked ones.
        return calls.mapped || (origin == FileOrigin::Mounted && calls.other.stacked_mappings);
    }
    match origin {
        FileOrigin::Memfd | FileOrigin::KernelMount => {
            seen.inode.atime != baseline.atime || baseline.atime_recent
        }
        FileOrigin::Mounted => true,
    }
}

/// Findings of a harvest.
pub(crate) fn harvested(harvest: Harvest) -> Findings {
    let Harvest { mut written, ended, taken, guarded, blocked, taken_unobserved } = harvest;
    ranges::normalize(&mut written);
    let mut findings = bits::taken(taken);
    findings.observed = written;
    findings.merge(bits::guarded(guarded));
    findings.gaps.extend(taken_unobserved.then(bits::unobserved_gap));
    for ended in ended {
        findings
            .add_suspect(ended.pages, ended_gap(ended, "a tracked mapping ended before it was harvested"));
    }
    for AddressSpacePages { pid, pages } in blocked {
        let detail = "the process holds the lock of its address space (mmap_lock): not harvested in time";
        for pages in pages {
            findings.add_suspect(pages, gap(GapKind::BlockedMapping, Some(pid), Some(pages), detail));
        }
    }
    findings
}

/// Findings of a search for forked children.
pub(crate) fn children(harvest: ChildHarvest) -> Findings {
    let ChildHarvest { written, ended, taken, unidentified } = harvest;
    let mut findings = bits::taken(taken);
    findings.inherited = written;
    for ended in ended {
        findings.add_suspect(ended.pages, ended_gap(ended, "a child unmapped its mapping"));
    }
    for child in unidentified {
        let detail = format!("a child of process {} exited or was not found", child.pid);
        let gap = gap(GapKind::EndedMapping, None, Some(child.pages), detail);
        findings.add_suspect(child.pages, gap);
    }
    findings
}

fn ended_gap(ended: EndedMapping, detail: &str) -> CoverageGap {
    gap(GapKind::EndedMapping, Some(ended.pid), Some(ended.pages), detail)
}

/// The mappings since the last checkpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MappingHistory<'a> {
    /// Untracked mappings at the last checkpoint, or detached since.
    pub(crate) untracked_before: &'a UntrackedMappings,
    /// Result of [`mappings_came`].
    pub(crate) mappings_came: bool,
    /// As in [`Observation`].
    pub(crate) forked: &'a [AddressSpacePages],
    /// As in [`Observation`].
    pub(crate) child_reaped: bool,
    /// As in [`Observation`].
    pub(crate) forks_possible: bool,
    /// The pages of all tracked mappings.
    pub(crate) tracked_pages: &'a [PageRange],
}

/// Findings on writers that existed since the last checkpoint, whether or not they exist now.
pub(crate) fn mappings(history: MappingHistory<'_>, policy: CoveragePolicy) -> Findings {
    let MappingHistory {
        untracked_before,
        mappings_came,
        forked,
        child_reaped,
        forks_possible,
        tracked_pages,
    } = history;
    let mut findings = Findings::default();
    if forks_possible {
        let detail = "forks are not observed: children may have run that were not reaped";
        findings.gaps.push(ignored(gap(GapKind::UnknownMappers, None, None, detail)));
    }
    for pages in &untracked_before.pages {
        let detail = "was mapped at the last checkpoint";
        findings.add_by_policy(policy, *pages, gap(GapKind::UntrackedMapping, None, Some(*pages), detail));
    }
    if untracked_before.unknown {
        let detail = "mappers were unknown at the last checkpoint";
        findings.add_by_policy(policy, ALL_PAGES, gap(GapKind::UnknownMappers, None, None, detail));
    }
    if mappings_came {
        let detail = "a process mapped the file after the last checkpoint";
        findings.add_by_policy(policy, ALL_PAGES, gap(GapKind::UntrackedMapping, None, None, detail));
    }
    for AddressSpacePages { pid, pages } in forked {
        for range in pages {
            let detail = format!("process {pid} forked, and its child was not tracked");
            let gap = gap(GapKind::UntrackedMapping, None, Some(*range), detail);
            findings.add_by_policy(policy, *range, gap);
        }
    }
    if child_reaped {
        for pages in tracked_pages {
            let detail = "a child of a tracked process exited, and forks are not observed";
            findings.add_by_policy(policy, *pages, gap(GapKind::EndedMapping, None, Some(*pages), detail));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use fdmap_proto::tracking::Effect;
    use fdmap_proto::units::PageIndex;

    use super::*;
    use crate::tracking::observe::{CallWrites, Modifiers, OtherCalls};

    fn calls(lost: bool, mapped: bool) -> Option<CallWrites> {
        let other = OtherCalls { unmatched: lost, ..OtherCalls::default() };
        Some(CallWrites { other, mapped, ..CallWrites::default() })
    }

    fn seen(atime: i64, sealed: bool, calls: Option<CallWrites>) -> Observation {
        Observation {
            inode: InodeBaseline { atime: (atime, 0), writers_sealed: sealed, ..InodeBaseline::default() },
            modifiers: Modifiers::default(),
            signals_lost: false,
            writable_vmas: Some(0),
            intact_vmas: Some(0),
            bits_taken: false,
            forked: Vec::new(),
            child_reaped: false,
            forks_possible: false,
            calls,
            loop_device: false,
            permanently_attached: false,
            time: Instant::now(),
        }
    }

    fn stacked() -> Option<CallWrites> {
        let other = OtherCalls { stacked_mappings: true, ..OtherCalls::default() };
        Some(CallWrites { other, ..CallWrites::default() })
    }

    #[test]
    fn mapping_may_have_come_unless_the_right_signal_excludes_it() {
        let baseline = InodeBaseline::default();
        let (same, changed) = (0, 1);
        for (origin, atime, calls, came) in [
            (FileOrigin::Memfd, same, None, false),
            (FileOrigin::Memfd, changed, None, true),
            (FileOrigin::Memfd, changed, calls(false, false), false),
            (FileOrigin::Memfd, same, calls(false, true), true),
            (FileOrigin::Memfd, same, calls(true, true), true),
            (FileOrigin::Memfd, changed, calls(true, false), false),
            (FileOrigin::KernelMount, same, calls(false, false), false),
            (FileOrigin::KernelMount, changed, calls(false, false), false),
            (FileOrigin::KernelMount, same, calls(false, true), true),
            (FileOrigin::KernelMount, same, calls(true, true), true),
            (FileOrigin::KernelMount, same, None, false),
            (FileOrigin::KernelMount, changed, None, true),
            (FileOrigin::Memfd, same, stacked(), false),
            (FileOrigin::KernelMount, same, stacked(), false),
            (FileOrigin::Mounted, same, stacked(), true),
            (FileOrigin::Mounted, changed, calls(false, false), false),
            (FileOrigin::Mounted, same, calls(false, true), true),
            (FileOrigin::Mounted, same, None, true),
            (FileOrigin::Mounted, same, calls(true, true), true),
            (FileOrigin::Mounted, changed, calls(true, false), false),
        ] {
            let observation = seen(atime, false, calls);
            assert_eq!(mappings_came(&observation, &baseline, origin), came, "{origin:?} {observation:?}");
        }
    }

    #[test]
    fn same_atime_proves_nothing_within_its_tick() {
        let recent = InodeBaseline { atime_recent: true, ..InodeBaseline::default() };
        for (origin, calls, came) in [
            (FileOrigin::Memfd, None, true),
            (FileOrigin::Memfd, calls(false, false), false),
            (FileOrigin::KernelMount, None, true),
            (FileOrigin::KernelMount, calls(false, false), false),
        ] {
            assert_eq!(mappings_came(&seen(0, false, calls), &recent, origin), came, "{origin:?}");
        }
    }

    #[test]
    fn sealed_file_has_no_new_mappings_but_copies_if_it_was_sealed_at_the_last_checkpoint() {
        let sealed = InodeBaseline { writers_sealed: true, ..InodeBaseline::default() };
        let observation = seen(1, true, None);
        assert!(!mappings_came(&observation, &sealed, FileOrigin::Mounted));
        // No seal refuses a copy of a mapping, or its growth.
        let calls = |remapped| Some(CallWrites { mapped: true, remapped, ..CallWrites::default() });
        for remapped in [false, true] {
            let came = mappings_came(&seen(1, true, calls(remapped)), &sealed, FileOrigin::Memfd);
            assert_eq!(came, remapped);
        }
        assert!(
            mappings_came(&observation, &InodeBaseline::default(), FileOrigin::Mounted),
            "sealed meanwhile"
        );
        assert!(mappings_came(&seen(1, false, None), &sealed, FileOrigin::Mounted), "not sealed now");
    }

    /// What the gaps report, except for texts.
    fn gaps(findings: &Findings) -> Vec<(GapKind, Effect, Option<u32>, Option<PageRange>)> {
        findings.gaps.iter().map(|gap| (gap.kind, gap.effect, gap.pid, gap.range)).collect()
    }

    #[test]
    fn ended_mappings_make_their_pages_suspect() {
        let pages = PageRange::at(PageIndex(4), 2);
        let written = vec![PageRange::at(PageIndex(1), 1), PageRange::at(PageIndex(0), 1)];
        let findings = harvested(Harvest {
            written: written.clone(),
            ended: vec![EndedMapping { pid: 7, pages }],
            ..Harvest::default()
        });
        assert_eq!(findings.observed, [PageRange::first(2)]);
        assert_eq!(findings.suspect, [pages]);
        let ended = |pid| (GapKind::EndedMapping, Effect::Conservative, pid, Some(pages));
        assert_eq!(gaps(&findings), [ended(Some(7))]);
        assert!(findings.gaps[0].detail.starts_with("a tracked mapping"), "{}", findings.gaps[0].detail);
        let child = EndedMapping { pid: 8, pages };
        let findings = children(ChildHarvest {
            written: written.clone(),
            ended: vec![child],
            unidentified: vec![child],
            ..ChildHarvest::default()
        });
        assert_eq!((&findings.observed, &findings.inherited), (&vec![], &written));
        assert_eq!(findings.suspect, [pages, pages]);
        assert_eq!(gaps(&findings), [ended(Some(8)), ended(None)]);
        assert!(findings.gaps[0].detail.starts_with("a child unmapped"), "{}", findings.gaps[0].detail);
        assert!(findings.gaps[1].detail.starts_with("a child of process 8"), "{}", findings.gaps[1].detail);
    }

    #[test]
    fn harvest_without_some_written_bits_is_a_gap() {
        let pages = PageRange::at(PageIndex(4), 2);
        let spaces = || vec![AddressSpacePages { pid: 7, pages: vec![pages] }];
        let gap = |kind| (kind, Effect::Conservative, Some(7), Some(pages));
        let unobserved = (GapKind::BitsTaken, Effect::Ignored, None, None);
        for (findings, suspect, gap) in [
            (
                harvested(Harvest { taken: spaces(), ..Harvest::default() }),
                vec![pages],
                gap(GapKind::BitsTaken),
            ),
            (
                harvested(Harvest { guarded: spaces(), ..Harvest::default() }),
                vec![pages],
                gap(GapKind::UntrackedMapping),
            ),
            (harvested(Harvest { taken_unobserved: true, ..Harvest::default() }), vec![], unobserved),
            (
                children(ChildHarvest { taken: spaces(), ..ChildHarvest::default() }),
                vec![pages],
                gap(GapKind::BitsTaken),
            ),
        ] {
            assert_eq!((gaps(&findings), findings.suspect), (vec![gap], suspect));
        }
        assert_eq!(harvested(Harvest::default()), Findings::default());
        assert_eq!(children(ChildHarvest::default()), Findings::default());
    }

    #[test]
    fn each_writer_of_the_past_makes_its_pages_suspect_unless_ignored() {
        let at = |page| PageRange::at(PageIndex(page), 2);
        let (pages, more) = (vec![at(4), at(8)], vec![at(20)]);
        let none = UntrackedMappings::default();
        let some = UntrackedMappings { pages: pages.clone(), unknown: false };
        let unknown = UntrackedMappings { pages: vec![], unknown: true };
        let forked =
            [(7, &pages), (8, &more)].map(|(pid, pages)| AddressSpacePages { pid, pages: pages.clone() });
        let quiet = MappingHistory {
            untracked_before: &none,
            mappings_came: false,
            forked: &[],
            child_reaped: false,
            forks_possible: false,
            tracked_pages: &pages,
        };
        assert_eq!(mappings(quiet, CoveragePolicy::Conservative), Findings::default());
        let both = [pages.clone(), more].concat();
        for (history, suspect, kind) in [
            (MappingHistory { untracked_before: &some, ..quiet }, &pages, GapKind::UntrackedMapping),
            (
                MappingHistory { untracked_before: &unknown, ..quiet },
                &vec![ALL_PAGES],
                GapKind::UnknownMappers,
            ),
            (MappingHistory { mappings_came: true, ..quiet }, &vec![ALL_PAGES], GapKind::UntrackedMapping),
            (MappingHistory { forked: &forked, ..quiet }, &both, GapKind::UntrackedMapping),
            (MappingHistory { child_reaped: true, ..quiet }, &pages, GapKind::EndedMapping),
        ] {
            for (policy, effect) in [
                (CoveragePolicy::Conservative, Effect::Conservative),
                (CoveragePolicy::Refuse, Effect::Conservative),
                (CoveragePolicy::Ignore, Effect::Ignored),
            ] {
                let findings = mappings(history, policy);
                // A gap of all pages has no range.
                let gap = |range: &PageRange| (kind, effect, None, (*range != ALL_PAGES).then_some(*range));
                let expected: Vec<_> = suspect.iter().map(gap).collect();
                assert_eq!(gaps(&findings), expected, "{history:?} {policy:?}");
                let suspect = if effect == Effect::Ignored { &[] } else { suspect.as_slice() };
                assert_eq!(findings.suspect, suspect, "{history:?} {policy:?}");
            }
        }
        // Possible forks are reported under every policy, and make nothing suspect.
        let findings =
            mappings(MappingHistory { forks_possible: true, ..quiet }, CoveragePolicy::Conservative);
        let ignored = (GapKind::UnknownMappers, Effect::Ignored, None, None);
        assert_eq!((gaps(&findings), findings.suspect), (vec![ignored], vec![]));
    }
}
