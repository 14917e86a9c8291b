//! Counting what each user makes the service hold.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Caller, FileError};

/// A bound on one kind of thing for each user.
#[derive(Debug)]
pub struct Quota {
    what: &'static str,
    most: u64,
    used: Mutex<HashMap<u32, u64>>,
}

/// A part of somebody's quota, given back on drop.
#[derive(Debug)]
pub struct Share {
    quota: Arc<Quota>,
    uid: u32,
    amount: u64,
}

impl Quota {
    /// At most `most` of `what` for each user.
    #[must_use]
    pub fn new(what: &'static str, most: u64) -> Arc<Self> {
        Arc::new(Self { what, most, used: Mutex::default() })
    }

    /// Takes a part of the caller's quota; administrators are counted and not bound.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn take(self: &Arc<Self>, caller: &Caller, amount: u64) -> Result<Share, FileError> {
        self.take_for(caller.uid, amount, caller.admin)
    }

    /// Takes a part of the quota of `uid`, bound or not.
    ///
    /// # Errors
    /// [`FileError::Limit`]
    pub fn take_for(self: &Arc<Self>, uid: u32, amount: u64, unbound: bool) -> Result<Share, FileError> {
        self.change(uid, 0, amount, unbound)?;
        Ok(Share { quota: Arc::clone(self), uid, amount })
    }

    /// The share as it is with `amount`, if there is room for that.
    fn change(&self, uid: u32, from: u64, to: u64, unbound: bool) -> Result<(), FileError> {
        let mut used = self.used();
        let others = used.get(&uid).copied().unwrap_or(0).saturating_sub(from);
        let then = others.saturating_add(to);
        if then > self.most && to > from && !unbound {
            let limit = format!(
                "{others} {} and may have {}, which leaves no room for {to} more",
                self.what, self.most
            );
            return Err(FileError::Limit { uid, limit });
        }
        if then == 0 {
            used.remove(&uid);
        } else {
            used.insert(uid, then);
        }
        Ok(())
    }

    fn used(&self) -> MutexGuard<'_, HashMap<u32, u64>> {
        // Nothing panics while it is held.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Share {
    /// What it is.
    #[must_use]
    pub const fn amount(&self) -> u64 {
        self.amount
    }

    /// Makes it larger or smaller.
    ///
    /// # Errors
    /// [`FileError::Limit`]: it stays as it was then.
    pub fn change(&mut self, amount: u64, unbound: bool) -> Result<(), FileError> {
        self.quota.change(self.uid, self.amount, amount, unbound)?;
        self.amount = amount;
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // Giving back is never refused.
        let _ = self.quota.change(self.uid, self.amount, 0, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(uid: u32) -> Caller {
        Caller::new(uid, uid, Vec::new(), 0)
    }

    #[test]
    fn quota_is_each_users_own_and_comes_back() {
        let quota = Quota::new("files", 10);
        let first = quota.take(&caller(1), 7).unwrap();
        let error = quota.take(&caller(1), 4).unwrap_err();
        assert_eq!(error.to_string(), "user 1 has 7 files and may have 10, which leaves no room for 4 more");
        let _theirs = quota.take(&caller(2), 10).unwrap();
        drop(first);
        let _all = quota.take(&caller(1), 10).unwrap();
    }

    #[test]
    fn share_grows_within_the_quota_only() {
        let quota = Quota::new("bytes", 10);
        let mut share = quota.take(&caller(1), 6).unwrap();
        assert!(share.change(11, false).is_err());
        assert_eq!((share.amount(), quota.used().get(&1)), (6, Some(&6)));
        share.change(10, false).unwrap();
        share.change(2, false).unwrap();
        assert_eq!(quota.used().get(&1), Some(&2));
    }

    #[test]
    fn root_is_not_bound() {
        let quota = Quota::new("files", 1);
        let shares: Vec<_> = (0..5).map(|_| quota.take(&caller(0), 1).unwrap()).collect();
        assert_eq!(shares.len(), 5);
        drop(shares);
        assert!(quota.used().is_empty());
    }

    #[test]
    fn absurd_amounts_do_not_wrap_around() {
        let quota = Quota::new("bytes", 100);
        let _some = quota.take(&caller(1), 50).unwrap();
        assert!(quota.take(&caller(1), u64::MAX).is_err());
    }
}
