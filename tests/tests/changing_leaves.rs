//! While pages are written, punched, collapsed to huge pages, split, swapped out and swapped in, the probes report no
//! page in a state that it never had. They run in this process, so that scans follow each other closely.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fdmap_client::proto::units::PageSize;
use fdmap_client::proto::{PageIndex, PageRange, PageState};
use fdmap_server::pages::{BLOCK_LEAVES, Block, BlockIndex, BlockRange, ScanOptions};
use fdmap_server::probe::{Probe, ScanOutput, ScanTarget, SyscallsProbe, XarrayProbe};
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::{cachestat, memfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::hugepages::shmem_thp;
use fdmap_tests::pattern::mix;
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::{HarnessError, HarnessResult};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: usize = 4096;
const LEAF: usize = 64 * PAGE;
const HUGE: usize = 512 * PAGE;
/// Leaves of single pages: twelve blocks.
const LEAVES: usize = 768;
/// Huge pages after these: one block.
const HUGE_PAGES: usize = 8;
const PAGES: u64 = (LEAVES * 64 + HUGE_PAGES * 512) as u64;
/// linux/mman.h
const MADV_PAGEOUT: i32 = 21;
const MADV_COLLAPSE: i32 = 25;
/// Bits of the pages of a leaf.
const LAST: u64 = 1 << 63;
const ODD: u64 = 0xaaaa_aaaa_aaaa_aaaa;

/// Treatment of a leaf of single pages, by its number modulo 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The last page is punched and written; the others are locked in memory.
    Punched,
    /// The last page is punched, written, swapped out and in; the others are locked in memory.
    Moved,
    /// All pages are swapped out and in, and never punched.
    Kept,
    /// Pages with an odd number were never written; the others are locked in memory.
    Half,
}

impl Kind {
    const fn of(leaf: usize) -> Self {
        [Self::Punched, Self::Moved, Self::Kept, Self::Half][leaf % 4]
    }

    /// Pages that are locked in memory.
    const fn locked(self) -> u64 {
        match self {
            Self::Punched | Self::Moved => !LAST,
            Self::Kept => 0,
            Self::Half => !ODD,
        }
    }
}

/// The file under test, and its pages that never leave memory.
struct File {
    fd: OwnedFd,
    mapping: RawMapping,
    _locked: Vec<RawMapping>,
    stop: AtomicBool,
}

impl File {
    fn create() -> Self {
        let fd = memfd::create("changing-leaves", None).unwrap();
        memfd::resize(fd.as_fd(), PAGES * PAGE as u64).unwrap();
        // Page tables of 2 MiB need an aligned address.
        let mapping = RawMapping::shared(fd.as_fd(), 0, (PAGES as usize) * PAGE).unwrap();
        let mut locked = Vec::new();
        for leaf in 0..LEAVES {
            let kind = Kind::of(leaf);
            for page in (0..64).filter(|page| kind != Kind::Half || page % 2 == 0) {
                write(&mapping, leaf * LEAF + page * PAGE);
            }
            match kind {
                Kind::Punched | Kind::Moved => locked.push(lock(fd.as_fd(), leaf * LEAF, 63 * PAGE)),
                Kind::Kept => {}
                // One page each: a lock must not write the page after it. Few leaves suffice.
                Kind::Half if leaf < 64 => {
                    locked.extend(
                        (0..64).step_by(2).map(|page| lock(fd.as_fd(), leaf * LEAF + page * PAGE, PAGE)),
                    );
                }
                Kind::Half => {}
            }
        }
        (0..HUGE_PAGES * 512).for_each(|page| write(&mapping, LEAVES * LEAF + page * PAGE));
        Self { fd, mapping, _locked: locked, stop: AtomicBool::new(false) }
    }

    /// Calls `step` with numbers from 0 on until the test ends.
    fn repeat(&self, step: impl Fn(&Self, u64)) {
        (0..).take_while(|_| !self.stop.load(Ordering::Relaxed)).for_each(|nth| step(self, nth));
    }

    fn punch(&self, at: usize, len: usize) {
        memfd::punch_hole(self.fd.as_fd(), at as u64, len as u64).unwrap();
    }

    /// Punches and writes the last pages of leaves.
    fn punch_and_write(&self, nth: u64) {
        let leaf = mix(nth) as usize % (LEAVES / 4) * 4;
        let last = 63 * PAGE;
        self.punch(leaf * LEAF + last, PAGE);
        self.punch((leaf + 1) * LEAF + last, PAGE);
        write(&self.mapping, leaf * LEAF + last);
        write(&self.mapping, (leaf + 1) * LEAF + last);
    }

    /// Swaps pages out and in.
    fn swap(&self, nth: u64) {
        let leaf = mix(!nth) as usize % (LEAVES / 4) * 4;
        // Not always: a call fails where a page is busy.
        let _ = self.mapping.advise((leaf + 1) * LEAF + 63 * PAGE, PAGE, MADV_PAGEOUT);
        let kept = (leaf + 2) * LEAF;
        let _ = self.mapping.advise(kept, LEAF, MADV_PAGEOUT);
        for page in 0..nth as usize % 65 {
            self.mapping.read(kept + page * PAGE).unwrap();
        }
    }

    /// Collapses huge pages, swaps them out, and splits them in memory and in swap. The first half of each is never punched.
    fn collapse_and_split(&self, nth: u64) {
        let at = LEAVES * LEAF + mix(nth ^ 77) as usize % HUGE_PAGES * HUGE;
        (0..512).step_by(5).for_each(|page| write(&self.mapping, at + page * PAGE));
        let _ = self.mapping.advise(at, HUGE, MADV_COLLAPSE);
        if nth.is_multiple_of(2) {
            let _ = self.mapping.advise(at, HUGE, MADV_PAGEOUT);
            self.mapping.read(at + mix(nth) as usize % 256 * PAGE).unwrap();
        }
        self.punch(at + (256 + mix(nth) as usize % 256) * PAGE, PAGE);
        if nth.is_multiple_of(3) {
            self.punch(at + 256 * PAGE, 256 * PAGE);
        }
    }
}

fn write(mapping: &RawMapping, at: usize) {
    mapping.write(at, 7).unwrap();
}

/// Maps a part of the file, and keeps its pages in memory.
fn lock(fd: BorrowedFd<'_>, at: usize, len: usize) -> RawMapping {
    let mapping = RawMapping::shared(fd, at as u64, len).unwrap();
    mapping.lock_on_fault().unwrap();
    (0..len).step_by(PAGE).for_each(|page| write(&mapping, page));
    mapping
}

/// What the scans found, beside what they must not find.
#[derive(Debug, Default)]
struct Seen {
    scans: u64,
    punched: u64,
    written: u64,
    swapped: u64,
    swapped_in: u64,
    huge_swapped: u64,
}

impl Seen {
    fn check(&mut self, blocks: &[(BlockIndex, Block)]) {
        assert_eq!(blocks.len(), LEAVES / BLOCK_LEAVES + 1, "each block has data");
        for (index, block) in blocks {
            for leaf in 0..BLOCK_LEAVES {
                let number = index.0 as usize * BLOCK_LEAVES + leaf;
                let word = |state| block.state_word(leaf, state, false);
                let what = format!("scan {}, leaf {number}", self.scans);
                assert_eq!(word(PageState::Unknown), 0, "{what}");
                if number < LEAVES {
                    self.check_leaf(number, &what, word);
                } else {
                    if (number / 4).is_multiple_of(2) {
                        assert_eq!(word(PageState::Hole), 0, "{what}: no page of it was punched");
                    }
                    self.huge_swapped += u64::from(word(PageState::Swapped) != 0);
                }
            }
        }
        self.scans += 1;
    }

    fn check_leaf(&mut self, number: usize, what: &str, word: impl Fn(PageState) -> u64) {
        let kind = Kind::of(number);
        let [hole, resident, swapped] = [PageState::Hole, PageState::Resident, PageState::Swapped].map(word);
        assert_eq!(hole | resident | swapped, u64::MAX, "{what}");
        let always = if kind == Kind::Half && number >= 64 { 0 } else { kind.locked() };
        assert_eq!(resident & always, always, "{what}, {kind:?}: locked pages are in memory");
        match kind {
            Kind::Punched => {
                assert_eq!(swapped & !LAST, 0, "{what}");
                self.punched += hole >> 63;
                self.written += resident >> 63;
            }
            Kind::Moved => assert_eq!(hole & !LAST, 0, "{what}"),
            Kind::Kept => {
                assert_eq!(hole, 0, "{what}: no page of it was punched");
                self.swapped += u64::from(swapped.count_ones());
                self.swapped_in += u64::from(resident.count_ones());
            }
            Kind::Half => {
                assert_eq!(hole, ODD, "{what}: every other page was never written");
            }
        }
    }
}

fn scan(probe: &dyn Probe, file: &File) -> ScanOutput {
    scan_all(probe, file.fd.as_fd(), PAGES)
}

fn scan_all(probe: &dyn Probe, fd: BorrowedFd<'_>, pages: u64) -> ScanOutput {
    let target = ScanTarget {
        fd,
        page_size: PageSize::new(PAGE as u64).unwrap(),
        file_pages: pages,
        hugetlb_order: None,
    };
    let mut out = ScanOutput::default();
    let range = BlockRange::around(PageRange::at(PageIndex(0), pages));
    probe.scan(&target, range, ScanOptions::default(), &|| false, &mut out).unwrap();
    assert_eq!(out.uncertainty.unsettled_leaves, 0, "leaves settle within some milliseconds");
    out
}

#[test]
fn scan_by_xarray_reports_no_state_that_a_page_never_had() {
    assert_only_states_that_pages_had(&XarrayProbe::load().unwrap(), 200);
}

#[test]
fn scan_by_syscalls_reports_no_state_that_a_page_never_had() {
    require(counting());
    assert_only_states_that_pages_had(&SyscallsProbe, 50);
}

/// Without it, the syscalls probe uses lseek(2), which cannot detect each change.
fn counting() -> HarnessResult<()> {
    let memfd = memfd::create("counted", None)?;
    let counted = cachestat::count(memfd.as_fd(), 0, 1);
    counted.map(drop).map_err(|error| HarnessError::Missing(error.to_string()))
}

/// Each scan takes as long as some moves of the pages.
#[test]
fn pages_that_move_between_memory_and_swap_all_the_time_are_no_holes() {
    const MOVED: usize = 8;
    let _host = HostLock::acquire().unwrap();
    require(counting());
    let _swap = require(Swap::make(1 << 30, SwapKind::Any));
    let xarray = XarrayProbe::load().unwrap();
    let fd = memfd::create("moving", None).unwrap();
    memfd::resize(fd.as_fd(), (MOVED * PAGE) as u64).unwrap();
    let mapping = RawMapping::shared(fd.as_fd(), 0, MOVED * PAGE).unwrap();
    (0..MOVED).for_each(|page| write(&mapping, page * PAGE));
    let is_over = AtomicBool::new(false);
    let move_page = |page: usize| {
        while !is_over.load(Ordering::Relaxed) {
            // Not always: a call fails where a page is busy.
            let _ = mapping.advise(page * PAGE, PAGE, MADV_PAGEOUT);
            mapping.read(page * PAGE).unwrap();
        }
    };
    let (mut swapped, mut resident) = (0, 0);
    std::thread::scope(|scope| {
        for page in 0..MOVED {
            scope.spawn(move || move_page(page));
        }
        let scans = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let began = Instant::now();
            while began.elapsed() < Duration::from_secs(5) {
                for probe in [&xarray as &dyn Probe, &SyscallsProbe] {
                    let [(_, block)] = &scan_all(probe, fd.as_fd(), MOVED as u64).blocks[..] else {
                        panic!("{:?}: no page has data", probe.kind());
                    };
                    for page in 0..MOVED as u64 {
                        match block.state(page) {
                            PageState::Swapped => swapped += 1,
                            PageState::Resident => resident += 1,
                            other => panic!("{:?}: page {page} is {other:?}", probe.kind()),
                        }
                    }
                }
            }
        }));
        is_over.store(true, Ordering::Relaxed);
        scans.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    println!("{swapped} swapped, {resident} resident");
    assert!(swapped > 0 && resident > 0, "{swapped} swapped, {resident} resident");
}

fn assert_only_states_that_pages_had(probe: &dyn Probe, min_scans: u64) {
    let host = HostLock::acquire().unwrap();
    let _huge = require(shmem_thp(&host));
    let _swap = require(Swap::make(1 << 30, SwapKind::Any));
    let file = File::create();
    let mut seen = Seen::default();
    seen.check(&scan(probe, &file).blocks);
    std::thread::scope(|scope| {
        scope.spawn(|| file.repeat(File::punch_and_write));
        scope.spawn(|| file.repeat(File::swap));
        scope.spawn(|| file.repeat(File::collapse_and_split));
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_secs(10) {
                seen.check(&scan(probe, &file).blocks);
            }
        }));
        file.stop.store(true, Ordering::Relaxed);
        checked.unwrap();
    });
    println!("{seen:?}");
    assert!(seen.scans > min_scans, "{seen:?}");
    assert!(seen.punched > 0 && seen.written > 0, "{seen:?}");
    assert!(seen.swapped > 0 && seen.swapped_in > 0 && seen.huge_swapped > 0, "{seen:?}");
}
