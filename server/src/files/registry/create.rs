//! Creation and adoption of files.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use fdmap_proto::file::{Access, Backing, Lifetime, Origin, OwnedName, Seals, check_name};
use fdmap_proto::units::FileId;
use fdmap_sys::fd::OpenMode;
use fdmap_sys::memfd::{MemfdFlags, MemfdKind};
use fdmap_sys::ownership::Ownership;
use fdmap_sys::{Errno, SyscallError, fd, memfd, ownership};

use super::super::service_file::{FileCharge, FileProperties, InodeKey, ServiceFile};
use super::super::usage::Usage;
use super::super::{Caller, FileError};
use super::Registry;
use super::index::Reservation;
use crate::random::random_id;
use crate::watchdog::{Operation, Phase};

/// The file that a Create request describes.
#[derive(Clone, Debug)]
pub struct FileSpec {
    /// Unique among the files of the owner.
    pub name: String,
    pub size_bytes: u64,
    pub backing: Backing,
    /// The service adds them after it has set the size.
    pub seals: Seals,
    /// `None`: the caller owns the file, and no other user has a right to it.
    pub access: Option<Access>,
    /// `None`: the default for the caller.
    pub lifetime: Option<Lifetime>,
}

/// What [`Registry::insert_new`] needs besides the descriptor.
struct NewFile {
    backing: Backing,
    origin: Origin,
    access: Access,
    lifetime: Lifetime,
    charge: FileCharge,
    former_ownership: Option<Ownership>,
}

impl Registry {
    /// Creates a file.
    ///
    /// # Errors
    /// [`FileError`]; no file is created.
    pub fn create(&self, caller: &Caller, spec: FileSpec) -> Result<Arc<ServiceFile>, FileError> {
        let FileSpec { name, size_bytes, backing, seals, access, lifetime } = spec;
        check_name(&name)?;
        let hugetlb = self.check_backing(backing)?;
        check_size(backing, size_bytes, self.limits.file_bytes)?;
        let access = access_of(caller, access)?;
        let lifetime = self.lifetime_of(caller, &access, lifetime)?;
        let name = OwnedName { name, uid: access.uid };
        let reservation = Reservation::new(self, caller, name, None)?;
        let charge = self.charge(caller, access.uid, size_bytes, lifetime)?;

        let fd = memfd::create(&reservation.name.name, hugetlb)?;
        ownership::take(fd.as_fd())?;
        memfd::resize(fd.as_fd(), size_bytes)?;
        if !seals.is_empty() {
            memfd::add_seals(fd.as_fd(), seals.bits())?;
        }
        let (origin, former_ownership) = (Origin::Created, None);
        let file = NewFile { backing, origin, access, lifetime, charge, former_ownership };
        self.insert_new(fd, &reservation, file)
    }

    /// Creates an empty memfd with the caller's `memfd_create` arguments and owns it as file `name`. Clients set its size.
    ///
    /// # Errors
    /// [`FileError`]; no file is created.
    pub fn memfd_create(
        &self,
        caller: &Caller,
        name: String,
        memfd_name: &str,
        flags: MemfdFlags,
        lifetime: Option<Lifetime>,
    ) -> Result<Arc<ServiceFile>, FileError> {
        check_name(&name)?;
        let access = Access::private(caller.uid, caller.gid);
        let lifetime = self.lifetime_of(caller, &access, lifetime)?;
        let name = OwnedName { name, uid: caller.uid };
        let reservation = Reservation::new(self, caller, name, None)?;
        let charge = self.charge(caller, caller.uid, 0, lifetime)?;
        let fd = memfd::create_with(memfd_name, flags)?;
        let Some(kind) = memfd::kind(fd.as_fd())? else {
            return Err(FileError::Size("the host has no huge pages of the requested size".to_owned()));
        };
        ownership::take(fd.as_fd())?;
        let (backing, origin, former_ownership) = (backing_of(kind), Origin::Created, None);
        let file = NewFile { backing, origin, access, lifetime, charge, former_ownership };
        self.insert_new(fd, &reservation, file)
    }

    /// Adopts a memfd or other shared memory that a client passed. An empty name selects the memory's own name.
    ///
    /// # Errors
    /// [`FileError`]; the client's memory is unchanged.
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
        let reservation = Reservation::new(self, caller, name, Some(InodeKey::of(passed)?))?;
        let charge = self.charge(caller, access.uid, size_bytes, lifetime)?;

        // The owner of a memfd may change its mode, and mincore reports the truth only to the owner: so the service takes the
        // inode of a memfd. Other shared memory keeps its owner, because other processes open or attach it by name.
        let former_ownership = match memfd.map(|_| ownership::take(passed)).transpose() {
            Err(SyscallError { errno: Errno::EPERM, .. }) => {
                return Err(FileError::NotAdoptable(
                    "it belongs to another user, and the service lacks the privilege to take ownership",
                ));
            }
            other => other?,
        };
        // Reopen: the client can change the flags and the offset of the description that it passed.
        let adopted = fd::reopen(passed, true).map_err(FileError::from).and_then(|fd| {
            let (backing, origin) = (backing_of(kind), Origin::Adopted);
            let file = NewFile { backing, origin, access, lifetime, charge, former_ownership };
            self.insert_new(fd, &reservation, file)
        });
        if let (Err(_), Some(former)) = (&adopted, former_ownership) {
            // Return the first error.
            let _ = ownership::restore(passed, former);
        }
        adopted
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

    fn insert_new(
        &self,
        fd: OwnedFd,
        reservation: &Reservation<'_>,
        file: NewFile,
    ) -> Result<Arc<ServiceFile>, FileError> {
        let NewFile { backing, origin, access, lifetime, charge, former_ownership } = file;
        let usage = match origin {
            Origin::Adopted => Usage::used(),
            Origin::Created => Usage::new_until(self.unused_until()),
        };
        let properties = FileProperties {
            id: random_id(FileId::new),
            name: reservation.name.name.clone(),
            backing,
            origin,
            created: SystemTime::now(),
            access,
            page_size: self.page_size,
            lifetime,
            usage,
            charge,
            former_ownership,
        };
        self.insert(fd, properties)
    }

    /// The lifetime of a new file.
    fn lifetime_of(
        &self,
        caller: &Caller,
        access: &Access,
        requested: Option<Lifetime>,
    ) -> Result<Lifetime, FileError> {
        self.keep.lifetime(caller, is_administrator(access.uid), requested)
    }

    /// The earliest end of an ephemeral file that no process opens from now on.
    pub(super) fn unused_until(&self) -> Instant {
        Instant::now() + self.limits.unused_file_timeout
    }

    /// The hugetlb page size for `memfd_create`.
    fn check_backing(&self, backing: Backing) -> Result<Option<u64>, FileError> {
        let Backing::Hugetlb(requested) = backing else { return Ok(None) };
        if self.hugetlb_page_sizes.contains(&requested) {
            return Ok(Some(requested));
        }
        Err(FileError::NoHugetlb { requested, available: self.hugetlb_page_sizes.clone() })
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

const fn backing_of(kind: MemfdKind) -> Backing {
    match kind {
        MemfdKind::Shmem => Backing::Shmem,
        MemfdKind::Hugetlb(page_bytes) => Backing::Hugetlb(page_bytes),
    }
}

/// Checks a requested size.
pub(super) fn check_size(backing: Backing, bytes: u64, max_bytes: u64) -> Result<(), FileError> {
    if bytes == 0 {
        return Err(FileError::Size("a file of 0 bytes has no pages".to_owned()));
    }
    check_max_size(bytes, max_bytes)?;
    if let Backing::Hugetlb(page) = backing
        && !bytes.is_multiple_of(page)
    {
        return Err(FileError::Size(format!("{bytes} bytes is not a multiple of the {page}-byte huge page")));
    }
    Ok(())
}

fn check_max_size(bytes: u64, max_bytes: u64) -> Result<(), FileError> {
    if bytes > max_bytes {
        return Err(FileError::Size(format!(
            "{bytes} bytes is more than the limit of {max_bytes} for one file"
        )));
    }
    Ok(())
}

fn is_administrator(uid: u32) -> bool {
    uid == 0 || uid == nix::unistd::Uid::effective().as_raw()
}

fn is_owner_or_root(uid: u32) -> bool {
    let own = nix::unistd::Uid::effective();
    own.is_root() || own.as_raw() == uid
}

/// The access of a new file. Only an administrator makes another user the owner.
pub(super) fn access_of(caller: &Caller, access: Option<Access>) -> Result<Access, FileError> {
    let access = access.unwrap_or(Access::private(caller.uid, caller.gid));
    if access.uid != caller.uid && !caller.admin {
        return Err(FileError::GivingAway { uid: caller.uid, owner: access.uid });
    }
    Ok(access)
}

/// The name argument of `memfd_create`, or the last component of a path.
fn own_name(memory: BorrowedFd<'_>) -> Result<String, FileError> {
    let target = fd::link_target(memory)?;
    let path = target.strip_suffix(" (deleted)").unwrap_or(&target);
    let name = path.strip_prefix("/memfd:").or_else(|| path.rsplit('/').next());
    name.map(str::to_owned).ok_or(FileError::NotAdoptable("its name is unknown"))
}
