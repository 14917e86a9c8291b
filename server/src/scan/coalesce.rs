//! Coalesces concurrent scans of one file.
//!
//! A request that arrives during a scan waits for the next scan, and all waiting requests share it. The next scan
//! begins after the request arrived, so a result is never older than its request unless the request allows an age. Any
//! number of concurrent requests costs at most two scans.

use std::collections::VecDeque;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use fdmap_proto::provenance::Moment;
use fdmap_proto::units::PageRange;
use fdmap_sys::clock::monotonic_ns;
use tokio::sync::oneshot;

use super::ScanSource;
use crate::pages::{AttributeMap, BlockRange, ScanOptions, ScanResult, ScanStamp, Scanned, Snapshot};
use crate::probe::{Probe, ScanError, ScanOutput, ScanTarget};
use crate::watchdog::{Operation, Phase};

/// Ranges that one scan reads for several requests; a single request may have more. Bounds the number of stamps.
const MAX_SHARED_RANGES: usize = 4096;

/// Blocks that a scan with attributes reads at once: at most 24 MiB of attributes. Only those of requested pages are
/// kept.
const MAX_ATTRIBUTE_BLOCKS: u64 = 256;

/// Scans one file for concurrent requests.
pub struct ScanCoalescer {
    source: ScanSource,
    probe: Arc<dyn Probe>,
    latest: ArcSwap<Snapshot>,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiter>,
    /// A thread is scanning. It takes the next requests from `waiting` when it finishes.
    scanning: bool,
}

#[derive(Debug)]
struct Waiter {
    pages: Vec<PageRange>,
    /// The blocks that contain `pages`.
    ranges: Vec<BlockRange>,
    options: ScanOptions,
    /// `CLOCK_MONOTONIC` in nanoseconds. A scan that began before is too old for this request.
    since: u64,
    reply: oneshot::Sender<Result<ScanResult, Arc<ScanError>>>,
}

impl ScanCoalescer {
    pub fn new(source: ScanSource, probe: Arc<dyn Probe>) -> Arc<Self> {
        let latest = ArcSwap::from_pointee(Snapshot::default());
        Arc::new(Self { source, probe, latest, queue: Mutex::default() })
    }

    #[must_use]
    pub fn probe(&self) -> &Arc<dyn Probe> {
        &self.probe
    }

    #[must_use]
    pub const fn source(&self) -> &ScanSource {
        &self.source
    }

    /// Returns the states of the pages in `ranges`, read at most `max_age` ago. With a `max_age` of 0, a new scan
    /// begins after the call. Attributes are never reused from an earlier scan.
    ///
    /// # Errors
    /// The error of the scan, shared by all its requests.
    pub async fn read(
        self: &Arc<Self>,
        ranges: &[PageRange],
        options: ScanOptions,
        max_age: Duration,
    ) -> Result<ScanResult, Arc<ScanError>> {
        self.read_when(std::future::ready(()), ranges, options, max_age).await
    }

    /// The same, for a request that may start a thread when `permit` resolves. Until then another request's thread may serve it.
    /// The thread drops the permit when it ends.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn read_when<P: Send + 'static>(
        self: &Arc<Self>,
        permit: impl Future<Output = P>,
        ranges: &[PageRange],
        options: ScanOptions,
        max_age: Duration,
    ) -> Result<ScanResult, Arc<ScanError>> {
        let (pages, ranges) = (ranges.to_vec(), blocks_around(ranges));
        let requested = options;
        // Drop the options that the probe does not support, so that such requests share scans with others.
        let options = ScanOptions {
            distinguish_swap_cached: options.distinguish_swap_cached && self.probe.reports_slots(),
            attributes: options.attributes && !self.probe.attributes().is_empty(),
        };
        let unsupported = (requested.attributes && !options.attributes).then(Arc::default);
        let max_age = u64::try_from(max_age.as_nanos()).unwrap_or(u64::MAX);
        let since = monotonic_ns().saturating_sub(max_age);
        if max_age > 0 && !options.attributes {
            let snapshot = Snapshot::clone(&self.latest.load());
            if ranges.iter().all(|range| stale(&snapshot, *range, options, since).is_empty()) {
                return Ok(ScanResult { snapshot, attributes: unsupported });
            }
        }
        let (reply, mut answer) = oneshot::channel();
        self.queue().waiting.push_back(Waiter { pages, ranges, options, since, reply });
        let answer = tokio::select! {
            biased;
            answer = &mut answer => answer,
            permit = permit => {
                if self.starts_scanning() {
                    let scans = Arc::clone(self);
                    tokio::task::spawn_blocking(move || {
                        let _until_the_end = permit;
                        scans.scan_until_idle();
                    });
                } else {
                    drop(permit);
                }
                answer.await
            }
        };
        let mut reading = answer.unwrap_or_else(|_| Err(Arc::new(ScanError::Panicked)))?;
        reading.attributes = reading.attributes.or(unsupported);
        Ok(reading)
    }

    /// Returns true if no thread is scanning, and a request waits. The caller must then start one.
    fn starts_scanning(&self) -> bool {
        let mut queue = self.queue();
        !queue.waiting.is_empty() && !std::mem::replace(&mut queue.scanning, true)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // No code panics while it holds the lock, so the state behind a poisoned lock is consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Scans until no request waits.
    fn scan_until_idle(&self) {
        // Dropped after the guard: a requester that learns of a panic can start the next scan.
        let mut together = Vec::new();
        let guard = PanicGuard { scans: self };
        while self.next_batch(&mut together) {
            let operation = Operation::begin("Scan", &self.source.name, Phase::PageStates);
            let result = self.scan_for(&together).map_err(Arc::new);
            drop(operation);
            for waiter in together.drain(..) {
                let part = |(snapshot, attributes): &(Snapshot, AttributeMap)| ScanResult {
                    snapshot: snapshot.clone(),
                    // Only the attributes of this request, so that it does not keep the memory of others.
                    attributes: (waiter.options.attributes)
                        .then(|| Arc::new(attributes.restricted(&waiter.pages))),
                };
                // The requester may have dropped its request.
                let _ = waiter.reply.send(result.as_ref().map(part).map_err(Arc::clone));
            }
        }
        std::mem::forget(guard);
    }

    /// Takes the requests of the next scan. Returns `false` if none waits; the thread must then stop scanning.
    fn next_batch(&self, together: &mut Vec<Waiter>) -> bool {
        let mut queue = self.queue();
        *together = take_together(&mut queue.waiting);
        queue.scanning = !together.is_empty();
        queue.scanning
    }

    /// Scans once for all of `together`, which have equal options. Returns the snapshot and the attributes of their
    /// pages.
    fn scan_for(&self, together: &[Waiter]) -> Result<(Snapshot, AttributeMap), ScanError> {
        let is_cancelled = || together.iter().all(|waiter| waiter.reply.is_closed());
        let options = together.first().map_or_else(ScanOptions::default, |first| first.options);
        // Drop old stamps before the scan: the stamps of all ranges of these requests must exist together afterwards,
        // however scattered the ranges are.
        let mut snapshot = self.latest.load().with_few_stamps();
        let mut todo = Vec::new();
        for waiter in together {
            // Attributes are not kept between scans, so read all of them.
            let since = if options.attributes { u64::MAX } else { waiter.since };
            todo.extend(waiter.ranges.iter().flat_map(|range| stale(&snapshot, *range, options, since)));
        }
        BlockRange::join(&mut todo);
        let max_blocks = if options.attributes { MAX_ATTRIBUTE_BLOCKS } else { u64::MAX };
        let requested = if options.attributes { pages_of(together) } else { Vec::new() };
        let mut attributes = AttributeMap::default();
        for range in todo.iter().flat_map(|range| range.parts(max_blocks)) {
            let found = self.scan(range, options, &is_cancelled, &mut snapshot)?;
            let pages = range.pages();
            let first = requested.partition_point(|some| some.end() <= pages.start());
            let end = requested.partition_point(|some| some.start() < pages.end());
            attributes.append(found.restricted(&requested[first..end]));
        }
        // Only the scanning thread publishes, so no update is lost between load and store.
        self.latest.store(Arc::new(snapshot.clone()));
        Ok((snapshot, attributes))
    }

    /// Scans one range, puts its states into `snapshot`, and returns its attributes.
    fn scan(
        &self,
        range: BlockRange,
        options: ScanOptions,
        is_cancelled: &(dyn Fn() -> bool + Sync),
        snapshot: &mut Snapshot,
    ) -> Result<AttributeMap, ScanError> {
        let ScanSource { fd, page_size, hugetlb_order, .. } = &self.source;
        let begin = now();
        let file_pages = self.source.file_pages()?;
        let target =
            ScanTarget { fd: fd.as_fd(), page_size: *page_size, file_pages, hugetlb_order: *hugetlb_order };
        let mut out = ScanOutput::default();
        self.probe.scan(&target, range, options, is_cancelled, &mut out)?;
        let ScanOptions { distinguish_swap_cached, .. } = options;
        let stamp = ScanStamp {
            begin,
            end: now(),
            distinguish_swap_cached,
            uncertainty: out.uncertainty,
            opaque: out.opaque,
        };
        snapshot.put(Scanned { range, blocks: out.blocks, stamp, file_pages });
        Ok(out.attributes)
    }
}

/// The blocks that contain the pages of `ranges`, with adjacent blocks merged. An empty range counts as one page: the
/// answer that a file is empty needs a scan as well.
fn blocks_around(ranges: &[PageRange]) -> Vec<BlockRange> {
    let never_empty = |range: &PageRange| PageRange::at(range.start(), range.len().max(1));
    let mut blocks: Vec<BlockRange> =
        ranges.iter().map(|range| BlockRange::around(never_empty(range))).collect();
    BlockRange::join(&mut blocks);
    blocks
}

/// All requested pages, in ascending order and without overlap.
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

/// The parts of `range` that must be scanned.
fn stale(snapshot: &Snapshot, range: BlockRange, options: ScanOptions, since: u64) -> Vec<BlockRange> {
    snapshot.stale(range, |stamp| {
        stamp.begin.monotonic_ns >= since
            && (stamp.distinguish_swap_cached || !options.distinguish_swap_cached)
    })
}

/// Takes the first request and those with the same options, as long as their ranges fit into one scan. Removes requests
/// that were dropped.
fn take_together(waiting: &mut VecDeque<Waiter>) -> Vec<Waiter> {
    waiting.retain(|waiter| !waiter.reply.is_closed());
    let Some(options) = waiting.front().map(|first| first.options) else {
        return Vec::new();
    };
    let mut ranges = 0;
    let (together, others): (Vec<_>, Vec<_>) = waiting.drain(..).partition(|waiter| {
        let first = ranges == 0;
        let fits = waiter.options == options && (first || ranges + waiter.ranges.len() <= MAX_SHARED_RANGES);
        ranges += if fits { waiter.ranges.len() } else { 0 };
        fits
    });
    waiting.extend(others);
    together
}

fn now() -> Moment {
    Moment { monotonic_ns: monotonic_ns(), wall: SystemTime::now() }
}

/// Runs if the scanning thread panics: waiting requests fail, and the next request starts another thread.
struct PanicGuard<'a> {
    scans: &'a ScanCoalescer,
}

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        let mut queue = self.scans.queue();
        queue.scanning = false;
        queue.waiting.clear();
    }
}

#[cfg(test)]
mod tests;
