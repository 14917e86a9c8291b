//! Things that one scan at a time can use, made as they are needed.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Up to `most` things, each lent to one user at a time.
#[derive(Debug)]
pub(super) struct Pool<T> {
    inner: Mutex<Inner<T>>,
    returned: Condvar,
    most: usize,
}

#[derive(Debug)]
struct Inner<T> {
    idle: Vec<T>,
    /// Idle or lent.
    made: usize,
}

impl<T> Pool<T> {
    /// With one thing that is there already.
    pub(super) fn new(first: T, most: usize) -> Self {
        let inner = Inner { idle: vec![first], made: 1 };
        Self { inner: Mutex::new(inner), returned: Condvar::new(), most }
    }

    /// Things that can be lent at once.
    pub(super) const fn most(&self) -> usize {
        self.most
    }

    /// Lends a thing to `work`, waiting for one if as many as there may be are lent. A thing whose user panics is not
    /// lent again.
    ///
    /// # Errors
    /// `make`'s, if a thing had to be made.
    pub(super) fn with<R, E>(
        &self,
        make: impl FnOnce() -> Result<T, E>,
        work: impl FnOnce(&mut T) -> R,
    ) -> Result<R, E> {
        let idle = self.take_or_reserve();
        let place = Place { pool: self };
        let mut thing = match idle {
            Some(thing) => thing,
            None => make()?,
        };
        let result = work(&mut thing);
        self.lock().idle.push(thing);
        self.returned.notify_one();
        std::mem::forget(place);
        Ok(result)
    }

    /// An idle thing, or `None` and the right to make one.
    fn take_or_reserve(&self) -> Option<T> {
        let mut inner = self.lock();
        loop {
            if let Some(thing) = inner.idle.pop() {
                return Some(thing);
            }
            if inner.made < self.most {
                inner.made += 1;
                return None;
            }
            inner = self.returned.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        // Nothing panics while it is held.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place among the things made, given up on drop.
struct Place<'a, T> {
    pool: &'a Pool<T>,
}

impl<T> Drop for Place<'_, T> {
    fn drop(&mut self) {
        self.pool.lock().made -= 1;
        self.pool.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn no_more_are_lent_than_may_be() {
        let pool = Pool::new((), 2);
        let (lent, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    pool.with(
                        || Ok::<_, ()>(()),
                        |()| {
                            most.fetch_max(lent.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                            std::thread::yield_now();
                            lent.fetch_sub(1, Ordering::SeqCst);
                        },
                    )
                });
            }
        });
        assert!((1..=2).contains(&most.into_inner()));
    }

    #[test]
    fn place_of_a_panicked_or_failed_user_is_free_again() {
        let pool = Pool::new(1, 1);
        let panicked =
            catch_unwind(AssertUnwindSafe(|| pool.with(|| Ok::<_, ()>(2), |_| panic!("as planned"))));
        assert!(panicked.is_err());
        assert_eq!(pool.with(|| Err::<i32, _>("no"), |thing| *thing), Err("no"));
        assert_eq!(pool.with(|| Ok::<_, ()>(3), |thing| *thing), Ok(3));
        assert_eq!(pool.with(|| Ok::<_, ()>(4), |thing| *thing), Ok(3), "it is used again");
    }
}
