//! One file that the service owns.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::SystemTime;

use fdmap_proto::file::{Access, Backing, FileInfo, Origin, Right, Rights, Seal, Seals};
use fdmap_proto::units::{FileId, PageSize};
use fdmap_sys::ownership::Ownership;
use fdmap_sys::{Errno, SyscallError, fd, memfd, ownership};

use super::quota::Share;
use super::retained::RetainedSnapshots;
use super::{Caller, FileError};
use crate::scan::{PageStateReader, ScanCoalescer, ScanSource};
use crate::store::Kept;
use crate::tracking::{EventSources, RecoveredFile, Tracker, TrackerOptions, TrackingError};

/// One file that the service owns. The kernel is asked for whatever clients can change: its size and its seals.
pub struct ServiceFile {
    id: FileId,
    name: String,
    /// Of the service's own; never handed out, since writes through it tell inotify nothing.
    fd: OwnedFd,
    backing: Backing,
    origin: Origin,
    created: SystemTime,
    device: u64,
    inode: u64,
    /// A System V segment: its inode has the number of the segment, which a memfd may have too.
    segment: bool,
    access: RwLock<Access>,
    page_size: PageSize,
    scans: Arc<ScanCoalescer>,
    kept: RetainedSnapshots,
    hub: Arc<EventSources>,
    /// Its generations, once somebody has asked for them.
    tracker: Mutex<Option<Arc<Tracker>>>,
    /// What its owner is charged for it. Held while the size or the owner changes.
    charge: Mutex<Charge>,
    /// Whose the inode was before it was adopted.
    before: Option<Ownership>,
}

/// Tells inodes apart: device, number, and whether it is a System V segment's, whose numbers are others than those of memfds
/// on the same device.
pub(super) type InodeKey = (u64, u64, bool);

/// What the names of System V segments begin with.
const SEGMENT: &str = "/SYSV";

/// The key of an inode that is open.
pub(super) fn inode_key(fd: BorrowedFd<'_>) -> Result<InodeKey, SyscallError> {
    let stat = fd::stat(fd)?;
    Ok((stat.st_dev, stat.st_ino, fd::link_target(fd)?.starts_with(SEGMENT)))
}

/// One file and its bytes, of its owner's quotas.
pub(super) struct Charge {
    pub(super) _file: Share,
    pub(super) bytes: Share,
}

/// What makes a file, besides its descriptor.
pub(super) struct Making {
    pub(super) id: FileId,
    pub(super) name: String,
    pub(super) backing: Backing,
    pub(super) origin: Origin,
    pub(super) created: SystemTime,
    pub(super) access: Access,
    pub(super) page_size: PageSize,
    pub(super) charge: Charge,
    /// Whose the inode was before it was adopted; `None` if it still is, or never was another's.
    pub(super) before: Option<Ownership>,
}

impl ServiceFile {
    pub(super) fn new(
        fd: OwnedFd,
        making: Making,
        reader: &PageStateReader,
        hub: Arc<EventSources>,
    ) -> Result<Self, FileError> {
        let Making { id, name, backing, origin, created, access, page_size, charge, before } = making;
        let stat = fd::stat(&fd)?;
        let hugetlb_order = match backing {
            Backing::Hugetlb(bytes) => u8::try_from((bytes / page_size.bytes()).trailing_zeros()).ok(),
            Backing::Shmem | Backing::ShmemThp => None,
        };
        let source = ScanSource { fd: fd::reopen_for_probe(fd.as_fd())?, page_size, hugetlb_order };
        Ok(Self {
            id,
            name,
            backing,
            origin,
            created,
            device: stat.st_dev,
            inode: stat.st_ino,
            segment: fd::link_target(fd.as_fd())?.starts_with(SEGMENT),
            access: RwLock::new(access),
            page_size,
            scans: reader.open(source),
            kept: RetainedSnapshots::default(),
            hub,
            tracker: Mutex::default(),
            charge: Mutex::new(charge),
            before,
            fd,
        })
    }

    /// Makes the inode its former owner's again.
    pub(super) fn give_back(&self) {
        let Some(before) = self.before else { return };
        if let Err(error) = ownership::restore(self.fd.as_fd(), before) {
            tracing::warn!(
                file = self.name,
                error = fdmap_proto::error_chain(&error),
                "giving an adopted file back"
            );
        }
    }

    /// The service's id for it.
    #[must_use]
    pub const fn id(&self) -> FileId {
        self.id
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The inode's device and number.
    #[must_use]
    pub const fn inode(&self) -> (u64, u64) {
        (self.device, self.inode)
    }

    /// The same, and whether it is a System V segment's.
    pub(super) const fn inode_key(&self) -> InodeKey {
        (self.device, self.inode, self.segment)
    }

    /// The readings of its pages.
    #[must_use]
    pub const fn scans(&self) -> &Arc<ScanCoalescer> {
        &self.scans
    }

    /// Snapshots that clients asked to keep.
    #[must_use]
    pub const fn kept(&self) -> &RetainedSnapshots {
        &self.kept
    }

    /// Its generations of writes, which begin when this is first asked for: that reads all of the file.
    ///
    /// # Errors
    /// [`TrackingError`], if they cannot begin.
    pub fn tracker(&self) -> Result<Arc<Tracker>, TrackingError> {
        let mut tracker = self.tracker.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tracker) = &*tracker {
            return Ok(Arc::clone(tracker));
        }
        let begun = Tracker::create(self.beginning()?)?;
        Ok(Arc::clone(tracker.insert(begun)))
    }

    fn beginning(&self) -> Result<TrackerOptions, SyscallError> {
        Ok(TrackerOptions {
            scans: Arc::clone(&self.scans),
            probe: Arc::clone(self.scans.probe()),
            event_sources: Arc::clone(&self.hub),
            file: self.told(Rights::NONE)?,
            // The service hands out descriptors that it opened anew; who passed one that it has keeps that.
            unnotified_descriptors: self.origin == Origin::Adopted,
            original_owner: self.before,
        })
    }

    /// Goes on with its generations.
    pub(super) fn recover(&self, remains: RecoveredFile) -> Result<(), TrackingError> {
        let recovered = Tracker::recover(self.beginning()?, remains)?;
        *self.tracker.lock().unwrap_or_else(PoisonError::into_inner) = Some(recovered);
        Ok(())
    }

    /// Has the file kept for the next process of the service, where somebody keeps descriptors. Its generations begin then.
    pub(super) fn keep(&self) -> Result<(), FileError> {
        if let Some(store) = self.hub.store() {
            store.keep(self.id, Kept::File, self.fd.as_fd());
            self.tracker().map_err(|error| FileError::Keeping(Box::new(error)))?;
        }
        Ok(())
    }

    /// Has it kept no more.
    pub(super) fn forget(&self) {
        if let Some(store) = self.hub.store() {
            let tracker = self.tracker.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(tracker) = tracker {
                tracker.drop_stored_descriptors();
            }
            store.remove(self.id, Kept::File);
        }
    }

    /// Nobody new can write from now on.
    pub(super) fn close(&self) -> Result<(), FileError> {
        match crate::tracking::seal_writers(self.fd.as_fd()) {
            Err(SyscallError { errno: Errno::EPERM, .. }) => {
                Err(FileError::Sealed { what: "closing the file".to_owned(), seal: Seal::Seal })
            }
            other => Ok(other?),
        }
    }

    /// Who may do what.
    #[must_use]
    pub fn access(&self) -> Access {
        // Nothing panics while it is held.
        *self.access.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes who may do what; `charge_to` charges another owner for one file and that many bytes.
    pub(super) fn set_access(
        &self,
        access: Access,
        charge_to: impl FnOnce(u64) -> Result<Charge, FileError>,
    ) -> Result<(), FileError> {
        let mut charge = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        if access.uid != self.access().uid {
            *charge = charge_to(charge.bytes.amount())?;
        }
        *self.access.write().unwrap_or_else(PoisonError::into_inner) = access;
        let tracker = self.tracker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(tracker) = tracker {
            let noted = tracker.update_file_info(self.told(Rights::NONE)?);
            noted.map_err(|error| FileError::Keeping(Box::new(error)))?;
        }
        Ok(())
    }

    /// Bytes, as the kernel has it now.
    ///
    /// # Errors
    /// `fstat`.
    pub fn size_bytes(&self) -> Result<u64, SyscallError> {
        Ok(u64::try_from(fd::stat(&self.fd)?.st_size).unwrap_or(0))
    }

    /// What there is to tell `caller`.
    ///
    /// # Errors
    /// A system call.
    pub fn info(&self, caller: &Caller) -> Result<FileInfo, FileError> {
        Ok(self.told(caller.rights(&self.access()))?)
    }

    fn told(&self, caller_rights: Rights) -> Result<FileInfo, SyscallError> {
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
            device: self.device,
            inode: self.inode,
            origin: self.origin,
            created: self.created,
            // st_blocks counts units of 512 bytes, whatever the page size.
            allocated_bytes: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
            caller_rights,
        })
    }

    /// # Errors
    /// [`FileError::Denied`]
    pub(super) fn demand(&self, caller: &Caller, right: Right) -> Result<(), FileError> {
        if caller.may(right, &self.access()) {
            return Ok(());
        }
        Err(FileError::Denied { uid: caller.uid, right, file: self.to_string() })
    }

    pub(super) fn demand_owner(&self, caller: &Caller) -> Result<(), FileError> {
        if caller.owns(&self.access()) {
            return Ok(());
        }
        Err(FileError::NotOwner { uid: caller.uid, file: self.to_string() })
    }

    /// A descriptor for a client: opened anew, so that its writes are seen and its offset is its own.
    ///
    /// # Errors
    /// [`FileError::Denied`]. A file that is sealed against writes is opened all the same, and refuses the writes.
    pub fn open_for(&self, caller: &Caller, writable: bool) -> Result<OwnedFd, FileError> {
        self.demand(caller, Right::Read)?;
        if writable {
            self.demand(caller, Right::Write)?;
        }
        Ok(fd::reopen(self.fd.as_fd(), writable)?)
    }

    /// The seals, as the kernel has them now.
    fn seals(&self) -> Result<Seals, SyscallError> {
        memfd::seals(self.fd.as_fd()).map(Seals::from_bits)
    }

    /// Changes the size and what the owner is charged for it.
    pub(super) fn resize(&self, bytes: u64, unbound: bool) -> Result<(), FileError> {
        let mut charge = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        let before = charge.bytes.amount();
        charge.bytes.change(bytes, unbound)?;
        let result = match memfd::resize(self.fd.as_fd(), bytes) {
            Err(SyscallError { errno: Errno::EPERM, .. }) => {
                let seal = if bytes > self.size_bytes()? { Seal::Grow } else { Seal::Shrink };
                Err(FileError::Sealed { what: format!("resizing to {bytes} bytes"), seal })
            }
            other => other.map_err(FileError::from),
        };
        if result.is_err() {
            charge.bytes.change(before, true)?;
        }
        result
    }

    pub(super) fn seal(&self, seals: Seals) -> Result<(), FileError> {
        match memfd::add_seals(self.fd.as_fd(), seals.bits()) {
            Err(SyscallError { errno: Errno::EPERM, .. }) => {
                Err(FileError::Sealed { what: format!("adding the seals {seals}"), seal: Seal::Seal })
            }
            Err(SyscallError { errno: Errno::EBUSY, .. }) => Err(FileError::MappedWritable),
            other => Ok(other?),
        }
    }

    /// Checks a size that was asked for.
    pub(super) fn check_size(backing: Backing, bytes: u64, most: u64) -> Result<(), FileError> {
        if bytes == 0 {
            return Err(FileError::Size("a file of 0 bytes has no pages".to_owned()));
        }
        if bytes > most {
            return Err(FileError::Size(format!(
                "{bytes} bytes are more than the limit of {most} for one file"
            )));
        }
        if let Backing::Hugetlb(page) = backing
            && !bytes.is_multiple_of(page)
        {
            return Err(FileError::Size(format!("{bytes} bytes are no multiple of the huge page of {page}")));
        }
        Ok(())
    }

    pub(super) const fn backing(&self) -> Backing {
        self.backing
    }
}

impl std::fmt::Display for ServiceFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "file {:?}", self.name)
    }
}
