//! Parsers of command-line values.

use clap::builder::{PathBufValueParser, TypedValueParser};
use fdmap_client::image::ImageLocation;
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::units::FileId;
use fdmap_client::proto::{Access, Backing, Generation, PageIndex, Rights, SnapshotId};

use super::CliError;
use super::range::PartialRange;

/// Parses a size in bytes: a number with an optional unit K, M, G or T (powers of 1024), which may end in B or iB.
///
/// # Errors
/// A message for the user.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 =
        number.parse().map_err(|_| "expected a number with an optional unit K, M, G or T".to_owned())?;
    let shift = match unit.to_ascii_uppercase().trim_end_matches('B').trim_end_matches('I') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(format!("unknown unit {unit:?}: expected K, M, G or T")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| "size exceeds 64 bits".to_owned())
}

/// Huge pages of a new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Huge {
    /// Transparent huge pages.
    Thp,
    /// hugetlb pages of this size in bytes.
    Hugetlb(u64),
}

impl Huge {
    /// Parses `thp` or a size.
    ///
    /// # Errors
    /// A message for the user.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "thp" { Ok(Self::Thp) } else { size(text).map(Self::Hugetlb) }
    }

    pub const fn backing(self) -> Backing {
        match self {
            Self::Thp => Backing::ShmemThp,
            Self::Hugetlb(bytes) => Backing::Hugetlb(bytes),
        }
    }
}

/// Parses a path or URL of an image. Paths may be other than UTF-8.
pub fn image_location() -> impl TypedValueParser<Value = ImageLocation> {
    PathBufValueParser::new().try_map(|path| ImageLocation::parse(&path))
}

/// Parses up to 16 hex digits without sign or prefix.
fn hex(text: &str) -> Option<u64> {
    let digits = text.len() <= 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if digits { u64::from_str_radix(text, 16).ok() } else { None }
}

/// Parses `NAME`, `USER/NAME`, or `id:` and 16 hex digits.
///
/// # Errors
/// A message for the user.
pub fn file_name(text: &str) -> Result<FileName, String> {
    if let Some(id) = text.strip_prefix("id:") {
        let id = hex(id).and_then(FileId::new);
        return id.map(FileName::Id).ok_or_else(|| "expected id: and up to 16 hex digits, not 0".to_owned());
    }
    Ok(fdmap_client::file_name::parse(text)?)
}

/// Name of a new file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewName {
    pub name: String,
    /// User id of the owner; `None`: the caller.
    pub uid: Option<u32>,
}

/// Parses `NAME` or `USER/NAME`.
///
/// # Errors
/// A message for the user.
pub fn new_name(text: &str) -> Result<NewName, String> {
    let (uid, name) = fdmap_client::file_name::split(text)?;
    Ok(NewName { name, uid })
}

/// Parses a user id or a login name.
///
/// # Errors
/// A message for the user.
pub fn user(text: &str) -> Result<u32, String> {
    Ok(fdmap_client::file_name::user_id(text)?)
}

/// Parses a snapshot id: 16 hex digits.
///
/// # Errors
/// A message for the user.
pub fn snapshot_id(text: &str) -> Result<SnapshotId, String> {
    let id = hex(text).and_then(SnapshotId::new);
    id.ok_or_else(|| "expected up to 16 hex digits, not 0".to_owned())
}

/// Parses a generation; 0 precedes the first.
///
/// # Errors
/// A message for the user.
pub fn generation(text: &str) -> Result<Generation, String> {
    let number = text.parse().ok().and_then(Generation::new);
    number.ok_or_else(|| format!("expected a number from 0 to {}", Generation::MAX))
}

/// Parses a cursor name.
///
/// # Errors
/// A message for the user.
pub fn cursor_name(text: &str) -> Result<String, String> {
    fdmap_client::proto::tracking::check_cursor_name(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

/// Parses a page range: `A..B`, `A..`, `..B`, or one page `A`.
///
/// # Errors
/// A message for the user.
pub fn page_range(text: &str) -> Result<PartialRange, String> {
    let page = |text: &str| {
        text.parse()
            .map(PageIndex)
            .map_err(|_| format!("invalid page {text:?}: expected numbers, as in 0..1024"))
    };
    let Some((start, end)) = text.split_once("..") else {
        let only = page(text)?;
        return Ok(PartialRange { start: only, end: Some(only.plus(1)) });
    };
    let start = if start.is_empty() { PageIndex(0) } else { page(start)? };
    let end = if end.is_empty() { None } else { Some(page(end)?) };
    match end {
        Some(end) if end <= start => Err(format!("empty page range {text}")),
        _ => Ok(PartialRange { start, end }),
    }
}

/// Applies the given changes to `base`; `None` if there are none.
///
/// # Errors
/// [`CliError::Usage`] if the mode is invalid.
pub fn access_of(
    base: Access,
    mode: Option<&str>,
    rights: [Option<Rights>; 3],
    uid: Option<u32>,
    gid: Option<u32>,
) -> Result<Option<Access>, CliError> {
    if mode.is_none() && rights.iter().all(Option::is_none) && uid.is_none() && gid.is_none() {
        return Ok(None);
    }
    let mut access = Access { uid: uid.unwrap_or(base.uid), gid: gid.unwrap_or(base.gid), ..base };
    if let Some(mode) = mode {
        let bits = u32::from_str_radix(mode, 8).ok().filter(|bits| *bits <= 0o777);
        let bits = bits.ok_or_else(|| {
            CliError::Usage(format!("invalid mode {mode:?}: expected an octal mode such as 640"))
        })?;
        access = Access::from_mode(access.uid, access.gid, bits);
    }
    let [owner, group, other] = rights;
    access.owner = owner.unwrap_or(access.owner);
    access.group = group.unwrap_or(access.group);
    access.other = other.unwrap_or(access.other);
    Ok(Some(access))
}

#[cfg(test)]
mod tests {
    use fdmap_client::proto::OwnedName;

    use super::*;

    #[test]
    fn size_units_are_powers_of_1024() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("16G"), Ok(16 << 30));
        assert_eq!(size("2MiB"), Ok(2 << 20));
        assert_eq!(size("1kb"), Ok(1024));
        assert_eq!(size("3t"), Ok(3 << 40));
        for bad in ["", "G", "-1", "1.5G", "5X", "99999999999T", "1 G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn range_ends_are_optional() {
        let range =
            |start, end: Option<u64>| Ok(PartialRange { start: PageIndex(start), end: end.map(PageIndex) });
        assert_eq!(page_range("3..9"), range(3, Some(9)));
        assert_eq!(page_range("3.."), range(3, None));
        assert_eq!(page_range("..9"), range(0, Some(9)));
        assert_eq!(page_range(".."), range(0, None));
        assert_eq!(page_range("7"), range(7, Some(8)));
        for bad in ["9..3", "3..3", "a..b", "", "-1..3", "3...9"] {
            assert!(page_range(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn file_is_named_or_identified() {
        assert_eq!(file_name("ram"), Ok(FileName::Name("ram".to_owned())));
        assert_eq!(file_name("id:00000000000000ff"), Ok(FileName::Id(FileId::new(255).unwrap())));
        let owned = |uid, name: &str| Ok(FileName::Owned(OwnedName { name: name.to_owned(), uid }));
        assert_eq!(file_name("1000/ram"), owned(1000, "ram"));
        assert_eq!(file_name("root/id:5"), owned(0, "id:5"));
        assert_eq!(new_name("1000/ram"), Ok(NewName { name: "ram".to_owned(), uid: Some(1000) }));
        assert_eq!(new_name("ram"), Ok(NewName { name: "ram".to_owned(), uid: None }));
        assert_eq!((user("1000"), user("root")), (Ok(1000), Ok(0)));
        for bad in
            ["", "nosuchuser/b", "1/a/b", "1/", "id:", "id:0", "id:xyz", "id:+f", "id:00000000000000000ff1"]
        {
            assert!(file_name(bad).is_err(), "{bad}");
        }
        let unknown = "no user \"nosuchuser\" on this host: give a login name or a user id";
        assert_eq!(new_name("nosuchuser/ram"), Err(unknown.to_owned()));
    }

    #[test]
    fn access_changes_apply_to_the_current_access() {
        let base = Access::from_mode(5, 6, 0o600);
        let none = [None, None, None];
        assert_eq!(access_of(base, None, none, None, None).unwrap(), None);
        let got = access_of(base, Some("640"), none, None, Some(9)).unwrap().unwrap();
        assert_eq!(got, Access::from_mode(5, 9, 0o640));
        let got = access_of(base, None, [None, Some(Rights::ALL), None], None, None).unwrap().unwrap();
        assert_eq!(got, Access { group: Rights::ALL, ..base });
        assert!(access_of(base, Some("888"), none, None, None).is_err());
        assert!(access_of(base, Some("7777"), none, None, None).is_err());
    }
}
