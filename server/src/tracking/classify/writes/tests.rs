use fdmap_proto::tracking::Effect;
use fdmap_proto::units::PageIndex;

use super::*;

const QUIET: DescriptorEvidence = DescriptorEvidence {
    writers_sealed: false,
    unnotified_descriptors: false,
    ctime_changed: false,
    modified: false,
    signals_lost: false,
    mapped_writes: false,
    traced_writes: false,
    untraced: None,
    loop_device: false,
    unnotified_write_pending: false,
};
const ALL_TRACED: UntracedWriters = UntracedWriters { lost: false, io_uring: false, unranged: false };

fn kind(evidence: DescriptorEvidence) -> Option<GapKind> {
    judge_descriptors(&evidence).conservative
}

#[test]
fn unchanged_inode_was_not_written_by_descriptor() {
    assert_eq!(judge_descriptors(&QUIET), DescriptorVerdict::default());
}

#[test]
fn sealed_file_needs_no_signals() {
    let loud = DescriptorEvidence {
        writers_sealed: true,
        ctime_changed: true,
        modified: true,
        signals_lost: true,
        ..QUIET
    };
    assert_eq!(judge_descriptors(&loud), DescriptorVerdict::default());
}

#[test]
fn modification_is_conservative_unless_its_range_was_traced() {
    let modified = DescriptorEvidence { ctime_changed: true, modified: true, ..QUIET };
    assert_eq!(kind(modified), Some(GapKind::DescriptorWrite));
    let unexplained = DescriptorEvidence { untraced: Some(ALL_TRACED), ..modified };
    assert_eq!(kind(unexplained), Some(GapKind::DescriptorWrite), "no traced call explains it");
    let modified = DescriptorEvidence { traced_writes: true, ..modified };
    assert_eq!(kind(DescriptorEvidence { untraced: Some(ALL_TRACED), ..modified }), None);
    for untraced in [
        UntracedWriters { lost: true, ..ALL_TRACED },
        UntracedWriters { io_uring: true, ..ALL_TRACED },
        UntracedWriters { unranged: true, ..ALL_TRACED },
    ] {
        assert!(kind(DescriptorEvidence { untraced: Some(untraced), ..modified }).is_some());
    }
}

#[test]
fn changed_ctime_without_another_reason_is_an_unnotified_write() {
    let changed = DescriptorEvidence { ctime_changed: true, ..QUIET };
    let verdict = judge_descriptors(&changed);
    assert_eq!(verdict.conservative, Some(GapKind::UnnotifiedDescriptor));
    assert!(verdict.unnotified_write && !verdict.only_possible);
    // Mapped writes explain the change, but other writes may have happened too.
    let verdict = judge_descriptors(&DescriptorEvidence { mapped_writes: true, ..changed });
    assert!(verdict.conservative.is_some() && verdict.only_possible);
    // With tracing, no other writer is possible.
    let traced = DescriptorEvidence { mapped_writes: true, untraced: Some(ALL_TRACED), ..changed };
    assert_eq!(kind(traced), None);
    assert!(kind(DescriptorEvidence { mapped_writes: false, ..traced }).is_some(), "no known writer");
    assert!(kind(DescriptorEvidence { loop_device: true, ..traced }).is_some());
    let io_uring = UntracedWriters { io_uring: true, ..ALL_TRACED };
    assert_eq!(
        kind(DescriptorEvidence { untraced: Some(io_uring), ..traced }),
        None,
        "it would raise IN_MODIFY"
    );
    let unnotified = DescriptorEvidence { untraced: Some(io_uring), unnotified_descriptors: true, ..traced };
    assert!(kind(unnotified).is_some());
}

#[test]
fn unnotified_write_counts_for_the_next_generation_too() {
    let pending = DescriptorEvidence { unnotified_write_pending: true, ..QUIET };
    assert_eq!(kind(pending), Some(GapKind::UnnotifiedDescriptor));
}

#[test]
fn lost_signals_count_whatever_the_ctime() {
    let lost = DescriptorEvidence { signals_lost: true, untraced: Some(ALL_TRACED), ..QUIET };
    assert_eq!(kind(lost), Some(GapKind::LostEvents));
}

/// The oracle: the rules as a sequence of separate conditions.
fn oracle(evidence: &DescriptorEvidence) -> DescriptorVerdict {
    let untraced = evidence.untraced;
    let any = |of: fn(UntracedWriters) -> bool| untraced.is_some_and(of);
    let (lost, io_uring, unranged) = (any(|u| u.lost), any(|u| u.io_uring), any(|u| u.unranged));
    let complete_trace = untraced.is_some() && !lost && !io_uring && !unranged;
    let no_known_writer = !evidence.mapped_writes && !evidence.traced_writes;
    let (conservative, only_possible, unnotified_write) = if evidence.writers_sealed {
        (None, false, false)
    } else if evidence.signals_lost {
        (Some(GapKind::LostEvents), false, true)
    } else if evidence.modified && !(evidence.traced_writes && complete_trace) {
        let unnotified = evidence.unnotified_descriptors && evidence.ctime_changed;
        (Some(GapKind::DescriptorWrite), false, unnotified)
    } else if evidence.ctime_changed && untraced.is_none() {
        let possible = evidence.mapped_writes && !evidence.unnotified_descriptors && !evidence.loop_device;
        (Some(GapKind::UnnotifiedDescriptor), possible, true)
    } else if evidence.ctime_changed
        && (lost
            || unranged
            || (io_uring && evidence.unnotified_descriptors)
            || evidence.loop_device
            || no_known_writer)
    {
        (Some(GapKind::UnnotifiedDescriptor), evidence.mapped_writes && !evidence.loop_device, true)
    } else if evidence.unnotified_write_pending {
        (Some(GapKind::UnnotifiedDescriptor), false, false)
    } else {
        (None, false, false)
    };
    DescriptorVerdict { conservative, only_possible, unnotified_write }
}

#[test]
fn every_combination_of_evidence_is_judged_as_the_oracle_does() {
    for bits in 0..1_u32 << 13 {
        let bit = |nth: u32| bits >> nth & 1 == 1;
        let untraced =
            bit(9).then(|| UntracedWriters { lost: bit(10), io_uring: bit(11), unranged: bit(12) });
        let evidence = DescriptorEvidence {
            writers_sealed: bit(0),
            unnotified_descriptors: bit(1),
            ctime_changed: bit(2),
            modified: bit(3),
            signals_lost: bit(4),
            mapped_writes: bit(5),
            traced_writes: bit(6),
            untraced,
            loop_device: bit(7),
            unnotified_write_pending: bit(8),
        };
        assert_eq!(judge_descriptors(&evidence), oracle(&evidence), "{evidence:?}");
    }
}

#[test]
fn only_possible_writes_follow_the_policy() {
    let certain = DescriptorVerdict {
        conservative: Some(GapKind::UnnotifiedDescriptor),
        only_possible: false,
        unnotified_write: true,
    };
    let possible = DescriptorVerdict { only_possible: true, ..certain };
    for (verdict, policy, effect) in [
        (certain, CoveragePolicy::Conservative, Effect::Conservative),
        (certain, CoveragePolicy::Ignore, Effect::Conservative),
        (possible, CoveragePolicy::Conservative, Effect::Conservative),
        (possible, CoveragePolicy::Refuse, Effect::Conservative),
        (possible, CoveragePolicy::Ignore, Effect::Ignored),
    ] {
        let findings = descriptor_findings(verdict, policy);
        assert_eq!(findings.gaps[0].effect, effect, "{verdict:?} {policy:?}");
        assert_eq!(findings.suspect.is_empty(), effect == Effect::Ignored);
    }
    let none = descriptor_findings(DescriptorVerdict::default(), CoveragePolicy::Conservative);
    assert_eq!(none, Findings::default());
}

#[test]
fn calls_in_progress_are_suspect_now_and_in_flight_later() {
    let at = |start, len| PageRange::at(PageIndex(start), len);
    let calls = CallWrites {
        untraced: ALL_TRACED,
        ended: vec![at(0, 2), at(8, 4)],
        imprecise: vec![at(5, 1)],
        in_flight: vec![at(9, 100)],
        mapped: false,
    };
    let mut findings = Findings { observed: vec![at(1, 2)], ..Findings::default() };
    let in_flight = traced_writes(Some(&calls), 10, &mut findings);
    assert_eq!(findings.observed, [at(0, 3), at(8, 2)], "calls beyond the end of the file wrote nothing");
    assert_eq!(findings.suspect, [at(5, 1), at(9, 100)]);
    assert_eq!(in_flight, [at(9, 1)]);
    assert!(traced_writes(None, 10, &mut findings).is_empty());
}

#[test]
fn checkpoint_with_any_evidence_is_not_idle() {
    let quiet = IdleEvidence {
        hugetlb: false,
        unnotified_descriptors: false,
        ctime_changed: false,
        modified: false,
        unnotified_write_pending: false,
        traced_writes: false,
        redirty_pages: false,
        untracked_mappings: false,
        mappings_intact: true,
        same_size: true,
        stamped_since: false,
    };
    assert!(idle(&quiet));
    for busy in [
        IdleEvidence { hugetlb: true, ..quiet },
        IdleEvidence { unnotified_descriptors: true, ..quiet },
        IdleEvidence { ctime_changed: true, ..quiet },
        IdleEvidence { modified: true, ..quiet },
        IdleEvidence { unnotified_write_pending: true, ..quiet },
        IdleEvidence { traced_writes: true, ..quiet },
        IdleEvidence { redirty_pages: true, ..quiet },
        IdleEvidence { untracked_mappings: true, ..quiet },
        IdleEvidence { mappings_intact: false, ..quiet },
        IdleEvidence { same_size: false, ..quiet },
        IdleEvidence { stamped_since: true, ..quiet },
    ] {
        assert!(!idle(&busy), "{busy:?}");
    }
}
