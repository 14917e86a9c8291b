//! A pool of values that one thread at a time can use. All are created at once: later the process lacks the capabilities.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Values, each used by one thread at a time.
#[derive(Debug)]
pub(super) struct Pool<T> {
    idle: Mutex<Vec<T>>,
    returned: Condvar,
    /// Number of values, idle or in use.
    count: usize,
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
        Self { idle: Mutex::new(values), returned: Condvar::new(), count }
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Calls `work` with a value, and waits for one if all are in use. A value of which `work` panicked is used again.
    pub(super) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        self.use_and_return(self.take(), work)
    }

    /// The same, but `None` if all values are in use.
    pub(super) fn with_idle<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        let value = self.lock().pop()?;
        Some(self.use_and_return(value, work))
    }

    fn use_and_return<R>(&self, mut value: T, work: impl FnOnce(&mut T) -> R) -> R {
        let result = catch_unwind(AssertUnwindSafe(|| work(&mut value)));
        self.lock().push(value);
        self.returned.notify_one();
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn take(&self) -> T {
        let mut idle = self.lock();
        loop {
            if let Some(value) = idle.pop() {
                return value;
            }
            idle = self.returned.wait(idle).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<T>> {
        // No code panics while it holds the lock.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

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
