//! Writers in the kernel that no signal shows.

use fdmap_proto::tracking::{CoverageGap, CoveragePolicy, GapKind};

use super::{Findings, gap, ignored};
use crate::tracking::observe::KernelWriters;
use crate::tracking::ranges::ALL_PAGES;

/// Which kernel writers the host has, and which of them a trace or a seal excludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelWriterEvidence {
    /// At this checkpoint.
    pub(crate) now: KernelWriters,
    /// When calls on the file began to be traced.
    pub(crate) before: KernelWriters,
    pub(crate) calls_traced: bool,
    /// Seals exclude writers that open the file, not devices that pin its pages.
    pub(crate) writers_sealed: bool,
    /// An io_uring request without a completion event may write to the file, by a descriptor that raises no event.
    pub(crate) skipped_requests: bool,
}

/// The gaps of writers that may have the file. Nothing shows when they write, so their pages are left out.
pub(crate) fn kernel_writers(evidence: KernelWriterEvidence) -> Vec<CoverageGap> {
    let KernelWriterEvidence { now, before, calls_traced, writers_sealed, skipped_requests } = evidence;
    let mut gaps = Vec::new();
    let mut add = |kind, detail: &str| gaps.push(ignored(gap(kind, None, None, detail)));
    if now.memfd_devices && !calls_traced {
        add(
            GapKind::DirectIo,
            "udmabuf or iommufd may write to the file, and calls that attach it are not traced",
        );
    } else if before.iommufd_in_use {
        add(GapKind::DirectIo, "iommufd may have mapped pages of the file before calls on it were traced");
    }
    if now.file_servers && !writers_sealed {
        add(GapKind::UnnotifiedDescriptor, "nvmet or the SCSI target of this host may have the file open");
    }
    if skipped_requests {
        let detail = "a request of io_uring without a completion event may write to the file at any time";
        add(GapKind::UnnotifiedDescriptor, detail);
    }
    gaps
}

/// Findings on a file that was passed to iommufd or FUSE passthrough, also if its writers are sealed.
pub(crate) fn permanently_attached(attached: bool, policy: CoveragePolicy) -> Findings {
    let mut findings = Findings::default();
    if attached {
        let detail = "the file was passed to iommufd or FUSE passthrough, which may write to it at any time";
        findings.add_by_policy(policy, ALL_PAGES, gap(GapKind::DirectIo, None, None, detail));
    }
    findings
}

#[cfg(test)]
mod tests {
    use fdmap_proto::tracking::Effect;

    use super::*;

    #[test]
    fn each_kernel_writer_is_a_gap_unless_it_cannot_have_the_file() {
        let none = KernelWriters::default();
        let devices = KernelWriters { memfd_devices: true, ..none };
        let iommufd = KernelWriters { iommufd_in_use: true, ..devices };
        let servers = KernelWriters { file_servers: true, ..none };
        let traced = KernelWriterEvidence {
            now: none,
            before: none,
            calls_traced: true,
            writers_sealed: false,
            skipped_requests: false,
        };
        let untraced = KernelWriterEvidence { calls_traced: false, ..traced };
        for (evidence, kinds) in [
            (traced, vec![]),
            (untraced, vec![]),
            (KernelWriterEvidence { now: devices, before: devices, ..traced }, vec![]),
            (KernelWriterEvidence { now: devices, ..untraced }, vec![GapKind::DirectIo]),
            (KernelWriterEvidence { now: iommufd, ..traced }, vec![]),
            (KernelWriterEvidence { now: iommufd, before: iommufd, ..traced }, vec![GapKind::DirectIo]),
            (
                KernelWriterEvidence { before: iommufd, writers_sealed: true, ..traced },
                vec![GapKind::DirectIo],
            ),
            (KernelWriterEvidence { now: servers, ..traced }, vec![GapKind::UnnotifiedDescriptor]),
            (KernelWriterEvidence { now: servers, writers_sealed: true, ..traced }, vec![]),
            (KernelWriterEvidence { before: servers, ..traced }, vec![]),
            (KernelWriterEvidence { skipped_requests: true, ..traced }, vec![GapKind::UnnotifiedDescriptor]),
        ] {
            let gaps = kernel_writers(evidence);
            assert_eq!(gaps.iter().map(|gap| gap.kind).collect::<Vec<_>>(), kinds, "{evidence:?}");
            assert!(gaps.iter().all(|gap| gap.effect == Effect::Ignored), "{evidence:?}");
        }
    }

    #[test]
    fn permanent_attachment_makes_all_pages_conservative_unless_the_policy_ignores_it() {
        let none = permanently_attached(false, CoveragePolicy::Conservative);
        assert_eq!(none, Findings::default());
        let found = permanently_attached(true, CoveragePolicy::Conservative);
        assert_eq!((found.suspect, found.gaps[0].kind), (vec![ALL_PAGES], GapKind::DirectIo));
        let ignored = permanently_attached(true, CoveragePolicy::Ignore);
        assert_eq!((ignored.suspect, ignored.gaps[0].effect), (vec![], Effect::Ignored));
    }
}
