//! Reads fork events of tracked processes in a separate process, the companion.
//!
//! A process that is tracked with [`UffdFeatures::EVENT_FORK`](fdmap_sys::uffd::UffdFeatures::EVENT_FORK) sleeps in
//! fork(), killable but otherwise uninterruptible, until the event is read. A companion that does nothing else reads
//! these events: `fdmapd` started a second time ([`companion`]). So fork() returns at once even if the service is
//! stopped, swapped out or deadlocked. Only freezing the whole cgroup stops the companion together with the service.
//!
//! ```text
//!              follow()                     the process forks
//!  (untracked) --------> followed ------------------------------> parent and child are followed
//!                          |  |                                     (Child, or Lost if the child could not be passed on)
//!    subscription dropped  |  |  the companion ends: a new one is started and follows all again (Lost)
//!           <--------------+  |
//!                             |  no companion lasts for 1 s, or the userfaultfd cannot be read
//!        closed here (Broken) <
//! ```
//!
//! **Latency of fork().** While the companion runs: a context switch to it. If it is killed: the milliseconds until the
//! next one has started. If none can be started, or each ends at once: [`RETRY_TIMEOUT`]. Then this module closes every
//! userfaultfd and reports [`ForkEvent::Broken`], and fork() returns when the receiver of that event closes its own
//! descriptor. A companion that ends while a [`ForkSink`] runs is noticed only when the sink returns, so sinks must not
//! block.
//!
//! fork() also returns when the last descriptor of the userfaultfd is closed. The tracked process itself must not have
//! one, because it would be the last.
//!
//! The threads and processes: [`companion`] is the process that reads events; `link` is the service's end of its
//! socket; `wire` is their protocol; `thread` receives the companion's messages, calls the sinks, and replaces a
//! companion that ends, or that sleeps and does not answer a `heartbeat`.

pub mod companion;
mod companions;
mod heartbeat;
mod link;
mod thread;
mod wire;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fdmap_sys::SyscallError;
use fdmap_sys::error::CallContext as _;
use fdmap_sys::uffd::Userfaultfd;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::holder::HeldSpace;
pub(crate) use companions::Companions;
use heartbeat::Heartbeat;
pub use link::StartError;
use link::{Link, Program};
pub use wire::FollowId;
use wire::{Message, Sent};

/// Time without a lasting companion after which all followed userfaultfds are closed.
pub const RETRY_TIMEOUT: Duration = Duration::from_secs(1);

/// Dropped subscriptions of one user that the companion has not confirmed. Each costs a descriptor. With so many, children are lost.
pub(crate) const MAX_UNFOLLOWED: usize = 2048;

/// An event of a followed address space.
#[derive(Debug)]
pub enum ForkEvent {
    /// The address space was forked.
    Child {
        /// The forked address space. Its subscription may have been dropped after the fork.
        parent: FollowId,
        /// The userfaultfd of the child, with the same features and ranges. The pid of the child is unknown, and it may
        /// have ended.
        uffd: HeldSpace,
        /// The subscription of the child, which uses the same sink.
        subscription: ForkSubscription,
    },
    /// The address space may have been forked, and its child is unknown. Writes of that child are not observed.
    Lost { parent: FollowId },
    /// No companion reads the events any more. The receiver must close its descriptors of the userfaultfd, or the
    /// process sleeps forever when it forks.
    Broken { id: FollowId },
}

/// Receives events on a thread of [`Forks`], without a lock held. It must not block.
pub type ForkSink = Arc<dyn Fn(ForkEvent) + Send + Sync>;

/// Why forks cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ForksError {
    #[error("starting the process that reads fork events")]
    Start(#[from] StartError),
    #[error("starting the thread that receives fork events")]
    Thread(#[source] io::Error),
    #[error(transparent)]
    Syscall(#[from] SyscallError),
}

/// The companion of one user, and the thread that receives its messages. Dropping this ends both; each address space that is
/// followed keeps it.
#[derive(Debug)]
pub struct Forks {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Forks {
    /// Starts the companion of `user` and the thread.
    ///
    /// # Errors
    /// [`ForksError`]
    pub fn start(user: u32) -> Result<Arc<Self>, ForksError> {
        Self::start_as(Program::own(user))
    }

    fn start_as(program: Program) -> Result<Arc<Self>, ForksError> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = EventFd::from_value_and_flags(0, flags).call(|| "eventfd".to_owned())?;
        let owner = OnceLock::new();
        let shared =
            Arc::new(Shared { state: Mutex::default(), wake, program, synced: Condvar::new(), owner });
        shared.ensure_companion(&mut shared.lock())?;
        let its = Arc::clone(&shared);
        let builder = std::thread::Builder::new().name("forks".to_owned());
        let thread = builder.spawn(move || thread::run(&its)).map_err(ForksError::Thread)?;
        let forks = Arc::new(Self { shared, thread: Some(thread) });
        // Set once: the value is new.
        let _ = forks.shared.owner.set(Arc::downgrade(&forks));
        Ok(forks)
    }

    /// Follows the address space of `uffd` and all its descendants by fork(). Events that are pending are reported as
    /// well. The features must have been negotiated ([`Userfaultfd::api`]). Does not block.
    ///
    /// # Errors
    /// [`ForksError::Syscall`] if descriptors are exhausted; [`ForksError::Start`] if no companion runs and none can be
    /// started.
    pub(crate) fn follow(&self, uffd: &HeldSpace, sink: ForkSink) -> Result<ForkSubscription, ForksError> {
        let uffd = uffd.clone();
        let id = FollowId::draw();
        let mut state = self.shared.lock();
        self.shared.ensure_companion(&mut state)?;
        state.followed.insert(id, Followed::new(uffd, sink, &self.shared));
        state.outbox.push_back(Message::Follow(id));
        self.shared.flush(&mut state);
        drop(state);
        // Heartbeats begin with the first address space.
        self.shared.wake();
        Ok(ForkSubscription { shared: Arc::clone(&self.shared), id })
    }

    /// Waits until the sinks have received every fork whose child could run before this call. Returns `false` after
    /// `timeout`, or if the companion ends meanwhile.
    #[must_use]
    pub fn wait_for_events(&self, timeout: Duration) -> bool {
        let id = FollowId::draw();
        let began = Instant::now();
        let mut state = self.shared.lock();
        let Some(companion) = state.link.as_ref().map(|link| link.pid) else { return false };
        state.outbox.push_back(Message::Sync(id));
        self.shared.flush(&mut state);
        loop {
            let same = state.link.as_ref().is_some_and(|link| link.pid == companion);
            if state.synced.remove(&id) {
                return same;
            }
            let left = timeout.checked_sub(began.elapsed()).filter(|_| same);
            let Some(left) = left else {
                // A late reply stays in `synced`, which therefore has at most one entry for each call that timed out.
                state.outbox.retain(|message| *message != Message::Sync(id));
                return false;
            };
            state = self.shared.synced.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Pid of the companion; `None` if none runs.
    #[must_use]
    pub fn companion(&self) -> Option<u32> {
        self.shared.lock().link.as_ref().map(|link| link.pid)
    }
}

impl Drop for Forks {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.wake();
        let Some(thread) = self.thread.take() else { return };
        // A sink may drop this on the thread itself, which cannot join itself.
        if thread.thread().id() != std::thread::current().id() {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
    }
}

/// Keeps an address space followed. Drop it together with the userfaultfd: without a reader, fork() blocks until the
/// userfaultfd is closed.
#[must_use]
pub struct ForkSubscription {
    shared: Arc<Shared>,
    id: FollowId,
}

impl ForkSubscription {
    /// Identifies the address space in [`ForkEvent`].
    #[must_use]
    pub const fn id(&self) -> FollowId {
        self.id
    }
}

impl fmt::Debug for ForkSubscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ForkSubscription({})", self.id)
    }
}

impl Drop for ForkSubscription {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.link.is_none() {
            let followed = state.followed.remove(&self.id);
            drop(state);
            drop(followed);
            return;
        }
        // Forks before the companion unfollows must still be reported, so the sink remains until the companion confirms. So does
        // the userfaultfd: the last close may block, and must not be that of the companion.
        let unfollowed =
            state.followed.get_mut(&self.id).is_some_and(|one| !std::mem::replace(&mut one.unfollowed, true));
        if unfollowed {
            state.unfollowed += 1;
            state.outbox.push_back(Message::Unfollow(self.id));
            self.shared.flush(&mut state);
        }
    }
}

/// The state that the thread shares with callers.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Wakes the thread, which then checks the state.
    wake: EventFd,
    program: Program,
    /// `State::synced` or `State::link` changed.
    synced: Condvar,
    owner: OnceLock<Weak<Forks>>,
}

#[derive(Debug, Default)]
struct State {
    /// Replies to [`Message::Sync`] that no caller has taken yet.
    synced: BTreeSet<FollowId>,
    heartbeat: Heartbeat,
    /// The companion; `None` while a new one is being started, and after that failed.
    link: Option<Arc<Link>>,
    followed: BTreeMap<FollowId, Followed>,
    /// How many of them the companion is to unfollow.
    unfollowed: usize,
    /// Messages to the companion.
    outbox: VecDeque<Message>,
    /// Why messages remain in the outbox.
    waits_for: Option<Sent>,
    stopping: bool,
}

/// A followed address space. Dropping a sink runs code of its owner, so it must not be dropped under the lock.
struct Followed {
    /// For the next companion.
    uffd: HeldSpace,
    /// The subscription was dropped, and the companion has not confirmed it.
    unfollowed: bool,
    sink: ForkSink,
    /// Keeps the companion until all its events are read. `None` while it ends.
    _forks: Option<Arc<Forks>>,
}

impl Followed {
    fn new(uffd: HeldSpace, sink: ForkSink, shared: &Shared) -> Self {
        let forks = shared.owner.get().and_then(Weak::upgrade);
        Self { uffd, unfollowed: false, sink, _forks: forks }
    }
}

impl fmt::Debug for Followed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Followed").field("uffd", &self.uffd).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // The write fails only if the counter is full, which wakes the thread anyway.
        let _ = self.wake.write(1);
    }

    /// Starts a companion if none runs. It follows everything that its predecessor followed.
    fn ensure_companion(&self, state: &mut State) -> Result<(), StartError> {
        if state.link.is_none() {
            state.link = Some(Arc::new(Link::start(&self.program)?));
            state.heartbeat = Heartbeat::default();
            let all = state.followed.iter().filter(|(_, followed)| !followed.unfollowed);
            state.outbox = all.map(|(id, _)| Message::Follow(*id)).collect();
            self.flush(state);
            self.wake();
        }
        Ok(())
    }

    /// Sends messages until the socket is full. The thread sends the rest.
    fn flush(&self, state: &mut State) {
        let before = state.waits_for.take();
        let Some(link) = state.link.as_ref() else { return };
        while let Some(message) = state.outbox.front() {
            let send = |uffd: Option<&Userfaultfd>| {
                wire::send(link.as_fd(), *message, uffd.map(|uffd| uffd.as_fd()))
            };
            let sent = match message {
                Message::Follow(id) => {
                    let followed = state.followed.get(id).filter(|one| !one.unfollowed);
                    followed.and_then(|one| one.uffd.with(|uffd| send(Some(uffd))))
                }
                _ => Some(send(None)),
            };
            match sent {
                // The subscription was dropped before the companion received this. Skip it; Unfollow comes later.
                None | Some(Sent::Yes) => state.outbox.pop_front(),
                // The thread will notice that the companion ended.
                Some(Sent::Closed) => return,
                Some(why) => {
                    state.waits_for = Some(why);
                    if before.is_none() {
                        self.wake();
                    }
                    return;
                }
            };
        }
    }
}

#[cfg(test)]
mod needs_root;
