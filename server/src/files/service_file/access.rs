//! Who has which rights to a file.

use std::sync::PoisonError;

use fdmap_proto::convert::FileName;
use fdmap_proto::file::{Access, Right};

use super::super::{Caller, FileError};
use super::{FileCharge, ServiceFile};

impl ServiceFile {
    #[must_use]
    pub fn access(&self) -> Access {
        // No code panics with the lock held.
        *self.access.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the access. If the owner changes, `charge_new_owner` charges the new one for the file and its bytes, and moves the name.
    pub(in super::super) fn set_access(
        &self,
        caller: &Caller,
        access: Access,
        charge_new_owner: impl FnOnce(u64) -> Result<FileCharge, FileError>,
    ) -> Result<(), FileError> {
        // The lock protects no data. Changes are recorded in the order in which they are made, and wait for checkpoints of the file;
        // a late resize, which needs the lock of the charge, does not.
        let _turn = self.access_turn.lock().unwrap_or_else(PoisonError::into_inner);
        // An earlier change may have given the file to another owner.
        self.require_owner(caller)?;
        let mut charge = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        if access.uid != self.access().uid {
            *charge = charge_new_owner(charge.bytes.amount())?;
            self.count_stored_for(charge.bytes.uid());
            self.stamp_quota.change_owner(access.uid);
        }
        *self.access.write().unwrap_or_else(PoisonError::into_inner) = access;
        drop(charge);
        if let Some(tracker) = self.existing_tracker() {
            self.record(&tracker)?;
        }
        Ok(())
    }

    pub(in super::super) fn require(&self, caller: &Caller, right: Right) -> Result<(), FileError> {
        if caller.has(right, &self.access()) {
            return Ok(());
        }
        Err(self.refusal(caller, FileError::Denied { uid: caller.uid, right, file: self.to_string() }))
    }

    pub(in super::super) fn require_owner(&self, caller: &Caller) -> Result<(), FileError> {
        if caller.owns(&self.access()) {
            return Ok(());
        }
        Err(self.refusal(caller, FileError::NotOwner { uid: caller.uid, file: self.to_string() }))
    }

    /// `error`, which names the owner, if the caller may know that the file exists.
    fn refusal(&self, caller: &Caller, error: FileError) -> FileError {
        match caller.knows(&self.access()) {
            true => error,
            false => FileError::NotFound(format!("{} not found", FileName::Id(self.id()))),
        }
    }
}
