use std::collections::BTreeSet;

use fdmap_proto::tracking::Effect;
use fdmap_proto::units::PageIndex;

use super::*;
use crate::tracking::observe::OtherCalls;

const QUIET: DescriptorEvidence = DescriptorEvidence {
    writers_sealed: false,
    unnotified_descriptors: false,
    ctime_changed: false,
    events: ModifyVerdict::None,
    signals_lost: false,
    mapped_writes: false,
    traced_calls: false,
    unranged: None,
    loop_device: false,
    pending: None,
};
const TRACED: Option<UnrangedCalls> = Some(UnrangedCalls { unmatched: false, requests: false });

fn kind(evidence: DescriptorEvidence) -> Option<GapKind> {
    judge_descriptors(&evidence).conservative
}

fn threads(ids: &[u32]) -> BTreeSet<u32> {
    ids.iter().copied().collect()
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
        events: ModifyVerdict::Unexplained,
        signals_lost: true,
        loop_device: true,
        ..QUIET
    };
    assert_eq!(judge_descriptors(&loud), DescriptorVerdict::default());
}

#[test]
fn event_is_explained_only_by_a_call_of_its_own_thread() {
    let calls = |ids: &[u32], other: &[u32]| CallWrites {
        threads: threads(ids),
        other: OtherCalls { threads: threads(other), ..OtherCalls::default() },
        ..CallWrites::default()
    };
    let by = |ids: &[u32]| Modifiers { threads: threads(ids), unnamed: false };
    let judge = |modifiers: &Modifiers, calls: &CallWrites| judge_events(modifiers, Some(calls), false);
    assert_eq!(judge(&by(&[]), &calls(&[], &[])), ModifyVerdict::None);
    assert_eq!(judge(&by(&[5]), &calls(&[5, 6], &[])), ModifyVerdict::Explained);
    assert_eq!(judge(&by(&[5, 6]), &calls(&[5], &[])), ModifyVerdict::Unexplained, "6 made no traced call");
    assert_eq!(judge(&by(&[5]), &calls(&[6], &[])), ModifyVerdict::Unexplained);
    assert_eq!(judge(&by(&[5]), &calls(&[5], &[5])), ModifyVerdict::Unexplained, "it wrote by other ways");
    assert_eq!(judge_events(&by(&[5]), None, false), ModifyVerdict::Unexplained, "no calls are traced");
}

#[test]
fn event_without_a_thread_is_explained_by_any_call_if_no_other_writer_is_possible() {
    let unnamed = Modifiers { threads: threads(&[]), unnamed: true };
    let calls = CallWrites { threads: threads(&[5]), ..CallWrites::default() };
    assert_eq!(judge_events(&unnamed, Some(&calls), false), ModifyVerdict::Explained);
    assert_eq!(
        judge_events(&unnamed, Some(&calls), true),
        ModifyVerdict::Unexplained,
        "the kernel may write"
    );
    assert_eq!(judge_events(&unnamed, Some(&CallWrites::default()), false), ModifyVerdict::Unexplained);
    for other in
        [OtherCalls { paths: true, ..Default::default() }, OtherCalls { stacked: true, ..Default::default() }]
    {
        let calls = CallWrites { other, ..calls.clone() };
        assert_eq!(judge_events(&unnamed, Some(&calls), false), ModifyVerdict::Unexplained, "{calls:?}");
    }
}

#[test]
fn events_are_conservative_unless_traced_calls_explain_them() {
    let modified = DescriptorEvidence { ctime_changed: true, events: ModifyVerdict::Unexplained, ..QUIET };
    assert_eq!(kind(modified), Some(GapKind::DescriptorWrite));
    let explained = DescriptorEvidence {
        events: ModifyVerdict::Explained,
        traced_calls: true,
        unranged: TRACED,
        ..modified
    };
    assert_eq!(kind(explained), None);
    // A write of the thread explains neither of these.
    assert!(kind(DescriptorEvidence { loop_device: true, ..explained }).is_some());
    for unranged in [
        UnrangedCalls { unmatched: true, requests: false },
        UnrangedCalls { unmatched: false, requests: true },
    ] {
        assert!(kind(DescriptorEvidence { unranged: Some(unranged), ..explained }).is_some());
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
    let traced = DescriptorEvidence { mapped_writes: true, unranged: TRACED, ..changed };
    assert_eq!(kind(traced), None);
    assert!(kind(DescriptorEvidence { mapped_writes: false, ..traced }).is_some(), "no known writer");
}

#[test]
fn calls_that_end_late_count_whatever_the_ctime() {
    let unranged = Some(UnrangedCalls { unmatched: false, requests: true });
    assert!(kind(DescriptorEvidence { unranged, ..QUIET }).is_some(), "ctime changed when they began");
    let attached = DescriptorEvidence { loop_device: true, unranged: TRACED, ..QUIET };
    assert_eq!(kind(attached), Some(GapKind::UnnotifiedDescriptor));
}

#[test]
fn unnotified_write_counts_for_the_next_generation_too() {
    let pending =
        |only_possible| DescriptorEvidence { pending: Some(PendingWrite { only_possible }), ..QUIET };
    assert_eq!(kind(pending(false)), Some(GapKind::UnnotifiedDescriptor));
    assert!(judge_descriptors(&pending(true)).only_possible);
}

#[test]
fn lost_signals_count_whatever_the_ctime() {
    let lost = DescriptorEvidence { signals_lost: true, unranged: TRACED, ..QUIET };
    assert_eq!(kind(lost), Some(GapKind::LostEvents));
}

/// The oracle: the rules as a sequence of separate conditions.
fn oracle(evidence: &DescriptorEvidence) -> DescriptorVerdict {
    let any = |of: fn(UnrangedCalls) -> bool| evidence.unranged.is_some_and(of);
    let traced = evidence.unranged.is_some();
    let no_known_writer = !evidence.mapped_writes && !evidence.traced_calls;
    let (conservative, only_possible, unnotified_write) = if evidence.writers_sealed {
        (None, false, false)
    } else if evidence.signals_lost {
        (Some(GapKind::LostEvents), false, true)
    } else if evidence.events == ModifyVerdict::Unexplained {
        let unnotified = evidence.unnotified_descriptors && evidence.ctime_changed;
        (Some(GapKind::DescriptorWrite), false, unnotified)
    } else if any(|calls| calls.unmatched) || any(|calls| calls.requests) {
        (Some(GapKind::DescriptorWrite), false, false)
    } else if evidence.loop_device {
        (Some(GapKind::UnnotifiedDescriptor), false, false)
    } else if evidence.ctime_changed && !traced {
        let possible = evidence.mapped_writes && !evidence.unnotified_descriptors;
        (Some(GapKind::UnnotifiedDescriptor), possible, true)
    } else if evidence.ctime_changed && no_known_writer {
        (Some(GapKind::UnnotifiedDescriptor), false, true)
    } else if let Some(pending) = evidence.pending {
        (Some(GapKind::UnnotifiedDescriptor), pending.only_possible, false)
    } else {
        (None, false, false)
    };
    DescriptorVerdict { conservative, only_possible, unnotified_write }
}

#[test]
fn every_combination_of_evidence_is_judged_as_the_oracle_does() {
    for bits in 0..1_u32 << 15 {
        let bit = |nth: u32| bits >> nth & 1 == 1;
        let unranged = bit(9).then(|| UnrangedCalls { unmatched: bit(10), requests: bit(11) });
        let evidence = DescriptorEvidence {
            writers_sealed: bit(0),
            unnotified_descriptors: bit(1),
            ctime_changed: bit(2),
            events: match (bit(3), bit(13)) {
                (false, _) => ModifyVerdict::None,
                (true, false) => ModifyVerdict::Explained,
                (true, true) => ModifyVerdict::Unexplained,
            },
            signals_lost: bit(4),
            mapped_writes: bit(5),
            traced_calls: bit(6),
            unranged,
            loop_device: bit(7),
            pending: bit(8).then(|| PendingWrite { only_possible: bit(14) }),
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
        let suspect = (effect == Effect::Conservative).then_some(ALL_PAGES);
        assert_eq!(findings.suspect, Vec::from_iter(suspect), "{verdict:?} {policy:?}");
    }
    let none = descriptor_findings(DescriptorVerdict::default(), CoveragePolicy::Conservative);
    assert_eq!(none, Findings::default());
}

#[test]
fn each_reason_is_described_by_words_of_its_own() {
    for (kind, only_possible, words) in [
        (GapKind::LostEvents, false, "signals were lost"),
        (GapKind::DescriptorWrite, false, "written or punched"),
        (GapKind::UnnotifiedDescriptor, false, "no writer was observed"),
        (GapKind::UnnotifiedDescriptor, true, "in addition to mappings"),
    ] {
        let verdict = DescriptorVerdict { conservative: Some(kind), only_possible, unnotified_write: false };
        let gap = &descriptor_findings(verdict, CoveragePolicy::Conservative).gaps[0];
        assert_eq!(gap.kind, kind);
        assert!(gap.detail.contains(words), "{kind:?} {only_possible}: {}", gap.detail);
    }
}

#[test]
fn calls_in_progress_are_suspect_now_and_in_flight_later() {
    let at = |start, len| PageRange::at(PageIndex(start), len);
    let calls = CallWrites {
        ended: vec![at(0, 2), at(8, 4)],
        imprecise: vec![at(5, 1)],
        in_flight: vec![at(9, 100)],
        ..CallWrites::default()
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
        loop_device: false,
        redirty_pages: false,
        permanently_attached: false,
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
        IdleEvidence { loop_device: true, ..quiet },
        IdleEvidence { redirty_pages: true, ..quiet },
        IdleEvidence { permanently_attached: true, ..quiet },
        IdleEvidence { untracked_mappings: true, ..quiet },
        IdleEvidence { mappings_intact: false, ..quiet },
        IdleEvidence { same_size: false, ..quiet },
        IdleEvidence { stamped_since: true, ..quiet },
    ] {
        assert!(!idle(&busy), "{busy:?}");
    }
}
