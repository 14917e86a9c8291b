//! Recovery of files that a previous process of the service left in the descriptor store.

use std::os::fd::AsFd;
use std::sync::Arc;

use fdmap_proto::MAX_NAME_BYTES;
use fdmap_proto::file::{FileInfo, OwnedName};
use fdmap_sys::{SyscallError, fd};

use super::super::service_file::{FileProperties, InodeKey, ServiceFile};
use super::super::stamp_quota::StampQuota;
use super::super::usage::Usage;
use super::super::{Caller, FileError, RestoreError, TrackedQuota};
use super::Registry;
use super::index::Reservation;
use crate::tracking::RecoveredFile;
use crate::watchdog::{Operation, Phase};

impl Registry {
    /// Recovers a file with its generations. The owner is charged without regard to the limits; so are, by `tracked`, the users of
    /// its tracked address spaces. If the owner has another file of this name, the file gets a new name.
    ///
    /// # Errors
    /// [`FileError`], or the tracking error if the generations cannot be recovered.
    pub fn restore(
        &self,
        recovered: RecoveredFile,
        tracked: &TrackedQuota,
    ) -> Result<Arc<ServiceFile>, RestoreError> {
        let info = recovered.info.clone();
        let name = OwnedName { name: info.name.clone(), uid: info.access.uid };
        let _operation = Operation::begin("recovery", &name.to_string().into(), Phase::Journal);
        let stat = fd::stat(&recovered.file).map_err(FileError::from)?;
        let key = InodeKey::of(recovered.file.as_fd()).map_err(FileError::from)?;
        let owner = Caller { uid: info.access.uid, gid: info.access.gid, groups: Vec::new(), admin: true };
        let reservation = self.reserve_recovered(&owner, &info, key)?;
        let size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let charge = self.acquire(None, info.access.uid, size_bytes, info.lifetime)?;
        let properties = FileProperties {
            id: info.id,
            name: reservation.name.name.clone(),
            backing: info.backing,
            origin: info.origin,
            created: info.created,
            access: info.access,
            page_size: self.page_size,
            lifetime: info.lifetime,
            fence: info.fence.clone(),
            // Clients that were about to open it connect again.
            usage: Usage::new_until(self.unused_until()),
            charge,
            stamp_quota: StampQuota::new(&self.stamp_quota, info.access.uid),
            former_ownership: recovered.original_owner(),
        };
        let fd = recovered.file.try_clone().map_err(|error| {
            FileError::from(SyscallError {
                call: format!("fcntl(F_DUPFD_CLOEXEC) of stored file {:?}", info.name),
                errno: fdmap_sys::error::errno_of(&error),
            })
        })?;
        let file = self.open(fd, properties)?;
        file.recover(recovered, &|space| tracked.charge_again(file.backing(), space))?;
        self.write().insert(&file);
        Ok(file)
    }

    /// Reserves the name of a recovered file. Two of them can have one name and owner: the previous process ended before it recorded
    /// a change of the owner, or the store did not receive the removal of a file that was deleted.
    fn reserve_recovered(
        &self,
        caller: &Caller,
        info: &FileInfo,
        inode: InodeKey,
    ) -> Result<Reservation<'_>, FileError> {
        let FileInfo { id, name, .. } = info;
        let mut taken: u64 = 0;
        loop {
            let suffix = match taken {
                0 => String::new(),
                1 => format!(".{id}"),
                _ => format!(".{id}.{taken}"),
            };
            let new_name = OwnedName { name: with_suffix(name, &suffix), uid: info.access.uid };
            match Reservation::new(self, caller, new_name, Some(inode)) {
                Err(FileError::NameTaken(_)) => taken += 1,
                Ok(reservation) if taken > 0 => {
                    let (name, new_name) = (info.owned_name().to_string(), reservation.name.to_string());
                    tracing::warn!(%id, name, new_name, "renamed a stored file: another one has its name and owner");
                    return Ok(reservation);
                }
                other => return other,
            }
        }
    }
}

/// `name` followed by `suffix`; `name` is cut to fit [`MAX_NAME_BYTES`].
fn with_suffix(name: &str, suffix: &str) -> String {
    let mut length = MAX_NAME_BYTES.saturating_sub(suffix.len()).min(name.len());
    while !name.is_char_boundary(length) {
        length -= 1;
    }
    format!("{}{suffix}", &name[..length])
}
