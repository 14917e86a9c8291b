//! Between messages and words. Nothing is guessed: what has no meaning is a [`ConvertError`].

mod files;
mod pages;
mod tracking;

pub use files::{backing_from_wire, backing_to_wire, seals_from_wire, seals_to_wire};
pub use pages::{AttributeSet, probe_from_wire};
pub use tracking::generation_from_wire;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::file::{NameError, check_name};
use crate::state::PageState;
use crate::tracking::CursorNameError;
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
    #[error("run of {length} pages, {skip} after page {start}")]
    Run {
        /// Where the run before ended.
        start: u64,
        /// Pages left out.
        skip: u64,
        /// Pages in the run.
        length: u64,
    },
    /// A name that no cursor has.
    #[error("bad name of a cursor")]
    Cursor(#[from] CursorNameError),
    /// Everything was observed, and yet there are gaps.
    #[error("coverage is called exact with {0} gaps")]
    ExactWithGaps(usize),
    /// Addresses that no mapping has.
    #[error("no mapping has {length} bytes at {address:#x}")]
    Addresses {
        /// The first.
        address: u64,
        /// Bytes.
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

/// One of the names of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileName {
    /// The service's id.
    Id(FileId),
    /// The file's name.
    Name(String),
    /// Its inode.
    Inode {
        /// `st_dev`
        device: u64,
        /// `st_ino`
        number: u64,
    },
}

impl std::fmt::Display for FileName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Id(id) => write!(f, "file with id {id}"),
            Self::Name(name) => write!(f, "file named {name:?}"),
            Self::Inode { device, number } => write!(f, "file with inode {number} on device {device:#x}"),
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
            Some(v1::file_ref::By::Inode(v1::Inode { device, number })) => Ok(Self::Inode { device, number }),
        }
    }
}

impl From<FileName> for v1::FileRef {
    fn from(name: FileName) -> Self {
        Self {
            by: Some(match name {
                FileName::Id(id) => v1::file_ref::By::Id(id.get()),
                FileName::Name(name) => v1::file_ref::By::Name(name),
                FileName::Inode { device, number } => v1::file_ref::By::Inode(v1::Inode { device, number }),
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

/// A moment as a message.
#[must_use]
pub fn timestamp_to_wire(time: SystemTime) -> prost_types::Timestamp {
    time.into()
}

/// A moment.
///
/// # Errors
/// [`ConvertError::Missing`] if it is absent, [`ConvertError::Duration`] if it lies before 1970 or outside of time.
pub fn timestamp_from_wire(
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

#[cfg(test)]
mod tests {
    use super::files::rights_from_wire;
    use super::*;
    use crate::file::{Access, Backing, Seals};
    use crate::state::PageAttributes;

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
