//! Generations, coverage, checkpoints, mappings and cursors.

use super::{
    ConvertError, duration_from_wire, duration_to_wire, known, timestamp_from_wire, timestamp_to_wire,
    wire_enum,
};
use crate::checkpoint::{BegunCursor, Checkpoint, CheckpointEvent, DirtyRate};
use crate::tracking::{
    ClientMapping, Coverage, CoverageGap, CoveragePolicy, Cursor, Effect, FileCoverage, GapKind,
    TrackedMapping, check_cursor_name,
};
use crate::units::{Generation, MappingId, PageIndex, PageRange};
use crate::v1;

wire_enum!(GapKind, v1::coverage_gap::Kind, "Kind", kind:
    UntrackedMapping, EndedMapping, DescriptorWrite, UnnotifiedDescriptor, DirectIo, Pinned, LostEvents,
    UnknownMappers, BitsTaken, BlockedMapping, CoarseStamps);
wire_enum!(Effect, v1::coverage_gap::Effect, "Effect", effect: Conservative, Ignored);
wire_enum!(CoveragePolicy, v1::CoveragePolicy, "CoveragePolicy", policy: Conservative, Refuse, Ignore);

/// Decodes a generation. 0 is [`Generation::NONE`].
///
/// # Errors
/// [`ConvertError::Number`] if the number exceeds [`Generation::MAX`].
pub fn generation_from_wire(field: &'static str, number: u64) -> Result<Generation, ConvertError> {
    Generation::new(number).ok_or(ConvertError::Number { field, value: number })
}

/// Decodes an optional generation, encoded as 0 if absent.
fn optional_generation(field: &'static str, number: u64) -> Result<Option<Generation>, ConvertError> {
    generation_from_wire(field, number).map(|generation| Some(generation).filter(|g| *g != Generation::NONE))
}

fn rate(field: &'static str, rate: f64) -> Result<f64, ConvertError> {
    if rate.is_finite() && rate >= 0.0 { Ok(rate) } else { Err(ConvertError::Rate(field)) }
}

fn required_coverage(coverage: Option<v1::Coverage>) -> Result<Coverage, ConvertError> {
    coverage.ok_or(ConvertError::Missing("coverage"))?.try_into()
}

impl CoveragePolicy {
    /// Decodes a coverage policy.
    ///
    /// # Errors
    /// [`ConvertError::UnknownEnum`] if the value is unknown or unspecified.
    pub fn from_wire(value: i32) -> Result<Self, ConvertError> {
        policy(value)
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
            kind: kind(gap.kind)?,
            effect: effect(gap.effect)?,
            pid: Some(gap.pid).filter(|pid| *pid != 0),
            range: gap.range.map(PageRange::try_from).transpose()?,
            detail: gap.detail,
            remedy: gap.remedy,
            first: generation_from_wire("first_generation", gap.first_generation)?,
            last: optional_generation("last_generation", gap.last_generation)?,
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
        // A reader that checks `exact` only must not miss a gap.
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

/// Rejects an address range that is empty or overflows.
fn check_addresses(address: u64, length_bytes: u64) -> Result<(), ConvertError> {
    match address.checked_add(length_bytes) {
        Some(_) if length_bytes > 0 => Ok(()),
        _ => Err(ConvertError::Addresses { address, length_bytes }),
    }
}

impl From<TrackedMapping> for v1::TrackedMapping {
    fn from(mapping: TrackedMapping) -> Self {
        let TrackedMapping { id, pid, address, length_bytes, first_page, inherited } = mapping;
        Self { id: id.get(), pid, address, length_bytes, first_page: first_page.0, inherited }
    }
}

impl TryFrom<v1::TrackedMapping> for TrackedMapping {
    type Error = ConvertError;

    fn try_from(mapping: v1::TrackedMapping) -> Result<Self, ConvertError> {
        let v1::TrackedMapping { id, pid, address, length_bytes, first_page, inherited } = mapping;
        check_addresses(address, length_bytes)?;
        let id = MappingId::new(id).ok_or(ConvertError::ZeroId("mapping id"))?;
        Ok(Self { id, pid, address, length_bytes, first_page: PageIndex(first_page), inherited })
    }
}

impl From<ClientMapping> for v1::ClientMapping {
    fn from(mapping: ClientMapping) -> Self {
        let ClientMapping { address, length_bytes, first_page } = mapping;
        Self { address, length_bytes, first_page: first_page.0 }
    }
}

impl TryFrom<v1::ClientMapping> for ClientMapping {
    type Error = ConvertError;

    fn try_from(mapping: v1::ClientMapping) -> Result<Self, ConvertError> {
        let v1::ClientMapping { address, length_bytes, first_page } = mapping;
        check_addresses(address, length_bytes)?;
        Ok(Self { address, length_bytes, first_page: PageIndex(first_page) })
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
            until_generation: optional_generation("until_generation", cursor.until_generation)?,
            uid: cursor.uid,
            created: timestamp_from_wire("created", cursor.created)?,
        })
    }
}

impl From<Checkpoint> for v1::CheckpointResponse {
    fn from(checkpoint: Checkpoint) -> Self {
        Self {
            generation: checkpoint.generation.get(),
            unchanged: checkpoint.unchanged,
            observed_pages: checkpoint.observed_pages,
            conservative_pages: checkpoint.conservative_pages,
            coverage: Some(checkpoint.coverage.into()),
            duration: Some(duration_to_wire(checkpoint.duration)),
            time: Some(timestamp_to_wire(checkpoint.time)),
        }
    }
}

impl TryFrom<v1::CheckpointResponse> for Checkpoint {
    type Error = ConvertError;

    fn try_from(checkpoint: v1::CheckpointResponse) -> Result<Self, ConvertError> {
        Ok(Self {
            generation: generation_from_wire("generation", checkpoint.generation)?,
            unchanged: checkpoint.unchanged,
            observed_pages: checkpoint.observed_pages,
            conservative_pages: checkpoint.conservative_pages,
            coverage: required_coverage(checkpoint.coverage)?,
            duration: duration_from_wire("duration", checkpoint.duration)?,
            time: timestamp_from_wire("time", checkpoint.time)?,
        })
    }
}

impl From<CheckpointEvent> for v1::CheckpointEvent {
    fn from(event: CheckpointEvent) -> Self {
        Self {
            generation: event.generation.get(),
            observed_pages: event.observed_pages,
            conservative_pages: event.conservative_pages,
            time: Some(timestamp_to_wire(event.time)),
            since_last: event.since_last.map(duration_to_wire),
            pages_per_second: event.pages_per_second,
        }
    }
}

impl TryFrom<v1::CheckpointEvent> for CheckpointEvent {
    type Error = ConvertError;

    fn try_from(event: v1::CheckpointEvent) -> Result<Self, ConvertError> {
        let since_last = event.since_last.map(|since| duration_from_wire("since_last", Some(since)));
        Ok(Self {
            generation: generation_from_wire("generation", event.generation)?,
            observed_pages: event.observed_pages,
            conservative_pages: event.conservative_pages,
            time: timestamp_from_wire("time", event.time)?,
            since_last: since_last.transpose()?,
            pages_per_second: rate("pages_per_second", event.pages_per_second)?,
        })
    }
}

impl From<DirtyRate> for v1::DirtyRateResponse {
    fn from(rate: DirtyRate) -> Self {
        Self {
            window: Some(duration_to_wire(rate.window)),
            observed_pages: rate.observed_pages,
            conservative_pages: rate.conservative_pages,
            pages_per_second: rate.pages_per_second,
            bytes_per_second: rate.bytes_per_second,
            coverage: Some(rate.coverage.into()),
            generation: rate.generation.get(),
        }
    }
}

impl TryFrom<v1::DirtyRateResponse> for DirtyRate {
    type Error = ConvertError;

    fn try_from(response: v1::DirtyRateResponse) -> Result<Self, ConvertError> {
        Ok(Self {
            window: duration_from_wire("window", response.window)?,
            observed_pages: response.observed_pages,
            conservative_pages: response.conservative_pages,
            pages_per_second: rate("pages_per_second", response.pages_per_second)?,
            bytes_per_second: rate("bytes_per_second", response.bytes_per_second)?,
            coverage: required_coverage(response.coverage)?,
            generation: generation_from_wire("generation", response.generation)?,
        })
    }
}

impl From<FileCoverage> for v1::GetCoverageResponse {
    fn from(file: FileCoverage) -> Self {
        Self {
            coverage: Some(file.coverage.into()),
            mappings: file.mappings.into_iter().map(v1::TrackedMapping::from).collect(),
            policy: v1::CoveragePolicy::from(file.policy).into(),
            generation: file.generation.get(),
            writers_sealed: file.writers_sealed,
        }
    }
}

impl TryFrom<v1::GetCoverageResponse> for FileCoverage {
    type Error = ConvertError;

    fn try_from(file: v1::GetCoverageResponse) -> Result<Self, ConvertError> {
        let mappings = file.mappings.into_iter().map(TrackedMapping::try_from);
        Ok(Self {
            coverage: required_coverage(file.coverage)?,
            mappings: mappings.collect::<Result<_, _>>()?,
            policy: policy(file.policy)?,
            generation: generation_from_wire("generation", file.generation)?,
            writers_sealed: file.writers_sealed,
        })
    }
}

impl From<BegunCursor> for v1::BeginCursorResponse {
    fn from(begun: BegunCursor) -> Self {
        Self {
            cursor: Some(begun.cursor.into()),
            observed_pages: begun.observed_pages,
            conservative_pages: begun.conservative_pages,
            coverage: Some(begun.coverage.into()),
        }
    }
}

impl TryFrom<v1::BeginCursorResponse> for BegunCursor {
    type Error = ConvertError;

    fn try_from(begun: v1::BeginCursorResponse) -> Result<Self, ConvertError> {
        let cursor = Cursor::try_from(begun.cursor.ok_or(ConvertError::Missing("cursor"))?)?;
        if cursor.until_generation.is_none() {
            return Err(ConvertError::Missing("until_generation"));
        }
        Ok(Self {
            cursor,
            observed_pages: begun.observed_pages,
            conservative_pages: begun.conservative_pages,
            coverage: required_coverage(begun.coverage)?,
        })
    }
}

#[cfg(test)]
mod tests;
