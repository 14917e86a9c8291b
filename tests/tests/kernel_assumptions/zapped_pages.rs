//! Page table entries that `MADV_DONTNEED` empties, and removals of pages: which of them the kernel shows.

use std::os::fd::AsFd as _;

use fdmap_sys::pagemap::PageRegion;
use fdmap_sys::testing::space::{self, SpaceCall};
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::hugepages::{hugetlb_2m, shmem_thp};
use fdmap_tests::test;
use fdmap_tests::tracked::{HUGE, PAGE, PageKind, TrackedMemfd, WpTracker};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;

use crate::change_time;

const PER_HUGE: u64 = HUGE / PAGE;

/// The pages whose page table entry is empty.
fn empty(tracker: &WpTracker) -> Vec<u64> {
    let mut regions = [PageRegion::default(); 64];
    let scanned = tracker.pagemap.scan_empty_entries(tracker.range, &mut regions).unwrap();
    assert_eq!(scanned.walk_end, tracker.range.end);
    let page = |address: u64| (address - tracker.range.start) / tracker.unit;
    regions[..scanned.count].iter().flat_map(|region| page(region.start)..page(region.end)).collect()
}

/// An armed hugetlb mapping of 8 pages, of which the first 4 have content.
fn armed_hugetlb() -> TrackedMemfd {
    let tracked = TrackedMemfd::new(PageKind::Hugetlb, 8).unwrap();
    for page in 0..4 {
        tracked.write(page * PER_HUGE, 1);
    }
    tracked.tracker.arm().unwrap();
    tracked
}

#[test]
fn written_and_zapped_hugetlb_pages_are_the_empty_entries() {
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, 8));
    let tracked = armed_hugetlb();
    assert_eq!(empty(&tracked.tracker), [0_u64; 0], "armed entries are not empty");
    // Pages 1 and 6 are written, 2 and 5 are not; 5 and 6 had no content.
    tracked.write(PER_HUGE, 2);
    tracked.write(6 * PER_HUGE, 2);
    assert_eq!(tracked.read(5 * PER_HUGE), 0);
    for page in [1, 2, 5, 6] {
        tracked.advise(page * PER_HUGE, PER_HUGE, libc::MADV_DONTNEED).unwrap();
    }
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0], "the written bits are lost");
    assert_eq!(empty(&tracked.tracker), [1, 6]);
    // A scan does not arm them, UFFDIO_WRITEPROTECT does.
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    assert_eq!(empty(&tracked.tracker), [1, 6]);
    tracked.tracker.arm().unwrap();
    assert_eq!(empty(&tracked.tracker), [0_u64; 0]);
    tracked.write(PER_HUGE, 3);
    assert_eq!(tracked.read(6 * PER_HUGE), 2);
    assert_eq!(tracked.tracker.harvest().unwrap(), [1]);
}

#[test]
fn removed_hugetlb_pages_keep_armed_entries_and_ctime() {
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, 8));
    let tracked = armed_hugetlb();
    let before = change_time(&tracked.file);
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let huge = HUGE.cast_signed();
    fallocate(&tracked.original, punch, 0, huge).unwrap();
    tracked.advise(PER_HUGE, PER_HUGE, libc::MADV_REMOVE).unwrap();
    space::change(tracked.original.as_fd(), SpaceCall::Unreserve, 2 * HUGE, HUGE).unwrap();
    for page in 0..3 {
        assert_eq!(tracked.read(page * PER_HUGE), 0, "page {page} was removed");
    }
    assert_eq!(change_time(&tracked.file), before);
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    assert_eq!(empty(&tracked.tracker), [0_u64; 0], "neither scan finds a removal");
}

/// Zaps all pages of a page table, so that the kernel may free the table.
fn zapped_table_keeps_written_bits(kind: PageKind) {
    let tracked = TrackedMemfd::new(kind, if kind == PageKind::Thp { 2 } else { 2 * PER_HUGE }).unwrap();
    for page in 0..2 * PER_HUGE {
        tracked.write(page, 1);
    }
    tracked.tracker.arm().unwrap();
    let all: Vec<u64> = (0..PER_HUGE).collect();
    for page in &all {
        tracked.write(*page, 2);
    }
    tracked.write(PER_HUGE + 7, 2);
    tracked.advise(0, 2 * PER_HUGE, libc::MADV_DONTNEED).unwrap();
    let written = tracked.tracker.harvest().unwrap();
    assert_eq!(written[..all.len()], all, "{kind:?}: every page of the table was written");
    assert_eq!(written[all.len()..], [PER_HUGE + 7], "{kind:?}");
    // The harvest armed the entries, or the hole that they left.
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0], "{kind:?}");
    tracked.write(5, 3);
    tracked.advise(0, 2 * PER_HUGE, libc::MADV_DONTNEED).unwrap();
    assert_eq!(tracked.tracker.harvest().unwrap(), [5], "{kind:?}");
}

#[test]
fn zapped_table_of_small_pages_keeps_written_bits() {
    zapped_table_keeps_written_bits(PageKind::Shmem);
}

#[test]
fn zapped_table_of_a_transparent_huge_page_keeps_written_bits() {
    let host = HostLock::acquire().unwrap();
    let _setting = require(shmem_thp(&host));
    zapped_table_keeps_written_bits(PageKind::Thp);
}
