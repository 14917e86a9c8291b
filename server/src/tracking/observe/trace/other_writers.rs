//! Threads that made calls which may have written to a followed file without naming it: by path, or through another file.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

use super::{Thread, WriteTracer};

/// The map has room for 16384 threads. Beyond this number, all are forgotten.
const MAX_REMEMBERED: usize = 12288;

#[derive(Debug)]
pub(super) struct OtherWriters {
    /// The map `calls_on_any`: the threads that are in a call which may concern any followed file.
    pub(super) calling: MapHandle,
    /// The map `requests_on_any`: the io_uring requests in progress that may concern any followed file.
    pub(super) requests: MapHandle,
    /// The map `other_writers`, from threads to the end of their last call in nanoseconds of CLOCK_MONOTONIC.
    pub(super) ended: MapHandle,
}

impl OtherWriters {
    /// Those of `threads` that are in such a call, or have ended one at or after `since_ns` of CLOCK_MONOTONIC. A thread whose
    /// entry cannot be read counts.
    pub(super) fn among(&self, threads: &BTreeSet<Thread>, since_ns: u64) -> BTreeSet<Thread> {
        let is_other = |thread: &&Thread| {
            let key = u64::from(**thread).to_ne_bytes();
            // In this order: a call that ends is noted before its entry is removed.
            let is_calling = self.calling.lookup(&key, MapFlags::ANY).map_or(true, |entry| entry.is_some());
            is_calling || has_ended(&self.ended, &key, since_ns)
        };
        threads.iter().filter(is_other).copied().collect()
    }

    /// True if the map has little room for further threads.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.threads().count() > MAX_REMEMBERED
    }

    /// Forgets all threads.
    pub(super) fn forget(&self) {
        for key in self.threads().collect::<Vec<_>>() {
            // A thread that is already gone is no error.
            let _ = self.ended.delete(&key);
        }
    }

    /// The threads in the map, as far as concurrent changes let it be read: an entry that is removed meanwhile makes the kernel
    /// start over.
    fn threads(&self) -> impl Iterator<Item = Vec<u8>> {
        self.ended.keys().take(2 * MAX_REMEMBERED)
    }
}

fn has_ended(map: &MapHandle, key: &[u8], since_ns: u64) -> bool {
    match map.lookup(key, MapFlags::ANY) {
        Ok(Some(value)) => {
            bytemuck::try_pod_read_unaligned::<u64>(&value).map_or(true, |ended| ended >= since_ns)
        }
        Ok(None) => false,
        Err(_) => true,
    }
}

impl WriteTracer {
    /// Those of `threads` that are in a call, or were at or after `since_ns` of CLOCK_MONOTONIC, that may have written to a
    /// followed file without naming it. All, if this cannot be read.
    pub(crate) fn other_writers_among(&self, threads: &BTreeSet<Thread>, since_ns: u64) -> BTreeSet<Thread> {
        self.other_writers().among(threads, since_ns)
    }

    /// Makes room for further threads, if there is little. It is counted as an unmatched call.
    pub(crate) fn forget_other_writers(&self) {
        let writers = self.other_writers();
        // Counted before and after: a reader that reads the counter, then the map, and the counter again finds that it has
        // changed since its last observation, or meanwhile.
        let forget = || self.forgotten.fetch_add(1, Ordering::SeqCst);
        if writers.is_nearly_full() {
            forget();
            writers.forget();
            forget();
        }
    }
}
