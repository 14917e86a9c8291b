//! What traced system calls wrote to a file, from one observation to the next.

use std::collections::BTreeSet;
use std::path::Path;

use fdmap_proto::units::{PageIndex, PageRange, PageSize};

use super::byte_range::ByteRange;
use super::observation::{CallWrites, OtherCalls, Thread};
use super::remaps::Remaps;
use super::trace::{FollowedId, WriteTracer};
use super::traced_writes::HostCounters;
use crate::tracking::ranges;

/// A longer range is not exact: the trace reports it for calls whose offset it does not know.
const MAX_EXACT_BYTES: u64 = 1 << 40;

/// With more ranges, the trace merges nearby ones together with the bytes between them.
const MAX_EXACT_RANGES: usize = 1024;

/// The host-wide counters and the time of the last observation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OtherCallHistory {
    last: Option<HostCounters>,
    /// CLOCK_MONOTONIC, in nanoseconds.
    observed_ns: u64,
}

impl OtherCallHistory {
    /// Starts from the counters `now`. The file shows what was written before.
    pub(crate) const fn starting_at(now: HostCounters, observed_ns: u64) -> Self {
        Self { last: Some(now), observed_ns }
    }

    /// True if the last observation found the same count of unmatched calls.
    pub(crate) fn unmatched_is(&self, now: HostCounters) -> bool {
        self.last.is_some_and(|last| last.unmatched == now.unmatched)
    }

    /// True if `now` equals the counters of the last observation.
    pub(crate) fn is(&self, now: HostCounters) -> bool {
        self.last == Some(now)
    }

    /// Compares the counters with the last ones. A counter changes when a call ends, so a call that ended since the last observation
    /// has changed it. Also returns whether files that could not be determined were attached to a device.
    fn update(&mut self, now: HostCounters) -> (OtherCalls, bool) {
        let last = self.last.replace(now);
        let changed = |of: fn(HostCounters) -> u64| last.is_none_or(|last| of(last) != of(now));
        let other = OtherCalls {
            unmatched: changed(|host| host.unmatched),
            requests: false,
            paths: changed(|host| host.paths),
            stacked: changed(|host| host.stacked),
            stacked_mappings: changed(|host| host.stacked_mappings),
            stacked_silent: changed(|host| host.stacked_silent),
            threads: BTreeSet::new(),
        };
        (other, changed(|host| host.attached))
    }
}

/// The calls since the last observation, and whether one of them attached the file to a device.
pub(crate) struct TakenCalls {
    pub(crate) writes: CallWrites,
    pub(crate) attached: bool,
    /// As in [`TracedWrites`](super::traced_writes::TracedWrites).
    pub(crate) permanently_attached: bool,
    /// CLOCK_MONOTONIC at the observation before.
    since_ns: u64,
    /// A call was in progress that may write to the file without naming it.
    other_calling: bool,
}

impl TakenCalls {
    /// Finds out which of the threads that modified the file also made calls that do not name it. `mounted`: the file is reachable
    /// by path; then the kernel may have written to it when a thread ended (process accounting before Linux 6.14, core dumps).
    pub(crate) fn look_up(&mut self, trace: &WriteTracer, modifiers: &BTreeSet<Thread>, mounted: bool) {
        self.writes.other.threads = trace.other_writers_among(modifiers, self.since_ns);
        if mounted {
            let ended = |thread: &&Thread| !Path::new(&format!("/proc/{thread}")).exists();
            self.writes.other.threads.extend(modifiers.iter().filter(ended));
            let other = &mut self.writes.other;
            other.unmatched |= other.stacked_silent || self.other_calling;
        }
    }
}

/// Takes the calls that were traced since the last call of this function. `now_ns`: CLOCK_MONOTONIC when the observation began.
pub(crate) fn take(
    trace: &WriteTracer,
    file: FollowedId,
    history: &mut OtherCallHistory,
    page_size: PageSize,
    now_ns: u64,
) -> TakenCalls {
    let traced = trace.drain(file);
    // Read before the counters: a call that ends is counted before it is no longer in progress.
    let other_calling = trace.other_writer_is_calling();
    // Read after the drain: the counters include every operation that ended before the observation.
    let (other, any_attached) = history.update(trace.host_counters());
    if other.unmatched {
        trace.forget_other_writers();
    }
    let since_ns = std::mem::replace(&mut history.observed_ns, now_ns);
    let merged = traced.merged || traced.ended.len() > MAX_EXACT_RANGES;
    let (imprecise, exact): (Vec<_>, Vec<_>) =
        traced.ended.iter().partition(|range| merged || range.length >= MAX_EXACT_BYTES);
    let writes = CallWrites {
        other: OtherCalls {
            unmatched: other.unmatched || traced.lost,
            requests: traced.requests || !trace.observes_io_uring(),
            // The event of a call may come before its end.
            paths: other.paths || other_calling,
            ..other
        },
        threads: traced.threads,
        ended: pages_of(&exact, page_size),
        imprecise: pages_of(&imprecise, page_size),
        in_flight: pages_of(&traced.in_flight.iter().collect::<Vec<_>>(), page_size),
        mapped: traced.mapped,
        remapped: traced.remapped,
        // Judged when all forks were received.
        remaps: Remaps::None,
    };
    TakenCalls {
        writes,
        attached: traced.attached || any_attached,
        permanently_attached: traced.permanently_attached,
        since_ns,
        other_calling,
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
    use super::*;

    #[test]
    fn each_counter_is_compared_with_its_last_value() {
        let counts = HostCounters {
            unmatched: 4,
            paths: 0,
            stacked: 2,
            attached: 1,
            stacked_mappings: 3,
            ..HostCounters::default()
        };
        let (first, attached) = OtherCallHistory::default().update(counts);
        assert!(first.unmatched && first.paths && attached, "earlier counts are unknown");
        let mut history = OtherCallHistory::starting_at(counts, 0);
        assert_eq!(history.update(counts), (OtherCalls::default(), false));
        for (now, other, attached) in [
            (
                HostCounters { unmatched: 5, ..counts },
                OtherCalls { unmatched: true, ..Default::default() },
                false,
            ),
            (HostCounters { paths: 1, ..counts }, OtherCalls { paths: true, ..Default::default() }, false),
            (
                HostCounters { stacked: 3, ..counts },
                OtherCalls { stacked: true, ..Default::default() },
                false,
            ),
            (
                HostCounters { stacked_silent: 1, ..counts },
                OtherCalls { stacked_silent: true, ..Default::default() },
                false,
            ),
            (HostCounters { attached: 2, ..counts }, OtherCalls::default(), true),
        ] {
            let mut history = OtherCallHistory::starting_at(counts, 0);
            assert_eq!(history.update(now), (other, attached), "{now:?}");
            assert_eq!(history.update(now), (OtherCalls::default(), false));
        }
    }
}
