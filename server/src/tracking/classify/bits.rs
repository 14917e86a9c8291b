//! Written bits that a call, which was not the service's, may have taken before they were harvested.
//!
//! PAGEMAP_SCAN write-protects pages that were written, UFFDIO_WRITEPROTECT and the other operations of a userfaultfd change the
//! protection of any range, and mremap with MREMAP_DONTUNMAP moves the bits away. What such a call took is unknown, so every page
//! of the address space may have been written.

use fdmap_proto::tracking::{CoverageGap, GapKind};

use super::{Findings, gap, ignored};
use crate::tracking::observe::AddressSpacePages;

/// Findings on address spaces whose written bits are incomplete.
pub(crate) fn taken(spaces: Vec<AddressSpacePages>) -> Findings {
    let mut findings = Findings::default();
    for AddressSpacePages { pid, pages } in spaces {
        for range in pages {
            let detail = format!("a call may have taken written bits of process {pid}");
            findings.add_suspect(range, gap(GapKind::BitsTaken, Some(pid), Some(range), detail));
        }
    }
    findings
}

/// Findings on ranges with guard regions, whose write protection was removed.
pub(crate) fn guarded(spaces: Vec<AddressSpacePages>) -> Findings {
    let mut findings = Findings::default();
    for AddressSpacePages { pid, pages } in spaces {
        for range in pages {
            let detail =
                format!("process {pid} called madvise(MADV_GUARD_INSTALL): its range is no longer tracked");
            let gap = gap(GapKind::UntrackedMapping, Some(pid), Some(range), detail);
            let remedy = "untrack the mapping, and track it again after MADV_GUARD_REMOVE".to_owned();
            findings.add_suspect(range, CoverageGap { remedy, ..gap });
        }
    }
    findings
}

/// The gap of mappings whose written bits any process can take unnoticed.
pub(crate) fn unobserved_gap() -> CoverageGap {
    ignored(gap(GapKind::BitsTaken, None, None, "calls that take written bits are not traced"))
}

#[cfg(test)]
mod tests {
    use fdmap_proto::tracking::Effect;
    use fdmap_proto::units::{PageIndex, PageRange};

    use super::*;

    #[test]
    fn all_pages_of_each_address_space_are_suspect() {
        let pages = [PageRange::first(2), PageRange::at(PageIndex(7), 1)];
        let spaces = || [5, 6].map(|pid| AddressSpacePages { pid, pages: pages.to_vec() }).to_vec();
        for (findings, kind) in
            [(taken(spaces()), GapKind::BitsTaken), (guarded(spaces()), GapKind::UntrackedMapping)]
        {
            assert_eq!(findings.suspect, [pages, pages].concat(), "{kind:?}");
            let gaps: Vec<_> =
                findings.gaps.iter().map(|gap| (gap.kind, gap.effect, gap.pid, gap.range)).collect();
            let of = |pid| pages.map(|range| (kind, Effect::Conservative, Some(pid), Some(range)));
            assert_eq!(gaps, [of(5), of(6)].concat());
        }
        assert_eq!(taken(Vec::new()), Findings::default());
    }

    #[test]
    fn remedy_of_guard_regions_names_the_call_that_removes_them() {
        let findings = guarded(vec![AddressSpacePages { pid: 5, pages: vec![PageRange::first(2)] }]);
        assert!(findings.gaps[0].remedy.contains("MADV_GUARD_REMOVE"), "{}", findings.gaps[0].remedy);
    }

    #[test]
    fn bits_that_may_be_taken_unnoticed_are_an_ignored_gap() {
        let gap = unobserved_gap();
        assert_eq!((gap.kind, gap.effect), (GapKind::BitsTaken, Effect::Ignored));
    }
}
