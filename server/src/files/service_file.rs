//! One file that the service owns. Changes of its inode are in `inode`, rights to it in `access`.

mod access;
mod inode;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::SystemTime;

use fdmap_proto::file::{Access, Backing, FileInfo, Lifetime, Origin, OwnedName, Right, Rights, Seals};
use fdmap_proto::units::{FileId, PageSize};
use fdmap_sys::ownership::Ownership;
use fdmap_sys::{SyscallError, fd, memfd};

use super::quota::QuotaPermit;
use super::retained::RetainedSnapshots;
use super::stamp_quota::StampQuota;
use super::usage::Usage;
use super::{Caller, FileError};
use crate::probe::ScanError;
use crate::scan::{PageStateReader, ScanCoalescer, ScanSource};
use crate::store::StoredFd;
use crate::tracking::{
    Charge, EventSources, RecoveredFile, RecoveredSpace, Tracker, TrackerOptions, TrackingError,
};
pub(super) use inode::ChangeBy;
use inode::InodeChanges;

/// One file that the service owns. Clients can change its size and its seals at any time, so these are read from the kernel for
/// each answer.
pub struct ServiceFile {
    id: FileId,
    name: String,
    /// Never sent to a client: writes through the description that created a memfd raise no event.
    fd: OwnedFd,
    backing: Backing,
    origin: Origin,
    created: SystemTime,
    inode: InodeKey,
    access: RwLock<Access>,
    /// Held while the access changes and is recorded.
    access_turn: Mutex<()>,
    page_size: PageSize,
    scans: Arc<ScanCoalescer>,
    retained: RetainedSnapshots,
    event_sources: Arc<EventSources>,
    /// `None` until the first request that needs generations.
    tracker: Mutex<Option<Arc<Tracker>>>,
    /// Locked while the owner changes.
    charge: Mutex<FileCharge>,
    stamp_quota: Arc<StampQuota>,
    inode_changes: InodeChanges,
    /// Owner and mode of the inode before adoption; `None` if the service did not change them.
    former_ownership: Option<Ownership>,
    lifetime: Lifetime,
    /// Why the file is fenced.
    fence: RwLock<Option<String>>,
    /// Locked while the file ends, too.
    usage: Mutex<Usage>,
}

/// Identifies an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct InodeKey {
    pub(super) device: u64,
    pub(super) number: u64,
    /// A System V segment. Its inode number is the segment's id, which a memfd on the same device may have too.
    pub(super) sysv: bool,
}

/// The link targets of System V segments in `/proc/PID/fd` start with this.
const SYSV_LINK_PREFIX: &str = "/SYSV";

impl InodeKey {
    pub(super) fn of(fd: BorrowedFd<'_>) -> Result<Self, SyscallError> {
        let stat = fd::stat(fd)?;
        let sysv = fd::link_target(fd)?.starts_with(SYSV_LINK_PREFIX);
        Ok(Self { device: stat.st_dev, number: stat.st_ino, sysv })
    }
}

/// The quotas of the owner that one file uses.
pub(super) struct FileCharge {
    pub(super) _file: QuotaPermit,
    /// Of an ephemeral file.
    pub(super) _ephemeral: Option<QuotaPermit>,
    pub(super) bytes: QuotaPermit,
}

/// The properties of a new or recovered file, without its descriptor.
pub(super) struct FileProperties {
    pub(super) id: FileId,
    pub(super) name: String,
    pub(super) backing: Backing,
    pub(super) origin: Origin,
    pub(super) created: SystemTime,
    pub(super) access: Access,
    pub(super) page_size: PageSize,
    pub(super) lifetime: Lifetime,
    pub(super) fence: Option<String>,
    pub(super) usage: Usage,
    pub(super) charge: FileCharge,
    pub(super) stamp_quota: Arc<StampQuota>,
    pub(super) former_ownership: Option<Ownership>,
}

impl ServiceFile {
    pub(super) fn new(
        fd: OwnedFd,
        properties: FileProperties,
        reader: &PageStateReader,
        event_sources: Arc<EventSources>,
    ) -> Result<Self, FileError> {
        let FileProperties {
            id,
            name,
            backing,
            origin,
            created,
            access,
            page_size,
            lifetime,
            fence,
            usage,
            charge,
            stamp_quota,
            former_ownership,
        } = properties;
        let inode = InodeKey::of(fd.as_fd())?;
        let hugetlb_order = match backing {
            Backing::Hugetlb(bytes) => u8::try_from((bytes / page_size.bytes()).trailing_zeros()).ok(),
            Backing::Shmem | Backing::ShmemThp => None,
        };
        let source = ScanSource {
            name: OwnedName { name: name.clone(), uid: access.uid }.to_string().into(),
            fd: fd::reopen_for_probe(fd.as_fd())?,
            page_size,
            hugetlb_order,
        };
        Ok(Self {
            id,
            name,
            backing,
            origin,
            created,
            inode,
            access: RwLock::new(access),
            access_turn: Mutex::default(),
            page_size,
            scans: reader.open(source),
            retained: RetainedSnapshots::default(),
            event_sources,
            tracker: Mutex::default(),
            charge: Mutex::new(charge),
            stamp_quota,
            inode_changes: InodeChanges::default(),
            former_ownership,
            lifetime,
            fence: RwLock::new(fence),
            usage: Mutex::new(usage),
            fd,
        })
    }

    #[must_use]
    pub const fn id(&self) -> FileId {
        self.id
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name and the present owner.
    #[must_use]
    pub fn owned_name(&self) -> OwnedName {
        OwnedName { name: self.name.clone(), uid: self.access().uid }
    }

    /// The device and the inode number.
    #[must_use]
    pub const fn inode(&self) -> (u64, u64) {
        (self.inode.device, self.inode.number)
    }

    pub(super) const fn inode_key(&self) -> InodeKey {
        self.inode
    }

    #[must_use]
    pub const fn scans(&self) -> &Arc<ScanCoalescer> {
        &self.scans
    }

    #[must_use]
    pub const fn lifetime(&self) -> Lifetime {
        self.lifetime
    }

    /// What is known about the use of an ephemeral file.
    pub(super) fn usage(&self) -> MutexGuard<'_, Usage> {
        // No code panics with the lock held.
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a client gets a descriptor. The caller must look the file up again afterwards: it may have ended just before.
    pub fn note_sent(&self) {
        self.usage().note_sent();
    }

    /// True if another process uses the file. `None` if the probe does not know.
    ///
    /// # Errors
    /// [`ScanError`]
    pub(super) fn is_used(&self) -> Result<Option<bool>, ScanError> {
        // All open file descriptions of the service that stay open. Each other one, such as that of a reply, counts as a use.
        let own = [self.fd.as_fd(), self.scans.source().fd.as_fd()];
        let references = self.scans.probe().dentry_references(own)?;
        Ok(references.map(|references| references.is_used()))
    }

    #[must_use]
    pub const fn retained(&self) -> &RetainedSnapshots {
        &self.retained
    }

    /// The file's tracker. The first call creates it, which reads the states of all pages.
    ///
    /// # Errors
    /// [`TrackingError`] if the tracker cannot be created.
    pub fn tracker(&self) -> Result<Arc<Tracker>, TrackingError> {
        let mut tracker = self.tracker.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tracker) = &*tracker {
            return Ok(Arc::clone(tracker));
        }
        let started = Tracker::create(self.tracker_options()?)?;
        Ok(Arc::clone(tracker.insert(started)))
    }

    /// The tracker, if it exists. Does not wait while another call creates it.
    #[must_use]
    pub fn tracker_now(&self) -> Option<Arc<Tracker>> {
        self.tracker.try_lock().ok().and_then(|tracker| tracker.clone())
    }

    fn tracker_options(&self) -> Result<TrackerOptions, SyscallError> {
        Ok(TrackerOptions {
            scans: Arc::clone(&self.scans),
            probe: Arc::clone(self.scans.probe()),
            event_sources: Arc::clone(&self.event_sources),
            file: self.describe(None)?,
            // Every descriptor that the service sends is a reopened one, whose writes raise inotify events. The process that
            // passed an adopted file keeps the description that created it.
            unnotified_descriptors: self.origin == Origin::Adopted,
            original_owner: self.former_ownership,
            stamp_charges: Arc::<StampQuota>::clone(&self.stamp_quota),
        })
    }

    /// Recovers the generations that a previous process of the service recorded. `charge`: charges for a tracked address
    /// space.
    pub(super) fn recover(
        &self,
        recovered: RecoveredFile,
        charge: &dyn Fn(&RecoveredSpace<'_>) -> Charge,
    ) -> Result<(), TrackingError> {
        self.count_stored_for(self.charged_user());
        let tracker = Tracker::recover(self.tracker_options()?, recovered, charge)?;
        *self.tracker.lock().unwrap_or_else(PoisonError::into_inner) = Some(tracker);
        Ok(())
    }

    /// Sends the file to the descriptor store and starts its tracker, so that the next process of the service can recover it.
    /// Does nothing without a store.
    pub(super) fn store(&self) -> Result<(), FileError> {
        if let Some(store) = self.event_sources.store() {
            store.add_file(self.id, self.charged_user(), self.fd.as_fd());
            if let Err(error) = self.tracker() {
                store.remove(self.id, StoredFd::Journal);
                store.remove(self.id, StoredFd::File);
                return Err(FileError::Persist(Box::new(error)));
            }
        }
        Ok(())
    }

    /// Removes all descriptors of the file from the descriptor store. Waits for a call that works on the file.
    pub(super) fn unstore(&self) {
        if let Some(store) = self.event_sources.store() {
            if let Some(tracker) = self.existing_tracker() {
                tracker.drop_stored_descriptors();
            }
            store.remove(self.id, StoredFd::File);
        }
    }

    fn count_stored_for(&self, user: u32) {
        if let Some(store) = self.event_sources.store() {
            store.charge(self.id, user);
        }
    }

    /// The user who is charged for the file: of a subordinate user id, its owner.
    fn charged_user(&self) -> u32 {
        self.charge.lock().unwrap_or_else(PoisonError::into_inner).bytes.uid()
    }

    fn existing_tracker(&self) -> Option<Arc<Tracker>> {
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn record(&self, tracker: &Tracker) -> Result<(), FileError> {
        let recorded = tracker.update_file_info(self.describe(None)?);
        recorded.map_err(|error| FileError::Persist(Box::new(error)))
    }

    /// Fences the file. Afterwards no generation is closed, no description for writing is opened, and neither size nor seals change.
    pub(super) fn set_fence(&self, caller: &Caller, reason: String) -> Result<(), FileError> {
        let _change = self.turn(caller, Right::Migrate, || format!("fence {self}"))?;
        let _turn = self.access_turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Rights change only with this lock held.
        self.require(caller, Right::Migrate)?;
        match self.fence() {
            Some(other) if other != reason => self.fenced(other),
            _ => self.replace_fence(Some(reason)),
        }
    }

    /// Ends the fence. `expected`: its reason, or empty.
    pub(super) fn end_fence(&self, caller: &Caller, expected: &str) -> Result<(), FileError> {
        let _turn = self.access_turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.require(caller, Right::Migrate)?;
        match self.fence() {
            Some(other) if !expected.is_empty() && other != expected => self.fenced(other),
            Some(_) => self.replace_fence(None),
            None => Ok(()),
        }
    }

    fn fenced<T>(&self, reason: String) -> Result<T, FileError> {
        Err(FileError::Fenced { file: self.to_string(), reason })
    }

    fn replace_fence(&self, fence: Option<String>) -> Result<(), FileError> {
        // The tracker refuses checkpoints by its record of the file.
        let tracker = self.tracker().map_err(|error| FileError::Persist(Box::new(error)))?;
        let replace = |fence| {
            std::mem::replace(&mut *self.fence.write().unwrap_or_else(PoisonError::into_inner), fence)
        };
        let before = replace(fence);
        let recorded = self.record(&tracker);
        if recorded.is_err() {
            replace(before);
        }
        recorded
    }

    fn fence(&self) -> Option<String> {
        self.fence.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The current size, in bytes.
    ///
    /// # Errors
    /// `fstat`.
    pub fn size_bytes(&self) -> Result<u64, SyscallError> {
        Ok(u64::try_from(fd::stat(&self.fd)?.st_size).unwrap_or(0))
    }

    /// The memory that the file holds, in RAM and in swap.
    pub(super) fn allocated_bytes(&self) -> Result<u64, SyscallError> {
        // st_blocks counts units of 512 bytes, whatever the page size is.
        Ok(u64::try_from(fd::stat(&self.fd)?.st_blocks).unwrap_or(0).saturating_mul(512))
    }

    /// Describes the file, with the rights of `caller`.
    ///
    /// # Errors
    /// `fstat`, `fcntl(F_GET_SEALS)`.
    pub fn info(&self, caller: &Caller) -> Result<FileInfo, FileError> {
        Ok(self.describe(Some(caller))?)
    }

    /// Without a caller, the description has no rights.
    fn describe(&self, caller: Option<&Caller>) -> Result<FileInfo, SyscallError> {
        let stat = fd::stat(&self.fd)?;
        let size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let access = self.access();
        Ok(FileInfo {
            id: self.id,
            name: self.name.clone(),
            size_bytes,
            pages: self.page_size.pages_in(size_bytes),
            backing: self.backing,
            seals: self.seals()?,
            access,
            device: self.inode.device,
            inode: self.inode.number,
            origin: self.origin,
            created: self.created,
            // st_blocks counts units of 512 bytes for every page size.
            allocated_bytes: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
            caller_rights: caller.map_or(Rights::NONE, |caller| caller.rights(&access)),
            owned_by_caller: caller.is_some_and(|caller| caller.uid == access.uid),
            lifetime: self.lifetime,
            fence: self.fence(),
        })
    }

    /// Opens the file for a client. The new description has its own offset, and its writes raise inotify events. A file with
    /// `F_SEAL_WRITE` opens for writing too; its writes fail.
    ///
    /// # Errors
    /// [`FileError::Denied`]; [`FileError::Fenced`] for writing.
    pub fn open_for(&self, caller: &Caller, writable: bool) -> Result<OwnedFd, FileError> {
        self.require(caller, Right::Read)?;
        if writable {
            self.require(caller, Right::Write)?;
        }
        // Held until the descriptor is open.
        let fence = self.fence.read().unwrap_or_else(PoisonError::into_inner);
        match &*fence {
            Some(reason) if writable => {
                Err(FileError::Fenced { file: self.to_string(), reason: reason.clone() })
            }
            _ => Ok(fd::reopen(self.fd.as_fd(), writable)?),
        }
    }

    /// # Errors
    /// [`FileError::Fenced`]
    fn require_unfenced(&self) -> Result<(), FileError> {
        self.fence().map_or(Ok(()), |reason| self.fenced(reason))
    }

    fn seals(&self) -> Result<Seals, SyscallError> {
        memfd::seals(self.fd.as_fd()).map(Seals::from_bits_retain)
    }

    pub(crate) const fn backing(&self) -> Backing {
        self.backing
    }
}

impl std::fmt::Display for ServiceFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "file {:?} of user {}", self.name, self.access().uid)
    }
}
