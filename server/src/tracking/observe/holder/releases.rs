//! Userfaultfds that the holders of all users are to close. The close may wait for as long as a process lasts. Until it returns, the
//! user is charged for the address space, and this module counts it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fdmap_sys::uffd::Userfaultfd;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::charge::Charge;
use super::wire::SpaceId;

/// Userfaultfds of one user that are being closed. A client with so many can pass no more.
pub(crate) const MAX_CLOSING: usize = 4096;
/// Those of all users but root together.
const MAX_CLOSING_OF_USERS: usize = 16 * MAX_CLOSING;
/// Time between two looks for closes that have returned. With many in progress, a multiple.
const INTERVAL: Duration = Duration::from_millis(20);
const RELEASES_PER_INTERVAL: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Releases(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    closing: Vec<Closing>,
    unsent: Vec<(u32, Release)>,
    /// Users whose charges are being dropped.
    returning: Vec<u32>,
    /// A thread looks for those that have returned.
    has_thread: bool,
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

impl Releases {
    /// The holder of `user` closes the other end of `closed` when it has closed the userfaultfd.
    pub(super) fn begin(self: &Arc<Self>, user: u32, closed: OwnedFd, charge: Option<Charge>) {
        let mut state = self.lock();
        state.closing.push(Closing { user, closed, charge });
        if !state.has_thread {
            let its = Arc::clone(self);
            let started = std::thread::Builder::new().name("releases".to_owned()).spawn(move || its.watch());
            // Without a thread, the next call of this function starts one.
            state.has_thread = started.is_ok();
        }
    }

    /// No holder could be started that closes the userfaultfd.
    pub(super) fn keep(&self, user: u32, release: Release) {
        self.lock().unsent.push((user, release));
    }

    /// Takes what no holder could be started for.
    pub(super) fn take_unsent(&self) -> Vec<(u32, Release)> {
        std::mem::take(&mut self.lock().unsent)
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.lock().unsent.is_empty()
    }

    /// Number of the user's userfaultfds that are not closed yet.
    #[cfg(test)]
    pub(super) fn count_of(&self, user: u32) -> usize {
        let state = self.lock();
        let closing = state.closing.iter().filter(|closing| closing.user == user).count();
        closing + state.unsent.iter().filter(|(of, _)| *of == user).count()
    }

    /// True if the user is still charged for some of them.
    pub(super) fn has_charged(&self, user: u32) -> bool {
        let state = self.lock();
        state.returning.contains(&user)
            || state.closing.iter().any(|closing| closing.user == user && closing.charge.is_some())
    }

    /// True if the user can have no further userfaultfd closed: the user, or all users but root together, have too many.
    pub(super) fn is_full(&self, user: u32) -> bool {
        let state = self.lock();
        let users = state.closing.iter().map(|closing| closing.user);
        is_full(users.chain(state.unsent.iter().map(|(user, _)| *user)), user)
    }

    fn watch(&self) {
        let mut count = 0;
        loop {
            let rounds = u32::try_from(count / RELEASES_PER_INTERVAL).unwrap_or(u32::MAX).saturating_add(1);
            std::thread::sleep(INTERVAL.saturating_mul(rounds));
            let mut state = self.lock();
            let ended = take_ended(&mut state.closing);
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

/// `users`: one for each userfaultfd that is not closed yet. Pure.
fn is_full(users: impl Iterator<Item = u32> + Clone, user: u32) -> bool {
    users.clone().filter(|of| *of == user).count() >= MAX_CLOSING
        || (user != 0 && users.filter(|of| *of != 0).count() >= MAX_CLOSING_OF_USERS)
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
    use std::iter::repeat_n;
    use std::time::Instant;

    use nix::fcntl::OFlag;

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
    fn user_and_all_users_but_root_are_limited() {
        // Users 1 to `users` have `each` userfaultfds that are not closed, root has one.
        let closing = |users: u32, each| (1..=users).flat_map(move |user| repeat_n(user, each)).chain([0]);
        assert!(!is_full(closing(2, MAX_CLOSING - 1), 1));
        assert!(is_full(closing(2, MAX_CLOSING), 1) && !is_full(closing(2, MAX_CLOSING), 3));
        assert!(!is_full(closing(17, MAX_CLOSING_OF_USERS / 17), 18));
        assert!(is_full(closing(16, MAX_CLOSING), 18) && !is_full(closing(16, MAX_CLOSING), 0));
    }
}
