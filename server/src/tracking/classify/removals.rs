//! Removals of pages that no signal shows.
//!
//! `MADV_REMOVE` and punched holes change the ctime of shmem. On hugetlb they do not, and page tables keep the entries of pages
//! that were not written. So the ctime of a hugetlb file proves nothing. An event shows a removal, unless it was made by the
//! descriptor of `memfd_create`, or through a mapping of that descriptor. Traced calls show it too.

use fdmap_proto::tracking::{CoveragePolicy, GapKind};

use super::{Findings, gap};
use crate::tracking::ranges::ALL_PAGES;

/// What is known about removals since the last checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemovalEvidence {
    pub(crate) hugetlb: bool,
    /// Descriptors may exist whose writes raise no event.
    pub(crate) unnotified_descriptors: bool,
    /// Seals exclude removals, and did when the last generation was closed.
    pub(crate) writers_sealed: bool,
    /// System calls are traced. Calls that the trace lost, or cannot assign to a file, make the file conservative anyway.
    pub(crate) calls_traced: bool,
}

/// Findings on removals that leave no signal.
pub(crate) fn unobserved_removals(evidence: RemovalEvidence, policy: CoveragePolicy) -> Findings {
    let mut findings = Findings::default();
    let RemovalEvidence { hugetlb, unnotified_descriptors, writers_sealed, calls_traced } = evidence;
    if hugetlb && unnotified_descriptors && !writers_sealed && !calls_traced {
        let detail = "pages of a hugetlb file may have been removed, and system calls are not traced";
        findings.add_by_policy(policy, ALL_PAGES, gap(GapKind::UnnotifiedDescriptor, None, None, detail));
    }
    findings
}

#[cfg(test)]
mod tests {
    use fdmap_proto::tracking::Effect;

    use super::*;

    const ADOPTED: RemovalEvidence = RemovalEvidence {
        hugetlb: true,
        unnotified_descriptors: true,
        writers_sealed: false,
        calls_traced: false,
    };

    #[test]
    fn removal_is_possible_where_neither_ctime_nor_events_nor_the_trace_shows_it() {
        for (evidence, possible) in [
            (ADOPTED, true),
            (RemovalEvidence { calls_traced: true, ..ADOPTED }, false),
            (RemovalEvidence { hugetlb: false, ..ADOPTED }, false),
            (RemovalEvidence { unnotified_descriptors: false, ..ADOPTED }, false),
            (RemovalEvidence { writers_sealed: true, ..ADOPTED }, false),
        ] {
            let findings = unobserved_removals(evidence, CoveragePolicy::Conservative);
            let gaps: Vec<_> = findings.gaps.iter().map(|gap| (gap.kind, gap.effect)).collect();
            let gap = possible.then_some((GapKind::UnnotifiedDescriptor, Effect::Conservative));
            assert_eq!(gaps, Vec::from_iter(gap), "{evidence:?}");
            assert_eq!(findings.suspect, Vec::from_iter(possible.then_some(ALL_PAGES)), "{evidence:?}");
        }
    }

    #[test]
    fn policy_may_ignore_removals() {
        let findings = unobserved_removals(ADOPTED, CoveragePolicy::Ignore);
        assert_eq!(findings.gaps[0].effect, Effect::Ignored);
        assert!(findings.suspect.is_empty());
    }
}
