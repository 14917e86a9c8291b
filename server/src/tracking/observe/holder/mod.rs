//! Holders: processes that hold the userfaultfds of tracked address spaces and make the calls that can wait for them.
//!
//! A process that holds its own mmap_lock stops every system call on its address space, and some of them uninterruptibly:
//! UFFDIO_WRITEPROTECT, UFFDIO_REGISTER, UFFDIO_UNREGISTER, and the last close of a userfaultfd. A thread that makes such a call may
//! never return, and its process may never end, whatever signal it gets. So the service makes none. Each user's address spaces
//! have a holder, a process without any other descriptor, which the service asks and does not wait for:
//!
//! ```text
//!                  call, deadline                             result
//!   HeldSpace --------------------> lane (one thread of  -------------------> HeldSpace
//!                                     the holder)    |
//!                                                    +-- the thread sleeps past the deadline: CallError::Blocked;
//!                                                        the lane belongs to the address space until the result arrives
//! ```
//!
//! **Deadline.** An operation waits for 500 ms in total for threads that sleep ([`patience`]). A thread that runs is waited for: a
//! harvest of a large mapping takes long. While a call waits for an address space, all others on it fail at once.
//!
//! **A late harvest** has cleared written bits, and its result reaches a later generation: [`HeldSpace::take_late_harvest`].
//!
//! **A holder that ends or is stopped** is replaced, and the new one gets the service's copies of all descriptors with their next
//! calls. The calls in progress fail, and written bits that they cleared are lost.
//!
//! **Close.** [`HeldSpace`] sends its copy of a userfaultfd to the holder and closes it afterwards: so a copy exists, in the queue of
//! the holder, when the service closes its own. The holder closes it on one of a few threads, and then a pipe, by which the service
//! knows. Until then the user is charged for it ([`releases`]).
//!
//! **A drop waits for nothing**: it may be that of a request, on a thread that serves all users. If the holder is to be started first, its
//! queue is full, or another thread talks to it, a thread of the user sends the userfaultfd ([`Holder::release`]).
//!
//! `space` has the calls, `process` is the holder's side, `wire` the protocol.

mod call;
mod closers;
mod held;
mod lane;
mod late;
mod link;
pub(crate) mod patience;
pub mod process;
mod releases;
mod space;
mod thread;
mod wire;

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use fdmap_proto::error_chain;
use fdmap_sys::{Errno, SyscallError};
use tracing::field::debug;

use super::ending;
use super::own_calls::CallCounter;
use crate::incidents::{self, Incident};
use crate::log_limit::LogLimit;
use crate::watchdog;
pub(crate) use call::{HarvestedMappings, SpaceCall, SpaceResult};
use held::{Held, Unanswered};
pub(crate) use held::{HeldSpace, LateHarvest, WeakSpace};
use lane::Lane;
use late::LateCalls;
pub(crate) use late::SpaceOwner;
use link::Link;
pub(crate) use link::Worker;
pub(crate) use releases::MAX_CLOSING;
use releases::{Releases, UnsentNumber};
use wire::Control;

/// Lanes of one holder.
const MAX_LANES: usize = 32;
/// Calls of one user that wait for address spaces. With so many, further calls of the user are not made.
const MAX_LATE: usize = 16;
/// Interval of the checks whether all userfaultfds are sent.
const SEND_INTERVAL: Duration = Duration::from_millis(10);
/// How long a call waits for a free lane.
const LANE_TIMEOUT: Duration = Duration::from_millis(500);

static BLOCKED: LogLimit = LogLimit::new();
static REPLACED: LogLimit = LogLimit::new();
static UNSTARTED: LogLimit = LogLimit::new();

/// A call was not made, or has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    #[error("a process holds the lock of its address space (mmap_lock)")]
    Blocked,
    #[error("the userfaultfd was closed, because its fork events cannot be read")]
    Closed,
    #[error("the process that makes the calls on this address space ended")]
    Ended,
    #[error("the process that makes the calls on this address space did not pass the descriptors")]
    Descriptors,
    #[error("a call on an address space has the result of another call: {0}")]
    Result(&'static str),
    #[error(transparent)]
    Syscall(#[from] SyscallError),
}

/// Finds what counts calls that take written bits, and is not to count those of holders. `None`: nothing counts them.
#[derive(Clone)]
pub(crate) struct FindCounter(pub(crate) Arc<dyn Fn() -> Option<Arc<dyn CallCounter>> + Send + Sync>);

impl fmt::Debug for FindCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FindCounter")
    }
}

/// The holders of all users.
#[derive(Debug)]
pub struct Holders {
    worker: Worker,
    counter: FindCounter,
    users: Mutex<HashMap<u32, Weak<Holder>>>,
    shared: Arc<Shared>,
}

/// What the holders of a user leave to the next one.
#[derive(Debug, Default)]
struct Shared {
    late: LateCalls,
    /// Links to processes that end when all their userfaultfds are closed. The next holder of the user is that process, if it
    /// has not ended: one that cannot close a userfaultfd is not replaced by others without end.
    retired: Mutex<HashMap<u32, Link>>,
    releases: Arc<Releases>,
}

/// The holder of one user, which starts with the first call and ends with the last address space.
#[derive(Debug)]
pub(crate) struct Holder {
    user: u32,
    worker: Worker,
    counter: FindCounter,
    shared: Arc<Shared>,
    state: Mutex<State>,
    /// A lane became free.
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// `None`: not started.
    link: Option<Link>,
    /// Counts the holders of this user.
    epoch: u64,
    free: Vec<Arc<Lane>>,
    /// Lanes of the current holder: free ones, and those of calls in progress.
    lanes: usize,
}

impl Holders {
    pub(crate) fn new(worker: Worker, counter: FindCounter) -> Self {
        Self { worker, counter, users: Mutex::default(), shared: Arc::default() }
    }

    /// The holder of a user.
    pub(crate) fn of_user(&self, user: u32) -> Arc<Holder> {
        let mut users = lock(&self.users);
        users.retain(|_, holder| holder.strong_count() > 0);
        if let Some(holder) = users.get(&user).and_then(Weak::upgrade) {
            return holder;
        }
        let holder = Arc::new(Holder {
            user,
            worker: self.worker,
            counter: self.counter.clone(),
            shared: Arc::clone(&self.shared),
            state: Mutex::default(),
            freed: Condvar::new(),
        });
        users.insert(user, Arc::downgrade(&holder));
        holder
    }

    /// True if a call on this address space was not answered in time, and may still run. It would take the written bits of a mapping
    /// that is registered meanwhile.
    pub(crate) fn has_late_call(&self, owner: SpaceOwner) -> bool {
        self.shared.late.concerns(owner)
    }

    /// Gives userfaultfds for which no holder could be started to holders, if some can be started now. Does not wait for them.
    pub(crate) fn send_again(&self) {
        for user in self.shared.releases.resume() {
            self.of_user(user).start_sending();
        }
    }

    /// Waits until the holders have all userfaultfds that are dropped. The last copy of one that no holder has is that of the service,
    /// whose end makes the last close.
    pub(crate) fn wait_until_sent(&self, timeout: Duration) {
        let began = Instant::now();
        while self.shared.releases.are_sending() && began.elapsed() < timeout {
            std::thread::sleep(SEND_INTERVAL);
        }
    }
}

impl Holder {
    pub(crate) const fn user(&self) -> u32 {
        self.user
    }

    /// True if charges end when userfaultfds of the user are closed.
    pub(crate) fn is_releasing(&self) -> bool {
        self.shared.releases.has_charged(self.user)
    }

    /// The userfaultfds that were dropped until now have no higher number.
    pub(crate) fn last_unsent(&self) -> UnsentNumber {
        self.shared.releases.last_unsent()
    }

    /// True if the holder is to get userfaultfds that were dropped. Until then the last copy of one may be that of the service.
    pub(crate) fn is_sending(&self, number: UnsentNumber) -> bool {
        self.shared.releases.is_sending(self.user, number)
    }

    /// True if so many userfaultfds of the user are not closed yet that the service takes no further one.
    pub(crate) fn is_full(&self) -> bool {
        self.shared.releases.is_full(self.user)
    }

    /// Makes a call. Waits for its result as long as the operation may.
    fn call(&self, held: &Held, call: &SpaceCall) -> Result<(SpaceResult, Vec<OwnedFd>), Unanswered> {
        let (lane, epoch) = self.begin(held, call).map_err(Unanswered::Error)?;
        if lane.wait() {
            return self.receive(lane, epoch).map_err(Unanswered::Error);
        }
        let mut state = self.lock();
        if state.epoch == epoch && state.link.as_ref().is_some_and(Link::is_stopped) {
            // A thread may still run: the call is late until the lane is closed.
            self.replace(&mut state, "is stopped");
        }
        incidents::count(Incident::HolderLate);
        if let Some(omitted) = BLOCKED.permit() {
            let (user, pid, file) = (self.user, held.owner().pid, watchdog::file());
            let file = file.as_deref().map(debug);
            tracing::warn!(
                user,
                pid,
                file,
                omitted,
                "a process of the user holds the lock of its address space"
            );
        }
        // No later call gets the lane.
        state.lanes -= usize::from(state.epoch == epoch);
        drop(state);
        self.shared.late.add(self.user, held.owner(), &lane);
        Err(Unanswered::Late(lane, epoch))
    }

    /// Sends a call on a lane of the current holder.
    fn begin(&self, held: &Held, call: &SpaceCall) -> Result<(Arc<Lane>, u64), CallError> {
        // A holder that has ended is noticed when a message is sent to it. It has not made the call.
        for _ in 0..2 {
            let (lane, epoch) = self.lane()?;
            let sent = held.send_to(epoch, |version, descriptors| {
                self.hold(epoch, Control::Hold(held.id(), version), descriptors)
            });
            let send = |version| lane.send(held.id(), version, call).map_err(|_| CallError::Ended);
            match sent.and_then(send) {
                Ok(()) => return Ok((lane, epoch)),
                Err(CallError::Closed) => {
                    self.give_back(lane, epoch);
                    return Err(CallError::Closed);
                }
                Err(_) => self.ended(epoch),
            }
        }
        Err(CallError::Ended)
    }

    fn hold(&self, epoch: u64, message: Control, descriptors: &[BorrowedFd<'_>]) -> Result<(), SyscallError> {
        let state = self.lock();
        let current = state.link.as_ref().filter(|_| state.epoch == epoch);
        let ended =
            || SyscallError { call: "sendmsg to a holder that has ended".to_owned(), errno: Errno::EPIPE };
        current.ok_or_else(ended)?.send(message, descriptors)
    }

    /// A lane of the current holder, which is started if there is none.
    fn lane(&self) -> Result<(Arc<Lane>, u64), CallError> {
        let mut state = self.lock();
        if self.shared.late.count_of(self.user) >= MAX_LATE {
            return Err(CallError::Blocked);
        }
        let mut failed = false;
        loop {
            if let Some(lane) = state.free.pop() {
                return Ok((lane, state.epoch));
            }
            if state.lanes < MAX_LANES {
                match self.ensure(&mut state).and_then(Link::open_lane) {
                    Ok(Some(lane)) => {
                        state.lanes += 1;
                        return Ok((Arc::new(lane), state.epoch));
                    }
                    // Another holder could start no thread either. Calls in progress return their lanes.
                    Ok(None) if state.lanes > 0 => {}
                    Ok(None) => return Err(CallError::Blocked),
                    Err(error) => {
                        let error = error_chain(&error);
                        tracing::debug!(user = self.user, error, "a holder of userfaultfds does not answer");
                        self.replace(&mut state, "does not answer");
                        // One that was retired may have ended just now.
                        if std::mem::replace(&mut failed, true) {
                            return Err(CallError::Ended);
                        }
                        continue;
                    }
                }
            }
            let waited = self.freed.wait_timeout(state, LANE_TIMEOUT);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if timeout.timed_out() && state.free.is_empty() {
                return Err(CallError::Blocked);
            }
        }
    }

    /// The current holder. Starts one if there is none.
    fn ensure<'a>(&self, state: &'a mut State) -> Result<&'a mut Link, SyscallError> {
        match &mut state.link {
            Some(link) => Ok(link),
            none => {
                state.epoch += 1;
                let started = self.start().inspect_err(|error| {
                    if let Some(omitted) = UNSTARTED.permit() {
                        let (user, error) = (self.user, error_chain(error));
                        tracing::warn!(user, error, omitted, "no holder of userfaultfds can be started");
                    }
                });
                Ok(none.insert(started?))
            }
        }
    }

    /// The process that was retired, if it has not ended, or a new one.
    fn start(&self) -> Result<Link, SyscallError> {
        let retired = lock(&self.shared.retired).remove(&self.user);
        if let Some(link) = retired.filter(|link| !link.has_ended()) {
            return Ok(link);
        }
        if !ending::may_start(self.user) {
            let call = "start of a holder while others that were killed do not end".to_owned();
            return Err(SyscallError { call, errno: Errno::EAGAIN });
        }
        Link::start(self.worker, self.user, (self.counter.0)())
    }

    fn receive(&self, lane: Arc<Lane>, epoch: u64) -> Result<(SpaceResult, Vec<OwnedFd>), CallError> {
        match lane.receive() {
            Ok(answer) => {
                self.give_back(lane, epoch);
                Ok(answer)
            }
            Err(error) => {
                tracing::debug!(user = self.user, error = error_chain(&error), "a holder ended");
                self.ended(epoch);
                Err(CallError::Ended)
            }
        }
    }

    /// Receives the result of a late call, which has arrived.
    fn receive_late(&self, lane: Arc<Lane>, epoch: u64) -> Result<SpaceResult, CallError> {
        self.shared.late.remove(&lane);
        let mut state = self.lock();
        state.lanes += usize::from(state.epoch == epoch);
        drop(state);
        match self.receive(lane, epoch)? {
            (SpaceResult::Failed(error), _) => Err(error.into()),
            (result, _) => Ok(result),
        }
    }

    fn give_back(&self, lane: Arc<Lane>, epoch: u64) {
        let mut state = self.lock();
        if state.epoch == epoch {
            state.free.push(lane);
            drop(state);
            self.freed.notify_one();
        }
    }

    /// The holder `epoch` has ended.
    fn ended(&self, epoch: u64) {
        let mut state = self.lock();
        if state.epoch == epoch && state.link.is_some() {
            self.replace(&mut state, "ended");
        }
    }

    /// Kills the holder, if there is one. The next call starts another one.
    fn replace(&self, state: &mut State, why: &str) {
        if let Some(mut link) = state.link.take() {
            if !link.is_retired() {
                incidents::count(Incident::HolderReplaced);
                if let Some(omitted) = REPLACED.permit() {
                    let (user, pid) = (self.user, link.pid());
                    tracing::warn!(
                        user,
                        pid,
                        omitted,
                        "a holder of userfaultfds {why}: another one replaces it"
                    );
                }
            }
            link.kill();
        }
        // The lanes of the calls in progress are those of an earlier holder from now on.
        state.epoch += 1;
        state.free.clear();
        state.lanes = 0;
        self.freed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Lets a holder end. Waits for nothing, as [`Holder::release`].
    fn retire(self: &Arc<Self>, user: u32, mut link: Link) {
        match link.send_now(Control::Quit, &[]) {
            Ok(()) => self.keep_retired(user, link),
            Err(SyscallError { errno: Errno::EAGAIN, .. }) => {
                let its = Arc::clone(self);
                let send = move || match link.send(Control::Quit, &[]) {
                    Ok(()) => its.keep_retired(user, link),
                    Err(_) => link.kill(),
                };
                // Without a thread it ends with the service.
                let _ = std::thread::Builder::new().name("releases".to_owned()).spawn(send);
            }
            Err(_) => link.kill(),
        }
    }

    /// The next holder of the user is this process, if it has not ended by then.
    fn keep_retired(&self, user: u32, link: Link) {
        if let Some(link) = link.retire() {
            let mut retired = lock(&self.retired);
            retired.retain(|_, link| !link.has_ended());
            retired.insert(user, link);
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let link = self.lock().link.take();
        if let Some(link) = link {
            self.shared.retire(self.user, link);
        }
    }
}
