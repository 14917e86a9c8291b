//! What traced system calls say of a file, from one look to the next.

use std::time::Instant;

use fdmap_proto::units::{PageIndex, PageRange, PageSize};

use super::evidence::{SILENT_WRITE, TracedCalls};
use super::look::Calls;
use super::ranges;
use super::trace::{ByteRange, FollowedId, RangelessWrites, WriteTracer};

/// A range beyond which a call is not taken at its word: it is what the trace tells of calls whose place it does not know.
const WHOLE: u64 = 1 << 40;

/// Ranges up to which each is sure to be as it was traced.
const MANY: usize = 1024;

/// The counts of other writers at the last look, and when they last changed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Others {
    last: Option<RangelessWrites>,
    io_uring: Option<Instant>,
    unranged: Option<Instant>,
}

impl Others {
    /// What has ended by now is found in the file.
    pub(super) const fn begin(now: RangelessWrites) -> Self {
        Self { last: Some(now), io_uring: None, unranged: None }
    }

    /// What they leave open now. Each count changes when something begins and again when it ends; requests that are asked not to
    /// tell of their success count when they begin only, so a change is remembered for as long as such a write may take.
    fn judge(&mut self, now: RangelessWrites, at: Instant) -> TracedCalls {
        let last = self.last.replace(now);
        let changed = |of: fn(RangelessWrites) -> u64| last.is_none_or(|last| of(last) != of(now));
        if changed(|others| others.io_uring.unwrap_or(0)) {
            self.io_uring = Some(at);
        }
        if changed(|others| others.aio.wrapping_add(others.paths).wrapping_add(others.removals)) {
            self.unranged = Some(at);
        }
        let lately = |when: Option<Instant>| when.is_some_and(|when| at.duration_since(when) < SILENT_WRITE);
        TracedCalls {
            lost: false,
            io_uring: now.io_uring.is_none() || lately(self.io_uring),
            unranged: lately(self.unranged),
        }
    }
}

/// Takes what was traced of a file since the last look.
pub(super) fn take(
    trace: &WriteTracer,
    file: FollowedId,
    others: &mut Others,
    page_size: PageSize,
    at: Instant,
) -> Calls {
    let traced = trace.drain(file);
    // After: whoever ended before the look has been counted by now.
    let left_open = others.judge(trace.rangeless_writes(), at);
    // Of very many ranges those that lie near one another were put together, with what lies between.
    let many = traced.ended.len() > MANY;
    let (vague, exact): (Vec<_>, Vec<_>) =
        traced.ended.iter().partition(|range| many || range.length >= WHOLE);
    Calls {
        left_open: TracedCalls { lost: traced.lost, ..left_open },
        ended: pages_of(&exact, page_size),
        vague: pages_of(&vague, page_size),
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
    fn rangeless_writes_are_reckoned_with_for_as_long_as_a_write_may_take() {
        let later = Instant::now();
        let counts = RangelessWrites { io_uring: Some(4), aio: 2, paths: 0, removals: 0 };
        let first = Others::default().judge(counts, later);
        assert!(first.io_uring && first.unranged, "what was before is not known");
        let mut others = Others::begin(counts);
        assert_eq!(
            others.judge(counts, later),
            TracedCalls { lost: false, io_uring: false, unranged: false }
        );
        let removed = RangelessWrites { removals: 1, ..counts };
        assert!(others.judge(removed, later).unranged);
        assert!(others.judge(removed, later + Duration::from_secs(1)).unranged);
        assert!(!others.judge(removed, later + SILENT_WRITE).unranged);
        assert!(others.judge(RangelessWrites { io_uring: None, ..removed }, later + SILENT_WRITE).io_uring);
    }
}
