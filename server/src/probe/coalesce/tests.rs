use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex as StdMutex};

use fdmap_proto::convert::AttributeSet;
use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::units::PageIndex;

use super::*;
use crate::pages::PackedAttributes;

/// A probe that counts its scans and can be held up.
#[derive(Default)]
struct Counting {
    scans: AtomicUsize,
    ranges: StdMutex<Vec<BlockRange>>,
    held: StdMutex<bool>,
    released: Condvar,
    panics: AtomicBool,
    gave_up: AtomicBool,
    /// Sees neither slots nor attributes.
    short_sighted: AtomicBool,
}

impl Counting {
    fn hold(&self) {
        *self.held.lock().unwrap() = true;
    }

    fn release(&self) {
        *self.held.lock().unwrap() = false;
        self.released.notify_all();
    }
}

impl Probe for Counting {
    fn kind(&self) -> ProbeKind {
        ProbeKind::Syscalls
    }

    fn attributes(&self) -> AttributeSet {
        if self.short_sighted.load(Ordering::SeqCst) { AttributeSet::NONE } else { AttributeSet::ALL }
    }

    fn sees_slots(&self) -> bool {
        !self.short_sighted.load(Ordering::SeqCst)
    }

    fn scan(
        &self,
        _target: &Target<'_>,
        range: BlockRange,
        wants: ScanOptions,
        given_up: &(dyn Fn() -> bool + Sync),
        out: &mut ScanOutput,
    ) -> Result<(), ScanError> {
        self.scans.fetch_add(1, Ordering::SeqCst);
        self.ranges.lock().unwrap().push(range);
        let mut held = self.held.lock().unwrap();
        while *held {
            if given_up() {
                self.gave_up.store(true, Ordering::SeqCst);
                return Err(ScanError::GivenUp);
            }
            held = self.released.wait_timeout(held, Duration::from_millis(1)).unwrap().0;
        }
        drop(held);
        for block in (range.start().0..range.end().0).filter(|_| wants.attributes) {
            let order = PackedAttributes { known: PackedAttributes::HAS_ORDER, ..Default::default() };
            for leaf in 0..64 {
                out.attributes.put_leaf(PageIndex(block * 4096 + leaf * 64), u64::MAX, &[order; 64]);
            }
        }
        assert!(!self.panics.swap(false, Ordering::SeqCst), "as planned");
        Ok(())
    }
}

fn scans() -> (Arc<Counting>, Arc<ScanCoalescer>) {
    let fd = fdmap_sys::memfd::create("shared", None).unwrap();
    fdmap_sys::memfd::resize(fd.as_fd(), 100 << 20).unwrap();
    let probe = Arc::new(Counting::default());
    let source = Source { fd, page_size: PageSize::new(4096).unwrap(), hugetlb_order: None };
    (Arc::clone(&probe), ScanCoalescer::new(source, probe))
}

const ALL: PageRange = PageRange::first(25_600);
const PLAIN: ScanOptions = ScanOptions { distinguish_swap_cached: false, attributes: false };

async fn until(what: impl Fn() -> bool) {
    for _ in 0..5000 {
        if what() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("it never came to that");
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_ask_during_a_scan_share_the_next_one() {
    let (probe, scans) = scans();
    probe.hold();
    let ask = || {
        let scans = Arc::clone(&scans);
        tokio::spawn(async move { scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap() })
    };
    let first = ask();
    until(|| probe.scans.load(Ordering::SeqCst) == 1).await;
    let asked = monotonic_ns();
    let others: Vec<_> = (0..50).map(|_| ask()).collect();
    until(|| scans.queue().waiting.len() == 50).await;
    probe.release();
    let begin_of =
        |reading: Reading| reading.snapshot.provenance(&[ALL], ProbeKind::Syscalls, 0).unwrap().begin;
    let first = begin_of(first.await.unwrap());
    assert!(first.monotonic_ns < asked, "the first scan began before the others asked");
    for other in others {
        let begin = begin_of(other.await.unwrap());
        assert!(begin.monotonic_ns >= asked, "no answer is older than its question");
    }
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn recent_answer_is_given_again_if_the_question_allows_it() {
    let (probe, scans) = scans();
    scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap();
    scans.read(&[ALL], PLAIN, Duration::from_secs(3600)).await.unwrap();
    assert_eq!(probe.scans.load(Ordering::SeqCst), 1);
    scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap();
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2, "0 means now");
    scans
        .read(&[ALL], ScanOptions { distinguish_swap_cached: true, ..PLAIN }, Duration::from_secs(3600))
        .await
        .unwrap();
    assert_eq!(probe.scans.load(Ordering::SeqCst), 3, "the recent answer tells less");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_is_not_known_is_read() {
    let (probe, scans) = scans();
    let part = PageRange::at(PageIndex(4096), 4096);
    scans.read(&[part], PLAIN, Duration::ZERO).await.unwrap();
    scans.read(&[ALL], PLAIN, Duration::from_secs(3600)).await.unwrap();
    let ranges: Vec<_> =
        probe.ranges.lock().unwrap().iter().map(|range| (range.start().0, range.end().0)).collect();
    assert_eq!(ranges, [(1, 2), (0, 1), (2, 7)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn scattered_pages_are_read_by_their_blocks() {
    let (probe, scans) = scans();
    let pages = [9000, 3, 4097, 5, 20_000].map(|page| PageRange::at(PageIndex(page), 1));
    scans.read(&pages, PLAIN, Duration::ZERO).await.unwrap();
    let ranges: Vec<_> =
        probe.ranges.lock().unwrap().iter().map(|range| (range.start().0, range.end().0)).collect();
    assert_eq!(ranges, [(0, 3), (4, 5)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn scan_ends_when_everybody_has_gone() {
    let (probe, scans) = scans();
    probe.hold();
    let asker = tokio::spawn({
        let scans = Arc::clone(&scans);
        async move { scans.read(&[ALL], PLAIN, Duration::ZERO).await.map(|_| ()) }
    });
    until(|| probe.scans.load(Ordering::SeqCst) == 1).await;
    asker.abort();
    until(|| probe.gave_up.load(Ordering::SeqCst)).await;
    probe.release();
    scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn panicking_probe_is_an_error_and_the_next_question_is_answered() {
    let (probe, scans) = scans();
    probe.panics.store(true, Ordering::SeqCst);
    let error = scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap_err();
    assert!(matches!(*error, ScanError::Lost));
    scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn attributes_are_read_anew_and_handed_out_once() {
    let (probe, scans) = scans();
    let wants = ScanOptions { attributes: true, ..PLAIN };
    scans.read(&[ALL], wants, Duration::ZERO).await.unwrap();
    let reading = scans.read(&[ALL], wants, Duration::from_secs(3600)).await.unwrap();
    assert!(reading.attributes.is_some());
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_about_an_empty_file_rests_on_a_reading() {
    let (_, scans) = scans();
    let none = PageRange::first(0);
    let provenance =
        |reading: &Reading| reading.snapshot.provenance(&[none], ProbeKind::Syscalls, 0).unwrap();
    scans.read(&[ALL], PLAIN, Duration::ZERO).await.unwrap();
    fdmap_sys::memfd::resize(scans.source().fd.as_fd(), 0).unwrap();
    let asked = monotonic_ns();
    let reading = scans.read(&[none], PLAIN, Duration::ZERO).await.unwrap();
    assert_eq!(reading.snapshot.file_pages(), 0);
    assert!(provenance(&reading).begin.monotonic_ns >= asked);

    let (_, scans) = self::scans();
    provenance(&scans.read(&[none], PLAIN, Duration::ZERO).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn as_many_scattered_pages_as_may_be_asked_for_are_told_of_together() {
    let (_, scans) = scans();
    let pages: Vec<_> = (0..4096).map(|nth| PageRange::at(PageIndex(nth * 2 * 4096), 1)).collect();
    let reading = scans.read(&pages, PLAIN, Duration::ZERO).await.unwrap();
    assert!(reading.snapshot.provenance(&pages, ProbeKind::Syscalls, 0).is_some());

    // What lies between them is read, and they are not forgotten meanwhile.
    let whole = PageRange::first(4096 * 2 * 4096);
    let reading = scans.read(&[whole], PLAIN, Duration::from_secs(3600)).await.unwrap();
    assert!(reading.snapshot.provenance(&[whole], ProbeKind::Syscalls, 0).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_probe_cannot_see_is_not_looked_for_again() {
    let (probe, scans) = scans();
    probe.short_sighted.store(true, Ordering::SeqCst);
    probe.hold();
    let blind = ScanOptions { distinguish_swap_cached: true, attributes: true };
    let ask = |wants| {
        let scans = Arc::clone(&scans);
        tokio::spawn(async move { scans.read(&[ALL], wants, Duration::ZERO).await.unwrap() })
    };
    let first = ask(blind);
    until(|| probe.scans.load(Ordering::SeqCst) == 1).await;
    let others: Vec<_> = (0..50).map(|nth| ask(if nth % 2 == 0 { blind } else { PLAIN })).collect();
    until(|| scans.queue().waiting.len() == 50).await;
    probe.release();
    assert!(first.await.unwrap().attributes.is_some(), "none is known, but they were asked for");
    for other in others {
        other.await.unwrap();
    }
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2);
    let reading = scans.read(&[ALL], blind, Duration::from_secs(3600)).await.unwrap();
    assert!(reading.attributes.is_some());
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2, "the recent answer tells as much as can be told");
}

#[tokio::test(flavor = "multi_thread")]
async fn attributes_are_held_by_those_who_asked_for_them_only() {
    let (probe, scans) = scans();
    probe.hold();
    let wants = ScanOptions { attributes: true, ..PLAIN };
    let ask = |range: PageRange| {
        let scans = Arc::clone(&scans);
        tokio::spawn(async move { scans.read(&[range], wants, Duration::ZERO).await.unwrap() })
    };
    let first = ask(PageRange::first(1));
    until(|| probe.scans.load(Ordering::SeqCst) == 1).await;
    let (one, most) = (ask(PageRange::at(PageIndex(4096), 1)), ask(ALL));
    until(|| scans.queue().waiting.len() == 2).await;
    probe.release();
    let mut bytes = Vec::new();
    for reading in [first, one, most] {
        bytes.push(reading.await.unwrap().attributes.unwrap().bytes());
    }
    assert!(bytes[0] < 200 && bytes[1] < 200 && bytes[2] > 20_000, "{bytes:?}");
    assert_eq!(probe.scans.load(Ordering::SeqCst), 2, "they share the scan nonetheless");
}
