//! Adoption of memfds and other shared memory that clients pass.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fdmap_proto::error_chain;
use fdmap_proto::file::{Access, Lifetime, Origin, OwnedName, check_name};
use fdmap_sys::fd::OpenMode;
use fdmap_sys::ownership::Ownership;
use fdmap_sys::{Errno, SyscallError, fd, memfd};

use super::super::inode_calls::InodeCallError;
use super::super::service_file::{InodeKey, ServiceFile};
use super::super::{Caller, FileError};
use super::Registry;
use super::create::{NewFile, access_of, backing_of, check_max_size};
use super::index::Reservation;
use crate::watchdog::{Operation, Phase};

impl Registry {
    /// Adopts a memfd or other shared memory that a client passed. An empty name selects the memory's own name.
    ///
    /// # Errors
    /// [`FileError`]; the client's memory is unchanged. After [`FileError::Inode`], the service may take the inode for a moment later.
    pub fn adopt(
        &self,
        caller: &Caller,
        passed: BorrowedFd<'_>,
        name: String,
        access: Option<Access>,
        lifetime: Option<Lifetime>,
    ) -> Result<Arc<ServiceFile>, FileError> {
        check_open_mode(passed)?;
        let memfd = memfd::kind(passed)?;
        let kind = match memfd {
            Some(kind) => Some(kind),
            None => memfd::shared_memory(passed)?,
        };
        let kind = kind.ok_or(FileError::NotAdoptable("it is neither a memfd nor other shared memory"))?;
        let name = if name.is_empty() { own_name(passed)? } else { name };
        check_name(&name)?;
        let access = access_of(caller, access)?;
        let lifetime = self.lifetime_of(caller, &access, lifetime)?;
        let name = OwnedName { name, uid: access.uid };
        let _operation = Operation::begin("Adopt", &name.to_string().into(), Phase::Inode);
        let size_bytes = self.check_adopted_inode(passed, memfd.is_some())?;
        let inode = InodeKey::of(passed)?;
        let mut reservation = Reservation::new(self, caller, name, Some(inode))?;
        let charge = self.charge(caller, access.uid, size_bytes, lifetime)?;

        // The owner of a memfd may change its mode, and mincore reports the truth only to the owner: so the service takes the
        // inode of a memfd. Other shared memory keeps its owner, because other processes open or attach it by name.
        let former_ownership = memfd.map(|_| self.take(passed, inode, &mut reservation)).transpose()?;
        // Reopen: the client can change the flags and the offset of the description that it passed.
        let adopted = fd::reopen(passed, true).map_err(FileError::from).and_then(|fd| {
            let (backing, origin) = (backing_of(kind), Origin::Adopted);
            let file = NewFile { backing, origin, access, lifetime, charge, former_ownership };
            self.insert_new(fd, &reservation, file)
        });
        if let (Err(_), Some(former)) = (&adopted, former_ownership) {
            self.give_back(passed, inode, former, &mut reservation);
        }
        adopted
    }

    /// Takes ownership of an inode. If that fails or is late, the inode gets its former ownership, and is reserved until then.
    fn take(
        &self,
        passed: BorrowedFd<'_>,
        inode: InodeKey,
        reservation: &mut Reservation<'_>,
    ) -> Result<Ownership, FileError> {
        let name = &reservation.name;
        let released = self.release_later(inode, name.to_string());
        match self.inode_calls.take(self.helpers_of(name.uid), passed, released) {
            Err(InodeCallError::Syscall(SyscallError { errno: Errno::EPERM, .. })) => {
                Err(FileError::NotAdoptable(
                    "it belongs to another user, and the service lacks the privilege to take ownership",
                ))
            }
            Err(error) => {
                let operation = format!("adopt file {:?} of user {}", name.name, name.uid);
                if matches!(error, InodeCallError::Blocked) {
                    reservation.keep_inode();
                }
                Err(FileError::of_inode(operation, error))
            }
            Ok(former) => Ok(former),
        }
    }

    /// Undoes [`Self::take`].
    fn give_back(
        &self,
        passed: BorrowedFd<'_>,
        inode: InodeKey,
        former: Ownership,
        reservation: &mut Reservation<'_>,
    ) {
        let name = &reservation.name;
        let released = self.release_later(inode, name.to_string());
        let restored = self.inode_calls.restore(self.helpers_of(name.uid), passed, former, released);
        match restored {
            Err(InodeCallError::Blocked) => reservation.keep_inode(),
            // The caller returns its first error.
            Err(error) => {
                let (file, error) = (name.to_string(), error_chain(&error));
                tracing::warn!(file, error, "cannot restore the owner and mode of a file that is refused");
            }
            Ok(()) => {}
        }
    }

    /// Returns the size in bytes of memory that can be adopted.
    fn check_adopted_inode(&self, passed: BorrowedFd<'_>, memfd: bool) -> Result<u64, FileError> {
        let stat = fd::stat(passed)?;
        // mincore reports the truth only to the owner and to root.
        if !memfd && !is_owner_or_root(stat.st_uid) {
            return Err(FileError::NotAdoptable(
                "it is not a memfd, belongs to another user, and the service is not root",
            ));
        }
        let size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        check_max_size(size_bytes, self.limits.file_bytes)?;
        Ok(size_bytes)
    }
}

/// A client that can only read must not get a writable descriptor by way of the service.
fn check_open_mode(passed: BorrowedFd<'_>) -> Result<(), FileError> {
    match fd::open_mode(passed)? {
        OpenMode::ReadWrite => Ok(()),
        OpenMode::Path => Err(FileError::NotAdoptable("it is an O_PATH descriptor")),
        OpenMode::ReadOnly | OpenMode::WriteOnly => {
            Err(FileError::NotAdoptable("it is not open for reading and writing"))
        }
    }
}

fn is_owner_or_root(uid: u32) -> bool {
    let own = nix::unistd::Uid::effective();
    own.is_root() || own.as_raw() == uid
}

/// The name argument of `memfd_create`, or the last component of a path.
fn own_name(memory: BorrowedFd<'_>) -> Result<String, FileError> {
    let target = fd::link_target(memory)?;
    let path = target.strip_suffix(" (deleted)").unwrap_or(&target);
    let name = path.strip_prefix("/memfd:").or_else(|| path.rsplit('/').next());
    name.map(str::to_owned).ok_or(FileError::NotAdoptable("its name is unknown"))
}
