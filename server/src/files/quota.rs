//! Quotas per user, and of all users together.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::subordinate::SubordinateIds;
use super::{Caller, FileError};
use crate::tracking::Charged;

/// Makes the quotas of one service, which share what they know about its users.
#[derive(Clone, Debug)]
pub struct Quotas {
    subordinate: Arc<SubordinateIds>,
    /// The limit of all users together, as a multiple of that of one user.
    users_at_limit: u32,
}

/// A limit on one resource, counted for each user. Subordinate user ids count for their owner.
#[derive(Debug)]
pub struct Quota {
    /// The resource, as error messages name it.
    resource: &'static str,
    max_per_user: u64,
    /// Of all users but root.
    max_of_users: u64,
    subordinate: Arc<SubordinateIds>,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    /// By user id. Users without any have no entry.
    by_user: HashMap<u32, u64>,
    /// By all users but root together. Of what a user has beyond the limit of one, nothing counts: an administrator granted it.
    users: u64,
}

/// An amount charged to one user. Dropping it returns the amount.
#[derive(Debug)]
pub struct QuotaPermit {
    quota: Arc<Quota>,
    uid: u32,
    amount: u64,
}

impl Quotas {
    #[must_use]
    pub fn new(users_at_limit: u32) -> Self {
        let subordinate = Arc::new(SubordinateIds::default());
        subordinate.reload();
        Self { subordinate, users_at_limit }
    }

    #[must_use]
    pub fn quota(&self, resource: &'static str, max_per_user: u64) -> Arc<Quota> {
        self.quota_of_users(resource, max_per_user, u64::MAX)
    }

    /// A quota of at most `max_per_user` for each user, and `max_of_users` for all users but root together, both in units of
    /// `resource`.
    #[must_use]
    pub fn quota_of_users(&self, resource: &'static str, max_per_user: u64, max_of_users: u64) -> Arc<Quota> {
        Arc::new(Quota {
            resource,
            max_per_user,
            max_of_users: max_per_user.saturating_mul(u64::from(self.users_at_limit)).min(max_of_users),
            subordinate: Arc::clone(&self.subordinate),
            used: Mutex::default(),
        })
    }

    /// The user who is charged for what `uid` uses: of a subordinate user id, its owner.
    #[must_use]
    pub fn owner_of(&self, uid: u32) -> u32 {
        self.subordinate.owner_of(uid)
    }

    /// Reads the subordinate user ids of the host, if they have changed.
    pub fn reload(&self) {
        self.subordinate.reload();
    }
}

impl Quota {
    /// The user who is charged for what `uid` uses: of a subordinate user id, its owner.
    pub(super) fn owner_of(&self, uid: u32) -> u32 {
        self.subordinate.owner_of(uid)
    }

    /// Charges the caller. Administrators are counted but not limited.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn acquire(self: &Arc<Self>, caller: &Caller, amount: u64) -> Result<QuotaPermit, FileError> {
        self.acquire_for(caller.uid, amount, caller.admin)
    }

    /// Charges user `uid`, without limit if `unlimited`.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn acquire_for(
        self: &Arc<Self>,
        uid: u32,
        amount: u64,
        unlimited: bool,
    ) -> Result<QuotaPermit, FileError> {
        let uid = self.subordinate.owner_of(uid);
        self.replace(uid, 0, amount, unlimited)?;
        Ok(QuotaPermit { quota: Arc::clone(self), uid, amount })
    }

    /// Charges the caller for `amount`, or for all that one user may have if that is less: a single thing may be larger.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn acquire_at_most(self: &Arc<Self>, caller: &Caller, amount: u64) -> Result<QuotaPermit, FileError> {
        self.acquire(caller, amount.min(self.max_per_user))
    }

    /// The same, for a thing of which `charged` is charged already.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn acquire_at_most_beside(
        self: &Arc<Self>,
        caller: &Caller,
        amount: u64,
        charged: u64,
    ) -> Result<QuotaPermit, FileError> {
        self.acquire(caller, amount.min(self.max_per_user.saturating_sub(charged)))
    }

    /// True if the caller can acquire nothing more.
    #[must_use]
    pub fn is_exhausted_for(&self, caller: &Caller) -> bool {
        let uid = self.subordinate.owner_of(caller.uid);
        let used = self.used();
        let own = used.by_user.get(&uid).copied().unwrap_or(0);
        !caller.admin && (own >= self.max_per_user || uid != 0 && used.users >= self.max_of_users)
    }

    /// Charges user `uid` for what was charged before, by a previous process of the service: the limits may be lower now.
    #[must_use]
    pub fn charge_again(self: &Arc<Self>, uid: u32, amount: u64) -> QuotaPermit {
        let uid = self.subordinate.owner_of(uid);
        // A charge without limit never fails.
        let _ = self.replace(uid, 0, amount, true);
        QuotaPermit { quota: Arc::clone(self), uid, amount }
    }

    /// Replaces a charge of `from` by one of `to`. Reducing a charge never fails.
    fn replace(&self, uid: u32, from: u64, to: u64, unlimited: bool) -> Result<(), FileError> {
        let mut used = self.used();
        let others = used.by_user.get(&uid).copied().unwrap_or(0).saturating_sub(from);
        let total = others.saturating_add(to);
        let is_limited = to > from && !unlimited;
        let exceeds = |subject: String, others: u64, max: u64| {
            let resource = self.resource;
            FileError::Limit {
                subject,
                limit: format!("{others} {resource}; {to} more would exceed the limit of {max}"),
            }
        };
        if is_limited && total > self.max_per_user {
            return Err(exceeds(format!("user {uid} has"), others, self.max_per_user));
        }
        if uid != 0 {
            let counted = |amount: u64| amount.min(self.max_per_user);
            let others = used.users.saturating_sub(counted(others.saturating_add(from)));
            let users = others.saturating_add(counted(total));
            if is_limited && users > self.max_of_users {
                return Err(exceeds("all users together have".to_owned(), used.users, self.max_of_users));
            }
            used.users = users;
        }
        if total == 0 {
            used.by_user.remove(&uid);
        } else {
            used.by_user.insert(uid, total);
        }
        Ok(())
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        // No code panics with the lock held.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QuotaPermit {
    /// The user whose quota is charged: of a subordinate user id, its owner.
    #[must_use]
    pub const fn uid(&self) -> u32 {
        self.uid
    }

    #[must_use]
    pub const fn amount(&self) -> u64 {
        self.amount
    }

    /// Divides the amount: `amount` of it, and the rest.
    #[must_use]
    pub fn split(mut self, amount: u64) -> (Self, Self) {
        let rest = self.amount.saturating_sub(amount);
        self.amount -= rest;
        let of_rest = Self { quota: Arc::clone(&self.quota), uid: self.uid, amount: rest };
        (self, of_rest)
    }

    /// Adds the amount of another permit, of the same user and quota.
    pub(super) fn absorb(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.quota, &other.quota) && self.uid == other.uid, "one charge");
        self.amount = self.amount.saturating_add(std::mem::take(&mut other.amount));
    }

    /// Changes the amount.
    ///
    /// # Errors
    /// [`FileError::Limit`]; the amount is unchanged.
    pub fn resize(&mut self, amount: u64, unlimited: bool) -> Result<(), FileError> {
        self.quota.replace(self.uid, self.amount, amount, unlimited)?;
        self.amount = amount;
        Ok(())
    }

    /// The same, or to all that one user may have if that is less, as [`Quota::acquire_at_most`].
    ///
    /// # Errors
    /// [`FileError::Limit`]; the amount is unchanged.
    pub fn resize_at_most(&mut self, amount: u64, unlimited: bool) -> Result<(), FileError> {
        self.resize(amount.min(self.quota.max_per_user), unlimited)
    }
}

impl Charged for QuotaPermit {
    fn user(&self) -> u32 {
        self.uid
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        // Reducing a charge never fails.
        let _ = self.quota.replace(self.uid, self.amount, 0, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(uid: u32) -> Caller {
        Caller::new(uid, uid, Vec::new(), 0)
    }

    /// A quota that all users together reach when three have all of theirs.
    fn quota(resource: &'static str, max_per_user: u64) -> Arc<Quota> {
        let quotas = Quotas { subordinate: Arc::default(), users_at_limit: 3 };
        quotas.quota(resource, max_per_user)
    }

    #[test]
    fn quota_is_per_user_and_returns_on_drop() {
        let quota = quota("files", 10);
        let first = quota.acquire(&caller(1), 7).unwrap();
        let error = quota.acquire(&caller(1), 4).unwrap_err();
        assert_eq!(error.to_string(), "user 1 has 7 files; 4 more would exceed the limit of 10");
        let _other_user = quota.acquire(&caller(2), 10).unwrap();
        drop(first);
        let _all = quota.acquire(&caller(1), 10).unwrap();
    }

    #[test]
    fn all_users_together_are_limited_and_root_is_not() {
        let quota = quota("files", 10);
        let _root = quota.acquire(&caller(0), 100).unwrap();
        let mut permits: Vec<_> = (1..4).map(|uid| quota.acquire(&caller(uid), 10).unwrap()).collect();
        let error = quota.acquire(&caller(4), 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "all users together have 30 files; 1 more would exceed the limit of 30"
        );
        // An administrator may charge a user beyond the limit, and a reduction never fails.
        let mut beyond = quota.acquire_for(4, 5, true).unwrap();
        beyond.resize(1, false).unwrap();
        assert!(beyond.resize(2, false).is_err());
        permits.pop();
        beyond.resize(10, false).unwrap();
        assert_eq!(quota.used().users, 30);
        beyond.resize(1000, true).unwrap();
        assert_eq!(quota.used().users, 30, "an administrator granted the rest");
        drop((permits, beyond));
        assert_eq!(quota.used().users, 0);
    }

    #[test]
    fn permit_grows_only_within_the_quota() {
        let quota = quota("bytes", 10);
        let mut permit = quota.acquire(&caller(1), 6).unwrap();
        assert!(permit.resize(11, false).is_err());
        assert_eq!((permit.amount(), quota.used().by_user.get(&1)), (6, Some(&6)));
        permit.resize(10, false).unwrap();
        permit.resize(2, false).unwrap();
        assert_eq!(quota.used().by_user.get(&1), Some(&2));
    }

    #[test]
    fn single_thing_may_be_larger_than_the_quota() {
        let quota = quota("bytes", 10);
        let all = quota.acquire_at_most(&caller(1), 1000).unwrap();
        assert_eq!(all.amount(), 10);
        assert!(quota.acquire_at_most(&caller(1), 1).is_err());
        assert_eq!(quota.acquire_at_most_beside(&caller(1), 1000, 10).unwrap().amount(), 0);
        drop(all);
        let _some = quota.acquire_at_most(&caller(1), 4).unwrap();
        assert!(quota.acquire_at_most(&caller(1), 1000).is_err(), "only if there is nothing else");
    }

    #[test]
    fn quota_is_exhausted_for_users_who_can_acquire_nothing() {
        let quota = quota("bytes", 10);
        let is_exhausted = |uid| quota.is_exhausted_for(&caller(uid));
        let mut first = quota.acquire(&caller(1), 9).unwrap();
        assert!(!is_exhausted(1));
        // Without regard to the limit.
        first.resize(12, true).unwrap();
        assert_eq!([0, 1, 2].map(is_exhausted), [false, true, false]);
        let others = [2, 3].map(|uid| quota.acquire(&caller(uid), 10).unwrap());
        assert_eq!([0, 1, 4].map(is_exhausted), [false, true, true]);
        drop((first, others));
        assert!(![1, 2, 3, 4].into_iter().any(is_exhausted));
    }

    #[test]
    fn parts_of_a_permit_are_returned_one_by_one() {
        let quota = quota("bytes", 10);
        let (some, rest) = quota.acquire(&caller(1), 7).unwrap().split(5);
        assert_eq!((some.amount(), rest.amount(), quota.used().by_user.get(&1)), (5, 2, Some(&7)));
        drop(some);
        assert_eq!(quota.used().by_user.get(&1), Some(&2));
        assert_eq!(quota.used().users, 2);
        let (all, none) = rest.split(100);
        drop(all);
        assert_eq!((none.amount(), quota.used().by_user.get(&1)), (0, None));
    }

    #[test]
    fn root_is_not_limited() {
        let quota = quota("files", 1);
        let permits: Vec<_> = (0..5).map(|_| quota.acquire(&caller(0), 1).unwrap()).collect();
        assert_eq!(permits.len(), 5);
        drop(permits);
        assert!(quota.used().by_user.is_empty());
    }

    #[test]
    fn what_was_charged_before_counts_although_the_limit_is_lower_now() {
        let quota = quota("address spaces", 2);
        let again: Vec<_> = (0..5).map(|_| quota.charge_again(1, 1)).collect();
        assert!(quota.acquire(&caller(1), 1).is_err());
        drop(again);
        let _all = quota.acquire(&caller(1), 2).unwrap();
    }

    #[test]
    fn huge_amount_does_not_wrap_around() {
        let quota = quota("bytes", 100);
        let _some = quota.acquire(&caller(1), 50).unwrap();
        assert!(quota.acquire(&caller(1), u64::MAX).is_err());
    }
}
