//! The registry of all files: listing and changes. Requests find files in `lookup`. Creation, adoption and recovery are in `create`,
//! `adopt` and `recover`; `ending` has the end of a file.

mod adopt;
mod create;
mod ending;
mod index;
mod lookup;
mod recover;

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use fdmap_proto::convert::FileName;
use fdmap_proto::file::{Access, Lifetime, OwnedName, Right, Seals, check_name};
use fdmap_proto::units::PageSize;
use tokio::sync::broadcast;

use super::allocated::HeldMemory;
use super::inode_calls::InodeCalls;
use super::quota::{Quota, Quotas};
use super::service_file::{ChangeBy, FileCharge, FileProperties, ServiceFile};
use super::{Caller, FileError, FileEvent, FileEventKind, KeepPolicy, Limits};
use crate::scan::PageStateReader;
use crate::tracking::EventSources;
use crate::watchdog::Phase;
pub use create::FileSpec;
use index::FileIndex;

/// Events that a watcher may lag behind before it misses some.
const EVENT_BACKLOG: usize = 1024;

pub struct Registry {
    index: Arc<RwLock<FileIndex>>,
    inode_calls: InodeCalls,
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
    held_memory: HeldMemory,
    state_quota: Arc<Quota>,
    stamp_quota: Arc<Quota>,
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
            index: Arc::default(),
            inode_calls: InodeCalls::new(event_sources.worker(), limits.helper_idle_timeout),
            reader,
            event_sources,
            page_size,
            hugetlb_page_sizes,
            quotas: quotas.clone(),
            file_quota: quotas.quota("files", u64::from(limits.files_per_user)),
            ephemeral_quota: quotas.quota("ephemeral files", u64::from(limits.files_per_user)),
            byte_quota: quotas.quota("bytes of files", limits.bytes_per_user),
            held_memory: HeldMemory::default(),
            state_quota: quotas.quota("bytes of page states", limits.state_bytes_per_user),
            stamp_quota: quotas.quota("bytes of stamps", limits.state_bytes_per_user),
            limits,
            keep,
            events: broadcast::Sender::new(EVENT_BACKLOG),
        }
    }

    /// Memory of the service for page states, in bytes: retained snapshots, and what open streams report.
    #[must_use]
    pub const fn states(&self) -> &Arc<Quota> {
        &self.state_quota
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
    /// [`FileError`]; the size is unchanged, but after [`FileError::Inode`] it may change later.
    pub fn resize(
        &self,
        caller: &Caller,
        name: &FileName,
        bytes: u64,
    ) -> Result<Arc<ServiceFile>, FileError> {
        let file = self.find(caller, name, Right::Write)?;
        let _operation = file.begin("Resize", Phase::Inode);
        create::check_size(file.backing(), bytes, self.limits.file_bytes)?;
        if bytes > file.size_bytes()? {
            self.check_allocated(caller, file.access().uid)?;
        }
        file.resize(self.change_by(caller, &file), bytes)?;
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
        let _operation = file.begin("Seal", Phase::Inode);
        file.seal(self.change_by(caller, &file), seals)?;
        self.notify(&file, FileEventKind::Changed);
        Ok(file)
    }

    /// Seals the file against new writers. Writable mappings that exist stay.
    ///
    /// # Errors
    /// [`FileError::Sealed`] if the file has `F_SEAL_SEAL`; [`FileError`].
    pub fn seal_writers(&self, caller: &Caller, file: &Arc<ServiceFile>) -> Result<(), FileError> {
        let _operation = file.begin("SealWriters", Phase::Inode);
        file.seal_writers(self.change_by(caller, file))?;
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
        let _operation = file.begin("SetAccess", Phase::Lock);
        file.set_access(caller, access, |bytes| {
            let charge = self.charge(caller, access.uid, bytes, file.lifetime())?;
            self.write().change_owner(file.id(), access.uid)?;
            Ok(charge)
        })?;
        self.notify(&file, FileEventKind::Changed);
        Ok(file)
    }

    /// Fences a file.
    ///
    /// # Errors
    /// [`FileError::Fenced`] if it is fenced for another reason; [`FileError::Inode`] while a change of its inode is late; [`FileError`]; the fence is unchanged, except after
    /// [`FileError::Persist`].
    pub fn set_fence(&self, caller: &Caller, file: &ServiceFile, reason: String) -> Result<(), FileError> {
        check_name(&reason).map_err(FileError::Reason)?;
        let _operation = file.begin("Fence", Phase::Lock);
        file.set_fence(caller, reason)?;
        self.notify(file, FileEventKind::Changed);
        Ok(())
    }

    /// Ends the fence of a file that has the reason `expected`; with an empty one, any fence.
    ///
    /// # Errors
    /// As [`Self::set_fence`].
    pub fn end_fence(&self, caller: &Caller, file: &ServiceFile, expected: &str) -> Result<(), FileError> {
        let _operation = file.begin("Fence", Phase::Lock);
        file.end_fence(caller, expected)?;
        self.notify(file, FileEventKind::Changed);
        Ok(())
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
        let owner = self.quotas.owner_of(owner);
        self.held_memory
            .check(self.limits.allocated, owner, || self.all().iter().map(held).collect::<Vec<_>>())
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

    fn change_by<'a>(
        &'a self,
        caller: &'a Caller,
        file: &ServiceFile,
    ) -> ChangeBy<'a, impl FnOnce() + Send + use<>> {
        let notify = self.notifier(file, FileEventKind::Changed);
        ChangeBy { caller, calls: &self.inode_calls, user: self.helpers_of(file.access().uid), notify }
    }

    /// The user whose helpers change the inodes of files of `uid`.
    fn helpers_of(&self, uid: u32) -> u32 {
        self.quotas.owner_of(uid)
    }

    fn notify(&self, file: &ServiceFile, kind: FileEventKind) {
        self.notifier(file, kind)();
    }

    fn notifier(&self, file: &ServiceFile, kind: FileEventKind) -> impl FnOnce() + Send + use<> {
        let event = FileEvent { id: file.id(), name: file.name().to_owned(), kind };
        let events = self.events.clone();
        move || {
            // Sending fails if no watcher is subscribed.
            let _ = events.send(event);
        }
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
