//! File names: how requests identify files, and which names are valid.

use std::fmt;

use crate::units::FileId;

/// File name and owner; unique in the service while the file exists. Sorted by name, and by owner among files of one name.
///
/// Displayed as `UID/NAME`: a name contains no `/`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnedName {
    /// File name.
    pub name: String,
    /// User id of the owner.
    pub uid: u32,
}

impl OwnedName {
    /// Parses `UID/NAME`. Does not check the name. `None` if the text has another form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (uid, name) = text.split_once('/')?;
        Some(Self { name: name.to_owned(), uid: parse_uid(uid)? })
    }

    /// Name that identifies the file in requests of user `caller`: `NAME` or `UID/NAME`.
    #[must_use]
    pub fn of_caller(&self, caller: u32) -> String {
        if self.uid == caller { self.name.clone() } else { self.to_string() }
    }
}

impl fmt::Display for OwnedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.uid, self.name)
    }
}

/// Parses a user id of decimal digits without a sign.
#[must_use]
pub fn parse_uid(text: &str) -> Option<u32> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// Identifies a file in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileName {
    /// Id assigned by the service.
    Id(FileId),
    /// Name of a file that the caller owns.
    Name(String),
    /// Name of a file of any user.
    Owned(OwnedName),
    /// Inode behind a descriptor or mapping.
    Inode {
        /// `st_dev`
        device: u64,
        /// `st_ino`
        number: u64,
    },
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(f, "file with id {id}"),
            Self::Name(name) => write!(f, "file named {name:?}"),
            Self::Owned(OwnedName { name, uid }) => write!(f, "file named {name:?} of user {uid}"),
            Self::Inode { device, number } => write!(f, "file with inode {number} on device {device:#x}"),
        }
    }
}

/// True for characters that a terminal does not show, or that change the order of others: control and format characters (categories Cc
/// and Cf of Unicode 16), line and paragraph separators. Text with them can look like other text.
#[must_use]
pub fn is_invisible(c: char) -> bool {
    const FORMAT: [std::ops::RangeInclusive<char>; 21] = [
        '\u{ad}'..='\u{ad}',
        '\u{600}'..='\u{605}',
        '\u{61c}'..='\u{61c}',
        '\u{6dd}'..='\u{6dd}',
        '\u{70f}'..='\u{70f}',
        '\u{890}'..='\u{891}',
        '\u{8e2}'..='\u{8e2}',
        '\u{180e}'..='\u{180e}',
        '\u{200b}'..='\u{200f}',
        // With the line and the paragraph separator.
        '\u{2028}'..='\u{202e}',
        '\u{2060}'..='\u{2064}',
        '\u{2066}'..='\u{206f}',
        '\u{feff}'..='\u{feff}',
        '\u{fff9}'..='\u{fffb}',
        '\u{110bd}'..='\u{110bd}',
        '\u{110cd}'..='\u{110cd}',
        '\u{13430}'..='\u{1343f}',
        '\u{1bca0}'..='\u{1bca3}',
        '\u{1d173}'..='\u{1d17a}',
        '\u{e0001}'..='\u{e0001}',
        '\u{e0020}'..='\u{e007f}',
    ];
    c.is_control() || FORMAT.iter().any(|range| range.contains(&c))
}

/// Checks a file name: 1 to 249 bytes without `/`, control and format characters, and line separators.
///
/// # Errors
/// [`NameError`] with the violated rule.
pub fn check_name(name: &str) -> Result<(), NameError> {
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if name.len() > crate::MAX_NAME_BYTES {
        return Err(NameError::TooLong(name.len()));
    }
    match name.chars().find(|c| *c == '/' || is_invisible(*c)) {
        Some(c) => Err(NameError::Character(c)),
        None => Ok(()),
    }
}

/// Reason why a string is not a valid file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The name has no characters.
    #[error("file name is empty")]
    Empty,
    /// The name has more bytes than `memfd_create(2)` accepts.
    #[error("file name has {0} bytes; the maximum is {max}", max = crate::MAX_NAME_BYTES)]
    TooLong(usize),
    /// The name contains `/`, a control or format character, or a line separator.
    #[error("file name contains the character {0:?}")]
    Character(char),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_file_names_are_rejected() {
        assert_eq!(check_name("guest ram, node 0"), Ok(()));
        assert_eq!(check_name(""), Err(NameError::Empty));
        assert_eq!(check_name("a/b"), Err(NameError::Character('/')));
        assert_eq!(check_name("a\nb"), Err(NameError::Character('\n')));
        for invisible in
            ['\u{7f}', '\u{85}', '\u{ad}', '\u{200b}', '\u{202e}', '\u{2028}', '\u{2066}', '\u{e0041}']
        {
            assert_eq!(check_name(&format!("a{invisible}b")), Err(NameError::Character(invisible)));
        }
        assert_eq!(check_name("Gäste-RAM \u{2027}\u{202f}\u{3000}内存"), Ok(()));
        assert_eq!(check_name(&"x".repeat(250)), Err(NameError::TooLong(250)));
        assert_eq!(check_name(&"x".repeat(249)), Ok(()));
    }

    #[test]
    fn owned_name_is_sorted_by_name_and_written_with_its_owner() {
        let owned = |uid, name: &str| OwnedName { name: name.to_owned(), uid };
        for name in [owned(0, "ram"), owned(u32::MAX, "a b"), owned(7, "")] {
            assert_eq!(OwnedName::parse(&name.to_string()), Some(name));
        }
        assert!(owned(9, "a") < owned(0, "b") && owned(0, "b") < owned(1, "b"));
        for bad in ["", "ram", "/ram", "+1/ram", "-1/ram", "alice/ram", "4294967296/ram", "1 /ram"] {
            assert_eq!(OwnedName::parse(bad), None, "{bad}");
        }
    }
}
