use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex as StdMutex};

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::units::PageIndex;

use fdmap_proto::units::PageSize;

use super::*;
use crate::pages::PackedAttributes;

/// A probe that counts its scans and can be blocked.
#[derive(Default)]
struct Counting {
    scans: AtomicUsize,
    ranges: StdMutex<Vec<BlockRange>>,
    blocked: StdMutex<bool>,
    unblocked: Condvar,
    panics: AtomicBool,
    cancelled: AtomicBool,
    /// Reports neither slots nor attributes.
    limited: AtomicBool,
}

impl Counting {
    fn block(&self) {
        *self.blocked.lock().unwrap() = true;
    }

    fn unblock(&self) {
        *self.blocked.lock().unwrap() = false;
        self.unblocked.notify_all();
    }
}

impl Probe for Counting {
    fn kind(&self) -> ProbeKind {
        ProbeKind::Syscalls
    }

    fn attributes(&self) -> AttributeSet {
        if self.limited.load(Ordering::SeqCst) { AttributeSet::NONE } else { AttributeSet::ALL }
    }

    fn reports_slots(&self) -> bool {
        !self.limited.load(Ordering::SeqCst)
    }

    fn scan(
        &self,
        _target: &ScanTarget<'_>,
        range: BlockRange,
        options: ScanOptions,
        is_cancelled: &(dyn Fn() -> bool + Sync),
        out: &mut ScanOutput,
    ) -> Result<(), ScanError> {
        self.scans.fetch_add(1, Ordering::SeqCst);
        self.ranges.lock().unwrap().push(range);
        let mut blocked = self.blocked.lock().unwrap();
        while *blocked {
            if is_cancelled() {
                self.cancelled.store(true, Ordering::SeqCst);
                return Err(ScanError::Cancelled);
            }
            blocked = self.unblocked.wait_timeout(blocked, Duration::from_millis(1)).unwrap().0;
        }
        drop(blocked);
        for block in (range.start().0..range.end().0).filter(|_| options.attributes) {
            let order = PackedAttributes { known: PackedAttributes::HAS_ORDER, ..Default::default() };
            for leaf in 0..64 {
                out.attributes.put_leaf(PageIndex(block * 4096 + leaf * 64), u64::MAX, &[order; 64]);
            }
        }
        assert!(!self.panics.swap(false, Ordering::SeqCst), "planned panic");
        Ok(())
    }
}

fn scans() -> (Arc<Counting>, Arc<ScanCoalescer>) {
    let fd = fdmap_sys::memfd::create("shared", None).unwrap();
    fdmap_sys::memfd::resize(fd.as_fd(), 100 << 20).unwrap();
    let probe = Arc::new(Counting::default());
    let source = ScanSource {
        name: "scanned".into(),
        fd,
        page_size: PageSize::new(4096).unwrap(),
        hugetlb_order: None,
    };
    (Arc::clone(&probe), ScanCoalescer::new(source, probe))
}

const ALL: PageRange = PageRange::first(25_600);
const PLAIN: ScanOptions = ScanOptions { distinguish_swap_cached: false, attributes: false };

async fn until(condition: impl Fn() -> bool) {
    for _ in 0..5000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("timed out");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_during_a_scan_share_the_next_scan() {
    let (probe, scans) = scans();
    probe.block();
    let ask = || {
        let scans = Arc::clone(&scans);
        tokio::spawn(async move { scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap() })
    };
    let first = ask();
    until(|| probe.scans.load(Ordering::SeqCst) == 1).await;
    let requested = monotonic_ns();
    let others: Vec<_> = (0..50).map(|_| ask()).collect();
    until(|| scans.queue().waiting.len() == 50).await;
    probe.unblock();
    let begin_of =
        |reading: ScanResult| reading.snapshot.provenance(&[ALL], ProbeKind::Syscalls, 0).unwrap().begin;
    let first = begin_of(first.await.unwrap());
    assert!(first.monotonic_ns < requested, "the first scan began before the other requests");
    for other in others {
        let begin = begin_of(other.await.unwrap());
        assert!(begin.monotonic_ns >= requested, "no result is older than its request");
    }
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2);
}

/// A request whose threads are counted by the returned value, from the next notification of `start` on.
fn request(
    scans: &Arc<ScanCoalescer>,
    options: ScanOptions,
    start: &Arc<Notify>,
) -> (Arc<()>, tokio::task::JoinHandle<()>) {
    let (scans, start, threads) = (Arc::clone(scans), Arc::clone(start), Arc::new(()));
    let its = Arc::clone(&threads);
    let request = tokio::spawn(async move {
        let permit = async {
            start.notified().await;
            start.notify_one();
            Arc::clone(&its)
        };
        scans.read_when(permit, &[ALL], options, Duration::ZERO).await.unwrap();
    });
    (threads, request)
}

fn has_thread(threads: &Arc<()>) -> bool {
    // Also the request itself has one.
    Arc::strong_count(threads) > 2
}

#[tokio::test(flavor = "multi_thread")]
async fn request_starts_a_scan_with_its_permit_and_is_served_by_others_without() {
    let (probe, scans) = scans();
    let (start, never) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (threads, first) = request(&scans, PLAIN, &start);
    let (_, second) = request(&scans, PLAIN, &never);
    until(|| scans.queue().waiting.len() == 2).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(probe.scans.load(Ordering::SeqCst), 0);
    probe.block();
    start.notify_one();
    until(|| probe.scans.load(Ordering::SeqCst) == 1).await;
    assert!(has_thread(&threads));
    probe.unblock();
    first.await.unwrap();
    second.await.unwrap();
    until(|| Arc::strong_count(&threads) == 1).await;
    assert_eq!(probe.scans.load(Ordering::SeqCst), 1);
}

/// Requests that no scan serves together have a thread each, one after the other, and none keeps it for the others.
#[tokio::test(flavor = "multi_thread")]
async fn thread_of_a_request_ends_when_it_is_answered() {
    let (probe, scans) = scans();
    let start = Arc::new(Notify::new());
    start.notify_one();
    probe.block();
    let (threads, first) = request(&scans, PLAIN, &start);
    until(|| has_thread(&threads)).await;
    let (never, other_options) = (Arc::new(Notify::new()), ScanOptions { attributes: true, ..PLAIN });
    let (later, second) = request(&scans, other_options, &never);
    until(|| scans.queue().waiting.len() == 1).await;
    assert!(!has_thread(&later));
    probe.unblock();
    first.await.unwrap();
    // The other request still waits for a thread.
    until(|| Arc::strong_count(&threads) == 1).await;
    assert_eq!((probe.scans.load(Ordering::SeqCst), scans.queue().waiting.len()), (1, 1));
    never.notify_one();
    second.await.unwrap();
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn canceled_request_without_a_thread_does_not_wait() {
    let (probe, scans) = scans();
    let never = Arc::new(Notify::new());
    let requests = [request(&scans, PLAIN, &never).1, request(&scans, PLAIN, &never).1];
    until(|| scans.queue().waiting.len() == 2).await;
    requests[0].abort();
    until(|| scans.queue().waiting.len() == 1).await;
    requests[1].abort();
    until(|| scans.queue().waiting.is_empty()).await;
    assert_eq!(probe.scans.load(Ordering::SeqCst), 0);
}

/// Requests that take no turns with each other: each one has its permit before the scan in progress ends.
#[tokio::test(flavor = "multi_thread")]
async fn request_keeps_its_permit_while_another_one_scans() {
    let (probe, scans) = scans();
    let start = Arc::new(Notify::new());
    start.notify_one();
    probe.block();
    let (_, first) = request(&scans, PLAIN, &start);
    until(|| probe.scans.load(Ordering::SeqCst) == 1).await;
    let (threads, second) = request(&scans, ScanOptions { attributes: true, ..PLAIN }, &start);
    until(|| has_thread(&threads)).await;
    assert_eq!(probe.scans.load(Ordering::SeqCst), 1);
    probe.unblock();
    first.await.unwrap();
    second.await.unwrap();
    until(|| Arc::strong_count(&threads) == 1).await;
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2);
}

/// The thread that ends wakes the requests that wait, of which one starts the next scan.
#[tokio::test(flavor = "multi_thread")]
async fn requests_that_wait_during_a_scan_start_the_next_one() {
    let (probe, scans) = scans();
    let start = Arc::new(Notify::new());
    start.notify_one();
    for round in 1..=20 {
        let scanned = probe.scans.load(Ordering::SeqCst);
        probe.block();
        let (_, first) = request(&scans, PLAIN, &start);
        until(|| probe.scans.load(Ordering::SeqCst) == scanned + 1).await;
        let options = [false, true].map(|attributes| ScanOptions { attributes, ..PLAIN });
        let others: Vec<_> = (0..10).map(|nth| request(&scans, options[nth % 2], &start).1).collect();
        until(|| scans.queue().waiting.len() == 10).await;
        probe.unblock();
        first.await.unwrap();
        for other in others {
            other.await.unwrap();
        }
        // The scan of attributes serves the others as well, if it begins first.
        let more = probe.scans.load(Ordering::SeqCst) - scanned;
        assert!((2..=3).contains(&more), "{more} scans in round {round}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn recent_result_is_reused_within_max_age() {
    let (probe, scans) = scans();
    scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap();
    scans.read(&[ALL], PLAIN, Duration::from_secs(3600)).await.unwrap();
    assert_eq!(probe.scans.load(Ordering::SeqCst), 1);
    scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap();
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2, "a maximum age of 0 needs a new scan");
    scans
        .read(&[ALL], ScanOptions { distinguish_swap_cached: true, ..PLAIN }, Duration::from_secs(3600))
        .await
        .unwrap();
    assert_eq!(
        probe.scans.load(Ordering::SeqCst),
        3,
        "the recent scan did not distinguish swap-cached pages"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn only_stale_blocks_are_scanned() {
    let (probe, scans) = scans();
    let part = PageRange::at(PageIndex(4096), 4096);
    scans.read(&[part], PLAIN, Duration::ZERO).await.unwrap();
    scans.read(&[ALL], PLAIN, Duration::from_secs(3600)).await.unwrap();
    let ranges: Vec<_> =
        probe.ranges.lock().unwrap().iter().map(|range| (range.start().0, range.end().0)).collect();
    assert_eq!(ranges, [(1, 2), (0, 1), (2, 7)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn scattered_pages_are_scanned_by_block() {
    let (probe, scans) = scans();
    let pages = [9000, 3, 4097, 5, 20_000].map(|page| PageRange::at(PageIndex(page), 1));
    scans.read(&pages, PLAIN, Duration::ZERO).await.unwrap();
    let ranges: Vec<_> =
        probe.ranges.lock().unwrap().iter().map(|range| (range.start().0, range.end().0)).collect();
    assert_eq!(ranges, [(0, 3), (4, 5)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn scan_without_requesters_is_cancelled() {
    let (probe, scans) = scans();
    probe.block();
    let request = tokio::spawn({
        let scans = Arc::clone(&scans);
        async move { scans.read(&[ALL], PLAIN, Duration::ZERO).await.map(|_| ()) }
    });
    until(|| probe.scans.load(Ordering::SeqCst) == 1).await;
    request.abort();
    until(|| probe.cancelled.load(Ordering::SeqCst)).await;
    probe.unblock();
    scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn panicking_probe_fails_its_requests_only() {
    let (probe, scans) = scans();
    probe.panics.store(true, Ordering::SeqCst);
    let error = scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap_err();
    assert!(matches!(*error, ScanError::Panicked));
    scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn attributes_are_never_reused() {
    let (probe, scans) = scans();
    let options = ScanOptions { attributes: true, ..PLAIN };
    scans.read(&[ALL], options, Duration::ZERO).await.unwrap();
    let reading = scans.read(&[ALL], options, Duration::from_secs(3600)).await.unwrap();
    assert!(reading.attributes.is_some());
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_file_is_scanned() {
    let (_, scans) = scans();
    let none = PageRange::first(0);
    let provenance =
        |reading: &ScanResult| reading.snapshot.provenance(&[none], ProbeKind::Syscalls, 0).unwrap();
    scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap();
    fdmap_sys::memfd::resize(scans.source().fd.as_fd(), 0).unwrap();
    let requested = monotonic_ns();
    let reading = scans.read(&[none], PLAIN, Duration::ZERO).await.unwrap();
    assert_eq!(reading.snapshot.file_pages(), 0);
    assert!(provenance(&reading).begin.monotonic_ns >= requested);

    let (_, scans) = self::scans();
    provenance(&scans.read(&[none], PLAIN, Duration::ZERO).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn provenance_covers_the_most_scattered_request() {
    let (_, scans) = scans();
    let pages: Vec<_> = (0..4096).map(|nth| PageRange::at(PageIndex(nth * 2 * 4096), 1)).collect();
    let reading = scans.read(&pages, PLAIN, Duration::ZERO).await.unwrap();
    assert!(reading.snapshot.provenance(&pages, ProbeKind::Syscalls, 0).is_some());

    // The scan of the blocks between them keeps their stamps.
    let whole = PageRange::first(4096 * 2 * 4096);
    let reading = scans.read(&[whole], PLAIN, Duration::from_secs(3600)).await.unwrap();
    assert!(reading.snapshot.provenance(&[whole], ProbeKind::Syscalls, 0).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_options_share_scans_with_plain_requests() {
    let (probe, scans) = scans();
    probe.limited.store(true, Ordering::SeqCst);
    probe.block();
    let unsupported = ScanOptions { distinguish_swap_cached: true, attributes: true };
    let ask = |options| {
        let scans = Arc::clone(&scans);
        tokio::spawn(async move { scans.read(&[ALL], options, Duration::ZERO).await.unwrap() })
    };
    let first = ask(unsupported);
    until(|| probe.scans.load(Ordering::SeqCst) == 1).await;
    let others: Vec<_> = (0..50).map(|nth| ask(if nth % 2 == 0 { unsupported } else { PLAIN })).collect();
    until(|| scans.queue().waiting.len() == 50).await;
    probe.unblock();
    assert!(
        first.await.unwrap().attributes.is_some(),
        "the request asked for attributes, of which none are known"
    );
    for other in others {
        other.await.unwrap();
    }
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2);
    let reading = scans.read(&[ALL], unsupported, Duration::from_secs(3600)).await.unwrap();
    assert!(reading.attributes.is_some());
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2, "the recent scan has all that the probe reports");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_keep_the_attributes_of_their_own_pages_only() {
    let (probe, scans) = scans();
    probe.block();
    let options = ScanOptions { attributes: true, ..PLAIN };
    let ask = |range: PageRange| {
        let scans = Arc::clone(&scans);
        tokio::spawn(async move { scans.read(&[range], options, Duration::ZERO).await.unwrap() })
    };
    let first = ask(PageRange::first(1));
    until(|| probe.scans.load(Ordering::SeqCst) == 1).await;
    let (one, all) = (ask(PageRange::at(PageIndex(4096), 1)), ask(ALL));
    until(|| scans.queue().waiting.len() == 2).await;
    probe.unblock();
    let mut bytes = Vec::new();
    for reading in [first, one, all] {
        bytes.push(reading.await.unwrap().attributes.unwrap().bytes());
    }
    assert!(bytes[0] < 200 && bytes[1] < 200 && bytes[2] > 20_000, "{bytes:?}");
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2, "both requests share one scan");
}

/// A request that waits, and the end of its reply channel.
fn waiter(id: u64, ranges: &[(u64, u64)]) -> (Waiter, oneshot::Receiver<ScanAnswer>) {
    let (reply, answer) = oneshot::channel();
    let ranges = ranges.iter().map(|(start, end)| {
        let pages = PageRange::new(PageIndex(start * 4096), PageIndex(end * 4096)).unwrap();
        BlockRange::around(pages)
    });
    let (id, ranges) = (RequestId(id), ranges.collect());
    (Waiter { id, pages: Vec::new(), ranges, options: PLAIN, since: 0, reply }, answer)
}

#[test]
fn scan_for_a_request_reads_few_blocks_for_others() {
    const FEW_BLOCKS: u64 = MAX_BLOCKS_OF_OTHERS;
    type Ranges<'a> = &'a [(u64, u64)];
    // The ranges of the request whose turn it is, those of others, and the others that it serves.
    let cases: &[(Ranges<'_>, &[Ranges<'_>], &[u64])] = &[
        (&[(0, 1)], &[&[(5, 6)], &[(0, FEW_BLOCKS)], &[(0, FEW_BLOCKS - 1)], &[(7, 8)]], &[1, 3]),
        (&[(0, 1)], &[&[(0, FEW_BLOCKS + 1)], &[(9, 10)]], &[2]),
        // Blocks that it reads anyway cost nothing.
        (
            &[(0, 2 * FEW_BLOCKS)],
            &[&[(0, 2 * FEW_BLOCKS)], &[(FEW_BLOCKS, 2 * FEW_BLOCKS)], &[(0, 1), (3, 4)]],
            &[1, 2, 3],
        ),
        (&[(0, 2 * FEW_BLOCKS)], &[&[(0, 4 * FEW_BLOCKS)], &[(2 * FEW_BLOCKS, 4 * FEW_BLOCKS)]], &[2]),
        (&[(0, 2), (4, 6)], &[&[(0, FEW_BLOCKS)], &[(1, 5)], &[(4, 5)]], &[1, 3]),
    ];
    for (own, others, served) in cases {
        let (mut waiting, _answers): (VecDeque<_>, Vec<_>) =
            others.iter().zip(1..).map(|(ranges, id)| waiter(id, ranges)).chain([waiter(100, own)]).unzip();
        let together = take_together(&mut waiting, RequestId(100));
        let ids: Vec<_> = together.iter().map(|waiter| waiter.id.0).collect();
        assert_eq!((ids[0], &ids[1..]), (100, *served), "{own:?} {others:?}");
        assert_eq!(waiting.len() + together.len(), others.len() + 1);
    }
}
