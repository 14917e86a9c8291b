//! Threads that make calls which may write to a followed file without naming it: by path, or through a stacked file system.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use bytemuck::Zeroable as _;
use fdmap_proto::units::low_u32;
use fdmap_sys::Errno;

use super::Thread;
use crate::bpf::records::OtherWriter;

/// The map has room for 16384 threads. Beyond this number, those whose calls have ended are forgotten.
const MAX_REMEMBERED: usize = 12288;

/// Those of `threads` that are in such a call, or have ended one at or after `since_ns` of CLOCK_MONOTONIC. A thread whose entry
/// cannot be read counts.
pub(super) fn among(map: BorrowedFd<'_>, threads: &BTreeSet<Thread>, since_ns: u64) -> BTreeSet<Thread> {
    let is_other = |thread: &&Thread| {
        lookup(map, **thread)
            .is_none_or(|writer| writer.is_some_and(|writer| writer.calling != 0 || writer.ended >= since_ns))
    };
    threads.iter().filter(is_other).copied().collect()
}

/// `Some(None)`: the thread has no entry. `None`: the map cannot be read.
fn lookup(map: BorrowedFd<'_>, thread: Thread) -> Option<Option<OtherWriter>> {
    let (key, mut writer) = (u64::from(thread), OtherWriter::zeroed());
    // SAFETY: key and writer have the sizes of the keys and values of the map, and outlive the call.
    let failed = unsafe {
        libbpf_sys::bpf_map_lookup_elem(map.as_raw_fd(), (&raw const key).cast(), (&raw mut writer).cast())
    };
    match failed.saturating_neg() {
        0 => Some(Some(writer)),
        errno if Errno::from_raw(errno) == Errno::ENOENT => Some(None),
        _ => None,
    }
}

/// True if the map has little room for further threads.
pub(super) fn is_nearly_full(map: BorrowedFd<'_>) -> bool {
    keys(map).len() > MAX_REMEMBERED
}

/// Removes the threads whose calls have ended.
pub(super) fn forget_ended(map: BorrowedFd<'_>) {
    for thread in keys(map) {
        if lookup(map, thread).flatten().is_some_and(|writer| writer.calling == 0) {
            let key = u64::from(thread);
            // SAFETY: key has the size of the keys of the map, and outlives the call. A thread that is already gone is no error.
            unsafe { libbpf_sys::bpf_map_delete_elem(map.as_raw_fd(), (&raw const key).cast()) };
        }
    }
}

/// The threads in the map, as far as concurrent changes let it be read.
fn keys(map: BorrowedFd<'_>) -> Vec<Thread> {
    let (mut found, mut last) = (Vec::new(), None::<u64>);
    // An entry that is removed meanwhile makes the kernel start over.
    while found.len() < 2 * MAX_REMEMBERED {
        let mut next = 0_u64;
        let from = last.as_ref().map_or(std::ptr::null(), |key| std::ptr::from_ref(key).cast());
        // SAFETY: `from` is null or a key, `next` has room for a key, and both outlive the call.
        let failed =
            unsafe { libbpf_sys::bpf_map_get_next_key(map.as_raw_fd(), from, (&raw mut next).cast()) };
        if failed != 0 {
            break;
        }
        found.push(low_u32(next));
        last = Some(next);
    }
    found
}
