//! Ranges of a tracked address space in which the process installed guard regions.
//!
//! `madvise(MADV_GUARD_INSTALL)` of write-protected shmem never returns (`docs/kernel-reports.md`). So the write protection of
//! its range is removed from outside while the call runs, and the range is not tracked from then on.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fdmap_sys::address::AddressRange;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, SyscallError};

use super::revocable_uffd::RevocableUffd;

/// Boundaries of guard regions are multiples of this.
const PAGE_BYTES: u64 = 4096;

/// Guarded ranges that are listed one by one. With more, the range around all of them is guarded.
const MAX_RANGES: usize = 1024;

/// How long a change of the address space may delay the removal of protection.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Shared by the tracker, and by the thread that serves calls of the process. That thread must not wait for the tracker, which
/// may wait for the process.
#[derive(Clone, Debug)]
pub struct GuardedRanges(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    userfaultfd: RevocableUffd,
    tracked: Vec<AddressRange>,
    guarded: Mutex<Vec<AddressRange>>,
}

impl GuardedRanges {
    /// No range of `tracked` is guarded yet.
    pub(crate) fn new(userfaultfd: RevocableUffd, tracked: Vec<AddressRange>) -> Self {
        Self(Arc::new(Shared { userfaultfd, tracked, guarded: Mutex::default() }))
    }

    /// True if both are the same.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// True if a part of `range` is tracked.
    pub(crate) fn concern(&self, range: AddressRange) -> bool {
        self.0.tracked.iter().any(|tracked| !tracked.intersect(range).is_empty())
    }

    /// The guarded ranges, in ascending order, without overlap.
    pub(crate) fn ranges(&self) -> Vec<AddressRange> {
        self.0.guarded.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Removes the write protection of the tracked part of `range`, which is guarded from then on. May wait for the process.
    pub(crate) fn unprotect(&self, range: AddressRange) {
        let start = range.start - range.start % PAGE_BYTES;
        let range =
            AddressRange { start, end: range.end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX) };
        let parts = self.0.tracked.iter().map(|tracked| tracked.intersect(range));
        let parts: Vec<_> = parts.filter(|part| !part.is_empty()).collect();
        // Added first: a harvest that write-protects the range meanwhile finds it here afterwards.
        add(&mut self.0.guarded.lock().unwrap_or_else(PoisonError::into_inner), &parts);
        // A duplicate, because the lock of the userfaultfd must not be held while this waits.
        let duplicate = self.0.userfaultfd.with(Userfaultfd::try_clone);
        match duplicate {
            Some(Ok(userfaultfd)) => parts.iter().for_each(|part| remove_protection(&userfaultfd, *part)),
            Some(Err(error)) => {
                let error = fdmap_proto::error_chain(&error);
                tracing::warn!(error, "write protection of a guard region was not removed");
            }
            // The ranges are no longer registered.
            None => {}
        }
    }
}

/// Adds `more` to sorted ranges, and joins those that overlap or touch.
fn add(ranges: &mut Vec<AddressRange>, more: &[AddressRange]) {
    ranges.extend(more);
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, last| {
        let joins = next.start <= last.end;
        if joins {
            last.end = last.end.max(next.end);
        }
        joins
    });
    if let (Some(first), Some(last)) = (ranges.first(), ranges.last())
        && ranges.len() > MAX_RANGES
    {
        *ranges = vec![AddressRange { start: first.start, end: last.end }];
    }
}

/// Removes the write protection of every part of the range that is registered.
fn remove_protection(userfaultfd: &Userfaultfd, range: AddressRange) {
    let began = Instant::now();
    loop {
        match userfaultfd.write_protect(range, false) {
            // The process forks, or changes its mappings.
            Err(SyscallError { errno: Errno::EAGAIN, .. }) if began.elapsed() < MAX_WAIT => {
                std::thread::yield_now();
            }
            // The call ends at the first part that is not mapped or not registered.
            Err(SyscallError { errno: Errno::ENOENT, .. }) if range.len() > PAGE_BYTES => {
                let middle = range.start + (range.len() / PAGE_BYTES).div_ceil(2) * PAGE_BYTES;
                remove_protection(userfaultfd, AddressRange { end: middle, ..range });
                remove_protection(userfaultfd, AddressRange { start: middle, ..range });
                return;
            }
            Err(SyscallError { errno: Errno::ENOENT | Errno::ESRCH, .. }) | Ok(()) => return,
            Err(error) => {
                let error = fdmap_proto::error_chain(&error);
                tracing::warn!(error, "write protection of a guard region was not removed");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guarded_ranges_are_sorted_and_joined() {
        let range = |start, end| AddressRange { start, end };
        let mut ranges = Vec::new();
        add(&mut ranges, &[range(8, 9), range(1, 3)]);
        add(&mut ranges, &[range(3, 4), range(12, 14)]);
        assert_eq!(ranges, [range(1, 4), range(8, 9), range(12, 14)]);
        add(&mut ranges, &[range(0, 20)]);
        assert_eq!(ranges, [range(0, 20)]);
        let many: Vec<_> = (0..2000).map(|at| range(at * 10, at * 10 + 1)).collect();
        add(&mut ranges, &many);
        assert_eq!(ranges, [range(0, 19991)]);
    }
}
