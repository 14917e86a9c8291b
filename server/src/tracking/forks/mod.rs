//! Reading the forks of tracked processes, in a process of its own.
//!
//! A process that is tracked with [`UffdFeatures::EVENT_FORK`](fdmap_sys::uffd::UffdFeatures::EVENT_FORK) and forks sleeps, killable
//! but else uninterruptible, until somebody has read the event. So they are read by a companion that does nothing else:
//! `fdmapd` started once more ([`companion`]). Whatever becomes of the service (stopped, swapped out, deadlocked), forks
//! return at once; whoever freezes its whole control group stops the companion along with it.
//!
//! ```text
//!              follow()                     the process forks
//!  (untracked) --------> followed ------------------------------> followed, and the child is, too
//!                          |  |                                     (Child, or Lost if it could not be passed on)
//!      Following dropped   |  |  the companion ends: another one is started, all are followed anew (Lost)
//!           <--------------+  |
//!                             |  none could be started for 1 s, or the userfaultfd cannot be read
//!        closed here (Broken) <
//! ```
//!
//! **How long a fork can take.** While the companion runs, as long as a context switch to it. If it is killed, until
//! another one has been started: milliseconds. If none can be started, or each ends soon, for [`RETRY`]; then every
//! userfaultfd is closed here and [`ForkNews::Broken`] told, and forks go on when the receiver of that closes its own.
//! Only while a [`Sink`] is at work, a companion that ends is not noticed: sinks must not wait for anything.
//!
//! A fork goes on, too, when the last descriptor of the userfaultfd is closed. So whoever follows must see to it that the
//! tracked process has none itself: it would be the last one.

pub mod companion;
mod link;
mod thread;
mod wire;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fdmap_sys::SyscallError;
use fdmap_sys::error::CallContext as _;
use fdmap_sys::uffd::Userfaultfd;
use nix::sys::eventfd::{EfdFlags, EventFd};

pub use link::StartError;
use link::{Link, Program};
pub use wire::FollowId;
use wire::{Message, Sent};

/// For how long it is tried to have a companion that lasts, before all that it should follow is let go.
pub const RETRY: Duration = Duration::from_secs(1);

/// What happened to an address space that is followed.
#[derive(Debug)]
pub enum ForkNews {
    /// It was forked.
    Child {
        /// Who forked. It may have been let go meanwhile: what it did before that is told.
        parent: FollowId,
        /// The child's, with the same features and ranges; which process it is, it does not tell. It may have ended.
        uffd: Userfaultfd,
        /// Its forks come to the same sink.
        following: Following,
    },
    /// It may have been forked, and nothing is known of the child. Pages that such a child writes are not seen.
    Lost {
        /// Who may have forked.
        parent: FollowId,
    },
    /// Nobody reads its forks any more. Whoever has descriptors of the userfaultfd must close them, or processes that
    /// fork wait forever.
    Broken {
        /// Whose.
        id: FollowId,
    },
}

/// What is called with news, on a thread of [`Forks`], with no lock held. It must not wait.
pub type Sink = Arc<dyn Fn(ForkNews) + Send + Sync>;

/// Why forks cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ForksError {
    /// There is no companion.
    #[error("starting the process that reads forks")]
    Start(#[from] StartError),
    /// There is no thread.
    #[error("starting the thread that is told of forks")]
    Thread(#[source] io::Error),
    /// No descriptors.
    #[error(transparent)]
    Syscall(#[from] SyscallError),
}

/// The companion, and the thread that hears from it. Both end with this. Userfaultfds are to be closed before: forks that
/// nobody reads wait for that.
#[derive(Debug)]
pub struct Forks {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Forks {
    /// Starts both.
    ///
    /// # Errors
    /// [`ForksError`]
    pub fn start() -> Result<Arc<Self>, ForksError> {
        Self::start_as(Program::own())
    }

    fn start_as(program: Program) -> Result<Arc<Self>, ForksError> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = EventFd::from_value_and_flags(0, flags).call(|| "eventfd".to_owned())?;
        let shared = Arc::new(Shared { state: Mutex::default(), wake, program, news: Condvar::new() });
        shared.revive(&mut shared.lock())?;
        let its = Arc::clone(&shared);
        let builder = std::thread::Builder::new().name("forks".to_owned());
        let thread = builder.spawn(move || thread::run(&its)).map_err(ForksError::Thread)?;
        Ok(Arc::new(Self { shared, thread: Some(thread) }))
    }

    /// Follows the address space of `uffd`, and all that come from it by fork. Forks from before are told if nobody has read
    /// them. UffdFeatures must have been agreed on ([`Userfaultfd::api`]). Does not wait.
    ///
    /// # Errors
    /// [`ForksError::Syscall`] if there is no descriptor left; [`ForksError::Start`] if there is no companion and none can be
    /// started now either.
    pub fn follow(&self, uffd: &Userfaultfd, sink: Sink) -> Result<Following, ForksError> {
        let uffd = uffd.try_clone()?;
        let id = FollowId::draw();
        let mut state = self.shared.lock();
        self.shared.revive(&mut state)?;
        state.followed.insert(id, Followed { uffd: Some(uffd), sink });
        state.outbox.push_back(Message::Follow(id));
        self.shared.flush(&mut state);
        drop(state);
        Ok(Following { shared: Arc::clone(&self.shared), id })
    }

    /// Waits until the sinks have heard of every fork whose child could have run before this was called. `false` if that took
    /// longer than `most`, or the companion ended meanwhile.
    #[must_use]
    pub fn wait_for_news(&self, most: Duration) -> bool {
        let id = FollowId::draw();
        let began = Instant::now();
        let mut state = self.shared.lock();
        let Some(companion) = state.link.as_ref().map(|link| link.pid) else { return false };
        state.outbox.push_back(Message::Tell(id));
        self.shared.flush(&mut state);
        loop {
            let same = state.link.as_ref().is_some_and(|link| link.pid == companion);
            if state.told.remove(&id) {
                return same;
            }
            let left = most.checked_sub(began.elapsed()).filter(|_| same);
            let Some(left) = left else {
                // Should it be answered yet: there are no more of these than calls that gave up.
                state.outbox.retain(|message| *message != Message::Tell(id));
                return false;
            };
            state = self.shared.news.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The companion's pid; `None` if there is none at the moment.
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
        // A sink may be what drops this, and a thread cannot wait for itself.
        if thread.thread().id() != std::thread::current().id() {
            // If it panicked, that has been said.
            let _ = thread.join();
        }
    }
}

/// An address space is followed while this lives. Drop it together with the userfaultfd: forks that nobody reads wait until
/// that is closed.
#[must_use]
pub struct Following {
    shared: Arc<Shared>,
    id: FollowId,
}

impl Following {
    /// Names it in [`ForkNews`].
    #[must_use]
    pub const fn id(&self) -> FollowId {
        self.id
    }
}

impl fmt::Debug for Following {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Following({})", self.id)
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.link.is_none() {
            let followed = state.followed.remove(&self.id);
            drop(state);
            drop(followed);
            return;
        }
        // What it forked before the companion lets go of it has still to be told: the sink stays until that has happened.
        let uffd = state.followed.get_mut(&self.id).and_then(|followed| followed.uffd.take());
        if uffd.is_some() {
            state.outbox.push_back(Message::Unfollow(self.id));
            self.shared.flush(&mut state);
        }
        // To close it may take a while: the kernel waits for the lock of the address space.
        drop(state);
        drop(uffd);
    }
}

/// What the thread and everybody else share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Tells the thread to look at the state.
    wake: EventFd,
    program: Program,
    /// Something was told.
    news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Answers to [`Message::Tell`] that nobody has taken yet.
    told: BTreeSet<FollowId>,
    /// The companion; none while another one is being started, and after that was given up.
    link: Option<Arc<Link>>,
    followed: BTreeMap<FollowId, Followed>,
    /// To the companion.
    outbox: VecDeque<Message>,
    /// Why there is something in the outbox.
    waits_for: Option<Sent>,
    stopping: bool,
}

/// One that is followed. Sinks are others' code, also when they are dropped: that must not happen under the lock.
struct Followed {
    /// For the next companion. `None` when it was let go and the companion is about to confirm that.
    uffd: Option<Userfaultfd>,
    sink: Sink,
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
        // It fails if it was told 2^64 - 2 times and has not looked; then it will anyway.
        let _ = self.wake.write(1);
    }

    /// Sees to it that there is a companion. One that is new follows all that the one before did.
    fn revive(&self, state: &mut State) -> Result<(), StartError> {
        if state.link.is_none() {
            state.link = Some(Arc::new(Link::start(&self.program)?));
            let all = state.followed.iter().filter(|(_, followed)| followed.uffd.is_some());
            state.outbox = all.map(|(id, _)| Message::Follow(*id)).collect();
            self.flush(state);
            self.wake();
        }
        Ok(())
    }

    /// Sends what the socket has room for. The rest is sent by the thread.
    fn flush(&self, state: &mut State) {
        let before = state.waits_for.take();
        let Some(link) = state.link.as_ref() else { return };
        while let Some(message) = state.outbox.front() {
            let uffd = match message {
                Message::Follow(id) => match state.followed.get(id).and_then(|one| one.uffd.as_ref()) {
                    // Let go before the companion heard of it. It will hear of that.
                    None => {
                        state.outbox.pop_front();
                        continue;
                    }
                    some => some,
                },
                _ => None,
            };
            match wire::send(link.as_fd(), *message, uffd.map(|uffd| uffd.as_fd())) {
                Sent::Yes => state.outbox.pop_front(),
                // The thread is about to find that out, too.
                Sent::Gone => return,
                why => {
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
mod tests;
