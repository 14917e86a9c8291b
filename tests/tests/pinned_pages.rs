//! Pinned and otherwise referenced pages: every known kind of reference, on folios of every size.

use std::os::fd::{AsFd as _, OwnedFd};

use fdmap_proto::error_chain;
use fdmap_proto::units::{PageIndex, PageRange, PageSize};
use fdmap_server::probe::{PinKind, PinnedRange, Probe as _, ScanTarget, XarrayProbe};
use fdmap_sys::mapping::{Advice, SharedMapping};
use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_sys::testing::kernel_access::RegisteredBuffer;
use fdmap_sys::{memfd, splice};
use fdmap_tests::HarnessError;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, settle_lru_lists};
use fdmap_tests::hugepages::{hugetlb_2m, shmem_64k, shmem_thp};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, pause};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;

fn probe() -> XarrayProbe {
    let missing = |error| HarnessError::Missing(format!("the xarray probe: {}", error_chain(&error)));
    require(XarrayProbe::load().map_err(missing))
}

/// A file of `pages` pages and the probe that reports its pins.
struct Bench {
    probe: XarrayProbe,
    file: OwnedFd,
    pages: u64,
    hugetlb_order: Option<u8>,
}

impl Bench {
    fn new(pages: u64, hugetlb: Option<u64>) -> Self {
        let probe = probe();
        let file = memfd::create("pins", hugetlb).unwrap();
        memfd::resize(file.as_fd(), pages * PAGE).unwrap();
        Self { probe, file, pages, hugetlb_order: hugetlb.map(|_| 9) }
    }

    fn map(&self) -> SharedMapping {
        let len = usize::try_from(self.pages * PAGE).unwrap();
        SharedMapping::shared_aligned(&self.file, len, HUGE as usize, true).unwrap()
    }

    fn pins_of(&self, ranges: &[PageRange]) -> Vec<PinnedRange> {
        let page_size = PageSize::new(PAGE).unwrap();
        let (fd, hugetlb_order) = (self.file.as_fd(), self.hugetlb_order);
        let target = ScanTarget { fd, page_size, file_pages: self.pages, hugetlb_order };
        let mut out = Vec::new();
        assert!(self.probe.pins(&target, ranges, &mut out).unwrap(), "the probe reports pins");
        out
    }

    /// The pins of all pages, after the batches of the LRU lists are drained.
    fn pins(&self) -> Vec<PinnedRange> {
        settle_lru_lists().unwrap();
        self.pins_of(&[PageRange::first(self.pages)])
    }

    fn mappings(&self) -> u64 {
        self.probe.writable_mappings(self.file.as_fd()).unwrap().expect("the kernel counts writable mappings")
    }
}

fn touch(mapping: &SharedMapping, every: u64) {
    for offset in (0..mapping.len()).step_by(every as usize) {
        assert!(mapping.write_at(offset, b"touched"));
    }
}

fn pinned(first: u64, pages: u64, kind: PinKind) -> PinnedRange {
    PinnedRange { range: PageRange::at(PageIndex(first), pages), kind }
}

/// A forked process that inherits all mappings of this process and does nothing. Killed on drop.
struct Twin(Pid);

impl Twin {
    fn start() -> Self {
        // SAFETY: the child only calls pause, which is permitted after a fork of a process with threads.
        match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => Self(child),
            ForkResult::Child => loop {
                pause();
            },
        }
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        kill(self.0, Signal::SIGKILL).unwrap();
        waitpid(self.0, None).unwrap();
    }
}

/// Registers `len` bytes of the mapping at `offset` as an io_uring buffer. The pages are pinned while the ring
/// exists.
fn register(mapping: &SharedMapping, offset: usize, len: usize) -> RegisteredBuffer {
    RegisteredBuffer::new(&BorrowedMapping::of(mapping), offset, len).unwrap()
}

/// Checks that pages are not reported while page tables alone reference them, and that they are reported while a
/// registered buffer or a pipe references them. A folio has `folio` pages.
fn check_reference_kinds(bench: &Bench, folio: u64) {
    let mapping = bench.map();
    if folio > 1 && bench.hugetlb_order.is_none() {
        mapping.advise(Advice::HugePage).unwrap();
    }
    touch(&mapping, if bench.hugetlb_order.is_some() { HUGE } else { PAGE });
    assert_eq!(bench.pins(), [], "mapped once");
    let second = bench.map();
    touch(&second, if bench.hugetlb_order.is_some() { HUGE } else { PAGE });
    assert_eq!(bench.pins(), [], "mapped twice by one process");
    let twin = Twin::start();
    assert_eq!(bench.pins(), [], "mapped by two processes");
    drop((second, twin));
    assert_eq!(bench.pins(), [], "mapped once again");

    let at = |page: u64| (page * PAGE) as usize;
    let first = 3 * folio;
    let ring = register(&mapping, at(first + folio / 2), PAGE as usize);
    let dma = pinned(first, folio, PinKind::Dma);
    assert_eq!(bench.pins(), [dma], "a registered buffer");
    assert_eq!(bench.pins_of(&[PageRange::at(PageIndex(first), 1)]), [pinned(first, 1, PinKind::Dma)]);
    assert_eq!(bench.pins_of(&[PageRange::at(PageIndex(first + folio), 64)]), [], "the next folio");
    drop(mapping);
    assert_eq!(bench.pins(), [dma], "a registered buffer without a mapping");
    drop(ring);
    // A kernel worker releases registered buffers later.
    for _ in 0..1000 {
        if bench.pins().is_empty() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(bench.pins(), [], "after the buffer is released");

    let (_read, write) = nix::unistd::pipe().unwrap();
    let mapping = bench.map();
    match bench.hugetlb_order {
        None => {
            let offset = (first + folio / 2) * PAGE;
            splice::into_pipe(bench.file.as_fd(), offset, write.as_fd(), 10).unwrap();
        }
        // hugetlbfs files do not support splice, but vmsplice accepts their mapped pages.
        Some(_) => {
            let mapping = BorrowedMapping::of(&mapping);
            assert_eq!(mapping.vmsplice(at(first + folio / 2), 10, write.as_fd()), Ok(10));
        }
    }
    assert_eq!(bench.pins(), [pinned(first, folio, PinKind::ExtraReference)], "in a pipe");
}

#[test]
fn small_pages_are_reported_only_while_referenced() {
    let _host = HostLock::acquire().unwrap();
    let bench = Bench::new(20_000, None);
    check_reference_kinds(&bench, 1);
}

#[test]
fn folios_of_64_kib_are_reported_only_while_referenced() {
    let host = HostLock::acquire().unwrap();
    let _setting = require(shmem_64k(&host));
    let bench = Bench::new(20_000, None);
    check_reference_kinds(&bench, 16);
}

#[test]
fn transparent_huge_pages_are_reported_only_while_referenced() {
    let host = HostLock::acquire().unwrap();
    let _setting = require(shmem_thp(&host));
    let bench = Bench::new(16 * 512, None);
    check_reference_kinds(&bench, 512);
}

#[test]
fn hugetlb_pages_are_reported_only_while_referenced() {
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, 16));
    let bench = Bench::new(16 * 512, Some(HUGE));
    assert_eq!(bench.pins(), [], "an empty file has no pins");
    check_reference_kinds(&bench, 512);
}

#[test]
fn pins_are_found_in_trees_of_every_height() {
    let bench = Bench::new(100_000, None);
    let everywhere = [PageRange::first(bench.pages)];
    let mapping = bench.map();
    let mut rings = Vec::new();
    // An empty tree, then one leaf, then trees with more and more levels.
    for page in [0, 63, 64, 5000, 99_999] {
        rings.push((page, register(&mapping, (page * PAGE) as usize, PAGE as usize)));
        let expected: Vec<_> = rings.iter().map(|(page, _)| pinned(*page, 1, PinKind::Dma)).collect();
        let joined = |found: Vec<PinnedRange>| {
            found.into_iter().flat_map(|one| {
                (one.range.start().0..one.range.end().0).map(move |page| pinned(page, 1, one.kind))
            })
        };
        assert_eq!(joined(bench.pins_of(&everywhere)).collect::<Vec<_>>(), expected);
        let one_by_one: Vec<_> = rings.iter().map(|(page, _)| PageRange::at(PageIndex(*page), 1)).collect();
        assert_eq!(joined(bench.pins_of(&one_by_one)).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn swapped_pages_have_no_pins_and_pinned_pages_stay_resident() {
    let _host = HostLock::acquire().unwrap();
    let bench = Bench::new(4096, None);
    let _swap = require(Swap::make(64 << 20, SwapKind::Any));
    let mapping = bench.map();
    touch(&mapping, PAGE);
    let _ring = register(&mapping, 100 * PAGE as usize, 10 * PAGE as usize);
    settle_lru_lists().unwrap();
    mapping.advise(Advice::PageOut).unwrap();
    let in_core = fdmap_sys::cachestat::count(bench.file.as_fd(), 0, 0).unwrap().cached;
    assert!(in_core < 2048, "{in_core} pages are still in memory");
    assert_eq!(bench.pins(), [pinned(100, 10, PinKind::Dma)]);
}

#[test]
fn writable_mapping_count_includes_every_possible_writer() {
    // A process that another test forks inherits the mappings of this test.
    let _host = HostLock::acquire().unwrap();
    let bench = Bench::new(16, None);
    assert_eq!(bench.mappings(), 0);
    let first = bench.map();
    assert_eq!(bench.mappings(), 1);
    let read_only = SharedMapping::shared(&bench.file, 0, 4096, false).unwrap();
    assert_eq!(bench.mappings(), 2, "mprotect could make the mapping writable");
    let twin = Twin::start();
    assert_eq!(bench.mappings(), 4, "the mappings of a child count");
    drop(twin);
    let only_read = fdmap_sys::fd::reopen_for_probe(bench.file.as_fd()).unwrap();
    let never_writable = SharedMapping::shared(&only_read, 0, 4096, false).unwrap();
    assert_eq!(bench.mappings(), 2, "a mapping of a read-only descriptor never becomes writable");
    drop((first, read_only, never_writable));
    assert_eq!(bench.mappings(), 0);
    memfd::add_seals(bench.file.as_fd(), fdmap_sys::mapping::IMMUTABLE_SEALS).unwrap();
    assert_eq!(bench.mappings(), 0, "sealed");
}

/// Restricts this thread to one processor.
fn run_on(cpu: usize) {
    let mut one = nix::sched::CpuSet::new();
    one.set(cpu).unwrap();
    nix::sched::sched_setaffinity(Pid::from_raw(0), &one).unwrap();
}

/// Locked pages that are faulted in wait in two batches of the processor, which explain only one reference.
#[test]
fn page_in_a_batch_of_another_processor_is_referenced_until_the_batches_are_drained() {
    const MAX_ATTEMPTS: u64 = 1000;
    const BATCH: u64 = 4;
    let _host = HostLock::acquire().unwrap();
    let all = nix::sched::sched_getaffinity(Pid::from_raw(0)).unwrap();
    let cpus: Vec<_> =
        (0..nix::sched::CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or(false)).collect();
    let bench = Bench::new(MAX_ATTEMPTS * BATCH, None);
    let mapping = bench.map();
    BorrowedMapping::of(&mapping).lock_on_fault().unwrap();
    let found = (0..MAX_ATTEMPTS).find(|attempt| {
        let pages = [PageRange::at(PageIndex(attempt * BATCH), BATCH)];
        run_on(cpus[0]);
        for page in attempt * BATCH..(attempt + 1) * BATCH {
            assert!(mapping.write_at((page * PAGE) as usize, b"touched"));
        }
        run_on(cpus[cpus.len() - 1]);
        // Another program that runs on the processor may drain its batches at any time.
        if bench.pins_of(&pages).is_empty() {
            return false;
        }
        fdmap_sys::lru::drain_batches().unwrap();
        assert_eq!(bench.pins_of(&pages), []);
        true
    });
    nix::sched::sched_setaffinity(Pid::from_raw(0), &all).unwrap();
    assert!(found.is_some(), "no page was in a batch");
}

/// CPU time of this process. Unlike wall-clock time, it does not advance while other processes run.
fn processor_time() -> std::time::Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_PROCESS_CPUTIME_ID).unwrap().into()
}

/// Prints the time per page. The bound is far above the usual time, to allow for busy hosts.
#[test]
fn pins_of_65536_pages_are_found_fast() {
    let _host = HostLock::acquire().unwrap();
    let pages = 1 << 16;
    let bench = Bench::new(pages, None);
    let mapping = bench.map();
    touch(&mapping, PAGE);
    let scattered = |every: u64| -> Vec<PageRange> {
        (0..pages / every).map(|nth| PageRange::at(PageIndex(nth * every), 1)).collect()
    };
    settle_lru_lists().unwrap();
    for (what, ranges) in [
        ("one range", vec![PageRange::first(pages)]),
        ("each page separately", scattered(1)),
        ("every other page", scattered(2)),
        ("one page of each leaf", scattered(64)),
    ] {
        let requested: u64 = ranges.iter().map(|range| range.len()).sum();
        let fastest = (0..20)
            .map(|_| {
                let begin = std::time::Instant::now();
                assert_eq!(bench.pins_of(&ranges), []);
                begin.elapsed()
            })
            .min()
            .unwrap();
        let each = fastest.as_nanos() as f64 / requested as f64;
        eprintln!("{what}: {each:.1} ns per page");
        assert!(each < 2000.0);
    }
    let begin = processor_time();
    for _ in 0..10_000 {
        bench.mappings();
    }
    eprintln!("counting mappings: {} ns", (processor_time() - begin).as_nanos() / 10_000);
}
