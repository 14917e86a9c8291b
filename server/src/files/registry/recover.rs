//! Recovery of files that a previous process of the service left in the descriptor store.

use std::os::fd::AsFd;
use std::sync::Arc;

use fdmap_sys::{SyscallError, fd};

use super::super::service_file::{FileProperties, InodeKey, ServiceFile};
use super::super::{Caller, FileError, RestoreError};
use super::Registry;
use super::index::Reservation;
use crate::tracking::RecoveredFile;

impl Registry {
    /// Recovers a file with its generations. The owner is charged without regard to the limits.
    ///
    /// # Errors
    /// [`FileError`], or the tracking error if the generations cannot be recovered.
    pub fn restore(&self, recovered: RecoveredFile) -> Result<Arc<ServiceFile>, RestoreError> {
        let info = recovered.info.clone();
        let unlimited =
            Caller { uid: info.access.uid, gid: info.access.gid, groups: Vec::new(), admin: true };
        let stat = fd::stat(&recovered.file).map_err(FileError::from)?;
        let key = InodeKey::of(recovered.file.as_fd()).map_err(FileError::from)?;
        let reservation = Reservation::new(self, &unlimited, info.owned_name(), Some(key))?;
        let size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let charge = self.charge(&unlimited, info.access.uid, size_bytes)?;
        let properties = FileProperties {
            id: info.id,
            name: reservation.name.name.clone(),
            backing: info.backing,
            origin: info.origin,
            created: info.created,
            access: info.access,
            page_size: self.page_size,
            charge,
            former_ownership: recovered.original_owner(),
        };
        let fd = recovered.file.try_clone().map_err(|error| {
            FileError::from(SyscallError {
                call: format!("fcntl(F_DUPFD_CLOEXEC) of stored file {:?}", info.name),
                errno: fdmap_sys::error::errno_of(&error),
            })
        })?;
        let file = self.open(fd, properties)?;
        file.recover(recovered)?;
        self.write().insert(&file);
        Ok(file)
    }
}
