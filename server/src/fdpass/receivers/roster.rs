//! The receivers of one user, and which of them gets the next connection. Pure.
//!
//! ```text
//!           start              blocked             reaped
//!   (none) -------> available ----------> blocked --------> (none)
//!                    |  ^                  |  ^               ^
//!                    |  +- answers again --+  | late          |
//!                    |                        |    reaped     |
//!                    +------- ends -------> ending -----------+
//! ```
//!
//! A receiver runs as long as one of its sessions, also when another one has replaced it. So one that answers again is available again,
//! and another one is started only while none is. Otherwise a user whose descriptors block each receiver for a second would have one
//! for each session.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Receivers of one user that run. While all of them are blocked or end, further connections of the user are refused.
pub(super) const MAX_RECEIVERS_PER_USER: usize = 4;
/// Receivers of all users but root that are blocked. With so many, users without an available one get none.
pub(super) const MAX_BLOCKED_OF_USERS: usize = 16 * MAX_RECEIVERS_PER_USER;

/// No further receiver can be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    User,
    AllUsers,
}

/// The receivers of one user, each of which the caller knows as a `P`.
#[derive(Debug)]
pub(super) struct Roster<P> {
    /// The last one gets the next connection.
    available: Vec<Arc<P>>,
    /// Those that are killed, or have ended, and were not blocked.
    ending: Vec<Arc<P>>,
    /// Those that were started and are not reaped.
    running: usize,
    blocked: Blocked,
}

/// Counts the receivers of a user that are blocked.
#[derive(Debug)]
struct Blocked {
    count: usize,
    /// `None`: the user is root.
    of_users: Option<Arc<AtomicUsize>>,
}

impl<P> Roster<P> {
    /// `of_users`: those of all users but root; `None` for root.
    pub(super) const fn new(of_users: Option<Arc<AtomicUsize>>) -> Self {
        Self {
            available: Vec::new(),
            ending: Vec::new(),
            running: 0,
            blocked: Blocked { count: 0, of_users },
        }
    }

    /// The receiver that gets the next connection.
    pub(super) fn current(&self) -> Option<&Arc<P>> {
        self.available.last()
    }

    pub(super) fn is_current(&self, receiver: &Arc<P>) -> bool {
        self.current().is_some_and(|current| Arc::ptr_eq(current, receiver))
    }

    pub(super) fn is_available(&self, receiver: &Arc<P>) -> bool {
        self.available.iter().any(|available| Arc::ptr_eq(available, receiver))
    }

    /// Receivers that run.
    pub(super) const fn running(&self) -> usize {
        self.running
    }

    /// Fails if no further receiver may be started.
    pub(super) fn check(&self) -> Result<(), Full> {
        if self.running >= MAX_RECEIVERS_PER_USER {
            return Err(Full::User);
        }
        let of_users = self.blocked.of_users.as_ref();
        if of_users.is_some_and(|of_users| of_users.load(Ordering::Relaxed) >= MAX_BLOCKED_OF_USERS) {
            return Err(Full::AllUsers);
        }
        Ok(())
    }

    /// A receiver was started.
    pub(super) fn add(&mut self, receiver: Arc<P>) {
        self.running += 1;
        self.available.push(receiver);
        self.update_blocked();
    }

    /// A receiver is blocked, and gets no connections.
    pub(super) fn block(&mut self, receiver: &Arc<P>) {
        self.forget(receiver);
        self.update_blocked();
    }

    /// A receiver that is not blocked is to end, or has ended, and gets no connections.
    pub(super) fn end(&mut self, receiver: &Arc<P>) {
        self.forget(receiver);
        self.ending.push(Arc::clone(receiver));
        self.update_blocked();
    }

    fn forget(&mut self, receiver: &Arc<P>) {
        for receivers in [&mut self.available, &mut self.ending] {
            receivers.retain(|known| !Arc::ptr_eq(known, receiver));
        }
    }

    /// A receiver answers again. It gets connections when the current one gets none.
    pub(super) fn restore(&mut self, receiver: &Arc<P>) {
        if !self.is_available(receiver) {
            self.forget(receiver);
            self.available.insert(0, Arc::clone(receiver));
        }
        self.update_blocked();
    }

    /// A receiver that gets no connections is reaped.
    pub(super) fn reaped(&mut self, receiver: &Arc<P>) {
        self.forget(receiver);
        self.running -= 1;
        self.update_blocked();
    }

    fn update_blocked(&mut self) {
        self.blocked.set(self.running - self.available.len() - self.ending.len());
    }
}

impl Blocked {
    fn set(&mut self, count: usize) {
        let before = std::mem::replace(&mut self.count, count);
        if let Some(of_users) = &self.of_users {
            if count >= before {
                of_users.fetch_add(count - before, Ordering::Relaxed);
            } else {
                of_users.fetch_sub(before - count, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Roster = super::Roster<usize>;

    /// The receiver of the next connection, which is started if there is none.
    fn connect(roster: &mut Roster) -> Option<Arc<usize>> {
        if roster.current().is_none() {
            roster.check().ok()?;
            roster.add(Arc::new(roster.running()));
        }
        roster.current().cloned()
    }

    #[test]
    fn user_whose_receivers_are_blocked_in_turn_has_a_bounded_number_of_them() {
        let of_users = Arc::new(AtomicUsize::new(0));
        let mut roster = Roster::new(Some(Arc::clone(&of_users)));
        let mut blocked = Vec::new();
        for round in 0..256 {
            let receiver = connect(&mut roster).expect("one is available, or may be started");
            roster.block(&receiver);
            blocked.push(receiver);
            if blocked.len() == MAX_RECEIVERS_PER_USER {
                assert_eq!(roster.check(), Err(Full::User), "{round}");
                roster.restore(&blocked.remove(0));
                assert_eq!(of_users.load(Ordering::Relaxed), MAX_RECEIVERS_PER_USER - 1);
            }
        }
        assert_eq!(roster.running(), MAX_RECEIVERS_PER_USER);
        let last = roster.current().cloned().unwrap();
        for receiver in blocked.iter().chain([&last]) {
            roster.reaped(receiver);
        }
        assert_eq!((roster.running(), of_users.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn receiver_that_answers_again_takes_no_connection_from_the_current_one() {
        let mut roster = Roster::new(None);
        let first = connect(&mut roster).unwrap();
        roster.block(&first);
        let second = connect(&mut roster).unwrap();
        roster.restore(&first);
        roster.restore(&first);
        assert!(roster.is_current(&second) && roster.is_available(&first));
        roster.block(&second);
        assert!(Arc::ptr_eq(&connect(&mut roster).unwrap(), &first));
        roster.block(&first);
        assert!(roster.current().is_none());
        assert_eq!(roster.running(), 2);
    }

    #[test]
    fn blocked_receivers_of_all_users_but_root_are_limited() {
        let of_users = Arc::new(AtomicUsize::new(0));
        let of_user = || Roster::new(Some(Arc::clone(&of_users)));
        let mut users: Vec<_> = std::iter::repeat_with(of_user).take(MAX_BLOCKED_OF_USERS).collect();
        for roster in &mut users {
            assert_eq!(roster.check(), Ok(()));
            let receiver = connect(roster).unwrap();
            roster.block(&receiver);
        }
        assert_eq!(of_user().check(), Err(Full::AllUsers));
        assert_eq!(Roster::new(None).check(), Ok(()));
        // Those that only end count no more, unless they are late.
        let ends = Arc::new(0);
        users[0].reaped(&Arc::new(0));
        users[0].add(Arc::clone(&ends));
        users[0].end(&ends);
        assert_eq!((users[0].current(), of_user().check()), (None, Ok(())));
        users[0].block(&ends);
        assert_eq!(of_user().check(), Err(Full::AllUsers));
        users[0].reaped(&ends);
        assert_eq!(of_user().check(), Ok(()));
    }
}
