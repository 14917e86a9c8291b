//! Between messages and words. Nothing is guessed: what has no meaning is a [`ConvertError`].

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::file::{Access, Backing, FileInfo, NameError, Origin, Right, Rights, Seal, Seals, check_name};
use crate::provenance::{Doubts, Moment, ProbeKind, Provenance};
use crate::state::{Mappers, PageAttributes, PageFlags, PageState};
use crate::units::{FileId, PageIndex, PageRange};
use crate::v1;

/// Why a message has no meaning.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// A field that must be there is not.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// An enum has a value that this version does not know, or none.
    #[error("{field} has the unknown value {value}")]
    UnknownEnum {
        /// The enum's name.
        field: &'static str,
        /// The value.
        value: i32,
    },
    /// An id is 0.
    #[error("{0} is 0, which names nothing")]
    ZeroId(&'static str),
    /// A name that no file has.
    #[error("bad name of a file")]
    Name(#[from] NameError),
    /// A range that ends before it begins.
    #[error("pages {start}..{end} end before they begin")]
    Backwards {
        /// Its first page.
        start: u64,
        /// The page after its last.
        end: u64,
    },
    /// A duration below 0, or too long to be one.
    #[error("{field} of {seconds} s and {nanos} ns is no duration")]
    Duration {
        /// The field.
        field: &'static str,
        /// Its seconds.
        seconds: i64,
        /// Its nanoseconds.
        nanos: i32,
    },
    /// A number is out of its range.
    #[error("{field} is {value}")]
    Number {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The backing and the hugetlb page size do not go together.
    #[error("hugetlb_page_size {0} goes with BACKING_HUGETLB and with nothing else")]
    HugetlbSize(u64),
    /// The columns of a batch do not fit one another.
    #[error("column {column} has {got} elements for {runs} runs")]
    Columns {
        /// The column.
        column: &'static str,
        /// Its elements.
        got: usize,
        /// The runs that need one.
        runs: usize,
    },
    /// A run is empty or ends beyond the last nameable page.
    #[error("run of {length} pages, {gap} after page {start}")]
    Run {
        /// Where the run before ended.
        start: u64,
        /// Pages left out.
        gap: u64,
        /// Pages in the run.
        length: u64,
    },
    /// A word is no swap slot.
    #[error("{0:#x} is no swap slot")]
    Slot(u64),
}

fn known<T: TryFrom<i32>>(field: &'static str, value: i32) -> Result<T, ConvertError> {
    // 0 is always "unspecified", which no required enum may be.
    if value == 0 {
        return Err(ConvertError::UnknownEnum { field, value });
    }
    T::try_from(value).map_err(|_| ConvertError::UnknownEnum { field, value })
}

/// The state of an enum value.
///
/// # Errors
/// [`ConvertError::UnknownEnum`] also for "unspecified".
pub fn state_from_wire(value: i32) -> Result<PageState, ConvertError> {
    Ok(match known::<v1::PageState>("PageState", value)? {
        v1::PageState::Hole => PageState::Hole,
        v1::PageState::Resident => PageState::Resident,
        v1::PageState::SwapCached => PageState::SwapCached,
        v1::PageState::Swapped => PageState::Swapped,
        v1::PageState::Unknown => PageState::Unknown,
        v1::PageState::Unspecified => {
            return Err(ConvertError::UnknownEnum { field: "PageState", value });
        }
    })
}

impl From<PageState> for v1::PageState {
    fn from(state: PageState) -> Self {
        match state {
            PageState::Hole => Self::Hole,
            PageState::Resident => Self::Resident,
            PageState::SwapCached => Self::SwapCached,
            PageState::Swapped => Self::Swapped,
            PageState::Unknown => Self::Unknown,
        }
    }
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

/// One of the two names of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileName {
    /// The service's id.
    Id(FileId),
    /// The file's name.
    Name(String),
}

impl std::fmt::Display for FileName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Id(id) => write!(f, "file with id {id}"),
            Self::Name(name) => write!(f, "file named {name:?}"),
        }
    }
}

impl TryFrom<Option<v1::FileRef>> for FileName {
    type Error = ConvertError;

    fn try_from(file: Option<v1::FileRef>) -> Result<Self, ConvertError> {
        match file.and_then(|file| file.by) {
            None => Err(ConvertError::Missing("file")),
            Some(v1::file_ref::By::Id(id)) => {
                FileId::new(id).map(Self::Id).ok_or(ConvertError::ZeroId("file id"))
            }
            Some(v1::file_ref::By::Name(name)) => {
                check_name(&name)?;
                Ok(Self::Name(name))
            }
        }
    }
}

impl From<FileName> for v1::FileRef {
    fn from(name: FileName) -> Self {
        Self {
            by: Some(match name {
                FileName::Id(id) => v1::file_ref::By::Id(id.get()),
                FileName::Name(name) => v1::file_ref::By::Name(name),
            }),
        }
    }
}

/// A duration of 0 or more; absent is 0.
///
/// # Errors
/// [`ConvertError::Duration`] if it is negative or not normal.
pub fn duration_from_wire(
    field: &'static str,
    duration: Option<prost_types::Duration>,
) -> Result<Duration, ConvertError> {
    let duration = duration.unwrap_or_default();
    let (seconds, nanos) = (duration.seconds, duration.nanos);
    match (u64::try_from(seconds), u32::try_from(nanos)) {
        (Ok(whole), Ok(part)) if part < 1_000_000_000 => Ok(Duration::new(whole, part)),
        _ => Err(ConvertError::Duration { field, seconds, nanos }),
    }
}

/// A duration as a message; longer than 2^63 seconds is cut there.
#[must_use]
pub fn duration_to_wire(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
    }
}

fn timestamp_to_wire(time: SystemTime) -> prost_types::Timestamp {
    time.into()
}

fn timestamp_from_wire(
    field: &'static str,
    time: Option<prost_types::Timestamp>,
) -> Result<SystemTime, ConvertError> {
    let time = time.ok_or(ConvertError::Missing(field))?;
    let since =
        duration_from_wire(field, Some(prost_types::Duration { seconds: time.seconds, nanos: time.nanos }))?;
    UNIX_EPOCH.checked_add(since).ok_or(ConvertError::Duration {
        field,
        seconds: time.seconds,
        nanos: time.nanos,
    })
}

fn rights_from_wire(values: &[i32]) -> Result<Rights, ConvertError> {
    values
        .iter()
        .map(|value| {
            Ok(match known::<v1::Right>("Right", *value)? {
                v1::Right::See => Right::See,
                v1::Right::Read => Right::Read,
                v1::Right::Write => Right::Write,
                v1::Right::Checkpoint => Right::Checkpoint,
                v1::Right::Evict => Right::Evict,
                v1::Right::Migrate => Right::Migrate,
                v1::Right::Unspecified => {
                    return Err(ConvertError::UnknownEnum { field: "Right", value: 0 });
                }
            })
        })
        .collect()
}

fn rights_to_wire(rights: Rights) -> Vec<i32> {
    rights
        .iter()
        .map(|right| {
            i32::from(match right {
                Right::See => v1::Right::See,
                Right::Read => v1::Right::Read,
                Right::Write => v1::Right::Write,
                Right::Checkpoint => v1::Right::Checkpoint,
                Right::Evict => v1::Right::Evict,
                Right::Migrate => v1::Right::Migrate,
            })
        })
        .collect()
}

impl TryFrom<v1::Access> for Access {
    type Error = ConvertError;

    fn try_from(access: v1::Access) -> Result<Self, ConvertError> {
        Ok(Self {
            uid: access.uid,
            gid: access.gid,
            owner: rights_from_wire(&access.owner)?,
            group: rights_from_wire(&access.group)?,
            other: rights_from_wire(&access.other)?,
        })
    }
}

impl From<Access> for v1::Access {
    fn from(access: Access) -> Self {
        Self {
            uid: access.uid,
            gid: access.gid,
            owner: rights_to_wire(access.owner),
            group: rights_to_wire(access.group),
            other: rights_to_wire(access.other),
        }
    }
}

/// The seals of a list of enum values.
///
/// # Errors
/// [`ConvertError::UnknownEnum`] also for "unspecified".
pub fn seals_from_wire(values: &[i32]) -> Result<Seals, ConvertError> {
    values
        .iter()
        .map(|value| {
            Ok(match known::<v1::Seal>("Seal", *value)? {
                v1::Seal::Seal => Seal::Seal,
                v1::Seal::Shrink => Seal::Shrink,
                v1::Seal::Grow => Seal::Grow,
                v1::Seal::Write => Seal::Write,
                v1::Seal::FutureWrite => Seal::FutureWrite,
                v1::Seal::Exec => Seal::Exec,
                v1::Seal::Unspecified => {
                    return Err(ConvertError::UnknownEnum { field: "Seal", value: 0 });
                }
            })
        })
        .collect()
}

/// The enum values of seals; those without a name are left out.
#[must_use]
pub fn seals_to_wire(seals: Seals) -> Vec<i32> {
    seals
        .iter()
        .map(|seal| {
            i32::from(match seal {
                Seal::Seal => v1::Seal::Seal,
                Seal::Shrink => v1::Seal::Shrink,
                Seal::Grow => v1::Seal::Grow,
                Seal::Write => v1::Seal::Write,
                Seal::FutureWrite => v1::Seal::FutureWrite,
                Seal::Exec => v1::Seal::Exec,
            })
        })
        .collect()
}

/// A backing with the hugetlb page size that goes with it; unspecified is shmem.
///
/// # Errors
/// [`ConvertError::HugetlbSize`] if one is there without the other.
pub fn backing_from_wire(backing: i32, hugetlb_page_size: u64) -> Result<Backing, ConvertError> {
    let unknown = ConvertError::UnknownEnum { field: "Backing", value: backing };
    let (backing, hugetlb) = match v1::Backing::try_from(backing).map_err(|_| unknown)? {
        v1::Backing::Unspecified | v1::Backing::Shmem => (Backing::Shmem, false),
        v1::Backing::ShmemThp => (Backing::ShmemThp, false),
        v1::Backing::Hugetlb => (Backing::Hugetlb(hugetlb_page_size), true),
    };
    if hugetlb == (hugetlb_page_size != 0) {
        Ok(backing)
    } else {
        Err(ConvertError::HugetlbSize(hugetlb_page_size))
    }
}

/// A backing as the two fields of a message.
#[must_use]
pub fn backing_to_wire(backing: Backing) -> (i32, u64) {
    match backing {
        Backing::Shmem => (v1::Backing::Shmem.into(), 0),
        Backing::ShmemThp => (v1::Backing::ShmemThp.into(), 0),
        Backing::Hugetlb(bytes) => (v1::Backing::Hugetlb.into(), bytes),
    }
}

impl From<FileInfo> for v1::File {
    fn from(file: FileInfo) -> Self {
        let (backing, hugetlb_page_size) = backing_to_wire(file.backing);
        Self {
            id: file.id.get(),
            name: file.name,
            size_bytes: file.size_bytes,
            pages: file.pages,
            backing,
            hugetlb_page_size,
            seals: seals_to_wire(file.seals),
            access: Some(file.access.into()),
            device: file.device,
            inode: file.inode,
            origin: match file.origin {
                Origin::Created => v1::Origin::Created,
                Origin::Adopted => v1::Origin::Adopted,
            }
            .into(),
            created: Some(timestamp_to_wire(file.created)),
            allocated_bytes: file.allocated_bytes,
            your_rights: rights_to_wire(file.your_rights),
        }
    }
}

impl TryFrom<v1::File> for FileInfo {
    type Error = ConvertError;

    fn try_from(file: v1::File) -> Result<Self, ConvertError> {
        check_name(&file.name)?;
        Ok(Self {
            id: FileId::new(file.id).ok_or(ConvertError::ZeroId("file id"))?,
            name: file.name,
            size_bytes: file.size_bytes,
            pages: file.pages,
            backing: backing_from_wire(file.backing, file.hugetlb_page_size)?,
            seals: seals_from_wire(&file.seals)?,
            access: file.access.ok_or(ConvertError::Missing("access"))?.try_into()?,
            device: file.device,
            inode: file.inode,
            origin: match known::<v1::Origin>("Origin", file.origin)? {
                v1::Origin::Adopted => Origin::Adopted,
                v1::Origin::Created | v1::Origin::Unspecified => Origin::Created,
            },
            created: timestamp_from_wire("created", file.created)?,
            allocated_bytes: file.allocated_bytes,
            your_rights: rights_from_wire(&file.your_rights)?,
        })
    }
}

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
            unsettled_leaves: p.doubts.unsettled_leaves,
            unknown_pages: p.doubts.unknown_pages,
            swap_cached_told_apart: p.swap_cached_told_apart,
            swap_cache_undetermined: p.doubts.swap_cache_undetermined,
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
            doubts: Doubts {
                unsettled_leaves: p.unsettled_leaves,
                unknown_pages: p.unknown_pages,
                swap_cache_undetermined: p.swap_cache_undetermined,
            },
            swap_cached_told_apart: p.swap_cached_told_apart,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_and_unspecified_enums_are_refused() {
        for value in [0, -1, 99] {
            assert!(state_from_wire(value).is_err());
            assert!(seals_from_wire(&[value]).is_err());
            assert!(AttributeSet::from_wire(&[value]).is_err());
            assert!(rights_from_wire(&[value]).is_err());
            assert!(probe_from_wire(value).is_err());
        }
    }

    #[test]
    fn sets_survive_the_wire() {
        let seals = Seals::from_bits(0x3f);
        assert_eq!(seals_from_wire(&seals_to_wire(seals)), Ok(seals));
        assert_eq!(AttributeSet::from_wire(&AttributeSet::ALL.to_wire()), Ok(AttributeSet::ALL));
        let access = Access::from_mode(3, 4, 0o751);
        assert_eq!(Access::try_from(v1::Access::from(access)), Ok(access));
    }

    #[test]
    fn hugetlb_size_goes_with_hugetlb_only() {
        let hugetlb = v1::Backing::Hugetlb.into();
        assert_eq!(backing_from_wire(hugetlb, 2 << 20), Ok(Backing::Hugetlb(2 << 20)));
        assert!(backing_from_wire(hugetlb, 0).is_err());
        assert!(backing_from_wire(v1::Backing::Shmem.into(), 2 << 20).is_err());
        assert_eq!(backing_from_wire(0, 0), Ok(Backing::Shmem));
        assert!(backing_from_wire(17, 0).is_err());
    }

    #[test]
    fn negative_durations_are_refused() {
        let wire = |seconds, nanos| Some(prost_types::Duration { seconds, nanos });
        assert!(duration_from_wire("max_age", wire(-1, 0)).is_err());
        assert!(duration_from_wire("max_age", wire(0, -5)).is_err());
        assert!(duration_from_wire("max_age", wire(0, 1_000_000_000)).is_err());
        assert_eq!(duration_from_wire("max_age", wire(1, 5)), Ok(Duration::new(1, 5)));
        assert_eq!(duration_from_wire("max_age", None), Ok(Duration::ZERO));
    }

    #[test]
    fn unknown_attributes_stay_unknown() {
        let nothing = PageAttributes::default();
        let wire = v1::PageAttributes::from(nothing);
        assert_eq!((wire.order, wire.flags, wire.map_count, wire.maybe_pinned), (None, None, None, None));
        assert_eq!(PageAttributes::try_from(wire), Ok(nothing));
    }

    #[test]
    fn file_ref_must_name_something() {
        assert!(FileName::try_from(None).is_err());
        assert!(FileName::try_from(Some(v1::FileRef { by: Some(v1::file_ref::By::Id(0)) })).is_err());
        let empty = Some(v1::FileRef { by: Some(v1::file_ref::By::Name(String::new())) });
        assert!(FileName::try_from(empty).is_err());
    }
}
