//! Drafts of request fields: mostly valid values, sometimes arbitrary ones.

use arbitrary::{Arbitrary, Result, Unstructured};
use fdmap_proto::file::OwnedName;
use fdmap_proto::v1;
use fdmap_proto::v1::file_ref::By;

/// A value for an enum field: mostly from 1 to `known`, sometimes 0 (unspecified) or an unknown value.
pub fn enum_value(u: &mut Unstructured<'_>, known: i32) -> Result<i32> {
    if rarely(u)? {
        return u.arbitrary();
    }
    if rarely(u)? { u.int_in_range(-1..=7) } else { u.int_in_range(1..=known) }
}

/// A lifetime: mostly a valid one, or unspecified.
pub fn lifetime(u: &mut Unstructured<'_>) -> Result<i32> {
    if rarely(u)? { enum_value(u, 2) } else { u.int_in_range(0..=2) }
}

/// Values for a repeated enum field.
pub fn enum_values(u: &mut Unstructured<'_>, known: i32) -> Result<Vec<i32>> {
    let count = u.int_in_range(0..=4)?;
    (0..count).map(|_| enum_value(u, known)).collect()
}

/// True for one of 32 values: for choices that end a session or invalidate a request. The value is neither one that libFuzzer
/// prefers nor 0, which exhausted inputs yield.
pub fn rarely(u: &mut Unstructured<'_>) -> Result<bool> {
    Ok(u.int_in_range(0..=31)? == 21)
}

/// At most `max` values.
pub fn up_to<'a, T: Arbitrary<'a>>(u: &mut Unstructured<'a>, max: usize) -> Result<Vec<T>> {
    u.arbitrary_iter()?.take(max).collect()
}

/// A value in one of 64 inputs.
pub fn rare<'a, T: Arbitrary<'a>>(u: &mut Unstructured<'a>) -> Result<Option<T>> {
    if rarely(u)? { u.arbitrary() } else { Ok(None) }
}

/// The file of a request.
#[derive(Clone, Debug)]
pub enum FileDraft {
    /// An existing file, by name: from 128 on without the owner, which names it only for the owner.
    Name(u8),
    /// An existing file, by id.
    Id(u8),
    Other(OtherFile),
}

/// A reference that names no file, or one by chance.
#[derive(Arbitrary, Clone, Debug)]
pub enum OtherFile {
    Name(String),
    /// Any id, including 0.
    Id(u64),
    Inode(u64, u64),
    Owned(u32, String),
    /// A `FileRef` without a reference.
    Empty,
    /// The field is missing.
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

/// Name and id of a file, for requests that are only decoded.
#[must_use]
pub fn ram() -> (OwnedName, u64) {
    (OwnedName { name: "ram".to_owned(), uid: 0 }, 7)
}

impl FileDraft {
    /// Encodes the field. `files`: names and ids of the existing files.
    #[must_use]
    pub fn field(&self, files: &[(OwnedName, u64)]) -> Option<v1::FileRef> {
        let pick = |nth: &u8| {
            let none = (OwnedName { name: String::new(), uid: 0 }, 0);
            files.get(usize::from(*nth) % files.len().max(1)).cloned().unwrap_or(none)
        };
        let by = match self {
            Self::Name(nth) => {
                let (OwnedName { name, uid }, _) = pick(nth);
                Some(if *nth < 128 { By::OwnedName(v1::OwnedName { uid, name }) } else { By::Name(name) })
            }
            Self::Id(nth) => Some(By::Id(pick(nth).1)),
            Self::Other(OtherFile::Name(name)) => Some(By::Name(name.clone())),
            Self::Other(OtherFile::Id(id)) => Some(By::Id(*id)),
            Self::Other(OtherFile::Inode(device, number)) => {
                Some(By::Inode(v1::Inode { device: *device, number: *number }))
            }
            Self::Other(OtherFile::Owned(uid, name)) => {
                Some(By::OwnedName(v1::OwnedName { uid: *uid, name: name.clone() }))
            }
            Self::Other(OtherFile::Empty) => None,
            Self::Other(OtherFile::Absent) => return None,
        };
        Some(v1::FileRef { by })
    }
}

/// The page range of a request.
#[derive(Clone, Copy, Debug)]
pub enum RangeDraft {
    /// The field is missing.
    Absent,
    /// Pages near those that hold data. `start`: relative to the first of them.
    Near { start: i16, len: u16 },
    /// From this page, relative to the first with data, to the end of the file.
    Rest(u16),
    /// Any range, also one that ends before its start.
    Any { start: u64, end: u64 },
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
    /// Encodes the field for a file of `file_pages` pages with data from page `first` on.
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

#[derive(Clone, Copy, Debug)]
pub enum DurationDraft {
    /// The field is missing.
    Absent,
    /// Seconds.
    Short(u8),
    /// Any duration, also an invalid one.
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
    #[must_use]
    pub fn field(self) -> Option<prost_types::Duration> {
        match self {
            Self::Absent => None,
            Self::Short(seconds) => Some(prost_types::Duration { seconds: i64::from(seconds), nanos: 0 }),
            Self::Any(seconds, nanos) => Some(prost_types::Duration { seconds, nanos }),
        }
    }
}
