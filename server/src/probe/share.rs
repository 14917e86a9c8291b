//! One scan of a file for all who ask at the same time.
//!
//! Whoever asks while a scan is under way waits for the next one, which begins after the question; all who wait share it.
//! So an answer is never older than its question, unless the question allows it, and any number of askers costs at most
//! two scans.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use fdmap_proto::provenance::Moment;
use fdmap_proto::units::{PageRange, PageSize};
use fdmap_sys::clock::monotonic_ns;
use tokio::sync::oneshot;

use super::{Probe, ScanError, ScanOutput, Target, Wants};
use crate::pages::{AttributeMap, BlockRange, Scanned, Snapshot, Stamp};

/// Ranges that are read for several askers together; one alone may have more. It bounds how many stamps there are.
const TOGETHER: usize = 4096;

/// What a scan came to, for one who asked.
#[derive(Clone, Debug)]
pub struct Reading {
    /// All that is known of the file.
    pub snapshot: Snapshot,
    /// Attributes, if they were wanted.
    pub attributes: Option<Arc<AttributeMap>>,
}

/// The file as it is read, whoever asks.
#[derive(Debug)]
pub struct Source {
    /// Open read-only.
    pub fd: OwnedFd,
    /// The base page size.
    pub page_size: PageSize,
    /// log2 of the base pages of a huge page, for hugetlb files.
    pub hugetlb_order: Option<u8>,
}

impl Source {
    /// The file's size in pages now.
    ///
    /// # Errors
    /// `fstat`.
    pub fn file_pages(&self) -> Result<u64, ScanError> {
        let bytes = fdmap_sys::fd::stat(&self.fd)?.st_size;
        Ok(self.page_size.pages_in(u64::try_from(bytes).unwrap_or(0)))
    }
}

/// The scans of one file.
pub struct SharedScans {
    source: Source,
    probe: Arc<dyn Probe>,
    latest: ArcSwap<Snapshot>,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiter>,
    /// A thread is scanning, and will look at `waiting` when it is done.
    at_work: bool,
}

#[derive(Debug)]
struct Waiter {
    ranges: Vec<BlockRange>,
    wants: Wants,
    /// Readings that began before this are too old.
    since: u64,
    reply: oneshot::Sender<Result<Reading, Arc<ScanError>>>,
}

impl SharedScans {
    /// Nothing is read yet.
    #[must_use]
    pub fn new(source: Source, probe: Arc<dyn Probe>) -> Arc<Self> {
        let latest = ArcSwap::from_pointee(Snapshot::default());
        Arc::new(Self { source, probe, latest, queue: Mutex::default() })
    }

    /// The file.
    #[must_use]
    pub const fn source(&self) -> &Source {
        &self.source
    }

    /// The states of the pages of `ranges`, read at most `max_age` before now.
    ///
    /// # Errors
    /// The scan's.
    pub async fn read(
        self: &Arc<Self>,
        ranges: &[PageRange],
        wants: Wants,
        max_age: Duration,
    ) -> Result<Reading, Arc<ScanError>> {
        let ranges = blocks_around(ranges);
        let max_age = u64::try_from(max_age.as_nanos()).unwrap_or(u64::MAX);
        let since = monotonic_ns().saturating_sub(max_age);
        if max_age > 0 && !wants.attributes {
            let snapshot = Snapshot::clone(&self.latest.load());
            if ranges.iter().all(|range| stale(&snapshot, *range, wants, since).is_empty()) {
                return Ok(Reading { snapshot, attributes: None });
            }
        }
        let (reply, answer) = oneshot::channel();
        if self.line_up(Waiter { ranges, wants, since, reply }) {
            let scans = Arc::clone(self);
            tokio::task::spawn_blocking(move || scans.work());
        }
        answer.await.unwrap_or_else(|_| Err(Arc::new(ScanError::Lost)))
    }

    /// True if nobody is at work, and the caller has to see to it.
    fn line_up(&self, waiter: Waiter) -> bool {
        let mut queue = self.queue();
        queue.waiting.push_back(waiter);
        !std::mem::replace(&mut queue.at_work, true)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics while it is held.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Scans until nobody waits.
    fn work(&self) {
        // Dropped after `leave`: whoever is told of a panic finds nobody at work.
        let mut together = Vec::new();
        let leave = Leave { scans: self };
        while self.next_batch(&mut together) {
            let result = self.scan_for(&together).map_err(Arc::new);
            for waiter in together.drain(..) {
                // It may have gone.
                let _ = waiter.reply.send(result.clone());
            }
        }
        std::mem::forget(leave);
    }

    /// `false` if nobody waits: then nobody is at work any more.
    fn next_batch(&self, together: &mut Vec<Waiter>) -> bool {
        let mut queue = self.queue();
        *together = take_together(&mut queue.waiting);
        queue.at_work = !together.is_empty();
        queue.at_work
    }

    /// One reading that satisfies all of `together`, who want the same.
    fn scan_for(&self, together: &[Waiter]) -> Result<Reading, ScanError> {
        let given_up = || together.iter().all(|waiter| waiter.reply.is_closed());
        let mut attributes = AttributeMap::default();
        let mut wants = Wants::default();
        let begin = monotonic_ns();
        // Only now: what is read for those who wait must be told of together, be it ever so scattered.
        self.latest.store(Arc::new(self.latest.load().with_few_stamps()));
        for waiter in together {
            wants = waiter.wants;
            // Attributes are not kept: only what was read just now, for another of those who wait, has them.
            let since = if wants.attributes { begin } else { waiter.since };
            for range in &waiter.ranges {
                let snapshot = Snapshot::clone(&self.latest.load());
                for range in stale(&snapshot, *range, wants, since) {
                    attributes.append(self.scan(range, wants, &given_up)?);
                }
            }
        }
        let snapshot = Snapshot::clone(&self.latest.load());
        Ok(Reading { snapshot, attributes: wants.attributes.then(|| Arc::new(attributes)) })
    }

    /// Reads and publishes one range.
    fn scan(
        &self,
        range: BlockRange,
        wants: Wants,
        given_up: &(dyn Fn() -> bool + Sync),
    ) -> Result<AttributeMap, ScanError> {
        let Source { fd, page_size, hugetlb_order } = &self.source;
        let begin = now();
        let file_pages = self.source.file_pages()?;
        let target =
            Target { fd: fd.as_fd(), page_size: *page_size, file_pages, hugetlb_order: *hugetlb_order };
        let mut out = ScanOutput::default();
        self.probe.scan(&target, range, wants, given_up, &mut out)?;
        let told_apart = wants.told_apart && self.probe.sees_slots();
        let stamp = Stamp { begin, end: now(), told_apart, doubts: out.doubts, blind: out.blind };
        let scanned = Scanned { range, blocks: out.blocks, stamp, file_pages };
        // Only the one thread at work publishes, so nothing is lost between load and store.
        self.latest.store(Arc::new(self.latest.load().with(scanned)));
        Ok(out.attributes)
    }
}

/// The blocks that hold the pages of `ranges`, neighbours put together. Of an empty file the first block is read: that it
/// has no pages is to rest on a reading as well.
fn blocks_around(ranges: &[PageRange]) -> Vec<BlockRange> {
    let never_empty = |range: &PageRange| PageRange::at(range.start(), range.len().max(1));
    let mut blocks: Vec<BlockRange> =
        ranges.iter().map(|range| BlockRange::around(never_empty(range))).collect();
    blocks.sort_unstable_by_key(|range| range.start());
    blocks.dedup_by(|next, range| match BlockRange::new(range.start(), range.end().max(next.end())) {
        Some(both) if next.start() <= range.end() => {
            *range = both;
            true
        }
        _ => false,
    });
    blocks
}

/// What of `range` must be read.
fn stale(snapshot: &Snapshot, range: BlockRange, wants: Wants, since: u64) -> Vec<BlockRange> {
    snapshot
        .stale(range, |stamp| stamp.begin.monotonic_ns >= since && (stamp.told_apart || !wants.told_apart))
}

/// Everybody who wants the same as the one who came first, as long as they do not want too much.
fn take_together(waiting: &mut VecDeque<Waiter>) -> Vec<Waiter> {
    waiting.retain(|waiter| !waiter.reply.is_closed());
    let Some(wants) = waiting.front().map(|first| first.wants) else {
        return Vec::new();
    };
    let mut ranges = 0;
    let (together, others): (Vec<_>, Vec<_>) = waiting.drain(..).partition(|waiter| {
        let first = ranges == 0;
        let fits = waiter.wants == wants && (first || ranges + waiter.ranges.len() <= TOGETHER);
        ranges += if fits { waiter.ranges.len() } else { 0 };
        fits
    });
    waiting.extend(others);
    together
}

fn now() -> Moment {
    Moment { monotonic_ns: monotonic_ns(), wall: SystemTime::now() }
}

/// If the thread panics: those who wait are told so, and the next one who asks starts another.
struct Leave<'a> {
    scans: &'a SharedScans,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let mut queue = self.scans.queue();
        queue.at_work = false;
        queue.waiting.clear();
    }
}

#[cfg(test)]
mod tests;
