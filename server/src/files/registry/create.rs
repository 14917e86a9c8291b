//! Creation of files.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use fdmap_proto::file::{Access, Backing, Lifetime, Origin, OwnedName, Seals, check_name};
use fdmap_proto::units::FileId;
use fdmap_sys::memfd::{MemfdFlags, MemfdKind};
use fdmap_sys::ownership::Ownership;
use fdmap_sys::{memfd, ownership};

use super::super::caller::is_administrator;
use super::super::service_file::{FileCharge, FileProperties, ServiceFile};
use super::super::stamp_quota::StampQuota;
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
pub(super) struct NewFile {
    pub(super) backing: Backing,
    pub(super) origin: Origin,
    pub(super) access: Access,
    pub(super) lifetime: Lifetime,
    pub(super) charge: FileCharge,
    pub(super) former_ownership: Option<Ownership>,
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
        let _operation = Operation::begin("Create", &name.to_string().into(), Phase::Inode);
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
        let _operation = Operation::begin("MemfdCreate", &name.to_string().into(), Phase::Inode);
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

    pub(super) fn insert_new(
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
            fence: None,
            usage,
            charge,
            stamp_quota: StampQuota::new(&self.stamp_quota, access.uid),
            former_ownership,
        };
        self.insert(fd, properties)
    }

    /// The lifetime of a new file.
    pub(super) fn lifetime_of(
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

pub(super) const fn backing_of(kind: MemfdKind) -> Backing {
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

pub(super) fn check_max_size(bytes: u64, max_bytes: u64) -> Result<(), FileError> {
    if bytes > max_bytes {
        return Err(FileError::Size(format!(
            "{bytes} bytes is more than the limit of {max_bytes} for one file"
        )));
    }
    Ok(())
}

/// The access of a new file. Only an administrator makes another user the owner.
pub(super) fn access_of(caller: &Caller, access: Option<Access>) -> Result<Access, FileError> {
    let access = access.unwrap_or(Access::private(caller.uid, caller.gid));
    if access.uid != caller.uid && !caller.admin {
        return Err(FileError::GivingAway { uid: caller.uid, owner: access.uid });
    }
    Ok(access)
}
