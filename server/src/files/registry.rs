//! The registry of all files: listing and changes. Requests find files in `lookup`. Creation, adoption and recovery are in `create`
//! and `recover`.

mod create;
mod index;
mod lookup;
mod recover;

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use fdmap_proto::convert::FileName;
use fdmap_proto::file::{Access, Lifetime, OwnedName, Right, Seals};
use fdmap_proto::units::{FileId, PageSize};
use tokio::sync::broadcast;

use super::quota::{Quota, Quotas};
use super::service_file::{FileCharge, FileProperties, ServiceFile};
use super::{Caller, FileError, FileEvent, FileEventKind, KeepPolicy, Limits};
use crate::scan::PageStateReader;
use crate::tracking::EventSources;
pub use create::FileSpec;
use index::FileIndex;

/// Events that a watcher may lag behind before it misses some.
const EVENT_BACKLOG: usize = 1024;

pub struct Registry {
    index: RwLock<FileIndex>,
    reader: PageStateReader,
    event_sources: Arc<EventSources>,
    page_size: PageSize,
    /// Bytes, all sizes that the host has.
    hugetlb_page_sizes: Vec<u64>,
    limits: Limits,
    keep: KeepPolicy,
    quotas: Quotas,
    file_quota: Arc<Quota>,
    /// As large as that of files, which does not limit administrators: a program that creates memfds without end must leave some
    /// descriptors of the service to others.
    ephemeral_quota: Arc<Quota>,
    byte_quota: Arc<Quota>,
    events: broadcast::Sender<FileEvent>,
}

impl Registry {
    /// A registry without files.
    #[must_use]
    pub fn new(
        reader: PageStateReader,
        event_sources: Arc<EventSources>,
        page_size: PageSize,
        hugetlb_page_sizes: Vec<u64>,
        quotas: &Quotas,
        limits: Limits,
        keep: KeepPolicy,
    ) -> Self {
        Self {
            index: RwLock::default(),
            reader,
            event_sources,
            page_size,
            hugetlb_page_sizes,
            quotas: quotas.clone(),
            file_quota: quotas.quota("files", u64::from(limits.files_per_user)),
            ephemeral_quota: quotas.quota("ephemeral files", u64::from(limits.files_per_user)),
            byte_quota: quotas.quota("bytes of files", limits.bytes_per_user),
            limits,
            keep,
            events: broadcast::Sender::new(EVENT_BACKLOG),
        }
    }

    /// Lists up to `max_files` files that the caller has the inspect right to, in the order of [`OwnedName`], starting after `after`.
    /// If more files follow, the name is that of the last file of the list.
    #[must_use]
    pub fn list(
        &self,
        caller: &Caller,
        after: Option<&OwnedName>,
        max_files: usize,
    ) -> (Vec<Arc<ServiceFile>>, Option<OwnedName>) {
        let index = self.read();
        let mut listed =
            index.after(after).filter(|(_, file)| caller.has(Right::Inspect, &file.access())).peekable();
        let (mut files, mut last) = (Vec::new(), None);
        for (name, file) in listed.by_ref().take(max_files) {
            files.push(Arc::clone(file));
            last = Some(name);
        }
        let more = listed.peek().is_some();
        (files, last.filter(|_| more).cloned())
    }

    /// All files, in no order.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<ServiceFile>> {
        self.read().all().map(Arc::clone).collect()
    }

    /// Changes the size. Shrinking frees pages, which takes long for a large file.
    ///
    /// # Errors
    /// [`FileError`]; the size is unchanged.
    pub fn resize(
        &self,
        caller: &Caller,
        name: &FileName,
        bytes: u64,
    ) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.find(caller, name, Right::Write)?;
        create::check_size(file.backing(), bytes, self.limits.file_bytes)?;
        if bytes > file.size_bytes()? {
            self.check_allocated(caller, file.access().uid)?;
        }
        file.resize(bytes, caller.admin)?;
        self.notify(&file, FileEventKind::Changed);
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
        self.notify(&file, FileEventKind::Changed);
        Ok(file)
    }

    /// Seals the file against new writers. Writable mappings that exist stay.
    ///
    /// # Errors
    /// [`FileError::Sealed`] if the file has `F_SEAL_SEAL`.
    pub fn seal_writers(&self, file: &ServiceFile) -> Result<(), FileError> {
        file.seal_writers()?;
        self.notify(file, FileEventKind::Changed);
        Ok(())
    }

    /// Changes owner and rights. Only an administrator changes the owner. The file keeps its name, among the names of the new owner.
    ///
    /// # Errors
    /// [`FileError`]; the access is unchanged, except after [`FileError::Persist`].
    pub fn set_access(
        &self,
        caller: &Caller,
        name: &FileName,
        access: Access,
    ) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.find_owned(caller, name)?;
        create::access_of(caller, Some(access))?;
        file.set_access(access, |bytes| {
            let charge = self.charge(caller, access.uid, bytes, file.lifetime())?;
            self.write().change_owner(file.id(), access.uid)?;
            Ok(charge)
        })?;
        self.notify(&file, FileEventKind::Changed);
        Ok(file)
    }

    /// Deletes a file that the caller owns. The kernel frees its memory with the last descriptor and mapping: dropping the
    /// returned file may take long.
    ///
    /// # Errors
    /// [`FileError`]
    pub fn delete(&self, caller: &Caller, name: &FileName) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.find_owned(caller, name)?;
        // A concurrent delete may have removed it since.
        self.remove(file.id()).ok_or_else(|| self.not_found(caller, name))
    }

    /// Deletes a file without a check of its owner. `None` if no file has this id.
    fn remove(&self, id: FileId) -> Option<Arc<ServiceFile>> {
        let file = self.take_out(id)?;
        file.unstore();
        Some(file)
    }

    /// Removes a file from the index. The caller calls `unstore`, which may wait for a call that works on the file.
    pub(super) fn take_out(&self, id: FileId) -> Option<Arc<ServiceFile>> {
        let file = self.write().remove_file(id)?;
        // The inode is reserved: an adoption of it must read the original owner and mode, not the service's. Without the lock: chmod
        // waits for a client that writes to the file, and a client can write for ever.
        file.restore_ownership();
        self.write().release_inode(&file);
        self.notify(&file, FileEventKind::Deleted);
        Some(file)
    }

    /// Subscribes to the events from now on.
    #[must_use]
    pub fn watch(&self) -> broadcast::Receiver<FileEvent> {
        self.events.subscribe()
    }

    fn insert(&self, fd: OwnedFd, properties: FileProperties) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.open(fd, properties)?;
        file.store()?;
        self.write().insert(&file);
        self.notify(&file, FileEventKind::Created);
        Ok(file)
    }

    fn open(&self, fd: OwnedFd, properties: FileProperties) -> Result<Arc<ServiceFile>, FileError> {
        Ok(Arc::new(ServiceFile::new(fd, properties, &self.reader, Arc::clone(&self.event_sources))?))
    }

    /// Refuses a further or larger file, if those of the owner hold too much memory.
    fn check_allocated(&self, caller: &Caller, owner: u32) -> Result<(), FileError> {
        if caller.admin {
            return Ok(());
        }
        let held = |file: &Arc<ServiceFile>| {
            let bytes = file.allocated_bytes().unwrap_or(0);
            (self.quotas.owner_of(file.access().uid), bytes)
        };
        let held: Vec<_> = self.all().iter().map(held).collect();
        self.limits.allocated.check(self.quotas.owner_of(owner), &held)
    }

    fn charge(
        &self,
        caller: &Caller,
        owner: u32,
        bytes: u64,
        lifetime: Lifetime,
    ) -> Result<FileCharge, FileError> {
        self.check_allocated(caller, owner)?;
        self.acquire(Some(caller), owner, bytes, lifetime)
    }

    /// Charges the owner for a file that `caller` adds. `None`: without regard to the limits.
    fn acquire(
        &self,
        caller: Option<&Caller>,
        owner: u32,
        bytes: u64,
        lifetime: Lifetime,
    ) -> Result<FileCharge, FileError> {
        let unlimited = caller.is_none_or(|caller| caller.admin);
        let ephemeral = || self.ephemeral_quota.acquire_for(owner, 1, caller.is_none());
        Ok(FileCharge {
            _file: self.file_quota.acquire_for(owner, 1, unlimited)?,
            _ephemeral: (lifetime == Lifetime::Ephemeral).then(ephemeral).transpose()?,
            bytes: self.byte_quota.acquire_for(owner, bytes, unlimited)?,
        })
    }

    fn notify(&self, file: &ServiceFile, kind: FileEventKind) {
        // Sending fails if no watcher is subscribed.
        let _ = self.events.send(FileEvent { id: file.id(), name: file.name().to_owned(), kind });
    }

    fn read(&self) -> RwLockReadGuard<'_, FileIndex> {
        // No code panics with the lock held.
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, FileIndex> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
