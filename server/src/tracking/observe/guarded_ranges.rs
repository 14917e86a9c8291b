//! Ranges of a tracked address space in which the process installed guard regions.
//!
//! `madvise(MADV_GUARD_INSTALL)` of write-protected shmem never returns (`docs/kernel-reports.md`). So the write protection of
//! its range is removed from outside while the call runs, and the range is not tracked from then on.

use std::sync::{Arc, Mutex, PoisonError};

use fdmap_sys::address::AddressRange;

use super::holder::{HeldSpace, SpaceCall};

/// Boundaries of guard regions are multiples of this.
const PAGE_BYTES: u64 = 4096;

/// Guarded ranges that are listed one by one. With more, the range around all of them is guarded.
const MAX_RANGES: usize = 1024;

/// Shared by the tracker, and by the thread that serves calls of the process. That thread must not wait for the tracker, which
/// may wait for the process.
#[derive(Clone, Debug)]
pub struct GuardedRanges(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    userfaultfd: HeldSpace,
    tracked: Vec<AddressRange>,
    guarded: Mutex<Vec<AddressRange>>,
}

impl GuardedRanges {
    /// No range of `tracked` is guarded yet.
    pub(crate) fn new(userfaultfd: HeldSpace, tracked: Vec<AddressRange>) -> Self {
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
        // A harvest may wait for the call of the process, and this lets it return.
        if let Err(error) = self.0.userfaultfd.unprotect(&SpaceCall::Unprotect { ranges: parts }) {
            let error = fdmap_proto::error_chain(&error);
            tracing::warn!(error, "write protection of a guard region was not removed");
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
