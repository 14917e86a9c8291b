//! Turns of the searches of one kind: some searches run at the same time, and each user has a share of them.
//!
//! Of those that wait, the next one is of a user with the fewest running searches. So the searches of one user
//! delay no other user, and those of several users delay it until one of them ends.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The user for whose files a search runs. `None`: an administrator, or all users.
pub(crate) type SearchUser = Option<u32>;

/// Limits on searches that run at the same time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SearchLimits {
    pub(crate) all: usize,
    /// Of one user. An administrator has no limit of its own.
    pub(crate) per_user: usize,
}

#[derive(Debug)]
pub(super) struct SearchTurns {
    turns: Mutex<Turns>,
    ended: Condvar,
}

/// The running and the waiting searches. Pure.
#[derive(Debug)]
struct Turns {
    limits: SearchLimits,
    running: Vec<SearchUser>,
    /// The numbers and users of the waiting searches, in the order in which they came.
    waiting: VecDeque<(u64, SearchUser)>,
    last: u64,
}

impl SearchTurns {
    pub(super) const fn new(limits: SearchLimits) -> Self {
        let turns = Turns { limits, running: Vec::new(), waiting: VecDeque::new(), last: 0 };
        Self { turns: Mutex::new(turns), ended: Condvar::new() }
    }

    /// Calls `search` when it is its turn. `None`: that was not before the deadline.
    pub(super) fn run<R>(
        &self,
        user: SearchUser,
        deadline: Instant,
        search: impl FnOnce() -> R,
    ) -> Option<R> {
        if !self.wait(user, deadline) {
            return None;
        }
        let result = catch_unwind(AssertUnwindSafe(search));
        self.lock().end(user);
        self.ended.notify_all();
        Some(result.unwrap_or_else(|panic| resume_unwind(panic)))
    }

    fn wait(&self, user: SearchUser, deadline: Instant) -> bool {
        let mut turns = self.lock();
        let number = turns.add(user);
        loop {
            let starts = turns.start(number);
            let left = deadline.saturating_duration_since(Instant::now());
            if starts || left.is_zero() {
                turns.waiting.retain(|(waiting, _)| *waiting != number);
                drop(turns);
                // Another one is the first now, and may have a turn, too.
                self.ended.notify_all();
                return starts;
            }
            turns = self.ended.wait_timeout(turns, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Turns> {
        // No code panics while it holds the lock.
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turns {
    fn add(&mut self, user: SearchUser) -> u64 {
        self.last += 1;
        self.waiting.push_back((self.last, user));
        self.last
    }

    /// True if the waiting search with this number starts: it is the first one of the users with the fewest running searches.
    fn start(&mut self, number: u64) -> bool {
        let Some((first, user)) = self.first() else { return false };
        if first == number {
            self.running.push(user);
        }
        first == number
    }

    fn end(&mut self, user: SearchUser) {
        if let Some(at) = self.running.iter().position(|running| *running == user) {
            self.running.swap_remove(at);
        }
    }

    fn first(&self) -> Option<(u64, SearchUser)> {
        let waiting = self.waiting.iter().copied().filter(|(_, user)| self.has_turn_for(*user));
        waiting.min_by_key(|(number, user)| (self.running_of(*user), *number))
    }

    fn has_turn_for(&self, user: SearchUser) -> bool {
        self.running.len() < self.limits.all
            && (user.is_none() || self.running_of(user) < self.limits.per_user)
    }

    /// 0 for an administrator, who so comes before users with running searches.
    fn running_of(&self, user: SearchUser) -> usize {
        user.map_or(0, |_| self.running.iter().filter(|running| **running == user).count())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const LIMITS: SearchLimits = SearchLimits { all: 3, per_user: 2 };

    /// Searches of `users` start in the order of the result, as long as none ends.
    fn starts(turns: &mut Turns, users: &[SearchUser]) -> Vec<SearchUser> {
        for user in users {
            turns.add(*user);
        }
        let next = |turns: &mut Turns| {
            let (number, user) = turns.first()?;
            assert!(turns.start(number));
            turns.waiting.retain(|(waiting, _)| *waiting != number);
            Some(user)
        };
        std::iter::from_fn(|| next(turns)).collect()
    }

    #[test]
    fn searches_start_in_turns_of_users_up_to_their_limits() {
        let (one, two, root) = (Some(1), Some(2), None);
        for (running, waiting, started) in [
            (vec![], vec![one, one, one, two], vec![one, two, one]),
            (vec![], vec![one, one, one], vec![one, one]),
            (vec![one, one], vec![one, two], vec![two]),
            (vec![one], vec![one, two, two], vec![two, one]),
            (vec![one, one, two], vec![one, two, root], vec![]),
            (vec![one, two], vec![one, two, root], vec![root]),
            (vec![], vec![root; 4], vec![root; 3]),
        ] {
            let mut turns =
                Turns { limits: LIMITS, running: running.clone(), waiting: VecDeque::new(), last: 0 };
            assert_eq!(starts(&mut turns, &waiting), started, "{waiting:?} beside {running:?}");
            // Each end lets one of those start that wait.
            for user in running.iter().chain(&started) {
                turns.end(*user);
                let next = starts(&mut turns, &[]);
                assert!(next.len() <= 1, "{next:?} after the end of one of {user:?}");
            }
        }
    }

    #[test]
    fn search_that_waits_starts_after_the_end_of_another_one_or_never() {
        let turns = SearchTurns::new(SearchLimits { all: 1, per_user: 1 });
        std::thread::scope(|scope| {
            let waiting = turns.run(Some(1), Instant::now() + LONG, || {
                assert_eq!(turns.run(Some(2), Instant::now(), || ()), None);
                assert_eq!(turns.run(Some(2), Instant::now() + Duration::from_millis(10), || ()), None);
                let waiting = scope.spawn(|| turns.run(Some(2), Instant::now() + LONG, || 7));
                while turns.lock().waiting.is_empty() {
                    std::thread::yield_now();
                }
                waiting
            });
            assert_eq!(waiting.unwrap().join().unwrap(), Some(7));
        });
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            turns.run(Some(1), Instant::now() + LONG, || panic!("planned panic"))
        }));
        assert!(panicked.is_err());
        assert_eq!(turns.run(Some(1), Instant::now() + LONG, || 8), Some(8));
        let turns = turns.lock();
        assert_eq!((turns.running.len(), turns.waiting.len()), (0, 0));
    }
}
