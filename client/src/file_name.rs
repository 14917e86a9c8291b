//! File names as people write them: `NAME` for a file of the caller, `USER/NAME` for a file of any user.

use fdmap_proto::file::{NameError, OwnedName, check_name, parse_uid};
use fdmap_proto::{FileName, error_chain};
use fdmap_sys::Errno;
use nix::unistd::User;

/// Reason why a text names no file or no user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileNameError {
    /// The name is invalid.
    #[error("invalid file name")]
    Name(#[from] NameError),
    /// This host has no user of this login name.
    #[error("no user {0:?} on this host: give a login name or a user id")]
    NoUser(String),
    /// The users of this host could not be read.
    #[error("getpwnam_r({user:?})")]
    Users {
        /// The login name.
        user: String,
        /// Its error.
        #[source]
        errno: Errno,
    },
}

/// Parses `NAME` or `USER/NAME`.
///
/// # Errors
/// [`FileNameError`]
pub fn parse(text: &str) -> Result<FileName, FileNameError> {
    let (uid, name) = split(text)?;
    Ok(match uid {
        Some(uid) => FileName::Owned(OwnedName { name, uid }),
        None => FileName::Name(name),
    })
}

/// Splits `NAME` or `USER/NAME` into the user id, if there is one, and the name.
///
/// # Errors
/// [`FileNameError`]
pub fn split(text: &str) -> Result<(Option<u32>, String), FileNameError> {
    let (user, name) = text.split_once('/').map_or((None, text), |(user, name)| (Some(user), name));
    check_name(name)?;
    Ok((user.map(user_id).transpose()?, name.to_owned()))
}

/// Returns the id of a user: a number as it is, or a login name of this host. Digits are always a number.
///
/// # Errors
/// [`FileNameError::NoUser`], [`FileNameError::Users`]
pub fn user_id(user: &str) -> Result<u32, FileNameError> {
    if let Some(uid) = parse_uid(user) {
        return Ok(uid);
    }
    match User::from_name(user) {
        Ok(Some(found)) => Ok(found.uid.as_raw()),
        Ok(None) => Err(FileNameError::NoUser(user.to_owned())),
        Err(errno) => Err(FileNameError::Users { user: user.to_owned(), errno }),
    }
}

/// Parsers of command lines report errors as text.
impl From<FileNameError> for String {
    fn from(error: FileNameError) -> Self {
        error_chain(&error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(uid: u32, name: &str) -> FileName {
        FileName::Owned(OwnedName { name: name.to_owned(), uid })
    }

    #[test]
    fn file_of_another_user_is_named_with_its_owner() {
        assert_eq!(parse("ram"), Ok(FileName::Name("ram".to_owned())));
        assert_eq!(parse("1000/guest ram"), Ok(owned(1000, "guest ram")));
        assert_eq!(parse("4294967295/ram"), Ok(owned(u32::MAX, "ram")));
        assert_eq!(parse("root/ram"), Ok(owned(0, "ram")));
    }

    #[test]
    fn unknown_users_and_invalid_names_are_rejected() {
        for unknown in ["", "no such user", "4294967296", "+1", "-1", "0x10"] {
            let text = format!("{unknown}/ram");
            assert_eq!(parse(&text), Err(FileNameError::NoUser(unknown.to_owned())));
        }
        let character = |c| Err(FileNameError::Name(NameError::Character(c)));
        assert_eq!(parse("1000/a/b"), character('/'));
        assert_eq!(parse("1000//ram"), character('/'));
        assert_eq!(parse("1000/guest\u{202e}mar"), character('\u{202e}'));
        for empty in ["", "1000/"] {
            assert_eq!(parse(empty), Err(FileNameError::Name(NameError::Empty)));
        }
    }
}
