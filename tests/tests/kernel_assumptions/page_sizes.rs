//! Small, transparent huge and hugetlb pages.

use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, read};
use fdmap_tests::hugepages::{hugetlb_2m, shmem_thp};
use fdmap_tests::test;
use fdmap_tests::tracked::{HUGE, PAGE, PageKind, TrackedMemfd, range_of};
use nix::fcntl::{FallocateFlags, fallocate};

const PER_HUGE: u64 = HUGE / PAGE;

fn punch(tracked: &TrackedMemfd, offset: u64, bytes: u64) {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&tracked.file, flags, offset.cast_signed(), bytes.cast_signed()).unwrap();
}

fn drop_table_entries(tracked: &TrackedMemfd, first: u64, pages: u64) {
    tracked.advise(first, pages, nix::libc::MADV_DONTNEED).unwrap();
}

/// KiB of the mapping that huge page table entries map.
fn huge_mapped(tracked: &TrackedMemfd) -> u64 {
    let smaps = read("/proc/self/smaps").unwrap();
    let head = format!("{:x}-", range_of(&tracked.mapping).start);
    let mut own = smaps.lines().skip_while(|line| !line.starts_with(&head));
    let line = own.find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

/// KiB of shmem that are in huge pages, mapped or not.
fn shmem_huge() -> u64 {
    let meminfo = read("/proc/meminfo").unwrap();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("ShmemHugePages:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

#[test]
fn untouched_shmem_reads_as_written_until_armed() {
    let tracked = TrackedMemfd::new(PageKind::Shmem, 1024).unwrap();
    let all: Vec<u64> = (0..1024).collect();
    assert_eq!(tracked.tracker.peek().unwrap(), all);
    assert_eq!(tracked.tracker.harvest().unwrap(), all, "a harvest also arms the mapping");
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    tracked.write(700, 1);
    assert_eq!(tracked.tracker.harvest().unwrap(), [700], "the page did not exist before");
    assert_eq!(tracked.read(701), 0);
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0], "a read is not reported");
}

#[test]
fn punched_page_is_not_reported_and_later_writes_are() {
    let tracked = TrackedMemfd::armed(16).unwrap();
    punch(&tracked, 4 * PAGE, 2 * PAGE);
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    assert_eq!(tracked.read(4), 0, "the punched page reads as zeroes");
    assert!(tracked.tracker.uffd.read_event().unwrap().is_none());
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    tracked.write(4, 2);
    tracked.write(5, 2);
    assert_eq!(tracked.tracker.harvest().unwrap(), [4, 5]);
}

#[test]
fn madv_dontneed_keeps_written_bits() {
    let tracked = TrackedMemfd::armed(16).unwrap();
    tracked.write(2, 2);
    drop_table_entries(&tracked, 1, 3);
    assert_eq!(tracked.tracker.harvest().unwrap(), [2]);
    drop_table_entries(&tracked, 1, 3);
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    tracked.write(3, 2);
    assert_eq!(tracked.tracker.harvest().unwrap(), [3]);
}

#[test]
fn armed_thp_is_split_and_reported_per_page() {
    let host = HostLock::acquire().unwrap();
    let _setting = require(shmem_thp(&host));
    let tracked = TrackedMemfd::new(PageKind::Thp, 4).unwrap();
    assert_eq!(
        tracked.tracker.peek().unwrap().len() as u64,
        4 * PER_HUGE,
        "an unarmed mapping reports every page"
    );
    for huge in 0..2 {
        tracked.write(huge * PER_HUGE, 1);
    }
    assert_eq!(huge_mapped(&tracked), 2 * HUGE / 1024);
    tracked.tracker.arm().unwrap();
    assert_eq!(huge_mapped(&tracked), 0, "arming splits each entry of 2 MiB");
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    tracked.write(77, 2);
    tracked.write(3 * PER_HUGE + 5, 2);
    assert_eq!(
        tracked.tracker.harvest().unwrap(),
        [77, 3 * PER_HUGE + 5],
        "the second page did not exist before"
    );
    punch(&tracked, 0, HUGE);
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    tracked.write(78, 3);
    assert_eq!(tracked.tracker.harvest().unwrap(), [78]);
}

#[test]
fn madv_collapse_changes_no_written_bit() {
    let host = HostLock::acquire().unwrap();
    let _setting = require(shmem_thp(&host));
    let tracked = TrackedMemfd::armed(2 * PER_HUGE).unwrap();
    tracked.write(3, 2);
    let before = shmem_huge();
    // The call fails with EINVAL, because no single entry maps the pages. They are collapsed nevertheless.
    let _ = tracked.advise(0, PER_HUGE, nix::libc::MADV_COLLAPSE);
    assert_eq!(shmem_huge(), before + HUGE / 1024);
    assert_eq!(tracked.tracker.harvest().unwrap(), [3]);
    tracked.write(5, 2);
    assert_eq!(tracked.tracker.harvest().unwrap(), [5]);
}

#[test]
fn unarmed_hugetlb_page_is_reported_as_written_by_a_read() {
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, 8));
    let tracked = TrackedMemfd::new(PageKind::Hugetlb, 8).unwrap();
    assert_eq!(tracked.tracker.peek().unwrap(), [0_u64; 0], "untouched");
    assert_eq!(
        tracked.tracker.harvest().unwrap(),
        [0_u64; 0],
        "unlike on shmem, a harvest does not arm the mapping"
    );
    assert_eq!(tracked.read(5 * PER_HUGE), 0);
    assert_eq!(tracked.tracker.harvest().unwrap(), [5], "the page was only read");
    assert_eq!(tracked.read(5 * PER_HUGE), 0);
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
}

#[test]
fn hugetlb_is_reported_per_huge_page() {
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, 8));
    let tracked = TrackedMemfd::new(PageKind::Hugetlb, 8).unwrap();
    tracked.tracker.arm().unwrap();
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    tracked.write(3 * PER_HUGE + 17, 1);
    assert_eq!(tracked.tracker.harvest().unwrap(), [3], "the page did not exist before");
    assert_eq!(tracked.read(5 * PER_HUGE), 0);
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0], "a read of an armed page is not reported");
    tracked.write(5 * PER_HUGE, 1);
    tracked.write(3 * PER_HUGE, 1);
    assert_eq!(tracked.tracker.harvest().unwrap(), [3, 5]);

    punch(&tracked, 3 * HUGE, HUGE);
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0], "a punched page is not reported");
    tracked.write(3 * PER_HUGE, 1);
    assert_eq!(tracked.tracker.harvest().unwrap(), [3], "a write after punching is reported");
    drop_table_entries(&tracked, 3 * PER_HUGE, PER_HUGE);
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    tracked.write(3 * PER_HUGE, 2);
    assert_eq!(tracked.tracker.harvest().unwrap(), [3]);
}
