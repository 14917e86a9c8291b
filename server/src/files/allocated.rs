//! A limit on the memory that the files of a user hold, in RAM and in swap.
//!
//! The kernel allocates a page when a process first writes to it, and charges that process's cgroup; the page stays with the file. So
//! the service cannot prevent an allocation. A user whose files hold too much gets no further file, and no larger one.

use std::collections::BTreeMap;

use nix::unistd::{SysconfVar, sysconf};

use super::FileError;

/// Limits in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatedLimits {
    pub per_user: u64,
    /// Of all users but root together.
    pub of_users: u64,
}

impl Default for AllocatedLimits {
    /// Half of the RAM for one user, three quarters for all.
    fn default() -> Self {
        let ram = ram_bytes();
        Self { per_user: ram / 2, of_users: ram / 4 * 3 }
    }
}

/// The RAM of the host in bytes; `u64::MAX`, which is no limit, if it is unknown.
pub(super) fn ram_bytes() -> u64 {
    let variable = |which| sysconf(which).ok().flatten().and_then(|value| u64::try_from(value).ok());
    let pages = variable(SysconfVar::_PHYS_PAGES);
    let ram = pages.zip(variable(SysconfVar::PAGE_SIZE)).map(|(pages, bytes)| pages.saturating_mul(bytes));
    ram.unwrap_or(u64::MAX)
}

impl AllocatedLimits {
    /// Refuses a further or larger file of `owner`, if the files hold too much. `files`: the owner of each file, and what it holds in
    /// bytes. Pure.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub(super) fn check(self, owner: u32, files: &[(u32, u64)]) -> Result<(), FileError> {
        let mut held: BTreeMap<u32, u64> = BTreeMap::new();
        for (uid, bytes) in files {
            let of_user = held.entry(*uid).or_default();
            *of_user = of_user.saturating_add(*bytes);
        }
        let exceeded = |subject: String, held: u64, limit: u64, option| FileError::Limit {
            subject,
            limit: format!(
                "{held} bytes of memory in files; the limit for further and larger files is {limit} ({option})"
            ),
        };
        let own = held.get(&owner).copied().unwrap_or(0);
        if own >= self.per_user {
            return Err(exceeded(
                format!("user {owner} has"),
                own,
                self.per_user,
                "--max-allocated-bytes-per-user",
            ));
        }
        // What one user holds beyond its own limit does not count against the others.
        let counted = held.iter().filter(|(uid, _)| **uid != 0).map(|(_, bytes)| *bytes.min(&self.per_user));
        let all = counted.fold(0, u64::saturating_add);
        if owner != 0 && all >= self.of_users {
            return Err(exceeded(
                "all users together have".to_owned(),
                all,
                self.of_users,
                "--max-allocated-bytes-of-users",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_all_users_are_limited_by_what_their_files_hold() {
        let limits = AllocatedLimits { per_user: 100, of_users: 150 };
        for (files, owner, fits) in [
            (&[][..], 7, true),
            (&[(7, 99)], 7, true),
            (&[(7, 60), (7, 40)], 7, false),
            (&[(7, 60), (7, 40)], 8, true),
            (&[(7, 100), (9, 50)], 8, false),
            (&[(7, 100), (9, 49), (0, 500)], 8, true),
            (&[(7, u64::MAX), (9, u64::MAX)], 8, false),
            (&[(7, 200)], 0, true),
            (&[(7, 500)], 8, true),
        ] {
            assert_eq!(limits.check(owner, files).is_ok(), fits, "{owner} with {files:?}");
        }
        let default = AllocatedLimits::default();
        assert!(default.per_user > 0 && default.per_user < default.of_users);
    }
}
