//! The memory that the stamps of a file take, charged to its owner.

use std::sync::{Arc, Mutex, PoisonError};

use super::caller::is_administrator;
use super::quota::{Quota, QuotaPermit};
use crate::tracking::StampCharges;

#[derive(Debug)]
pub(super) struct StampQuota {
    quota: Arc<Quota>,
    charge: Mutex<QuotaPermit>,
}

impl StampQuota {
    /// Of a file of user `owner` without stamps.
    pub(super) fn new(quota: &Arc<Quota>, owner: u32) -> Arc<Self> {
        let charge = Mutex::new(quota.charge_again(owner, 0));
        Arc::new(Self { quota: Arc::clone(quota), charge })
    }

    /// Charges the new owner of the file, without regard to its limit.
    pub(super) fn change_owner(&self, owner: u32) {
        let mut charge = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        *charge = self.quota.charge_again(owner, charge.amount());
    }
}

impl StampCharges for StampQuota {
    fn owner(&self) -> u32 {
        self.charge.lock().unwrap_or_else(PoisonError::into_inner).uid()
    }

    fn set(&self, bytes: u64) -> bool {
        let mut charge = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        let unlimited = is_administrator(charge.uid());
        charge.resize(bytes, unlimited).is_ok()
    }

    fn set_unlimited(&self, bytes: u64) {
        let mut charge = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        // A charge without limit never fails.
        let _ = charge.resize(bytes, true);
    }
}
