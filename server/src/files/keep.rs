//! Who may keep files: have files that do not end with their last user. Pure, but for names of users and groups.

use std::str::FromStr;

use fdmap_proto::file::Lifetime;
use nix::unistd::{Group, User};

use super::{Caller, FileError};

/// One value of `--allow-keep`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// Every user.
    All,
    /// The user with this id. Not users of its subordinate ids.
    User(u32),
    /// Users with this primary or supplementary group id.
    Group(u32),
}

/// Not a value of `--allow-keep`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a user, nor a group after @, nor `all`")]
pub struct KeeperError(String);

impl FromStr for Keeper {
    type Err = KeeperError;

    fn from_str(text: &str) -> Result<Self, KeeperError> {
        let unknown = || KeeperError(text.to_owned());
        if text == "all" {
            return Ok(Self::All);
        }
        let id = |name: &str, by_name: &dyn Fn(&str) -> Option<u32>| {
            name.parse().ok().or_else(|| by_name(name)).ok_or_else(unknown)
        };
        match text.strip_prefix('@') {
            Some(group) => {
                id(group, &|name| Some(Group::from_name(name).ok()??.gid.as_raw())).map(Self::Group)
            }
            None => id(text, &|name| Some(User::from_name(name).ok()??.uid.as_raw())).map(Self::User),
        }
    }
}

/// The users who may keep files, besides administrators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeepPolicy(Vec<Keeper>);

impl KeepPolicy {
    #[must_use]
    pub const fn new(keepers: Vec<Keeper>) -> Self {
        Self(keepers)
    }

    /// The lifetime of a new file. `administrators_file`: an administrator owns it.
    pub(super) fn lifetime(
        &self,
        caller: &Caller,
        administrators_file: bool,
        requested: Option<Lifetime>,
    ) -> Result<Lifetime, FileError> {
        match requested {
            Some(Lifetime::Kept) if !self.permits(caller) => Err(FileError::Keep { uid: caller.uid }),
            Some(lifetime) => Ok(lifetime),
            None if caller.admin && administrators_file => Ok(Lifetime::Kept),
            None => Ok(Lifetime::Ephemeral),
        }
    }

    fn permits(&self, caller: &Caller) -> bool {
        let matches = |keeper: &Keeper| match *keeper {
            Keeper::All => true,
            Keeper::User(uid) => caller.uid == uid,
            Keeper::Group(gid) => caller.gid == gid || caller.groups.contains(&gid),
        };
        caller.admin || self.0.iter().any(matches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_given_by_name_or_number() {
        for (text, keeper) in [
            ("all", Keeper::All),
            ("1000", Keeper::User(1000)),
            ("root", Keeper::User(0)),
            ("@1000", Keeper::Group(1000)),
            ("@root", Keeper::Group(0)),
        ] {
            assert_eq!(text.parse(), Ok(keeper), "{text}");
        }
        for text in ["", "@", "@all", "no such user", "-1", "4294967296"] {
            assert!(text.parse::<Keeper>().is_err(), "{text}");
        }
    }

    #[test]
    fn files_of_users_end_unless_they_may_keep_them_and_ask_for_it() {
        let policy = KeepPolicy::new(vec![Keeper::User(1), Keeper::Group(50)]);
        let caller = |uid, gid, groups: &[u32]| Caller::new(uid, gid, groups.to_vec(), 900);
        let (kept, ephemeral) = (Some(Lifetime::Kept), Some(Lifetime::Ephemeral));
        for (caller, administrators_file, requested, expected) in [
            (caller(0, 0, &[]), true, None, kept),
            (caller(900, 9, &[]), true, None, kept),
            (caller(0, 0, &[]), false, None, ephemeral),
            (caller(0, 0, &[]), false, kept, kept),
            (caller(0, 0, &[]), true, ephemeral, ephemeral),
            (caller(1, 1, &[]), false, None, ephemeral),
            (caller(1, 1, &[]), false, kept, kept),
            (caller(2, 50, &[]), false, kept, kept),
            (caller(2, 2, &[7, 50]), false, kept, kept),
            (caller(2, 2, &[7]), false, kept, None),
            (caller(50, 1, &[]), false, kept, None),
            (caller(2, 2, &[]), true, None, ephemeral),
            (caller(2, 2, &[]), false, ephemeral, ephemeral),
        ] {
            let got = policy.lifetime(&caller, administrators_file, requested);
            assert_eq!(got.ok(), expected, "{caller:?} {requested:?}");
        }
        assert!(KeepPolicy::new(vec![Keeper::All]).permits(&caller(7, 7, &[])));
        let refused = KeepPolicy::default().lifetime(&caller(7, 7, &[]), false, kept).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "user 7 may not keep files: they end with their last user. `fdmapd --allow-keep` permits it"
        );
    }
}
