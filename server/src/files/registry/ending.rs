//! The end of files: by a request, and when no process uses an ephemeral file.

use std::sync::{Arc, PoisonError};

use fdmap_proto::convert::FileName;
use fdmap_proto::error_chain;
use fdmap_proto::units::FileId;

use super::super::inode_calls::{InodeCallError, WhenLate};
use super::super::service_file::{InodeKey, ServiceFile};
use super::super::{Caller, FileError, FileEventKind};
use super::Registry;
use crate::watchdog::{self, Phase};

impl Registry {
    /// Deletes a file that the caller owns. The kernel frees its memory with the last descriptor and mapping: dropping the
    /// returned file may take long.
    ///
    /// # Errors
    /// [`FileError`]
    pub fn delete(&self, caller: &Caller, name: &FileName) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.find_owned(caller, name)?;
        // Another call may have removed it since, or given it to another owner.
        let removed = {
            let mut index = self.write();
            let is_owned = index.owner(file.id()).is_some_and(|owner| caller.admin || owner == caller.uid);
            is_owned.then(|| index.remove_file(file.id())).flatten()
        };
        let file = removed.ok_or_else(|| self.not_found(caller, name))?;
        self.notify(&file, FileEventKind::Deleted);
        self.finish(&file);
        Ok(file)
    }

    /// Removes a file from the index; `None` if no file has this id. The caller calls [`Self::finish`]. Until then the inode is
    /// reserved.
    pub(in super::super) fn take_out(&self, id: FileId) -> Option<Arc<ServiceFile>> {
        let file = self.write().remove_file(id)?;
        self.notify(&file, FileEventKind::Deleted);
        Some(file)
    }

    /// Drops what the service still has of a file that was removed from the index: the ownership of its inode, and descriptors in the
    /// store. Waits for a call that works on the file.
    pub(crate) fn finish(&self, file: &ServiceFile) {
        let _operation = file.begin("end of a file", Phase::Inode);
        // The inode is reserved until it has its former ownership: an adoption of it must read that, not the service's.
        let release = self.release_later(file.inode_key(), file.owned_name().to_string());
        let user = self.helpers_of(file.access().uid);
        match file.restore_ownership(&self.inode_calls, user, release) {
            // Releases it later.
            Err(InodeCallError::Blocked) => {}
            restored => self.release_later(file.inode_key(), file.owned_name().to_string())(restored),
        }
        watchdog::enter(Phase::Lock);
        file.unstore();
    }

    /// Ends the reservation of an inode, when it has its former ownership.
    pub(super) fn release_later(&self, inode: InodeKey, file: String) -> WhenLate {
        let index = Arc::clone(&self.index);
        Box::new(move |restored| {
            if let Err(error) = restored {
                let error = error_chain(&error);
                tracing::warn!(file, error, "cannot restore the owner and mode of an adopted file");
            }
            index.write().unwrap_or_else(PoisonError::into_inner).release_inode(inode);
        })
    }
}
