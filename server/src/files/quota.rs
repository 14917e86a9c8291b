//! Quotas per user.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Caller, FileError};

/// A limit on one resource, counted for each user.
#[derive(Debug)]
pub struct Quota {
    /// The resource, as error messages name it.
    resource: &'static str,
    max_per_user: u64,
    /// By user id. Users without any have no entry.
    used: Mutex<HashMap<u32, u64>>,
}

/// An amount charged to one user. Dropping it returns the amount.
#[derive(Debug)]
pub struct QuotaPermit {
    quota: Arc<Quota>,
    uid: u32,
    amount: u64,
}

impl Quota {
    #[must_use]
    pub fn new(resource: &'static str, max_per_user: u64) -> Arc<Self> {
        Arc::new(Self { resource, max_per_user, used: Mutex::default() })
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
        self.replace(uid, 0, amount, unlimited)?;
        Ok(QuotaPermit { quota: Arc::clone(self), uid, amount })
    }

    /// Replaces a charge of `from` by one of `to`. Reducing a charge never fails.
    fn replace(&self, uid: u32, from: u64, to: u64, unlimited: bool) -> Result<(), FileError> {
        let mut used = self.used();
        let others = used.get(&uid).copied().unwrap_or(0).saturating_sub(from);
        let total = others.saturating_add(to);
        if total > self.max_per_user && to > from && !unlimited {
            let limit = format!(
                "{others} {}; {to} more would exceed the limit of {}",
                self.resource, self.max_per_user
            );
            return Err(FileError::Limit { uid, limit });
        }
        if total == 0 {
            used.remove(&uid);
        } else {
            used.insert(uid, total);
        }
        Ok(())
    }

    fn used(&self) -> MutexGuard<'_, HashMap<u32, u64>> {
        // No code panics with the lock held.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QuotaPermit {
    #[must_use]
    pub const fn amount(&self) -> u64 {
        self.amount
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

    #[test]
    fn quota_is_per_user_and_returns_on_drop() {
        let quota = Quota::new("files", 10);
        let first = quota.acquire(&caller(1), 7).unwrap();
        let error = quota.acquire(&caller(1), 4).unwrap_err();
        assert_eq!(error.to_string(), "user 1 has 7 files; 4 more would exceed the limit of 10");
        let _other_user = quota.acquire(&caller(2), 10).unwrap();
        drop(first);
        let _all = quota.acquire(&caller(1), 10).unwrap();
    }

    #[test]
    fn permit_grows_only_within_the_quota() {
        let quota = Quota::new("bytes", 10);
        let mut permit = quota.acquire(&caller(1), 6).unwrap();
        assert!(permit.resize(11, false).is_err());
        assert_eq!((permit.amount(), quota.used().get(&1)), (6, Some(&6)));
        permit.resize(10, false).unwrap();
        permit.resize(2, false).unwrap();
        assert_eq!(quota.used().get(&1), Some(&2));
    }

    #[test]
    fn root_is_not_limited() {
        let quota = Quota::new("files", 1);
        let permits: Vec<_> = (0..5).map(|_| quota.acquire(&caller(0), 1).unwrap()).collect();
        assert_eq!(permits.len(), 5);
        drop(permits);
        assert!(quota.used().is_empty());
    }

    #[test]
    fn huge_amount_does_not_wrap_around() {
        let quota = Quota::new("bytes", 100);
        let _some = quota.acquire(&caller(1), 50).unwrap();
        assert!(quota.acquire(&caller(1), u64::MAX).is_err());
    }
}
