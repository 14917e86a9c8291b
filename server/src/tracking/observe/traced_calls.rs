//! What traced system calls wrote to a file, from one observation to the next.

use std::time::Instant;

use fdmap_proto::units::{PageIndex, PageRange, PageSize};

use super::observation::{CallWrites, UntracedWriters};
use super::trace::{ByteRange, FollowedId, RangelessWrites, WriteTracer};
use crate::tracking::baseline::UNNOTIFIED_WRITE_TIMEOUT;
use crate::tracking::ranges;

/// A longer range is not exact: the trace reports it for calls whose offset it does not know.
const MAX_EXACT_BYTES: u64 = 1 << 40;

/// With more ranges, the trace merges nearby ones together with the bytes between them.
const MAX_EXACT_RANGES: usize = 1024;

/// The counters of writers that the trace does not follow, and when they last changed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OtherWriterHistory {
    last: Option<RangelessWrites>,
    io_uring: Option<Instant>,
    unranged: Option<Instant>,
}

impl OtherWriterHistory {
    /// Starts from the counters `now`. The file shows what was written before.
    pub(crate) const fn starting_at(now: RangelessWrites) -> Self {
        Self { last: Some(now), io_uring: None, unranged: None }
    }

    /// Compares the counters with the last ones. A counter changes when an operation begins and again when it ends, except that
    /// requests without a completion event count at their begin only. So a change is remembered for the longest time that such a
    /// write may take.
    fn update(&mut self, now: RangelessWrites, at: Instant) -> UntracedWriters {
        let last = self.last.replace(now);
        let changed = |of: fn(RangelessWrites) -> u64| last.is_none_or(|last| of(last) != of(now));
        if changed(|others| others.io_uring.unwrap_or(0)) {
            self.io_uring = Some(at);
        }
        if changed(|others| others.aio.wrapping_add(others.paths).wrapping_add(others.removals)) {
            self.unranged = Some(at);
        }
        let recent = |when: Option<Instant>| {
            when.is_some_and(|when| at.duration_since(when) < UNNOTIFIED_WRITE_TIMEOUT)
        };
        UntracedWriters {
            lost: false,
            io_uring: now.io_uring.is_none() || recent(self.io_uring),
            unranged: recent(self.unranged),
        }
    }
}

/// Takes the calls that were traced since the last call of this function.
pub(crate) fn take(
    trace: &WriteTracer,
    file: FollowedId,
    others: &mut OtherWriterHistory,
    page_size: PageSize,
    at: Instant,
) -> CallWrites {
    let traced = trace.drain(file);
    // Read after the drain: the counters include every operation that ended before the observation.
    let untraced = others.update(trace.rangeless_writes(), at);
    let merged = traced.ended.len() > MAX_EXACT_RANGES;
    let (imprecise, exact): (Vec<_>, Vec<_>) =
        traced.ended.iter().partition(|range| merged || range.length >= MAX_EXACT_BYTES);
    CallWrites {
        untraced: UntracedWriters { lost: traced.lost, ..untraced },
        ended: pages_of(&exact, page_size),
        imprecise: pages_of(&imprecise, page_size),
        in_flight: pages_of(&traced.in_flight.iter().collect::<Vec<_>>(), page_size),
        mapped: traced.mapped,
    }
}

fn pages_of(bytes: &[&ByteRange], page_size: PageSize) -> Vec<PageRange> {
    let pages = |range: &&ByteRange| {
        let end = range.offset.saturating_add(range.length);
        let last = PageIndex(page_size.pages_in(end));
        PageRange::new(page_size.page_at(range.offset), last).unwrap_or_default()
    };
    let mut pages = bytes.iter().map(pages).collect();
    ranges::normalize(&mut pages);
    pages
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn changed_counter_is_remembered_for_the_longest_write() {
        let later = Instant::now();
        let counts = RangelessWrites { io_uring: Some(4), aio: 2, paths: 0, removals: 0 };
        let first = OtherWriterHistory::default().update(counts, later);
        assert!(first.io_uring && first.unranged, "earlier counts are unknown");
        let mut others = OtherWriterHistory::starting_at(counts);
        assert_eq!(
            others.update(counts, later),
            UntracedWriters { lost: false, io_uring: false, unranged: false }
        );
        let removed = RangelessWrites { removals: 1, ..counts };
        assert!(others.update(removed, later).unranged);
        assert!(others.update(removed, later + Duration::from_secs(1)).unranged);
        assert!(!others.update(removed, later + UNNOTIFIED_WRITE_TIMEOUT).unranged);
        let unreadable = RangelessWrites { io_uring: None, ..removed };
        assert!(others.update(unreadable, later + UNNOTIFIED_WRITE_TIMEOUT).io_uring);
    }
}
