//! What a reading rests on, and the attributes of pages.

use super::{ConvertError, known, timestamp_from_wire, timestamp_to_wire};
use crate::provenance::{Moment, ProbeKind, Provenance, Uncertainty};
use crate::state::{Mappers, PageAttributes, PageFlags};
use crate::v1;

/// The probe of an enum value.
///
/// # Errors
/// [`ConvertError::UnknownEnum`] also for "unspecified".
pub fn probe_from_wire(value: i32) -> Result<ProbeKind, ConvertError> {
    match known::<v1::Probe>("Probe", value)? {
        v1::Probe::Xarray => Ok(ProbeKind::Xarray),
        v1::Probe::Syscalls => Ok(ProbeKind::Syscalls),
        v1::Probe::Unspecified => Err(ConvertError::UnknownEnum { field: "Probe", value }),
    }
}

impl From<ProbeKind> for v1::Probe {
    fn from(probe: ProbeKind) -> Self {
        match probe {
            ProbeKind::Xarray => Self::Xarray,
            ProbeKind::Syscalls => Self::Syscalls,
        }
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
            swap_cache_undetermined: p.uncertainty.swap_cache_undetermined,
            instance: p.instance,
        }
    }
}

impl TryFrom<v1::Provenance> for Provenance {
    type Error = ConvertError;

    fn try_from(p: v1::Provenance) -> Result<Self, ConvertError> {
        Ok(Self {
            probe: probe_from_wire(p.probe)?,
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
                swap_cache_undetermined: p.swap_cache_undetermined,
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
            flags: a.flags.map(|flags| flags.bits & flags.known),
            known_flags: a.flags.map_or(0, |flags| flags.known),
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
        let unknown = ConvertError::UnknownEnum { field: "Mappers", value: a.mappers };
        Ok(Self {
            order,
            flags: a.flags.map(|bits| PageFlags { bits, known: a.known_flags }),
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

/// Which attributes are asked for, or can be seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttributeSet {
    /// log2 of the folio's pages.
    pub order: bool,
    /// The folio's flags.
    pub flags: bool,
    /// Map counts and mappers.
    pub map_count: bool,
    /// Maybe pinned for DMA.
    pub maybe_pinned: bool,
}

impl AttributeSet {
    /// All of them.
    pub const ALL: Self = Self { order: true, flags: true, map_count: true, maybe_pinned: true };
    /// None of them.
    pub const NONE: Self = Self { order: false, flags: false, map_count: false, maybe_pinned: false };

    /// True if nothing is asked for.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        !(self.order || self.flags || self.map_count || self.maybe_pinned)
    }

    /// True if all of `other` is in it.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        (self.order || !other.order)
            && (self.flags || !other.flags)
            && (self.map_count || !other.map_count)
            && (self.maybe_pinned || !other.maybe_pinned)
    }

    /// From enum values.
    ///
    /// # Errors
    /// [`ConvertError::UnknownEnum`] also for "unspecified".
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

    /// As enum values.
    #[must_use]
    pub fn to_wire(self) -> Vec<i32> {
        [
            (self.order, v1::Attribute::Order),
            (self.flags, v1::Attribute::Flags),
            (self.map_count, v1::Attribute::MapCount),
            (self.maybe_pinned, v1::Attribute::MaybePinned),
        ]
        .into_iter()
        .filter(|(wanted, _)| *wanted)
        .map(|(_, attribute)| attribute.into())
        .collect()
    }
}
