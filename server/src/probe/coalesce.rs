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

use super::{Probe, ScanError, ScanOptions, ScanOutput, Target};
use crate::pages::{AttributeMap, BlockRange, Scanned, Snapshot, Stamp};

/// Ranges that are read for several askers together; one alone may have more. It bounds how many stamps there are.
const TOGETHER: usize = 4096;

/// Blocks that are read at once for attributes, of which only those of pages that were asked for stay: 24 MiB at most.
const WITH_ATTRIBUTES: u64 = 256;

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
pub struct ScanCoalescer {
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
    pages: Vec<PageRange>,
    /// The blocks that hold them.
    ranges: Vec<BlockRange>,
    wants: ScanOptions,
    /// Readings that began before this are too old.
    since: u64,
    reply: oneshot::Sender<Result<Reading, Arc<ScanError>>>,
}

impl ScanCoalescer {
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
        wants: ScanOptions,
        max_age: Duration,
    ) -> Result<Reading, Arc<ScanError>> {
        let (pages, ranges) = (ranges.to_vec(), blocks_around(ranges));
        let asked = wants;
        // What the probe cannot see is not looked for: whoever asks for it is content with the same readings.
        let wants = ScanOptions {
            distinguish_swap_cached: wants.distinguish_swap_cached && self.probe.sees_slots(),
            attributes: wants.attributes && !self.probe.attributes().is_empty(),
        };
        let unseen = (asked.attributes && !wants.attributes).then(Arc::default);
        let max_age = u64::try_from(max_age.as_nanos()).unwrap_or(u64::MAX);
        let since = monotonic_ns().saturating_sub(max_age);
        if max_age > 0 && !wants.attributes {
            let snapshot = Snapshot::clone(&self.latest.load());
            if ranges.iter().all(|range| stale(&snapshot, *range, wants, since).is_empty()) {
                return Ok(Reading { snapshot, attributes: unseen });
            }
        }
        let (reply, answer) = oneshot::channel();
        if self.line_up(Waiter { pages, ranges, wants, since, reply }) {
            let scans = Arc::clone(self);
            tokio::task::spawn_blocking(move || scans.work());
        }
        let mut reading = answer.await.unwrap_or_else(|_| Err(Arc::new(ScanError::Lost)))?;
        reading.attributes = reading.attributes.or(unseen);
        Ok(reading)
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
                let part = |(snapshot, attributes): &(Snapshot, AttributeMap)| Reading {
                    snapshot: snapshot.clone(),
                    // Its own alone: what others asked for is theirs to hold.
                    attributes: (waiter.wants.attributes)
                        .then(|| Arc::new(attributes.restricted(&waiter.pages))),
                };
                // It may have gone.
                let _ = waiter.reply.send(result.as_ref().map(part).map_err(Arc::clone));
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

    /// One reading that satisfies all of `together`, who want the same, and the attributes that they asked for.
    fn scan_for(&self, together: &[Waiter]) -> Result<(Snapshot, AttributeMap), ScanError> {
        let given_up = || together.iter().all(|waiter| waiter.reply.is_closed());
        let wants = together.first().map_or_else(ScanOptions::default, |first| first.wants);
        // Stamps are forgotten now and not later: what is read for those who wait must be told of together, be it ever so
        // scattered.
        let mut snapshot = self.latest.load().with_few_stamps();
        let mut todo = Vec::new();
        for waiter in together {
            // Attributes are not kept: they are read anew.
            let since = if wants.attributes { u64::MAX } else { waiter.since };
            todo.extend(waiter.ranges.iter().flat_map(|range| stale(&snapshot, *range, wants, since)));
        }
        BlockRange::join(&mut todo);
        let at_once = if wants.attributes { WITH_ATTRIBUTES } else { u64::MAX };
        let wanted = if wants.attributes { pages_of(together) } else { Vec::new() };
        let mut attributes = AttributeMap::default();
        for range in todo.iter().flat_map(|range| range.parts(at_once)) {
            let found = self.scan(range, wants, &given_up, &mut snapshot)?;
            let pages = range.pages();
            let first = wanted.partition_point(|some| some.end() <= pages.start());
            let behind = wanted.partition_point(|some| some.start() < pages.end());
            attributes.append(found.restricted(&wanted[first..behind]));
        }
        // Only the one thread at work publishes, so nothing is lost between load and store.
        self.latest.store(Arc::new(snapshot.clone()));
        Ok((snapshot, attributes))
    }

    /// Reads one range and puts it into `snapshot`.
    fn scan(
        &self,
        range: BlockRange,
        wants: ScanOptions,
        given_up: &(dyn Fn() -> bool + Sync),
        snapshot: &mut Snapshot,
    ) -> Result<AttributeMap, ScanError> {
        let Source { fd, page_size, hugetlb_order } = &self.source;
        let begin = now();
        let file_pages = self.source.file_pages()?;
        let target =
            Target { fd: fd.as_fd(), page_size: *page_size, file_pages, hugetlb_order: *hugetlb_order };
        let mut out = ScanOutput::default();
        self.probe.scan(&target, range, wants, given_up, &mut out)?;
        let ScanOptions { distinguish_swap_cached, .. } = wants;
        let stamp = Stamp {
            begin,
            end: now(),
            distinguish_swap_cached,
            uncertainty: out.uncertainty,
            blind: out.blind,
        };
        snapshot.put(Scanned { range, blocks: out.blocks, stamp, file_pages });
        Ok(out.attributes)
    }
}

/// The blocks that hold the pages of `ranges`, neighbours put together. Of an empty file the first block is read: that it
/// has no pages is to rest on a reading as well.
fn blocks_around(ranges: &[PageRange]) -> Vec<BlockRange> {
    let never_empty = |range: &PageRange| PageRange::at(range.start(), range.len().max(1));
    let mut blocks: Vec<BlockRange> =
        ranges.iter().map(|range| BlockRange::around(never_empty(range))).collect();
    BlockRange::join(&mut blocks);
    blocks
}

/// All pages that somebody asked for, in ascending order and without overlap.
fn pages_of(together: &[Waiter]) -> Vec<PageRange> {
    let mut pages: Vec<PageRange> = together.iter().flat_map(|waiter| waiter.pages.iter().copied()).collect();
    pages.sort_unstable_by_key(|range| range.start());
    pages.dedup_by(|next, range| match PageRange::new(range.start(), range.end().max(next.end())) {
        Some(both) if next.start() <= range.end() => {
            *range = both;
            true
        }
        _ => false,
    });
    pages
}

/// What of `range` must be read.
fn stale(snapshot: &Snapshot, range: BlockRange, wants: ScanOptions, since: u64) -> Vec<BlockRange> {
    snapshot.stale(range, |stamp| {
        stamp.begin.monotonic_ns >= since && (stamp.distinguish_swap_cached || !wants.distinguish_swap_cached)
    })
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
    scans: &'a ScanCoalescer,
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
