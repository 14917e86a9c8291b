//! Writers in the kernel that no signal shows.

use fdmap_proto::tracking::{CoverageGap, CoveragePolicy, GapKind};

use super::{Findings, gap, ignored};
use crate::tracking::observe::SilentWriters;
use crate::tracking::ranges::ALL_PAGES;

/// What is known about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SilentEvidence {
    pub(crate) now: SilentWriters,
    /// When calls on the file began to be traced.
    pub(crate) before: SilentWriters,
    pub(crate) calls_traced: bool,
    /// Seals exclude writers that open the file, not devices that pin its pages.
    pub(crate) writers_sealed: bool,
}

/// The gaps of writers that may have the file. Nothing shows when they write, so their pages are left out.
pub(crate) fn silent_writers(evidence: SilentEvidence) -> Vec<CoverageGap> {
    let SilentEvidence { now, before, calls_traced, writers_sealed } = evidence;
    let mut gaps = Vec::new();
    let mut add = |kind, detail: &str| gaps.push(ignored(gap(kind, None, None, detail)));
    if now.memfd_devices && !calls_traced {
        add(
            GapKind::DirectIo,
            "udmabuf or iommufd may write to the file, and calls that attach it are not traced",
        );
    } else if before.iommufd_in_use {
        add(GapKind::DirectIo, "iommufd may have got the file before its calls were traced");
    }
    if now.file_servers && !writers_sealed {
        add(GapKind::UnnotifiedDescriptor, "nvmet or the SCSI target of this host may have the file open");
    }
    gaps
}

/// Findings on a file that was attached to what may write to it at any time, also if its writers are sealed.
pub(crate) fn attached_for_good(attached: bool, policy: CoveragePolicy) -> Findings {
    let mut findings = Findings::default();
    if attached {
        let detail = "iommufd or FUSE passthrough got the file, and may write to it at any time";
        findings.add_by_policy(policy, ALL_PAGES, gap(GapKind::DirectIo, None, None, detail));
    }
    findings
}

#[cfg(test)]
mod tests {
    use fdmap_proto::tracking::Effect;

    use super::*;

    #[test]
    fn each_silent_writer_is_a_gap_unless_it_cannot_have_the_file() {
        let none = SilentWriters::default();
        let devices = SilentWriters { memfd_devices: true, ..none };
        let iommufd = SilentWriters { iommufd_in_use: true, ..devices };
        let servers = SilentWriters { file_servers: true, ..none };
        let traced = SilentEvidence { now: none, before: none, calls_traced: true, writers_sealed: false };
        let untraced = SilentEvidence { calls_traced: false, ..traced };
        for (evidence, kinds) in [
            (traced, vec![]),
            (untraced, vec![]),
            (SilentEvidence { now: devices, before: devices, ..traced }, vec![]),
            (SilentEvidence { now: devices, ..untraced }, vec![GapKind::DirectIo]),
            (SilentEvidence { now: iommufd, ..traced }, vec![]),
            (SilentEvidence { now: iommufd, before: iommufd, ..traced }, vec![GapKind::DirectIo]),
            (SilentEvidence { before: iommufd, writers_sealed: true, ..traced }, vec![GapKind::DirectIo]),
            (SilentEvidence { now: servers, ..traced }, vec![GapKind::UnnotifiedDescriptor]),
            (SilentEvidence { now: servers, writers_sealed: true, ..traced }, vec![]),
            (SilentEvidence { before: servers, ..traced }, vec![]),
        ] {
            let gaps = silent_writers(evidence);
            assert_eq!(gaps.iter().map(|gap| gap.kind).collect::<Vec<_>>(), kinds, "{evidence:?}");
            assert!(gaps.iter().all(|gap| gap.effect == Effect::Ignored), "{evidence:?}");
        }
    }

    #[test]
    fn attachment_for_good_makes_all_pages_conservative_unless_the_policy_ignores_it() {
        let none = attached_for_good(false, CoveragePolicy::Conservative);
        assert_eq!(none, Findings::default());
        let found = attached_for_good(true, CoveragePolicy::Conservative);
        assert_eq!((found.suspect, found.gaps[0].kind), (vec![ALL_PAGES], GapKind::DirectIo));
        let ignored = attached_for_good(true, CoveragePolicy::Ignore);
        assert_eq!((ignored.suspect, ignored.gaps[0].effect), (vec![], Effect::Ignored));
    }
}
