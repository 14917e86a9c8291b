//! A pool of values that one scan at a time can use, created on demand.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Up to `max_values` values, each used by one thread at a time.
#[derive(Debug)]
pub(super) struct Pool<T> {
    inner: Mutex<Inner<T>>,
    returned: Condvar,
    max_values: usize,
}

#[derive(Debug)]
struct Inner<T> {
    idle: Vec<T>,
    /// Number of existing values, idle or in use.
    count: usize,
}

impl<T> Pool<T> {
    pub(super) fn new(first: T, max_values: usize) -> Self {
        let inner = Inner { idle: vec![first], count: 1 };
        Self { inner: Mutex::new(inner), returned: Condvar::new(), max_values }
    }

    pub(super) const fn max_values(&self) -> usize {
        self.max_values
    }

    /// Calls `work` with an idle or new value, and waits for one if all are in use. A value is dropped if `work`
    /// panics.
    ///
    /// # Errors
    /// The error of `create`, if a value had to be created.
    pub(super) fn with<R, E>(
        &self,
        create: impl FnOnce() -> Result<T, E>,
        work: impl FnOnce(&mut T) -> R,
    ) -> Result<R, E> {
        let idle = self.take_or_reserve();
        let reservation = Reservation { pool: self };
        let mut value = match idle {
            Some(value) => value,
            None => create()?,
        };
        let result = work(&mut value);
        self.lock().idle.push(value);
        self.returned.notify_one();
        std::mem::forget(reservation);
        Ok(result)
    }

    /// Returns an idle value, or reserves a new one and returns `None`.
    fn take_or_reserve(&self) -> Option<T> {
        let mut inner = self.lock();
        loop {
            if let Some(value) = inner.idle.pop() {
                return Some(value);
            }
            if inner.count < self.max_values {
                inner.count += 1;
                return None;
            }
            inner = self.returned.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        // No code panics while it holds the lock.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reserved value, which is released on drop.
struct Reservation<'a, T> {
    pool: &'a Pool<T>,
}

impl<T> Drop for Reservation<'_, T> {
    fn drop(&mut self) {
        self.pool.lock().count -= 1;
        self.pool.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn users_never_exceed_the_maximum() {
        let pool = Pool::new((), 2);
        let (users, max) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    pool.with(
                        || Ok::<_, ()>(()),
                        |()| {
                            max.fetch_max(users.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                            std::thread::yield_now();
                            users.fetch_sub(1, Ordering::SeqCst);
                        },
                    )
                });
            }
        });
        assert!((1..=2).contains(&max.into_inner()));
    }

    #[test]
    fn panic_and_error_release_the_reservation() {
        let pool = Pool::new(1, 1);
        let panicked =
            catch_unwind(AssertUnwindSafe(|| pool.with(|| Ok::<_, ()>(2), |_| panic!("planned panic"))));
        assert!(panicked.is_err());
        assert_eq!(pool.with(|| Err::<i32, _>("no"), |value| *value), Err("no"));
        assert_eq!(pool.with(|| Ok::<_, ()>(3), |value| *value), Ok(3));
        assert_eq!(pool.with(|| Ok::<_, ()>(4), |value| *value), Ok(3), "the value is reused");
    }
}
