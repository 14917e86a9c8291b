//! Coalesces concurrent scans of one file.
//!
//! A request that arrives during a scan waits for the next scan, and all waiting requests share it. The next scan
//! begins after the request arrived, so a result is never older than its request unless the request allows an age. Any
//! number of concurrent requests costs at most two scans, if one scan can serve them all.
//!
//! Each scan runs on the thread of a request that it serves, when it is the turn of that request, which is answered first. The thread
//! ends with the scan, so it never serves requests that arrive later.

use std::collections::VecDeque;
use std::os::fd::AsFd as _;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use fdmap_proto::provenance::Moment;
use fdmap_proto::units::PageRange;
use fdmap_sys::clock::monotonic_ns;
use tokio::sync::{Notify, oneshot};

use super::ScanSource;
use crate::pages::{AttributeMap, BlockRange, ScanOptions, ScanResult, ScanStamp, Scanned, Snapshot};
use crate::probe::{Probe, ScanError, ScanOutput, ScanTarget};
use crate::watchdog::{Operation, Phase};

/// Ranges that one scan reads for several requests; a single request may have more. Bounds the number of stamps.
const MAX_SHARED_RANGES: usize = 4096;

/// Blocks that one scan reads for other requests than the one whose thread it has, if these are more than it reads for that one: at most
/// so much later is the answer to it.
const MAX_BLOCKS_OF_OTHERS: u64 = 4096;

/// Blocks that a scan with attributes reads at once: at most 24 MiB of attributes. Only those of requested pages are
/// kept.
const MAX_ATTRIBUTE_BLOCKS: u64 = 256;

/// Scans one file for concurrent requests.
pub struct ScanCoalescer {
    source: ScanSource,
    probe: Arc<dyn Probe>,
    latest: ArcSwap<Snapshot>,
    queue: Mutex<Queue>,
    /// A scan has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiter>,
    /// A thread is scanning, or starts to.
    scanning: bool,
    last: RequestId,
}

/// Numbers the requests of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RequestId(u64);

#[derive(Debug)]
struct Waiter {
    id: RequestId,
    /// The pages whose attributes the request gets.
    pages: Vec<PageRange>,
    /// The blocks that contain the requested pages, in ascending order.
    ranges: Vec<BlockRange>,
    options: ScanOptions,
    /// `CLOCK_MONOTONIC` in nanoseconds. A scan that began before is too old for this request.
    since: u64,
    reply: oneshot::Sender<ScanAnswer>,
}

type ScanAnswer = Result<ScanResult, Arc<ScanError>>;

impl ScanCoalescer {
    pub fn new(source: ScanSource, probe: Arc<dyn Probe>) -> Arc<Self> {
        let latest = ArcSwap::from_pointee(Snapshot::default());
        Arc::new(Self { source, probe, latest, queue: Mutex::default(), ended: Notify::new() })
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

    /// As [`Self::read`], for a request that may scan the file in a thread once `turn` resolves. `turn` is polled only if a scan is
    /// needed. Until then another request's thread may serve it. The thread drops what `turn` resolves to when it ends.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn read_when<P: Send + 'static>(
        self: &Arc<Self>,
        turn: impl Future<Output = P>,
        ranges: &[PageRange],
        options: ScanOptions,
        max_age: Duration,
    ) -> Result<ScanResult, Arc<ScanError>> {
        let requested = options;
        // Drop the options that the probe does not support, so that such requests share scans with others.
        let options = ScanOptions {
            distinguish_swap_cached: options.distinguish_swap_cached && self.probe.reports_slots(),
            attributes: options.attributes && !self.probe.attributes().is_empty(),
        };
        let pages = if options.attributes { ranges.to_vec() } else { Vec::new() };
        let ranges = blocks_around(ranges);
        let unsupported = (requested.attributes && !options.attributes).then(Arc::default);
        let max_age = u64::try_from(max_age.as_nanos()).unwrap_or(u64::MAX);
        let since = monotonic_ns().saturating_sub(max_age);
        if max_age > 0 && !options.attributes {
            let snapshot = Snapshot::clone(&self.latest.load());
            if ranges.iter().all(|range| stale(&snapshot, *range, options, since).is_empty()) {
                return Ok(ScanResult { snapshot, attributes: unsupported });
            }
        }
        let (reply, answer) = oneshot::channel();
        let id = self.add(|id| Waiter { id, pages, ranges, options, since, reply });
        let _waits = Waiting { scans: self, id };
        let answer = self.answered(id, answer, turn).await;
        let mut reading = answer.unwrap_or_else(|_| Err(Arc::new(ScanError::Panicked)))?;
        reading.attributes = reading.attributes.or(unsupported);
        Ok(reading)
    }

    fn add(&self, waiter: impl FnOnce(RequestId) -> Waiter) -> RequestId {
        let mut queue = self.queue();
        queue.last.0 += 1;
        let id = queue.last;
        queue.waiting.push_back(waiter(id));
        id
    }

    /// Waits for the answer to a request, and starts a thread for it if no other one serves it before its turn.
    async fn answered<P: Send + 'static>(
        self: &Arc<Self>,
        id: RequestId,
        mut answer: oneshot::Receiver<ScanAnswer>,
        turn: impl Future<Output = P>,
    ) -> Result<ScanAnswer, oneshot::error::RecvError> {
        let permit = tokio::select! {
            biased;
            answer = &mut answer => return answer,
            permit = turn => permit,
        };
        loop {
            let mut ended = pin!(self.ended.notified());
            // From here on, no end is missed.
            ended.as_mut().enable();
            if self.starts_scanning() {
                let scans = Arc::clone(self);
                tokio::task::spawn_blocking(move || {
                    let _until_the_end = permit;
                    scans.scan_with(id);
                });
                return answer.await;
            }
            // A request outside of these turns scans: wait for its end.
            tokio::select! {
                biased;
                answer = &mut answer => return answer,
                () = ended => {}
            }
        }
    }

    /// Returns true if no thread was scanning. The caller must then start one.
    fn starts_scanning(&self) -> bool {
        !std::mem::replace(&mut self.queue().scanning, true)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // No code panics while it holds the lock, so the state behind a poisoned lock is consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Scans once, for this request and others that wait. Does nothing if it is answered or was dropped.
    fn scan_with(&self, id: RequestId) {
        // Dropped after the guard: a requester that learns of a panic can start the next scan.
        let mut together;
        let _end = ScanEnd { scans: self };
        together = take_together(&mut self.queue().waiting, id);
        if together.is_empty() {
            return;
        }
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

/// Takes the request `id`, which comes first, and those with the same options, as long as they fit into one scan with it. Removes requests
/// that were dropped. Empty if that request does not wait.
fn take_together(waiting: &mut VecDeque<Waiter>, id: RequestId) -> Vec<Waiter> {
    waiting.retain(|waiter| !waiter.reply.is_closed());
    let Some(own) = waiting.iter().position(|waiter| waiter.id == id).and_then(|at| waiting.remove(at))
    else {
        return Vec::new();
    };
    let mut ranges = own.ranges.len();
    let mut blocks_of_others = MAX_BLOCKS_OF_OTHERS.max(own.ranges.iter().map(|range| range.len()).sum());
    let mut together = vec![own];
    for waiter in std::mem::take(waiting) {
        let own = &together[0];
        let more = waiter.ranges.len();
        let fits = waiter.options == own.options && ranges + more <= MAX_SHARED_RANGES;
        let left = fits.then(|| without_blocks(blocks_of_others, &waiter.ranges, &own.ranges)).flatten();
        if let Some(left) = left {
            ranges += more;
            blocks_of_others = left;
            together.push(waiter);
        } else {
            waiting.push_back(waiter);
        }
    }
    together
}

/// `max` less the number of blocks in those of `ranges` that are not within one of `of`; `None` if these are more. Both are in ascending
/// order and without overlap.
fn without_blocks(max: u64, ranges: &[BlockRange], of: &[BlockRange]) -> Option<u64> {
    let is_within = |range: &BlockRange| {
        let at = of.partition_point(|other| other.end() < range.end());
        of.get(at).is_some_and(|other| other.start() <= range.start())
    };
    let mut beside = ranges.iter().filter(|range| !is_within(range));
    beside.try_fold(max, |left, range| left.checked_sub(range.len()))
}

fn now() -> Moment {
    Moment { monotonic_ns: monotonic_ns(), wall: SystemTime::now() }
}

/// A request that waits, or is answered. If it is dropped while no scan begins, as without a free thread, nothing else removes it.
struct Waiting<'a> {
    scans: &'a ScanCoalescer,
    id: RequestId,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.scans.queue().waiting.retain(|waiter| waiter.id != self.id);
    }
}

/// The end of a scan, also by a panic: requests that wait can start the next one.
struct ScanEnd<'a> {
    scans: &'a ScanCoalescer,
}

impl Drop for ScanEnd<'_> {
    fn drop(&mut self) {
        self.scans.queue().scanning = false;
        self.scans.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
