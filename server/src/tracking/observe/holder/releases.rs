//! Userfaultfds that the holders of all users are to close. The close may wait for as long as a process lasts. Until it returns, the
//! user is charged for the address space, and this module counts it.
//!
//! ```text
//!             sent at once                          pipe ended
//!   dropped ----------------------------> closing -------------> (none)
//!      |                                     ^
//!      | that may wait      a thread         |
//!      +----------> unsent ------------------+
//! ```

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fdmap_proto::error_chain;
use fdmap_sys::uffd::Userfaultfd;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::charge::Charge;
use super::Holder;
use super::wire::{Control, SpaceId};
use crate::log_limit::LogLimit;

/// Userfaultfds of one user that are being closed. A user with so many can pass no more.
pub(crate) const MAX_CLOSING: usize = 4096;
/// Those of all users but root together, of each user at most [`MAX_CLOSING`].
const MAX_CLOSING_OF_USERS: usize = 16 * MAX_CLOSING;
/// Time between two looks for closes that have returned. With many in progress, a multiple.
const INTERVAL: Duration = Duration::from_millis(20);
const RELEASES_PER_INTERVAL: usize = 256;

static UNSENT: LogLimit = LogLimit::new();

#[derive(Debug, Default)]
pub(super) struct Releases(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    closing: Vec<Closing>,
    /// By user.
    unsent: HashMap<u32, UnsentReleases>,
    /// Number of the last one that was added to these.
    last_unsent: UnsentNumber,
    /// Userfaultfds that are not closed yet, by user.
    open: HashMap<u32, usize>,
    /// Users whose charges are being dropped.
    returning: Vec<u32>,
    /// A thread looks for those that have returned.
    has_thread: bool,
}

/// Numbers the userfaultfds of all users that could not be sent at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct UnsentNumber(u64);

/// Userfaultfds of one user that no holder has got.
#[derive(Debug, Default)]
struct UnsentReleases {
    /// In ascending order.
    waiting: VecDeque<(UnsentNumber, Release)>,
    /// A thread sends them.
    is_sending: bool,
    /// The one that the thread sends now.
    in_progress: Option<UnsentNumber>,
}

/// A userfaultfd to close.
#[derive(Debug)]
pub(super) struct Release {
    pub(super) id: SpaceId,
    pub(super) userfaultfd: Userfaultfd,
    /// The holder closes it when this pipe has ended.
    pub(super) barrier: Option<OwnedFd>,
    /// `None`: it was never tracked, or belongs to a child without a late harvest.
    pub(super) charge: Option<Charge>,
}

/// A userfaultfd that a holder closes.
#[derive(Debug)]
struct Closing {
    user: u32,
    /// A pipe, whose other end the holder closes after the userfaultfd. So it ends also when the holder has.
    closed: OwnedFd,
    charge: Option<Charge>,
}

impl Holder {
    /// Closes a userfaultfd, whose last copies may be this one and that of the holder: when its barrier has ended. Waits for nothing.
    pub(super) fn release(self: &Arc<Self>, release: Release) {
        let sent = self.send_release(release, |message, descriptors| {
            let Ok(state) = self.state.try_lock() else { return false };
            state.link.as_ref().is_some_and(|link| link.send_now(message, descriptors).is_ok())
        });
        if let Err(release) = sent
            && self.shared.releases.add_unsent(self.user, release)
        {
            self.start_sending();
        }
    }

    /// Starts the thread that sends userfaultfds of the user.
    pub(super) fn start_sending(self: &Arc<Self>) {
        let holder = Arc::clone(self);
        let started =
            std::thread::Builder::new().name("sender".to_owned()).spawn(move || holder.send_unsent());
        if started.is_err() {
            self.shared.releases.stop_sending(self.user, None);
        }
    }

    /// Sends userfaultfds. May start the holder, and waits while its queue is full.
    fn send_unsent(&self) {
        while let Some(release) = self.shared.releases.next_unsent(self.user) {
            let sent = self.send_release(release, |message, descriptors| {
                let mut state = self.lock();
                (0..2).any(|_| {
                    let sent = self.ensure(&mut state).and_then(|link| link.send(message, descriptors));
                    if let Err(error) = &sent {
                        tracing::debug!(user = self.user, error = error_chain(error), "a holder ended");
                        self.replace(&mut state, "ended");
                    }
                    sent.is_ok()
                })
            });
            if let Err(release) = sent {
                if let Some(omitted) = UNSENT.permit() {
                    let user = self.user;
                    tracing::warn!(
                        user,
                        omitted,
                        "a userfaultfd stays open, because no holder can be started"
                    );
                }
                // The close here might never return.
                self.shared.releases.stop_sending(self.user, Some(release));
                return;
            }
        }
    }

    /// Closes a userfaultfd here, when `send` has passed it to the holder.
    fn send_release(
        &self,
        release: Release,
        send: impl FnOnce(Control, &[BorrowedFd<'_>]) -> bool,
    ) -> Result<(), Release> {
        let pipe = || nix::unistd::pipe2(OFlag::O_CLOEXEC).ok();
        // The first one ends when this process has closed its copy, the second one when the holder has. Without descriptors for
        // them, the holder closes it at once, and the charge ends with this call.
        let (own, theirs) = (pipe(), pipe());
        let mut descriptors = vec![release.userfaultfd.as_fd()];
        descriptors.extend(theirs.as_ref().map(|(_, end)| end.as_fd()));
        descriptors.extend(own.as_ref().map(|(ended, _)| ended.as_fd()));
        descriptors.extend(release.barrier.as_ref().map(OwnedFd::as_fd));
        if !send(Control::Release(release.id, theirs.is_some()), &descriptors) {
            return Err(release);
        }
        let Release { userfaultfd, charge, .. } = release;
        // In this order.
        drop(userfaultfd);
        drop(own);
        if let Some((closed, _)) = theirs {
            self.shared.releases.begin(self.user, closed, charge);
        }
        Ok(())
    }
}

impl Releases {
    /// The holder of `user` closes the other end of `closed` when it has closed the userfaultfd.
    pub(super) fn begin(self: &Arc<Self>, user: u32, closed: OwnedFd, charge: Option<Charge>) {
        let mut state = self.lock();
        state.closing.push(Closing { user, closed, charge });
        state.count(user);
        if !state.has_thread {
            let its = Arc::clone(self);
            let started = std::thread::Builder::new().name("releases".to_owned()).spawn(move || its.watch());
            // Without a thread, the next call of this function starts one.
            state.has_thread = started.is_ok();
        }
    }

    /// Keeps a userfaultfd until a thread sends it. True if the caller is to start that thread.
    pub(super) fn add_unsent(&self, user: u32, release: Release) -> bool {
        let mut state = self.lock();
        state.last_unsent.0 += 1;
        let number = state.last_unsent;
        state.count(user);
        let unsent = state.unsent.entry(user).or_default();
        unsent.waiting.push_back((number, release));
        !std::mem::replace(&mut unsent.is_sending, true)
    }

    /// The users with userfaultfds that no thread sends. The caller is to start one for each of them.
    pub(super) fn resume(&self) -> Vec<u32> {
        let mut state = self.lock();
        let stopped = state.unsent.iter_mut().filter(|(_, unsent)| !unsent.is_sending);
        let resumed = stopped.map(|(user, unsent)| {
            unsent.is_sending = true;
            *user
        });
        resumed.collect()
    }

    /// The next userfaultfd that the thread of `user` sends. `None`: the thread ends.
    pub(super) fn next_unsent(&self, user: u32) -> Option<Release> {
        let mut state = self.lock();
        let of_user = state.unsent.get_mut(&user)?;
        let next = of_user.waiting.pop_front();
        of_user.in_progress = next.as_ref().map(|(number, _)| *number);
        match &next {
            Some(_) => state.uncount(user),
            None => drop(state.unsent.remove(&user)),
        }
        next.map(|(_, release)| release)
    }

    /// The thread of `user` ends, or was not started. `unsent`: what it could not send.
    pub(super) fn stop_sending(&self, user: u32, unsent: Option<Release>) {
        let mut state = self.lock();
        let Some(of_user) = state.unsent.get_mut(&user) else { return };
        of_user.is_sending = false;
        if let (Some(number), Some(release)) = (of_user.in_progress.take(), unsent) {
            of_user.waiting.push_front((number, release));
            state.count(user);
        }
    }

    pub(super) fn last_unsent(&self) -> UnsentNumber {
        self.lock().last_unsent
    }

    /// True if a thread sends userfaultfds of the user up to this number.
    pub(super) fn is_sending(&self, user: u32, number: UnsentNumber) -> bool {
        let state = self.lock();
        let of_user = state.unsent.get(&user).filter(|unsent| unsent.is_sending);
        let next = of_user.and_then(|unsent| {
            unsent.in_progress.or_else(|| unsent.waiting.front().map(|(number, _)| *number))
        });
        next.is_some_and(|next| next <= number)
    }

    /// True if threads send userfaultfds.
    pub(super) fn are_sending(&self) -> bool {
        self.lock().unsent.values().any(|unsent| unsent.is_sending)
    }

    /// Number of the user's userfaultfds that are not closed yet.
    #[cfg(test)]
    pub(super) fn count_of(&self, user: u32) -> usize {
        self.lock().open.get(&user).copied().unwrap_or(0)
    }

    /// True if the user is still charged for some of them.
    pub(super) fn has_charged(&self, user: u32) -> bool {
        let state = self.lock();
        state.returning.contains(&user)
            || state.unsent.get(&user).is_some_and(|unsent| unsent.is_sending)
            || state.closing.iter().any(|closing| closing.user == user && closing.charge.is_some())
    }

    /// True if the user can have no further userfaultfd closed: the user, or all users but root together, have too many.
    pub(super) fn is_full(&self, user: u32) -> bool {
        is_full(self.lock().open.iter().map(|(user, open)| (*user, *open)), user)
    }

    fn watch(&self) {
        let mut count = 0;
        loop {
            let rounds = u32::try_from(count / RELEASES_PER_INTERVAL).unwrap_or(u32::MAX).saturating_add(1);
            std::thread::sleep(INTERVAL.saturating_mul(rounds));
            let mut state = self.lock();
            let ended = take_ended(&mut state.closing);
            ended.iter().for_each(|closing| state.uncount(closing.user));
            state.returning = ended.iter().map(|closing| closing.user).collect();
            drop(state);
            // A charge takes the lock of its quota.
            drop(ended);
            let mut state = self.lock();
            state.returning.clear();
            count = state.closing.len();
            state.has_thread = count > 0;
            if !state.has_thread {
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics with the lock held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn count(&mut self, user: u32) {
        *self.open.entry(user).or_default() += 1;
    }

    fn uncount(&mut self, user: u32) {
        if let Entry::Occupied(mut open) = self.open.entry(user) {
            *open.get_mut() -= 1;
            if *open.get() == 0 {
                open.remove();
            }
        }
    }
}

/// `open`: users, and how many of their userfaultfds are not closed yet. Those of one user beyond [`MAX_CLOSING`] do not
/// count toward the limit of all users. Pure.
fn is_full(open: impl Iterator<Item = (u32, usize)>, user: u32) -> bool {
    let (mut own, mut of_users) = (0, 0);
    for (of, open) in open {
        own += if of == user { open } else { 0 };
        of_users += if of == 0 { 0 } else { open.min(MAX_CLOSING) };
    }
    own >= MAX_CLOSING || (user != 0 && of_users >= MAX_CLOSING_OF_USERS)
}

/// Removes those whose pipes have ended.
fn take_ended(closing: &mut Vec<Closing>) -> Vec<Closing> {
    let mut polled: Vec<_> =
        closing.iter().map(|one| PollFd::new(one.closed.as_fd(), PollFlags::empty())).collect();
    // After a failure none has ended: the next look finds them.
    let _ = poll(&mut polled, PollTimeout::ZERO);
    let ended: Vec<_> = polled.iter().map(|one| one.any() == Some(true)).collect();
    let mut ended = ended.into_iter();
    closing.extract_if(.., |_| ended.next() == Some(true)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::{FindCounter, HeldSpace, Holders, Worker};
    use super::*;

    #[test]
    fn charge_is_returned_when_the_holder_has_closed_the_userfaultfd() {
        let releases = Arc::new(Releases::default());
        let pipes = [(); 3].map(|()| nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap());
        let charged = Arc::new(());
        let mut theirs = Vec::new();
        for (user, (closed, end)) in [7, 7, 8].into_iter().zip(pipes) {
            releases.begin(user, closed, Some(Arc::clone(&charged) as Charge));
            theirs.push(end);
        }
        std::thread::sleep(4 * INTERVAL);
        assert_eq!((releases.count_of(7), releases.count_of(8)), (2, 1));
        assert!(releases.has_charged(8) && !releases.has_charged(9));
        assert_eq!(Arc::strong_count(&charged), 4);
        drop(theirs.remove(1));
        let until = |charges| {
            let began = Instant::now();
            while Arc::strong_count(&charged) != charges {
                assert!(began.elapsed() < Duration::from_secs(20), "{} charges", Arc::strong_count(&charged));
                std::thread::sleep(INTERVAL);
            }
        };
        until(3);
        assert_eq!((releases.count_of(7), releases.count_of(8)), (1, 1));
        drop(theirs);
        until(1);
        assert_eq!(releases.count_of(7), 0);
        assert!(!releases.is_full(7));
    }

    #[test]
    fn drop_waits_neither_for_the_lock_of_the_holder_nor_for_its_start() {
        const TIMEOUT: Duration = Duration::from_secs(20);
        let holders = Holders::new(Worker::Thread, FindCounter(Arc::new(|| None)));
        let holder = holders.of_user(7);
        // As long as another thread starts the holder, or waits for its queue.
        let state = holder.lock();
        let space = HeldSpace::new(Userfaultfd::create().unwrap(), Arc::clone(&holder));
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop(space);
            done.send(()).unwrap();
        });
        assert_eq!(is_done.recv_timeout(TIMEOUT), Ok(()));
        let last = holder.last_unsent();
        assert!(holder.is_sending(last) && holder.is_releasing());
        drop(state);
        let until = |what: &str, condition: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !condition() {
                assert!(began.elapsed() < TIMEOUT, "{what}");
                std::thread::sleep(INTERVAL);
            }
        };
        until("it is sent", &|| !holder.is_sending(last));
        until("it is closed", &|| holder.shared.releases.count_of(7) == 0);
        holders.wait_until_sent(Duration::ZERO);
    }

    #[test]
    fn userfaultfds_are_sent_in_order_and_kept_if_no_holder_can_be_started() {
        let releases = Releases::default();
        let release = || {
            let userfaultfd = Userfaultfd::create().unwrap();
            Release { id: SpaceId::draw(), userfaultfd, barrier: None, charge: None }
        };
        let added: Vec<_> = std::iter::repeat_with(release).take(2).collect();
        let ids: Vec<_> = added.iter().map(|release| release.id).collect();
        let starts: Vec<_> = added.into_iter().map(|release| releases.add_unsent(7, release)).collect();
        assert_eq!(starts, [true, false], "one thread sends them");
        let last = releases.last_unsent();
        assert!(releases.add_unsent(8, release()));
        let first = releases.next_unsent(7).unwrap();
        assert!(first.id == ids[0] && releases.is_sending(7, last));
        releases.stop_sending(7, Some(first));
        assert!(!releases.is_sending(7, last), "no thread sends them");
        assert_eq!((releases.count_of(7), releases.resume()), (2, vec![7]));
        let sent: Vec<_> = std::iter::from_fn(|| releases.next_unsent(7)).map(|release| release.id).collect();
        assert_eq!(sent, ids);
        assert!(!releases.is_sending(7, last) && releases.is_sending(8, releases.last_unsent()));
        assert!(!releases.is_sending(8, last), "it was added later");
    }

    #[test]
    fn user_and_all_users_but_root_are_limited() {
        // Users 1 to `users` have `each` userfaultfds that are not closed, root has one.
        let closing = |users: u32, each| (1..=users).map(move |user| (user, each)).chain([(0, 1)]);
        assert!(!is_full(closing(2, MAX_CLOSING - 1), 1));
        assert!(
            is_full(closing(1, MAX_CLOSING_OF_USERS), 1) && !is_full(closing(1, MAX_CLOSING_OF_USERS), 2)
        );
        assert!(is_full(closing(2, MAX_CLOSING), 1) && !is_full(closing(2, MAX_CLOSING), 3));
        assert!(!is_full(closing(17, MAX_CLOSING_OF_USERS / 17), 18));
        assert!(is_full(closing(16, MAX_CLOSING), 18) && !is_full(closing(16, MAX_CLOSING), 0));
    }
}
