//! A limit on the memory that the files of a user hold, in RAM and in swap.
//!
//! The kernel allocates a page when a process first writes to it, and charges that process's cgroup; the page stays with the file. So
//! the service cannot prevent an allocation. A user whose files hold too much gets no further file, and no larger one.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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
    /// Refuses a further or larger file of `owner`, if the files hold too much. Pure.
    fn check(self, owner: u32, held: &HeldByUser) -> Result<(), FileError> {
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

/// What the files of each user hold, in bytes.
type HeldByUser = BTreeMap<u32, u64>;

/// Adds up what files hold: the owner and the bytes of each one.
fn by_user(files: impl IntoIterator<Item = (u32, u64)>) -> HeldByUser {
    let mut held = HeldByUser::new();
    for (uid, bytes) in files {
        let of_user = held.entry(uid).or_default();
        *of_user = of_user.saturating_add(bytes);
    }
    held
}

/// Time for which a reading is used, as a multiple of the time that it took. So readings of up to 5 ms take less than a tenth of a
/// processor.
const REUSE_FACTOR: u32 = 20;
/// Limit on that time.
const MAX_REUSE: Duration = Duration::from_millis(100);

/// The memory that files hold, as it was read at most [`MAX_REUSE`] ago: a reading asks the kernel about each file of all users, which
/// would take long for each file that is created.
#[derive(Debug, Default)]
pub(super) struct HeldMemory(Mutex<Option<Reading>>);

#[derive(Debug)]
struct Reading {
    held: HeldByUser,
    until: Instant,
}

impl HeldMemory {
    /// Refuses a further or larger file of `owner`, if the files hold too much. `read` returns the owner of each file, and what it holds
    /// in bytes. A refusal is by a new reading: files may have freed memory since an earlier one.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub(super) fn check<F: IntoIterator<Item = (u32, u64)>>(
        &self,
        limits: AllocatedLimits,
        owner: u32,
        read: impl FnOnce() -> F,
    ) -> Result<(), FileError> {
        let began = Instant::now();
        if self.last().as_ref().is_some_and(|reading| reading.permits(began, limits, owner)) {
            return Ok(());
        }
        let held = by_user(read());
        let result = limits.check(owner, &held);
        *self.last() = Some(Reading { held, until: Reading::until(began, Instant::now()) });
        result
    }

    fn last(&self) -> MutexGuard<'_, Option<Reading>> {
        // No code panics with the lock held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reading {
    /// Until when a reading is used that took from `began` to `ended`. Pure.
    fn until(began: Instant, ended: Instant) -> Instant {
        ended + (ended.duration_since(began) * REUSE_FACTOR).min(MAX_REUSE)
    }

    /// False: another reading is needed. Pure.
    fn permits(&self, now: Instant, limits: AllocatedLimits, owner: u32) -> bool {
        now < self.until && limits.check(owner, &self.held).is_ok()
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
            let held = by_user(files.iter().copied());
            assert_eq!(limits.check(owner, &held).is_ok(), fits, "{owner} with {files:?}");
        }
        let default = AllocatedLimits::default();
        assert!(default.per_user > 0 && default.per_user < default.of_users);
    }

    #[test]
    fn reading_permits_further_files_for_a_short_time() {
        let limits = AllocatedLimits { per_user: 100, of_users: u64::MAX };
        let now = Instant::now();
        let later = now + Duration::from_millis(1);
        let reading = Reading { held: by_user([(7, 60), (7, 40), (8, 99)]), until: later };
        for (at, user, permits) in [(now, 8, true), (later, 8, false), (now, 7, false), (now, 9, true)] {
            assert_eq!(reading.permits(at, limits, user), permits, "user {user}");
        }
        for (took, used) in [(0, 0), (1, 20), (5, 100), (6, 100), (10_000, 100)] {
            let ended = now + Duration::from_millis(took);
            assert_eq!(Reading::until(now, ended), ended + Duration::from_millis(used));
        }
    }

    #[test]
    fn earlier_reading_permits_and_never_refuses() {
        let limits = AllocatedLimits { per_user: 100, of_users: u64::MAX };
        let held = HeldMemory::default();
        // The bytes of user 7 at the call, whether it fits, and whether they are read.
        for (bytes, fits, is_read) in [(100, false, true), (99, true, true), (100, true, false)] {
            let mut was_read = false;
            let read = || {
                was_read = true;
                [(7, bytes)]
            };
            let result = held.check(limits, 7, read);
            assert_eq!((result.is_ok(), was_read), (fits, is_read), "{bytes} bytes");
            held.last().as_mut().unwrap().until = Instant::now() + Duration::from_secs(3600);
        }
    }
}
