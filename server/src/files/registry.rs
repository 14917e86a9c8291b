//! All files of the service.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::SystemTime;

use fdmap_proto::convert::FileName;
use fdmap_proto::file::{Access, Backing, Origin, Right, Seals, check_name};
use fdmap_proto::units::{FileId, PageSize};
use fdmap_sys::fd::OpenMode;
use fdmap_sys::memfd::{MemfdFlags, MemfdKind};
use fdmap_sys::ownership::Ownership;
use fdmap_sys::{Errno, SyscallError, fd, memfd, ownership};
use tokio::sync::broadcast;

use super::owned::{Charge, InodeKey, Making, ServiceFile, inode_key};
use super::quota::Quota;
use super::{Caller, FileError, FileEvent, Happened, Limits, RestoreError};
use crate::random::random_id;
use crate::scan::PageStateReader;
use crate::tracking::{EventSources, RecoveredFile};

/// Events that a slow watcher may lag behind before it loses some.
const EVENTS: usize = 1024;

/// A file to make.
#[derive(Clone, Debug)]
pub struct Creation {
    /// Unique in the service.
    pub name: String,
    /// Bytes.
    pub size_bytes: u64,
    /// What its pages are made of.
    pub backing: Backing,
    /// Added right after the size is set.
    pub seals: Seals,
    /// `None`: the caller's alone.
    pub access: Option<Access>,
}

/// All files of the service.
pub struct Registry {
    files: RwLock<Files>,
    reader: PageStateReader,
    hub: Arc<EventSources>,
    page_size: PageSize,
    hugetlb_page_sizes: Vec<u64>,
    limits: Limits,
    file_quota: Arc<Quota>,
    byte_quota: Arc<Quota>,
    events: broadcast::Sender<FileEvent>,
}

#[derive(Default)]
struct Files {
    by_id: HashMap<FileId, Arc<ServiceFile>>,
    by_name: BTreeMap<String, FileId>,
    by_inode: HashMap<InodeKey, FileId>,
    /// Names of files that are being made or adopted.
    coming: HashSet<String>,
    /// Inodes that are being adopted, and under which name.
    coming_inodes: HashMap<InodeKey, String>,
}

/// A name, and the inode of a file that is being adopted, which nobody else gets meanwhile.
struct Reserved<'a> {
    registry: &'a Registry,
    name: String,
    inode: Option<InodeKey>,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        let mut files = self.registry.write();
        files.coming.remove(&self.name);
        if let Some(inode) = self.inode {
            files.coming_inodes.remove(&inode);
        }
    }
}

impl Registry {
    /// No files yet.
    #[must_use]
    pub fn new(
        reader: PageStateReader,
        hub: Arc<EventSources>,
        page_size: PageSize,
        hugetlb_page_sizes: Vec<u64>,
        limits: Limits,
    ) -> Self {
        Self {
            files: RwLock::default(),
            reader,
            hub,
            page_size,
            hugetlb_page_sizes,
            file_quota: Quota::new("files", u64::from(limits.files_per_user)),
            byte_quota: Quota::new("bytes of files", limits.bytes_per_user),
            limits,
            events: broadcast::Sender::new(EVENTS),
        }
    }

    /// Makes a file.
    ///
    /// # Errors
    /// [`FileError`]; nothing is left behind then.
    pub fn create(&self, caller: &Caller, creation: Creation) -> Result<Arc<ServiceFile>, FileError> {
        let Creation { name, size_bytes, backing, seals, access } = creation;
        check_name(&name)?;
        let hugetlb = self.check_backing(backing)?;
        ServiceFile::check_size(backing, size_bytes, self.limits.file_bytes)?;
        let access = owner_of(caller, access)?;
        let reserved = self.reserve(name, None)?;
        let charge = self.charge(caller, access.uid, size_bytes)?;

        let fd = memfd::create(&reserved.name, hugetlb)?;
        ownership::take(fd.as_fd())?;
        memfd::resize(fd.as_fd(), size_bytes)?;
        if !seals.is_empty() {
            memfd::add_seals(fd.as_fd(), seals.bits())?;
        }
        self.add(fd, &reserved, backing, Origin::Created, access, (charge, None))
    }

    /// Makes an empty memfd as `memfd_create` would, with these flags, and keeps it under `name`. Clients give it its size.
    ///
    /// # Errors
    /// [`FileError`]; nothing is left behind then.
    pub fn memfd_create(
        &self,
        caller: &Caller,
        name: String,
        memfd_name: &str,
        flags: MemfdFlags,
    ) -> Result<Arc<ServiceFile>, FileError> {
        check_name(&name)?;
        let reserved = self.reserve(name, None)?;
        let charge = self.charge(caller, caller.uid, 0)?;
        let fd = memfd::create_with(memfd_name, flags)?;
        let backing = match memfd::kind(fd.as_fd())? {
            Some(MemfdKind::Hugetlb(page)) => Backing::Hugetlb(page),
            Some(MemfdKind::Shmem) => Backing::Shmem,
            None => {
                return Err(FileError::Size("there are no memfds with huge pages of this size".to_owned()));
            }
        };
        ownership::take(fd.as_fd())?;
        let access = Access::private(caller.uid, caller.gid);
        self.add(fd, &reserved, backing, Origin::Created, access, (charge, None))
    }

    /// Takes a memfd that a client passed, or other shared memory. An empty name means its own.
    ///
    /// # Errors
    /// [`FileError`]; the client's memfd is as it was then.
    pub fn adopt(
        &self,
        caller: &Caller,
        passed: BorrowedFd<'_>,
        name: String,
        access: Option<Access>,
    ) -> Result<Arc<ServiceFile>, FileError> {
        match fd::open_mode(passed)? {
            OpenMode::ReadWrite => {}
            OpenMode::Path => return Err(FileError::NotAdoptable("it is an O_PATH descriptor")),
            // Who may only read must not come to a writable descriptor by way of the service.
            OpenMode::ReadOnly | OpenMode::WriteOnly => {
                return Err(FileError::NotAdoptable("it is not open for reading and writing"));
            }
        }
        let memfd = memfd::kind(passed)?;
        let shared = match memfd {
            Some(kind) => Some(kind),
            None => memfd::shared_memory(passed)?,
        };
        let kind = shared.ok_or(FileError::NotAdoptable("it is neither a memfd nor other shared memory"))?;
        let name = if name.is_empty() { own_name(passed)? } else { name };
        check_name(&name)?;
        let backing = match kind {
            MemfdKind::Shmem => Backing::Shmem,
            MemfdKind::Hugetlb(page) => Backing::Hugetlb(page),
        };
        let access = owner_of(caller, access)?;
        let stat = fd::stat(passed)?;
        // mincore answers truly to an owner, and to root.
        if memfd.is_none() && !self.owner_or_root(stat.st_uid) {
            return Err(FileError::NotAdoptable(
                "it is no memfd and belongs to another user, and the service is not root",
            ));
        }
        let size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if size_bytes > self.limits.file_bytes {
            let most = self.limits.file_bytes;
            return Err(FileError::Size(format!(
                "{size_bytes} bytes are more than the limit of {most} for one file"
            )));
        }
        let reserved = self.reserve(name, Some(inode_key(passed)?))?;
        let charge = self.charge(caller, access.uid, size_bytes)?;

        // An owner of a memfd may change its mode, and mincore answers truly to an owner only. What others open by a path, or
        // attach to, they must be able to open still.
        let before = match memfd.map(|_| ownership::take(passed)).transpose() {
            Err(SyscallError { errno: Errno::EPERM, .. }) => {
                return Err(FileError::NotAdoptable(
                    "it belongs to another user, and the service is not privileged to own it",
                ));
            }
            other => other?,
        };
        // The service keeps a description of its own: the client can change flags and offset of the one it passed.
        let added = fd::reopen(passed, true)
            .map_err(FileError::from)
            .and_then(|fd| self.add(fd, &reserved, backing, Origin::Adopted, access, (charge, before)));
        if let (Err(_), Some(before)) = (&added, before) {
            // The first error is the one to tell.
            let _ = ownership::restore(passed, before);
        }
        added
    }

    /// The file of that id or name, if the caller has `right` to it.
    ///
    /// # Errors
    /// [`FileError::NotFound`] or [`FileError::Denied`]
    pub fn find(
        &self,
        caller: &Caller,
        name: &FileName,
        right: Right,
    ) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.lookup(name)?;
        file.demand(caller, right)?;
        Ok(file)
    }

    /// Up to `most` files that the caller may see, with names after `after`, in order of their names; and whether there
    /// are more.
    #[must_use]
    pub fn list(&self, caller: &Caller, after: &str, most: usize) -> (Vec<Arc<ServiceFile>>, bool) {
        let files = self.read();
        let names =
            files.by_name.range::<str, _>((std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded));
        let mut seen: Vec<_> = names
            .filter_map(|(_, id)| files.by_id.get(id))
            .filter(|file| caller.may(Right::Inspect, &file.access()))
            .take(most.saturating_add(1))
            .map(Arc::clone)
            .collect();
        let more = seen.len() > most;
        seen.truncate(most);
        (seen, more)
    }

    /// Every file.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<ServiceFile>> {
        self.read().by_id.values().map(Arc::clone).collect()
    }

    /// Changes the size. Shrinking a large file takes as long as freeing its pages does.
    ///
    /// # Errors
    /// [`FileError`]; the size is as it was then.
    pub fn resize(
        &self,
        caller: &Caller,
        name: &FileName,
        bytes: u64,
    ) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.find(caller, name, Right::Write)?;
        ServiceFile::check_size(file.backing(), bytes, self.limits.file_bytes)?;
        file.resize(bytes, caller.admin)?;
        self.tell(&file, Happened::Changed);
        Ok(file)
    }

    /// Adds seals.
    ///
    /// # Errors
    /// [`FileError`]
    pub fn seal(
        &self,
        caller: &Caller,
        name: &FileName,
        seals: Seals,
    ) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.find(caller, name, Right::Write)?;
        file.seal(seals)?;
        self.tell(&file, Happened::Changed);
        Ok(file)
    }

    /// Forbids new writers: whoever has mapped the file goes on.
    ///
    /// # Errors
    /// [`FileError::Sealed`] if the file is sealed against seals.
    pub fn close(&self, file: &ServiceFile) -> Result<(), FileError> {
        file.close()?;
        self.tell(file, Happened::Changed);
        Ok(())
    }

    /// Changes who may do what.
    ///
    /// # Errors
    /// [`FileError`]; the access is as it was then.
    pub fn set_access(
        &self,
        caller: &Caller,
        name: &FileName,
        access: Access,
    ) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.lookup(name)?;
        file.demand_owner(caller)?;
        owner_of(caller, Some(access))?;
        file.set_access(access, |bytes| self.charge(caller, access.uid, bytes))?;
        self.tell(&file, Happened::Changed);
        Ok(file)
    }

    /// Lets go of a file. Its memory is freed when the last of its users lets go as well: dropping what this gives may
    /// take as long.
    ///
    /// # Errors
    /// [`FileError`]
    pub fn delete(&self, caller: &Caller, name: &FileName) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.lookup(name)?;
        file.demand_owner(caller)?;
        // Somebody else may have been faster.
        self.let_go(file.id()).ok_or_else(|| not_found(name))
    }

    /// Lets go of a file, whoever owns it. `None` if there is none of this id.
    pub fn let_go(&self, id: FileId) -> Option<Arc<ServiceFile>> {
        let mut files = self.write();
        let file = files.by_id.remove(&id)?;
        files.by_name.remove(file.name());
        files.by_inode.remove(&file.inode_key());
        // Before somebody else can adopt it, who would take ours for what it was.
        file.give_back();
        drop(files);
        file.forget();
        self.tell(&file, Happened::Deleted);
        Some(file)
    }

    /// What happens to files from now on.
    #[must_use]
    pub fn watch(&self) -> broadcast::Receiver<FileEvent> {
        self.events.subscribe()
    }

    fn add(
        &self,
        fd: OwnedFd,
        reserved: &Reserved<'_>,
        backing: Backing,
        origin: Origin,
        access: Access,
        (charge, before): (Charge, Option<Ownership>),
    ) -> Result<Arc<ServiceFile>, FileError> {
        let id = random_id(FileId::new);
        let name = reserved.name.clone();
        let created = SystemTime::now();
        let making =
            Making { id, name, backing, origin, created, access, page_size: self.page_size, charge, before };
        let file = Arc::new(ServiceFile::new(fd, making, &self.reader, Arc::clone(&self.hub))?);
        file.keep()?;
        self.insert(&file);
        self.tell(&file, Happened::Created);
        Ok(file)
    }

    fn insert(&self, file: &Arc<ServiceFile>) {
        let (mut files, id) = (self.write(), file.id());
        files.by_name.insert(file.name().to_owned(), id);
        files.by_inode.insert(file.inode_key(), id);
        files.by_id.insert(id, Arc::clone(file));
    }

    /// Goes on with a file of an earlier process of the service. It counts for its owner, whatever the limits are now.
    ///
    /// # Errors
    /// [`FileError`], and [`TrackingError`] if its generations cannot go on.
    pub fn restore(&self, remains: RecoveredFile) -> Result<Arc<ServiceFile>, RestoreError> {
        let info = remains.info.clone();
        let nobody = Caller { uid: info.access.uid, gid: info.access.gid, groups: Vec::new(), admin: true };
        let inode = fd::stat(&remains.file).map_err(FileError::from)?;
        let key = inode_key(remains.file.as_fd()).map_err(FileError::from)?;
        let reserved = self.reserve(info.name.clone(), Some(key))?;
        let size_bytes = u64::try_from(inode.st_size).unwrap_or(0);
        let charge = self.charge(&nobody, info.access.uid, size_bytes)?;
        let making = Making {
            id: info.id,
            name: reserved.name.clone(),
            backing: info.backing,
            origin: info.origin,
            created: info.created,
            access: info.access,
            page_size: self.page_size,
            charge,
            before: remains.before(),
        };
        let fd = remains.file.try_clone().map_err(|error| {
            FileError::from(SyscallError {
                call: "fcntl(F_DUPFD_CLOEXEC) of a file that was kept".to_owned(),
                errno: fdmap_sys::error::errno_of(&error),
            })
        })?;
        let file = Arc::new(ServiceFile::new(fd, making, &self.reader, Arc::clone(&self.hub))?);
        file.recover(remains)?;
        self.insert(&file);
        Ok(file)
    }

    fn lookup(&self, name: &FileName) -> Result<Arc<ServiceFile>, FileError> {
        let files = self.read();
        let id = match name {
            FileName::Id(id) => Some(id),
            FileName::Name(name) => files.by_name.get(name),
            // A memfd, should a segment have the same number.
            FileName::Inode { device, number } => {
                let of = |segment| files.by_inode.get(&(*device, *number, segment));
                of(false).or_else(|| of(true))
            }
        };
        id.and_then(|id| files.by_id.get(id)).map(Arc::clone).ok_or_else(|| not_found(name))
    }

    /// Sees to it that nobody else takes the name, or owns the inode, before the file is added.
    fn reserve(&self, name: String, inode: Option<InodeKey>) -> Result<Reserved<'_>, FileError> {
        let mut files = self.write();
        if files.by_name.contains_key(&name) || files.coming.contains(&name) {
            return Err(FileError::NameTaken(name));
        }
        if let Some(inode) = inode {
            let owned = files.by_inode.get(&inode).and_then(|id| files.by_id.get(id));
            let owned = owned.map(|file| file.name().to_owned());
            if let Some(other) = owned.or_else(|| files.coming_inodes.get(&inode).cloned()) {
                return Err(FileError::AlreadyOwned(other));
            }
            files.coming_inodes.insert(inode, name.clone());
        }
        files.coming.insert(name.clone());
        Ok(Reserved { registry: self, name, inode })
    }

    /// The hugetlb page size that `memfd_create` is to use.
    fn check_backing(&self, backing: Backing) -> Result<Option<u64>, FileError> {
        let Backing::Hugetlb(asked) = backing else { return Ok(None) };
        if self.hugetlb_page_sizes.contains(&asked) {
            return Ok(Some(asked));
        }
        Err(FileError::NoHugetlb { asked, present: self.hugetlb_page_sizes.clone() })
    }

    fn owner_or_root(&self, uid: u32) -> bool {
        let own = nix::unistd::Uid::effective();
        own.is_root() || own.as_raw() == uid
    }

    fn charge(&self, caller: &Caller, owner: u32, bytes: u64) -> Result<Charge, FileError> {
        Ok(Charge {
            _file: self.file_quota.take_for(owner, 1, caller.admin)?,
            bytes: self.byte_quota.take_for(owner, bytes, caller.admin)?,
        })
    }

    fn tell(&self, file: &ServiceFile, happened: Happened) {
        // Nobody may be watching.
        let _ = self.events.send(FileEvent { id: file.id(), name: file.name().to_owned(), happened });
    }

    fn read(&self) -> RwLockReadGuard<'_, Files> {
        // Nothing panics while it is held.
        self.files.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Files> {
        self.files.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_found(name: &FileName) -> FileError {
    FileError::NotFound(name.to_string())
}

/// The access of a new file. Only administrators make others its owner.
fn owner_of(caller: &Caller, access: Option<Access>) -> Result<Access, FileError> {
    let access = access.unwrap_or(Access::private(caller.uid, caller.gid));
    if access.uid != caller.uid && !caller.admin {
        return Err(FileError::GivingAway { uid: caller.uid, owner: access.uid });
    }
    Ok(access)
}

/// The name that a memfd was made with, or the last part of a path.
fn own_name(memory: BorrowedFd<'_>) -> Result<String, FileError> {
    let target = fd::link_target(memory)?;
    let path = target.strip_suffix(" (deleted)").unwrap_or(&target);
    let name = path.strip_prefix("/memfd:").or_else(|| path.rsplit('/').next());
    name.map(str::to_owned).ok_or(FileError::NotAdoptable("its name cannot be told"))
}

#[cfg(test)]
mod tests;
