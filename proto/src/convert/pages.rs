//! Page states, ranges, attributes and provenance.

use super::{ConvertError, known, timestamp_from_wire, timestamp_to_wire, wire_enum};
use crate::attributes::{AttributeSet, KnownFlags, Mappers, PageAttributes, PageFlags};
use crate::provenance::{Moment, ProbeKind, Provenance, Uncertainty};
use crate::state::{PageState, SwapSlot};
use crate::summary::{PageInfo, PageSummary};
use crate::units::{PageIndex, PageRange, SnapshotId};
use crate::v1;

wire_enum!(PageState, v1::PageState, "PageState", state: Hole, Resident, SwapCached, Swapped, Unknown);
wire_enum!(ProbeKind, v1::Probe, "Probe", probe: Xarray, Syscalls);

/// Decodes a page state.
///
/// # Errors
/// [`ConvertError::UnknownEnum`] if the value is unknown or unspecified.
pub fn state_from_wire(value: i32) -> Result<PageState, ConvertError> {
    state(value)
}

/// Decodes a probe.
///
/// # Errors
/// [`ConvertError::UnknownEnum`] if the value is unknown or unspecified.
pub fn probe_from_wire(value: i32) -> Result<ProbeKind, ConvertError> {
    probe(value)
}

impl From<PageRange> for v1::PageRange {
    fn from(range: PageRange) -> Self {
        Self { start: range.start().0, end: range.end().0 }
    }
}

impl TryFrom<v1::PageRange> for PageRange {
    type Error = ConvertError;

    fn try_from(range: v1::PageRange) -> Result<Self, ConvertError> {
        let v1::PageRange { start, end } = range;
        Self::new(PageIndex(start), PageIndex(end)).ok_or(ConvertError::Backwards { start, end })
    }
}

impl From<Provenance> for v1::Provenance {
    fn from(p: Provenance) -> Self {
        Self {
            probe: v1::Probe::from(p.probe).into(),
            begin_monotonic_ns: p.begin.monotonic_ns,
            end_monotonic_ns: p.end.monotonic_ns,
            begin_time: Some(timestamp_to_wire(p.begin.wall)),
            end_time: Some(timestamp_to_wire(p.end.wall)),
            exact: p.exact(),
            unsettled_leaves: p.uncertainty.unsettled_leaves,
            unknown_pages: p.uncertainty.unknown_pages,
            swap_cached_distinguished: p.swap_cached_distinguished,
            swap_cache_undetermined_pages: p.uncertainty.swap_cache_undetermined_pages,
            instance: p.instance,
        }
    }
}

impl TryFrom<v1::Provenance> for Provenance {
    type Error = ConvertError;

    fn try_from(p: v1::Provenance) -> Result<Self, ConvertError> {
        Ok(Self {
            probe: probe(p.probe)?,
            begin: Moment {
                monotonic_ns: p.begin_monotonic_ns,
                wall: timestamp_from_wire("begin_time", p.begin_time)?,
            },
            end: Moment {
                monotonic_ns: p.end_monotonic_ns,
                wall: timestamp_from_wire("end_time", p.end_time)?,
            },
            uncertainty: Uncertainty {
                unsettled_leaves: p.unsettled_leaves,
                unknown_pages: p.unknown_pages,
                swap_cache_undetermined_pages: p.swap_cache_undetermined_pages,
            },
            swap_cached_distinguished: p.swap_cached_distinguished,
            instance: p.instance,
        })
    }
}

impl From<PageAttributes> for v1::PageAttributes {
    fn from(a: PageAttributes) -> Self {
        Self {
            order: a.order.map(u32::from),
            flags: a.flags.map(|flags| flags.valid().bits()),
            known_flags: a.flags.map_or(0, |flags| flags.known.bits()),
            map_count: a.map_count,
            mappers: match a.mappers {
                None => v1::Mappers::Unspecified,
                Some(Mappers::None) => v1::Mappers::None,
                Some(Mappers::One) => v1::Mappers::One,
                Some(Mappers::Several) => v1::Mappers::Several,
            }
            .into(),
            maybe_pinned: a.maybe_pinned,
        }
    }
}

impl TryFrom<v1::PageAttributes> for PageAttributes {
    type Error = ConvertError;

    fn try_from(a: v1::PageAttributes) -> Result<Self, ConvertError> {
        let order = a
            .order
            .map(|order| {
                let value = u64::from(order);
                u8::try_from(order).map_err(|_| ConvertError::Number { field: "order", value })
            })
            .transpose()?;
        let known = PageFlags::from_bits_retain(a.known_flags);
        let unknown = ConvertError::UnknownEnum { field: "Mappers", value: a.mappers };
        Ok(Self {
            order,
            flags: a.flags.map(|bits| KnownFlags { set: PageFlags::from_bits_retain(bits), known }),
            map_count: a.map_count,
            mappers: match v1::Mappers::try_from(a.mappers).map_err(|_| unknown)? {
                v1::Mappers::Unspecified => None,
                v1::Mappers::None => Some(Mappers::None),
                v1::Mappers::One => Some(Mappers::One),
                v1::Mappers::Several => Some(Mappers::Several),
            },
            maybe_pinned: a.maybe_pinned,
        })
    }
}

impl AttributeSet {
    /// Decodes a list of attributes.
    ///
    /// # Errors
    /// [`ConvertError::UnknownEnum`] if a value is unknown or unspecified.
    pub fn from_wire(values: &[i32]) -> Result<Self, ConvertError> {
        let mut set = Self::NONE;
        for value in values {
            match known::<v1::Attribute>("Attribute", *value)? {
                v1::Attribute::Order => set.order = true,
                v1::Attribute::Flags => set.flags = true,
                v1::Attribute::MapCount => set.map_count = true,
                v1::Attribute::MaybePinned => set.maybe_pinned = true,
                v1::Attribute::Unspecified => {
                    return Err(ConvertError::UnknownEnum { field: "Attribute", value: 0 });
                }
            }
        }
        Ok(set)
    }

    /// Encodes the set as a list.
    #[must_use]
    pub fn to_wire(self) -> Vec<i32> {
        [
            (self.order, v1::Attribute::Order),
            (self.flags, v1::Attribute::Flags),
            (self.map_count, v1::Attribute::MapCount),
            (self.maybe_pinned, v1::Attribute::MaybePinned),
        ]
        .into_iter()
        .filter(|(contained, _)| *contained)
        .map(|(_, attribute)| attribute.into())
        .collect()
    }
}

impl From<PageInfo> for v1::PageInfo {
    fn from(info: PageInfo) -> Self {
        Self {
            page: info.page.0,
            state: v1::PageState::from(info.state).into(),
            slot: info.slot.map(SwapSlot::raw),
            attributes: info.attributes.map(v1::PageAttributes::from),
        }
    }
}

impl TryFrom<v1::PageInfo> for PageInfo {
    type Error = ConvertError;

    fn try_from(info: v1::PageInfo) -> Result<Self, ConvertError> {
        let slot = |raw| SwapSlot::from_raw(raw).ok_or(ConvertError::Slot(raw));
        Ok(Self {
            page: PageIndex(info.page),
            state: state(info.state)?,
            slot: info.slot.map(slot).transpose()?,
            attributes: info.attributes.map(PageAttributes::try_from).transpose()?,
        })
    }
}

impl From<PageSummary> for v1::SummaryResponse {
    fn from(summary: PageSummary) -> Self {
        let swap_types = summary.swap_types.into_iter();
        Self {
            provenance: Some(summary.provenance.into()),
            range: Some(summary.range.into()),
            hole_pages: summary.hole_pages,
            resident_pages: summary.resident_pages,
            swap_cached_pages: summary.swap_cached_pages,
            swapped_pages: summary.swapped_pages,
            unknown_pages: summary.unknown_pages,
            runs: summary.runs,
            swap_types: swap_types.map(|(swap_type, pages)| v1::SwapTypePages { swap_type, pages }).collect(),
            snapshot_id: summary.snapshot.map_or(0, SnapshotId::get),
            file_pages: summary.file_pages,
        }
    }
}

impl TryFrom<v1::SummaryResponse> for PageSummary {
    type Error = ConvertError;

    fn try_from(summary: v1::SummaryResponse) -> Result<Self, ConvertError> {
        Ok(Self {
            provenance: summary.provenance.ok_or(ConvertError::Missing("provenance"))?.try_into()?,
            range: summary.range.ok_or(ConvertError::Missing("range"))?.try_into()?,
            hole_pages: summary.hole_pages,
            resident_pages: summary.resident_pages,
            swap_cached_pages: summary.swap_cached_pages,
            swapped_pages: summary.swapped_pages,
            unknown_pages: summary.unknown_pages,
            runs: summary.runs,
            swap_types: summary.swap_types.iter().map(|count| (count.swap_type, count.pages)).collect(),
            snapshot: SnapshotId::new(summary.snapshot_id),
            file_pages: summary.file_pages,
        })
    }
}
