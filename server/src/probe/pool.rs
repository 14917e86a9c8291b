//! A pool of values that one thread at a time can use. All are created at once: later the process lacks the capabilities.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Values, each used by one thread at a time. Waiting threads get them in the order in which they came.
#[derive(Debug)]
pub(super) struct Pool<T> {
    idle: Mutex<Idle<T>>,
    returned: Condvar,
    /// Number of values, idle or in use.
    count: usize,
}

#[derive(Debug)]
struct Idle<T> {
    values: Vec<T>,
    /// The numbers of the waiting threads.
    waiting: VecDeque<u64>,
    next: u64,
}

impl<T> Pool<T> {
    /// A pool of `first` and of values that `create` makes, in a thread each: `max_values` in all, or fewer if it returns `None`.
    pub(super) fn new(first: T, max_values: usize, create: impl Fn() -> Option<T> + Sync) -> Self
    where
        T: Send,
    {
        let mut values = vec![first];
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..max_values).map(|_| scope.spawn(&create)).collect();
            values.extend(others.into_iter().filter_map(|other| other.join().ok().flatten()));
        });
        let count = values.len();
        let idle = Idle { values, waiting: VecDeque::new(), next: 0 };
        Self { idle: Mutex::new(idle), returned: Condvar::new(), count }
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Calls `work` with a value, and waits for one if all are in use. A value whose `work` panicked is used again.
    pub(super) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        // Without a deadline the first attempt ends with a value.
        let value = loop {
            if let Some(value) = self.take(None) {
                break value;
            }
        };
        self.use_and_return(value, work)
    }

    /// Calls `work` with a value. `None`: until the deadline, all values are in use, or other threads wait.
    pub(super) fn with_until<R>(&self, deadline: Instant, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        let value = self.take(Some(deadline))?;
        Some(self.use_and_return(value, work))
    }

    /// Calls `work` with a value. `None`: all values are in use, or other threads wait.
    pub(super) fn with_idle<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut idle = self.lock();
        let value = if idle.waiting.is_empty() { idle.values.pop() } else { None };
        drop(idle);
        Some(self.use_and_return(value?, work))
    }

    /// Waits for a value; `None`: until the deadline there was none for this thread.
    fn take(&self, deadline: Option<Instant>) -> Option<T> {
        let mut idle = self.lock();
        let number = idle.wait();
        loop {
            let value = idle.take(number);
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if value.is_some() || left.is_some_and(|left| left.is_zero()) {
                idle.waiting.retain(|waiting| *waiting != number);
                drop(idle);
                // Another thread is the first now, and may have a value, too.
                self.returned.notify_all();
                return value;
            }
            idle = match left {
                Some(left) => {
                    self.returned.wait_timeout(idle, left).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.returned.wait(idle).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn use_and_return<R>(&self, mut value: T, work: impl FnOnce(&mut T) -> R) -> R {
        let result = catch_unwind(AssertUnwindSafe(|| work(&mut value)));
        self.lock().values.push(value);
        self.returned.notify_all();
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn lock(&self) -> MutexGuard<'_, Idle<T>> {
        // No code panics while it holds the lock.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Idle<T> {
    fn wait(&mut self) -> u64 {
        self.next += 1;
        self.waiting.push_back(self.next);
        self.next
    }

    /// A value for the waiting thread with this number, if it is the first.
    fn take(&mut self, number: u64) -> Option<T> {
        if self.waiting.front() == Some(&number) { self.values.pop() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn users_never_exceed_the_maximum() {
        let pool = Pool::new((), 2, || Some(()));
        let (users, max) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    pool.with(|()| {
                        max.fetch_max(users.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::yield_now();
                        users.fetch_sub(1, Ordering::SeqCst);
                    });
                });
            }
        });
        assert!((1..=2).contains(&max.into_inner()));
    }

    #[test]
    fn values_are_waited_for_in_turn_until_the_deadline() {
        const WAIT: Duration = Duration::from_secs(20);
        let pool = Pool::new((), 1, || None);
        let order = Mutex::new(Vec::new());
        let waits = |count: usize| {
            while pool.lock().waiting.len() < count {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            pool.with(|()| {
                assert_eq!(pool.with_until(Instant::now(), |()| ()), None);
                assert_eq!(pool.with_idle(|()| ()), None);
                for number in 0..3 {
                    let (pool, order) = (&pool, &order);
                    let push = move |(): &mut ()| order.lock().unwrap().push(number);
                    scope.spawn(move || {
                        assert_eq!(pool.with_until(Instant::now() + WAIT, push), Some(()));
                    });
                    waits(usize::try_from(number).unwrap() + 1);
                }
                assert_eq!(pool.with_until(Instant::now() + Duration::from_millis(10), |()| ()), None);
                waits(3);
            });
        });
        assert_eq!(*order.lock().unwrap(), [0, 1, 2]);
        assert_eq!(pool.with_idle(|()| 5), Some(5));
        assert_eq!(pool.lock().waiting.len(), 0);
    }

    #[test]
    fn values_that_cannot_be_created_are_omitted() {
        let next = AtomicUsize::new(1);
        let even = || Some(next.fetch_add(1, Ordering::SeqCst)).filter(|value| value % 2 == 0);
        assert_eq!(Pool::new(0, 6, even).count(), 3);
        assert_eq!(Pool::new(0, 1, || None).count(), 1);
    }

    #[test]
    fn value_of_a_panicked_user_is_used_again() {
        let pool = Pool::new(1, 1, || None);
        let panicked = catch_unwind(AssertUnwindSafe(|| pool.with(|_| panic!("planned panic"))));
        assert!(panicked.is_err());
        assert_eq!(pool.with(|value| *value), 1);
    }
}
