use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;

use strum::VariantArray as _;

use super::*;

fn generation(number: u64) -> Generation {
    Generation::new(number).unwrap()
}

fn gap(kind: GapKind) -> CoverageGap {
    CoverageGap {
        kind,
        effect: Effect::Conservative,
        pid: Some(7),
        range: Some(PageRange::first(9)),
        detail: "vhost".to_owned(),
        remedy: "track it".to_owned(),
        first: generation(3),
        last: None,
    }
}

fn any_gap() -> impl Strategy<Value = CoverageGap> {
    let numbers = (0_u64..1 << 31, 0_u64..1 << 31, proptest::option::of(1_u32..));
    let range = proptest::option::of((any::<u32>(), any::<u32>()));
    (0_usize..8, any::<bool>(), numbers, range).prop_map(|(kind, ignored, (first, last, pid), range)| {
        CoverageGap {
            kind: GapKind::VARIANTS[kind],
            effect: if ignored { Effect::Ignored } else { Effect::Conservative },
            pid,
            range: range.map(|(start, pages)| PageRange::at(PageIndex(start.into()), pages.into())),
            first: generation(first.min(Generation::MAX.get())),
            last: Some(generation(last.min(Generation::MAX.get()))).filter(|g| *g != Generation::NONE),
            ..gap(GapKind::Pinned)
        }
    })
}

proptest! {
    #[test]
    fn encoded_coverage_is_decoded(
        gaps in proptest::collection::vec(any_gap(), 0..5), tracked_mappings in any::<u64>(),
        granularity_pages in 1_u64..,
    ) {
        let coverage = Coverage { exact: gaps.is_empty(), gaps, tracked_mappings, granularity_pages };
        prop_assert_eq!(Coverage::try_from(v1::Coverage::from(coverage.clone())), Ok(coverage));
    }

    #[test]
    fn encoded_mappings_are_decoded(
        id in 1_u64.., pid in any::<u32>(), address in 0_u64..1 << 63, length_bytes in 1_u64..1 << 63,
        first_page in any::<u64>(), inherited in any::<bool>(),
    ) {
        let (id, first_page) = (MappingId::new(id).unwrap(), PageIndex(first_page));
        let tracked = TrackedMapping { id, pid, address, length_bytes, first_page, inherited };
        prop_assert_eq!(TrackedMapping::try_from(v1::TrackedMapping::from(tracked)), Ok(tracked));
        let client = ClientMapping { address, length_bytes, first_page };
        prop_assert_eq!(ClientMapping::try_from(v1::ClientMapping::from(client)), Ok(client));
    }
}

#[test]
fn enums_round_trip_and_unknown_values_are_rejected() {
    for expected in GapKind::VARIANTS {
        assert_eq!(kind(v1::coverage_gap::Kind::from(*expected).into()), Ok(*expected));
    }
    for policy in CoveragePolicy::VARIANTS {
        assert_eq!(CoveragePolicy::from_wire(v1::CoveragePolicy::from(*policy).into()), Ok(*policy));
    }
    for value in [0, -1, 99] {
        assert!(CoveragePolicy::from_wire(value).is_err());
        assert!(
            CoverageGap::try_from(v1::CoverageGap { kind: value, ..gap(GapKind::Pinned).into() }).is_err()
        );
        assert!(
            CoverageGap::try_from(v1::CoverageGap { effect: value, ..gap(GapKind::Pinned).into() }).is_err()
        );
    }
}

#[test]
fn exact_coverage_with_gaps_is_rejected() {
    let coverage = Coverage {
        exact: true,
        gaps: vec![gap(GapKind::DirectIo)],
        tracked_mappings: 1,
        granularity_pages: 1,
    };
    assert_eq!(Coverage::try_from(v1::Coverage::from(coverage)), Err(ConvertError::ExactWithGaps(1)));
    assert!(Coverage::try_from(v1::Coverage { exact: true, ..Default::default() }).is_err());
}

#[test]
fn generations_past_the_maximum_are_rejected() {
    let past = Generation::MAX.get() + 1;
    assert!(generation_from_wire("since", past).is_err());
    for (first_generation, last_generation) in [(past, 0), (1, past)] {
        let gap = v1::CoverageGap { first_generation, last_generation, ..gap(GapKind::LostEvents).into() };
        assert!(matches!(CoverageGap::try_from(gap), Err(ConvertError::Number { .. })));
    }
}

#[test]
fn mappings_that_overflow_are_rejected() {
    for (address, length_bytes) in [(0, 0), (u64::MAX, 1), (1, u64::MAX)] {
        let client = ClientMapping::try_from(v1::ClientMapping { address, length_bytes, first_page: 0 });
        assert_eq!(client, Err(ConvertError::Addresses { address, length_bytes }));
        let tracked = v1::TrackedMapping { id: 1, address, length_bytes, ..Default::default() };
        assert!(TrackedMapping::try_from(tracked).is_err());
    }
    let unnamed = v1::TrackedMapping { length_bytes: 4096, ..Default::default() };
    assert_eq!(TrackedMapping::try_from(unnamed), Err(ConvertError::ZeroId("mapping id")));
}

#[test]
fn encoded_cursors_are_decoded() {
    let idle = Cursor {
        name: "backup".to_owned(),
        generation: generation(4),
        until_generation: None,
        uid: 1000,
        created: UNIX_EPOCH + Duration::from_secs(1_700_000_000),
    };
    let begun = Cursor { until_generation: Some(generation(9)), ..idle.clone() };
    for cursor in [idle.clone(), begun] {
        assert_eq!(Cursor::try_from(v1::Cursor::from(cursor.clone())), Ok(cursor));
    }
    let nameless = v1::Cursor { name: String::new(), ..idle.clone().into() };
    assert!(matches!(Cursor::try_from(nameless), Err(ConvertError::Cursor(_))));
    assert!(Cursor::try_from(v1::Cursor { created: None, ..idle.into() }).is_err());
}

#[test]
fn first_checkpoint_event_has_no_predecessor() {
    let first = v1::CheckpointEvent {
        generation: 1,
        observed_pages: 2,
        time: Some(prost_types::Timestamp::default()),
        ..Default::default()
    };
    let event = CheckpointEvent::try_from(first).unwrap();
    assert_eq!((event.since_last, event.observed_pages), (None, 2));
    assert_eq!(v1::CheckpointEvent::from(event), first);
    let since_last = Some(prost_types::Duration { seconds: -1, nanos: 0 });
    assert!(CheckpointEvent::try_from(v1::CheckpointEvent { since_last, ..first }).is_err());
    assert!(CheckpointEvent::try_from(v1::CheckpointEvent { time: None, ..first }).is_err());
    assert!(CheckpointEvent::try_from(v1::CheckpointEvent { pages_per_second: f64::NAN, ..first }).is_err());
}

#[test]
fn invalid_rates_are_rejected() {
    assert_eq!(rate("pages_per_second", 1.5).unwrap(), 1.5);
    for invalid in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(rate("pages_per_second", invalid).is_err());
    }
}
