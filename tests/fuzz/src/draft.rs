//! Parts of requests: mostly such as have a meaning, sometimes anything at all.

use arbitrary::{Arbitrary, Result, Unstructured};
use fdmap_proto::v1;
use fdmap_proto::v1::file_ref::By;

/// A value for an enum field: mostly one from 1 to `known`; also 0 for "unspecified", and some that no version knows.
pub fn enum_value(u: &mut Unstructured<'_>, known: i32) -> Result<i32> {
    if rarely(u)? {
        return u.arbitrary();
    }
    if rarely(u)? { u.int_in_range(-1..=7) } else { u.int_in_range(1..=known) }
}

/// Values for a repeated enum field.
pub fn enum_values(u: &mut Unstructured<'_>, known: i32) -> Result<Vec<i32>> {
    let count = u.int_in_range(0..=4)?;
    (0..count).map(|_| enum_value(u, known)).collect()
}

/// True once in 32 times: for what ends a session or spoils a request. Not by the bytes that libFuzzer likes best, and not
/// where an input ends.
pub fn rarely(u: &mut Unstructured<'_>) -> Result<bool> {
    Ok(u.int_in_range(0..=31)? == 21)
}

/// Which file a request names.
#[derive(Clone, Debug)]
pub enum FileDraft {
    /// One that is there, by its name.
    Name(u8),
    /// One that is there, by its id.
    Id(u8),
    /// Something else, or nothing.
    Other(OtherFile),
}

/// What names no file, or one by chance.
#[derive(Arbitrary, Clone, Debug)]
pub enum OtherFile {
    /// Whatever name.
    Name(String),
    /// Whatever id, 0 among them.
    Id(u64),
    /// Whatever inode.
    Inode(u64, u64),
    /// No name and no id.
    Empty,
    /// No field.
    Absent,
}

impl<'a> Arbitrary<'a> for FileDraft {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(match u.int_in_range(0..=15)? {
            7 => Self::Other(u.arbitrary()?),
            0..=7 => Self::Name(u.arbitrary()?),
            _ => Self::Id(u.arbitrary()?),
        })
    }
}

impl FileDraft {
    /// The field, where `files` are there under these names and ids.
    #[must_use]
    pub fn field(&self, files: &[(String, u64)]) -> Option<v1::FileRef> {
        let pick = |nth: &u8| files.get(usize::from(*nth) % files.len().max(1)).cloned().unwrap_or_default();
        let by = match self {
            Self::Name(nth) => Some(By::Name(pick(nth).0)),
            Self::Id(nth) => Some(By::Id(pick(nth).1)),
            Self::Other(OtherFile::Name(name)) => Some(By::Name(name.clone())),
            Self::Other(OtherFile::Id(id)) => Some(By::Id(*id)),
            Self::Other(OtherFile::Inode(device, number)) => {
                Some(By::Inode(v1::Inode { device: *device, number: *number }))
            }
            Self::Other(OtherFile::Empty) => None,
            Self::Other(OtherFile::Absent) => return None,
        };
        Some(v1::FileRef { by })
    }
}

/// Which pages a request names.
#[derive(Clone, Copy, Debug)]
pub enum RangeDraft {
    /// No field.
    Absent,
    /// Pages around those that hold something.
    Near {
        /// From the first of these.
        start: i16,
        /// Pages.
        len: u16,
    },
    /// From there to the end of the file.
    Rest(u16),
    /// Whatever pages.
    Any {
        /// The first.
        start: u64,
        /// The one after the last, also before it.
        end: u64,
    },
}

impl<'a> Arbitrary<'a> for RangeDraft {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(match u.int_in_range(0..=15)? {
            7 => Self::Any { start: u.arbitrary()?, end: u.arbitrary()? },
            0..=4 => Self::Absent,
            5..=11 => Self::Near { start: u.arbitrary()?, len: u.arbitrary()? },
            _ => Self::Rest(u.arbitrary()?),
        })
    }
}

impl RangeDraft {
    /// The field, for a file of `file_pages` pages that holds something from page `first` on.
    #[must_use]
    pub fn field(self, first: u64, file_pages: u64) -> Option<v1::PageRange> {
        match self {
            Self::Absent => None,
            Self::Near { start, len } => {
                let start = first.saturating_add_signed(i64::from(start));
                Some(v1::PageRange { start, end: start.saturating_add(u64::from(len)) })
            }
            Self::Rest(start) => {
                Some(v1::PageRange { start: first.saturating_add(u64::from(start)), end: file_pages })
            }
            Self::Any { start, end } => Some(v1::PageRange { start, end }),
        }
    }
}

/// A duration.
#[derive(Clone, Copy, Debug)]
pub enum DurationDraft {
    /// No field.
    Absent,
    /// Some seconds.
    Short(u8),
    /// Whatever duration, also one that is none.
    Any(i64, i32),
}

impl<'a> Arbitrary<'a> for DurationDraft {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(match u.int_in_range(0..=15)? {
            7 => Self::Any(u.arbitrary()?, u.arbitrary()?),
            0..=11 => Self::Absent,
            _ => Self::Short(u.arbitrary()?),
        })
    }
}

impl DurationDraft {
    /// The field.
    #[must_use]
    pub fn field(self) -> Option<prost_types::Duration> {
        match self {
            Self::Absent => None,
            Self::Short(seconds) => Some(prost_types::Duration { seconds: i64::from(seconds), nanos: 0 }),
            Self::Any(seconds, nanos) => Some(prost_types::Duration { seconds, nanos }),
        }
    }
}
