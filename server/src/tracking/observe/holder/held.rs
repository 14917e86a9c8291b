//! An address space whose descriptors a holder has.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use fdmap_sys::SyscallError;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;

use super::super::charge::Charge;
use super::call::{HarvestedMappings, SpaceCall, SpaceResult};
use super::lane::Lane;
use super::releases::Release;
use super::space::SpaceFiles;
use super::wire::SpaceId;
use super::{CallError, Holder, SpaceOwner};

/// The userfaultfd of an address space, with its pagemap and maps once they are known. The service has copies, on which it makes
/// no call that can wait for a process. It closes them before the holder closes its own, so that the last close of a userfaultfd,
/// which can wait too, is never here.
///
/// When fork events can no longer be read, the userfaultfd is closed, so that no process waits for a reader.
#[derive(Clone, Debug)]
pub struct HeldSpace(Arc<Held>);

/// A reference that keeps no descriptor open.
#[derive(Clone, Debug)]
pub(crate) struct WeakSpace(Weak<Held>);

#[derive(Debug)]
pub(super) struct Held {
    holder: Arc<Holder>,
    id: SpaceId,
    /// `None`: closed.
    userfaultfd: Mutex<Option<Userfaultfd>>,
    files: Mutex<VersionedFiles>,
    /// The holder that has the descriptors, and their version.
    sent: Mutex<Option<(u64, u64)>>,
    /// For calls that are late.
    owner: Mutex<SpaceOwner>,
    /// The holder closes the userfaultfd when this pipe has ended.
    barrier: Mutex<Option<OwnedFd>>,
    /// Of the user, until the holder has closed the userfaultfd.
    charge: Mutex<Option<Charge>>,
    late: Mutex<Late>,
}

/// The pagemap and the maps. Their version changes with them.
#[derive(Debug, Default)]
struct VersionedFiles {
    version: u64,
    /// `None`: not known yet.
    files: Option<Arc<SpaceFiles>>,
}

/// A call that was not answered in time.
#[derive(Debug, Default)]
enum Late {
    #[default]
    None,
    /// Waits for its result.
    Waiting(LateCall),
    /// A harvest whose result was not taken yet.
    Harvested(Result<HarvestedMappings, CallError>),
}

#[derive(Debug)]
struct LateCall {
    lane: Arc<Lane>,
    epoch: u64,
    harvest: bool,
}

/// The result of a harvest that was not answered in time.
#[derive(Debug)]
pub(crate) enum LateHarvest {
    /// There is none.
    None,
    Waiting,
    Harvested(Result<HarvestedMappings, CallError>),
}

impl HeldSpace {
    /// Gives the userfaultfd to `holder`, with the first call.
    pub(crate) fn new(userfaultfd: Userfaultfd, holder: Arc<Holder>) -> Self {
        Self(Arc::new(Held {
            holder,
            id: SpaceId::draw(),
            userfaultfd: Mutex::new(Some(userfaultfd)),
            files: Mutex::default(),
            sent: Mutex::default(),
            owner: Mutex::default(),
            barrier: Mutex::default(),
            charge: Mutex::default(),
            late: Mutex::default(),
        }))
    }

    /// Another address space of the same user.
    pub(crate) fn sibling(&self, userfaultfd: Userfaultfd) -> Self {
        Self::new(userfaultfd, Arc::clone(&self.0.holder))
    }

    /// What the user is charged for the address space, until the holder has closed the userfaultfd.
    pub(crate) fn set_charge(&self, charge: Charge) {
        *lock(&self.0.charge) = Some(charge);
    }

    pub(crate) fn holder(&self) -> &Arc<Holder> {
        &self.0.holder
    }

    /// Calls `work`, which must not wait for a process, unless the userfaultfd was closed.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&Userfaultfd) -> T) -> Option<T> {
        lock(&self.0.userfaultfd).as_ref().map(work)
    }

    /// A reference that keeps no descriptor open.
    pub(crate) fn downgrade(&self) -> WeakSpace {
        WeakSpace(Arc::downgrade(&self.0))
    }

    /// The same userfaultfd, held by `holder`; `None` if it was closed. No call was made.
    pub(crate) fn given_to(self, holder: Arc<Holder>) -> Option<Self> {
        if Arc::ptr_eq(&self.0.holder, &holder) {
            return Some(self);
        }
        self.into_userfaultfd().map(|userfaultfd| Self::new(userfaultfd, holder))
    }

    /// Takes the userfaultfd, to give it to another holder; `None` if it was closed. No call was made.
    pub(crate) fn into_userfaultfd(self) -> Option<Userfaultfd> {
        lock(&self.0.userfaultfd).take()
    }

    /// Lets the holder close its copy of the userfaultfd when the pipe has ended: another process has closed its own by then, and is
    /// not the last one.
    pub(crate) fn close_after(&self, barrier: OwnedFd) {
        *lock(&self.0.barrier) = Some(barrier);
    }

    /// Closes the userfaultfd, here and in the holder.
    pub(crate) fn close(&self) {
        self.0.release();
    }

    /// Opens the pagemap and the maps of process `pid`. They are used when [`Self::set_files`] gets them.
    ///
    /// # Errors
    /// [`CallError`]
    pub(crate) fn open_files(&self, pid: u32) -> Result<(Pagemap, Maps), CallError> {
        let (result, descriptors) = self.0.call(&SpaceCall::Open { pid })?;
        match result {
            SpaceResult::Done => {}
            SpaceResult::Failed(error) => return Err(error.into()),
            other => return Err(CallError::Result(other.name())),
        }
        let [pagemap, maps] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| CallError::Descriptors)?;
        Ok((Pagemap::from_fd(pagemap)?, Maps::from_fd(maps)?))
    }

    /// The pagemap and the maps of the address space.
    pub(crate) fn set_files(&self, owner: SpaceOwner, pagemap: Arc<Pagemap>, maps: Maps) {
        *lock(&self.0.owner) = owner;
        let mut current = lock(&self.0.files);
        // The holder may have others, of a process that turned out to be another one.
        current.version += 1;
        current.files = Some(Arc::new(SpaceFiles { pagemap, maps }));
    }

    pub(crate) fn files(&self) -> Option<Arc<SpaceFiles>> {
        lock(&self.0.files).files.clone()
    }

    /// Makes a call without descriptors in its result.
    ///
    /// # Errors
    /// [`CallError`]
    pub(crate) fn call(&self, call: &SpaceCall) -> Result<SpaceResult, CallError> {
        match self.0.call(call)? {
            (SpaceResult::Failed(error), _) => Err(error.into()),
            (result, _) => Ok(result),
        }
    }

    /// True if the address space exists, or if no process answers, and the userfaultfd was not closed.
    pub(crate) fn is_alive(&self) -> bool {
        match self.call(&SpaceCall::IsAlive) {
            Ok(SpaceResult::Alive(alive)) => alive == Some(true),
            Err(CallError::Closed) => false,
            Ok(_) | Err(_) => true,
        }
    }

    /// True if it is known that the address space has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.call(&SpaceCall::IsAlive) == Ok(SpaceResult::Alive(Some(false)))
    }

    /// Takes the result of a harvest that was not answered in time.
    pub(crate) fn take_late_harvest(&self) -> LateHarvest {
        let mut late = lock(&self.0.late);
        match self.0.look(&mut late) {
            Late::None => LateHarvest::None,
            Late::Waiting(call) if call.harvest => LateHarvest::Waiting,
            Late::Waiting(_) => LateHarvest::None,
            Late::Harvested(_) => match std::mem::take(&mut *late) {
                Late::Harvested(result) => LateHarvest::Harvested(result),
                Late::None | Late::Waiting(_) => LateHarvest::None,
            },
        }
    }

    /// Removes the write protection of ranges, beside another call: that may wait for this one.
    ///
    /// # Errors
    /// [`CallError`]
    pub(crate) fn unprotect(&self, call: &SpaceCall) -> Result<(), CallError> {
        let held = &self.0;
        match held.holder.call(held, call) {
            Ok((SpaceResult::Failed(error), _)) => Err(error.into()),
            Ok(_) => Ok(()),
            Err(Unanswered::Error(error)) => Err(error),
            Err(Unanswered::Late(..)) => Err(CallError::Blocked),
        }
    }
}

impl WeakSpace {
    pub(crate) fn upgrade(&self) -> Option<HeldSpace> {
        self.0.upgrade().map(HeldSpace)
    }

    /// True if the address space has been dropped.
    pub(crate) fn is_dropped(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// Why a call has no result.
pub(super) enum Unanswered {
    Error(CallError),
    /// It waits for the address space.
    Late(Arc<Lane>, u64),
}

impl Held {
    pub(super) const fn id(&self) -> SpaceId {
        self.id
    }

    pub(super) fn owner(&self) -> SpaceOwner {
        *lock(&self.owner)
    }

    /// Makes a call, unless an earlier one still waits for the address space.
    fn call(&self, call: &SpaceCall) -> Result<(SpaceResult, Vec<OwnedFd>), CallError> {
        if let Late::Waiting(_) = self.look(&mut lock(&self.late)) {
            return Err(CallError::Blocked);
        }
        match self.holder.call(self, call) {
            Ok(answer) => Ok(answer),
            Err(Unanswered::Error(error)) => Err(error),
            Err(Unanswered::Late(lane, epoch)) => {
                let harvest = matches!(call, SpaceCall::Harvest { .. });
                let mut late = lock(&self.late);
                // The result of another harvest, which was not taken yet, is needed more than this call.
                if matches!(*late, Late::None) {
                    *late = Late::Waiting(LateCall { lane, epoch, harvest });
                }
                Err(CallError::Blocked)
            }
        }
    }

    /// Receives the result of a late call, if it has arrived.
    fn look<'a>(&self, late: &'a mut Late) -> &'a Late {
        if let Late::Waiting(call) = late
            && call.lane.is_ready(Duration::ZERO)
            && let Late::Waiting(LateCall { lane, epoch, harvest }) = std::mem::take(late)
        {
            let result = self.holder.receive_late(lane, epoch);
            if harvest {
                *late = Late::Harvested(result.and_then(|result| match result {
                    SpaceResult::Harvested(harvest) => Ok(harvest),
                    other => Err(CallError::Result(other.name())),
                }));
            }
        }
        late
    }

    /// Gives the descriptors to the holder `epoch` unless it has them. Returns their version.
    pub(super) fn send_to(
        &self,
        epoch: u64,
        send: impl FnOnce(u64, &[BorrowedFd<'_>]) -> Result<(), SyscallError>,
    ) -> Result<u64, CallError> {
        let mut sent = lock(&self.sent);
        let current = lock(&self.files);
        let (version, files) = (current.version, current.files.clone());
        drop(current);
        let userfaultfd = lock(&self.userfaultfd);
        let userfaultfd = userfaultfd.as_ref().ok_or(CallError::Closed)?;
        if *sent == Some((epoch, version)) {
            return Ok(version);
        }
        let mut descriptors = vec![userfaultfd.as_fd()];
        descriptors.extend(files.iter().flat_map(|files| [files.pagemap.as_fd(), files.maps.as_fd()]));
        send(version, &descriptors)?;
        *sent = Some((epoch, version));
        Ok(version)
    }

    /// Closes the copy of the service, and then that of the holder.
    fn release(&self) {
        let userfaultfd = lock(&self.userfaultfd).take();
        if let Some(userfaultfd) = userfaultfd {
            let (barrier, charge) = (lock(&self.barrier).take(), lock(&self.charge).clone());
            self.holder.release(Release { id: self.id, userfaultfd, barrier, charge });
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
