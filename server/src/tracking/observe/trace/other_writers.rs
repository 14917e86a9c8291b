//! Threads that make calls which may write to a followed file without naming it: by path, or through a stacked file system.

use std::collections::BTreeSet;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

use super::Thread;
use crate::bpf::records::OtherWriter;

/// The map has room for 16384 threads. Beyond this number, those whose calls have ended are forgotten.
const MAX_REMEMBERED: usize = 12288;

/// The map `other_writers`, from threads to [`OtherWriter`]s.
#[derive(Debug)]
pub(super) struct OtherWriters(MapHandle);

impl OtherWriters {
    pub(super) const fn new(map: MapHandle) -> Self {
        Self(map)
    }

    /// Those of `threads` that are in such a call, or have ended one at or after `since_ns` of CLOCK_MONOTONIC. A thread whose
    /// entry cannot be read counts.
    pub(super) fn among(&self, threads: &BTreeSet<Thread>, since_ns: u64) -> BTreeSet<Thread> {
        let is_other = |thread: &&Thread| {
            let key = u64::from(**thread);
            self.lookup(&key.to_ne_bytes()).is_none_or(|writer| {
                writer.is_some_and(|writer| writer.calling != 0 || writer.ended >= since_ns)
            })
        };
        threads.iter().filter(is_other).copied().collect()
    }

    /// True if any thread is in such a call. A thread whose entry cannot be read counts.
    pub(super) fn any_is_calling(&self) -> bool {
        self.keys().any(|key| match self.lookup(&key) {
            Some(writer) => writer.is_some_and(|writer| writer.calling != 0),
            None => true,
        })
    }

    /// `Some(None)`: the thread has no entry. `None`: the map cannot be read.
    fn lookup(&self, key: &[u8]) -> Option<Option<OtherWriter>> {
        match self.0.lookup(key, MapFlags::ANY).ok()? {
            Some(value) => bytemuck::try_pod_read_unaligned(&value).ok().map(Some),
            None => Some(None),
        }
    }

    /// True if the map has little room for further threads.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.keys().count() > MAX_REMEMBERED
    }

    /// Removes the threads whose calls have ended.
    pub(super) fn forget_ended(&self) {
        for key in self.keys().collect::<Vec<_>>() {
            if self.lookup(&key).flatten().is_some_and(|writer| writer.calling == 0) {
                // A thread that is already gone is no error.
                let _ = self.0.delete(&key);
            }
        }
    }

    /// The threads in the map, as far as concurrent changes let it be read: an entry that is removed meanwhile makes the kernel
    /// start over.
    fn keys(&self) -> impl Iterator<Item = Vec<u8>> {
        self.0.keys().take(2 * MAX_REMEMBERED)
    }
}
