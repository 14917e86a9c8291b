//! Entries for operations or calls in progress, in the order in which they began.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// An entry that lasts longer is slow.
pub(super) const SLOW: Duration = Duration::from_secs(1);

pub(super) struct List<T>(Mutex<Entries<T>>);

struct Entries<T> {
    /// The number of the next entry.
    next: u64,
    by_number: BTreeMap<u64, Arc<Entry<T>>>,
}

pub(super) struct Entry<T> {
    pub(super) began: Instant,
    reported: AtomicBool,
    pub(super) value: T,
}

/// An entry of a list until this is dropped.
pub(super) struct Listed<T: 'static> {
    list: &'static List<T>,
    number: u64,
    pub(super) entry: Arc<Entry<T>>,
}

impl<T> List<T> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Entries { next: 0, by_number: BTreeMap::new() }))
    }

    pub(super) fn add(&'static self, value: T) -> Listed<T> {
        let mut entries = self.lock();
        let number = entries.next;
        entries.next += 1;
        // With the lock: the order of the numbers is that of the times.
        let entry = Arc::new(Entry { began: Instant::now(), reported: AtomicBool::new(false), value });
        entries.by_number.insert(number, Arc::clone(&entry));
        Listed { list: self, number, entry }
    }

    /// Those that are slow at `now` and were not reported, oldest first.
    pub(super) fn slow_since(&self, now: Instant) -> Vec<Arc<Entry<T>>> {
        let is_slow = |entry: &&Arc<Entry<T>>| now.saturating_duration_since(entry.began) >= SLOW;
        let entries = self.lock();
        let slow = entries.by_number.values().take_while(is_slow);
        slow.filter(|entry| !entry.reported.load(Ordering::Relaxed)).map(Arc::clone).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Entries<T>> {
        // No code panics with the lock held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Entry<T> {
    pub(super) fn set_reported(&self) {
        self.reported.store(true, Ordering::Relaxed);
    }
}

impl<T> Listed<T> {
    /// Its time until now, if that is slow.
    pub(super) fn slow(&self) -> Option<Duration> {
        Some(self.entry.began.elapsed()).filter(|after| *after >= SLOW)
    }
}

impl<T> Drop for Listed<T> {
    fn drop(&mut self) {
        self.list.lock().by_number.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_listed_in_their_order_until_they_are_reported_or_end() {
        static LIST: List<char> = List::new();
        let slow = |now| LIST.slow_since(now).iter().map(|entry| entry.value).collect::<String>();
        let entries = ['a', 'b', 'c', 'd'].map(|value| LIST.add(value));
        assert_eq!(slow(Instant::now()), "");
        assert!(entries.iter().all(|entry| entry.slow().is_none()));
        let later = Instant::now() + SLOW;
        entries[1].entry.set_reported();
        assert_eq!(slow(later), "acd");
        let [a, b, c, d] = entries;
        drop((c, a));
        assert_eq!(slow(later), "d");
        drop((b, d));
        assert_eq!(slow(later), "");
    }
}
