//! Writes: generations, coverage, mappings, cursors.

use super::{ConvertError, known, timestamp_from_wire, timestamp_to_wire};
use crate::tracking::{
    ClientMapping, Coverage, CoverageGap, CoveragePolicy, Cursor, Effect, GapKind, TrackedMapping,
    check_cursor_name,
};
use crate::units::{Generation, MappingId, PageIndex, PageRange};
use crate::v1;

/// The generation of a number; 0 is [`Generation::NONE`].
///
/// # Errors
/// [`ConvertError::Number`] past [`Generation::MAX`].
pub fn generation_from_wire(field: &'static str, number: u64) -> Result<Generation, ConvertError> {
    Generation::new(number).ok_or(ConvertError::Number { field, value: number })
}

/// A generation where 0 stands for there being none.
fn some_generation(field: &'static str, number: u64) -> Result<Option<Generation>, ConvertError> {
    generation_from_wire(field, number).map(|generation| Some(generation).filter(|g| *g != Generation::NONE))
}

impl From<GapKind> for v1::coverage_gap::Kind {
    fn from(kind: GapKind) -> Self {
        match kind {
            GapKind::UntrackedMapping => Self::UntrackedMapping,
            GapKind::EndedMapping => Self::EndedMapping,
            GapKind::DescriptorWrite => Self::DescriptorWrite,
            GapKind::UnnotifiedDescriptor => Self::UnnotifiedDescriptor,
            GapKind::DirectIo => Self::DirectIo,
            GapKind::Pinned => Self::Pinned,
            GapKind::LostEvents => Self::LostEvents,
            GapKind::UnknownMappers => Self::UnknownMappers,
        }
    }
}

impl TryFrom<v1::coverage_gap::Kind> for GapKind {
    type Error = ConvertError;

    fn try_from(kind: v1::coverage_gap::Kind) -> Result<Self, ConvertError> {
        use v1::coverage_gap::Kind;
        Ok(match kind {
            Kind::UntrackedMapping => Self::UntrackedMapping,
            Kind::EndedMapping => Self::EndedMapping,
            Kind::DescriptorWrite => Self::DescriptorWrite,
            Kind::UnnotifiedDescriptor => Self::UnnotifiedDescriptor,
            Kind::DirectIo => Self::DirectIo,
            Kind::Pinned => Self::Pinned,
            Kind::LostEvents => Self::LostEvents,
            Kind::UnknownMappers => Self::UnknownMappers,
            Kind::Unspecified => return Err(ConvertError::UnknownEnum { field: "Kind", value: 0 }),
        })
    }
}

impl From<Effect> for v1::coverage_gap::Effect {
    fn from(effect: Effect) -> Self {
        match effect {
            Effect::Conservative => Self::Conservative,
            Effect::Ignored => Self::Ignored,
        }
    }
}

impl TryFrom<v1::coverage_gap::Effect> for Effect {
    type Error = ConvertError;

    fn try_from(effect: v1::coverage_gap::Effect) -> Result<Self, ConvertError> {
        match effect {
            v1::coverage_gap::Effect::Conservative => Ok(Self::Conservative),
            v1::coverage_gap::Effect::Ignored => Ok(Self::Ignored),
            v1::coverage_gap::Effect::Unspecified => {
                Err(ConvertError::UnknownEnum { field: "Effect", value: 0 })
            }
        }
    }
}

impl From<CoveragePolicy> for v1::CoveragePolicy {
    fn from(policy: CoveragePolicy) -> Self {
        match policy {
            CoveragePolicy::Conservative => Self::Conservative,
            CoveragePolicy::Refuse => Self::Refuse,
            CoveragePolicy::Ignore => Self::Ignore,
        }
    }
}

impl CoveragePolicy {
    /// Of an enum value.
    ///
    /// # Errors
    /// [`ConvertError::UnknownEnum`] also for "unspecified".
    pub fn from_wire(value: i32) -> Result<Self, ConvertError> {
        match known::<v1::CoveragePolicy>("CoveragePolicy", value)? {
            v1::CoveragePolicy::Conservative => Ok(Self::Conservative),
            v1::CoveragePolicy::Refuse => Ok(Self::Refuse),
            v1::CoveragePolicy::Ignore => Ok(Self::Ignore),
            v1::CoveragePolicy::Unspecified => {
                Err(ConvertError::UnknownEnum { field: "CoveragePolicy", value })
            }
        }
    }
}

impl From<CoverageGap> for v1::CoverageGap {
    fn from(gap: CoverageGap) -> Self {
        Self {
            kind: v1::coverage_gap::Kind::from(gap.kind).into(),
            effect: v1::coverage_gap::Effect::from(gap.effect).into(),
            pid: gap.pid.unwrap_or(0),
            range: gap.range.map(v1::PageRange::from),
            detail: gap.detail,
            remedy: gap.remedy,
            first_generation: gap.first.get(),
            last_generation: gap.last.map_or(0, Generation::get),
        }
    }
}

impl TryFrom<v1::CoverageGap> for CoverageGap {
    type Error = ConvertError;

    fn try_from(gap: v1::CoverageGap) -> Result<Self, ConvertError> {
        Ok(Self {
            kind: known::<v1::coverage_gap::Kind>("Kind", gap.kind)?.try_into()?,
            effect: known::<v1::coverage_gap::Effect>("Effect", gap.effect)?.try_into()?,
            pid: Some(gap.pid).filter(|pid| *pid != 0),
            range: gap.range.map(PageRange::try_from).transpose()?,
            detail: gap.detail,
            remedy: gap.remedy,
            first: generation_from_wire("first_generation", gap.first_generation)?,
            last: some_generation("last_generation", gap.last_generation)?,
        })
    }
}

impl From<Coverage> for v1::Coverage {
    fn from(coverage: Coverage) -> Self {
        Self {
            exact: coverage.exact,
            gaps: coverage.gaps.into_iter().map(v1::CoverageGap::from).collect(),
            tracked_mappings: coverage.tracked_mappings,
            granularity_pages: coverage.granularity_pages,
        }
    }
}

impl TryFrom<v1::Coverage> for Coverage {
    type Error = ConvertError;

    fn try_from(coverage: v1::Coverage) -> Result<Self, ConvertError> {
        let v1::Coverage { exact, gaps, tracked_mappings, granularity_pages } = coverage;
        // Whoever looks at `exact` alone must not be told that nothing is missing.
        if exact && !gaps.is_empty() {
            return Err(ConvertError::ExactWithGaps(gaps.len()));
        }
        if granularity_pages == 0 {
            return Err(ConvertError::Number { field: "granularity_pages", value: 0 });
        }
        let gaps = gaps.into_iter().map(CoverageGap::try_from).collect::<Result<_, _>>()?;
        Ok(Self { exact, gaps, tracked_mappings, granularity_pages })
    }
}

/// Refuses addresses that are none or wrap around.
fn check_addresses(address: u64, length: u64) -> Result<(), ConvertError> {
    match address.checked_add(length) {
        Some(_) if length > 0 => Ok(()),
        _ => Err(ConvertError::Addresses { address, length }),
    }
}

impl From<TrackedMapping> for v1::TrackedMapping {
    fn from(mapping: TrackedMapping) -> Self {
        let TrackedMapping { id, pid, address, length, first_page, inherited } = mapping;
        Self { id: id.get(), pid, address, length, first_page: first_page.0, inherited }
    }
}

impl TryFrom<v1::TrackedMapping> for TrackedMapping {
    type Error = ConvertError;

    fn try_from(mapping: v1::TrackedMapping) -> Result<Self, ConvertError> {
        let v1::TrackedMapping { id, pid, address, length, first_page, inherited } = mapping;
        check_addresses(address, length)?;
        let id = MappingId::new(id).ok_or(ConvertError::ZeroId("mapping id"))?;
        Ok(Self { id, pid, address, length, first_page: PageIndex(first_page), inherited })
    }
}

impl From<ClientMapping> for v1::ClientMapping {
    fn from(mapping: ClientMapping) -> Self {
        let ClientMapping { address, length, first_page } = mapping;
        Self { address, length, first_page: first_page.0 }
    }
}

impl TryFrom<v1::ClientMapping> for ClientMapping {
    type Error = ConvertError;

    fn try_from(mapping: v1::ClientMapping) -> Result<Self, ConvertError> {
        let v1::ClientMapping { address, length, first_page } = mapping;
        check_addresses(address, length)?;
        Ok(Self { address, length, first_page: PageIndex(first_page) })
    }
}

impl From<Cursor> for v1::Cursor {
    fn from(cursor: Cursor) -> Self {
        Self {
            name: cursor.name,
            generation: cursor.generation.get(),
            until_generation: cursor.until_generation.map_or(0, Generation::get),
            uid: cursor.uid,
            created: Some(timestamp_to_wire(cursor.created)),
        }
    }
}

impl TryFrom<v1::Cursor> for Cursor {
    type Error = ConvertError;

    fn try_from(cursor: v1::Cursor) -> Result<Self, ConvertError> {
        check_cursor_name(&cursor.name)?;
        Ok(Self {
            name: cursor.name,
            generation: generation_from_wire("generation", cursor.generation)?,
            until_generation: some_generation("until_generation", cursor.until_generation)?,
            uid: cursor.uid,
            created: timestamp_from_wire("created", cursor.created)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use proptest::prelude::*;

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
                kind: GapKind::ALL[kind],
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
        fn coverage_survives_the_wire(
            gaps in proptest::collection::vec(any_gap(), 0..5), tracked_mappings in any::<u64>(),
            granularity_pages in 1_u64..,
        ) {
            let coverage = Coverage { exact: gaps.is_empty(), gaps, tracked_mappings, granularity_pages };
            prop_assert_eq!(Coverage::try_from(v1::Coverage::from(coverage.clone())), Ok(coverage));
        }

        #[test]
        fn mappings_survive_the_wire(
            id in 1_u64.., pid in any::<u32>(), address in 0_u64..1 << 63, length in 1_u64..1 << 63,
            first_page in any::<u64>(), inherited in any::<bool>(),
        ) {
            let (id, first_page) = (MappingId::new(id).unwrap(), PageIndex(first_page));
            let tracked = TrackedMapping { id, pid, address, length, first_page, inherited };
            prop_assert_eq!(TrackedMapping::try_from(v1::TrackedMapping::from(tracked)), Ok(tracked));
            let client = ClientMapping { address, length, first_page };
            prop_assert_eq!(ClientMapping::try_from(v1::ClientMapping::from(client)), Ok(client));
        }
    }

    #[test]
    fn enums_survive_the_wire_and_strange_ones_are_refused() {
        for kind in GapKind::ALL {
            assert_eq!(GapKind::try_from(v1::coverage_gap::Kind::from(kind)), Ok(kind));
        }
        for policy in CoveragePolicy::ALL {
            assert_eq!(CoveragePolicy::from_wire(v1::CoveragePolicy::from(policy).into()), Ok(policy));
        }
        for value in [0, -1, 99] {
            assert!(CoveragePolicy::from_wire(value).is_err());
            assert!(
                CoverageGap::try_from(v1::CoverageGap { kind: value, ..gap(GapKind::Pinned).into() })
                    .is_err()
            );
            assert!(
                CoverageGap::try_from(v1::CoverageGap { effect: value, ..gap(GapKind::Pinned).into() })
                    .is_err()
            );
        }
    }

    #[test]
    fn nothing_is_exact_that_has_gaps() {
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
    fn generations_past_the_last_are_refused() {
        let past = Generation::MAX.get() + 1;
        assert!(generation_from_wire("since", past).is_err());
        for (first_generation, last_generation) in [(past, 0), (1, past)] {
            let gap =
                v1::CoverageGap { first_generation, last_generation, ..gap(GapKind::LostEvents).into() };
            assert!(matches!(CoverageGap::try_from(gap), Err(ConvertError::Number { .. })));
        }
    }

    #[test]
    fn mappings_that_wrap_around_are_refused() {
        for (address, length) in [(0, 0), (u64::MAX, 1), (1, u64::MAX)] {
            let refused = ClientMapping::try_from(v1::ClientMapping { address, length, first_page: 0 });
            assert_eq!(refused, Err(ConvertError::Addresses { address, length }));
            let tracked = v1::TrackedMapping { id: 1, address, length, ..Default::default() };
            assert!(TrackedMapping::try_from(tracked).is_err());
        }
        let nobody = v1::TrackedMapping { length: 4096, ..Default::default() };
        assert_eq!(TrackedMapping::try_from(nobody), Err(ConvertError::ZeroId("mapping id")));
    }

    #[test]
    fn cursors_survive_the_wire() {
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
}
