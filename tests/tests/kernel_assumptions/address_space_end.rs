//! Scan results after the end of a tracked mapping or of its address space.

use std::time::Duration;

use fdmap_sys::maps::Maps;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_sys::{Errno, SyscallError};
use fdmap_tests::memfd_agent::MemfdAgent;
use fdmap_tests::test;
use fdmap_tests::test_agent::command::{Command, MemfdCommand};
use fdmap_tests::tracked::{PageKind, TrackedMemfd, WpTracker};

use crate::errno;

fn tracked_agent() -> (MemfdAgent, WpTracker) {
    let mut agent = MemfdAgent::start(16, None).unwrap();
    let tracker = agent.track(UffdFeatures::empty()).unwrap();
    tracker.arm().unwrap();
    agent.write(3).unwrap();
    assert_eq!(tracker.peek().unwrap(), [3]);
    (agent, tracker)
}

/// True if a scan reports that the address space ended: `ESRCH`, or no pages on builds of 6.18 that return 0 for it.
fn is_end(scan: &Result<Vec<u64>, SyscallError>) -> bool {
    match scan {
        Ok(pages) => pages.is_empty(),
        Err(error) => error.errno == Errno::ESRCH,
    }
}

#[test]
fn scan_after_munmap_returns_no_pages_and_no_error() {
    let (mut agent, tracker) = tracked_agent();
    let maps = Maps::open(agent.agent.pid()).unwrap();
    assert_eq!(maps.vma_at_or_after(tracker.range.start, true).unwrap().unwrap().range, tracker.range);
    agent.call(MemfdCommand::Unmap).unwrap();
    assert_eq!(tracker.harvest(), Ok(vec![]), "page 3 was written, but the mapping no longer exists");
    // Only UFFDIO_WRITEPROTECT and the maps file show that the mapping no longer exists.
    assert_eq!(errno(tracker.arm()), Errno::ENOENT);
    let next = maps.vma_at_or_after(tracker.range.start, true).unwrap();
    assert!(next.is_none_or(|vma| vma.range.start >= tracker.range.end));
}

#[test]
fn exit_ends_the_scan() {
    let (mut agent, tracker) = tracked_agent();
    agent.agent.send(&Command::Exit).unwrap();
    while !agent.pidfd.exited().unwrap() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(is_end(&tracker.harvest()));
    assert_eq!(errno(tracker.arm()), Errno::ESRCH);
}

#[test]
fn exec_ends_the_scan_but_not_the_pidfd() {
    let (mut agent, tracker) = tracked_agent();
    let maps = Maps::open(agent.agent.pid()).unwrap();
    agent.agent.send(&Command::Exec).unwrap();
    loop {
        let scan = tracker.peek();
        if is_end(&scan) {
            break;
        }
        // While exec tears down the old address space, some builds also report pages that were not written.
        assert!(scan.unwrap().contains(&3), "a written page is missing");
    }
    assert_eq!(errno(tracker.arm()), Errno::ESRCH);
    assert_eq!(errno(maps.vma_at_or_after(0, true)), Errno::ESRCH);
    assert_eq!(agent.pidfd.exited(), Ok(false));
}

#[test]
fn replaced_mapping_is_eperm_with_check_wpasync_only() {
    let (mut agent, tracker) = tracked_agent();
    agent.call(MemfdCommand::Cover).unwrap();
    assert_eq!(errno(tracker.harvest()), Errno::EPERM);
    assert_eq!(errno(tracker.arm()), Errno::ENOENT);
    assert_ne!(tracker.peek_unchecked().unwrap(), [3], "the old mapping is not scanned");
}

#[test]
fn tracking_ends_with_the_last_userfaultfd() {
    let tracked = TrackedMemfd::armed(8).unwrap();
    let TrackedMemfd { tracker: WpTracker { uffd, pagemap, range, unit }, mapping, .. } = tracked;
    let duplicate = uffd.try_clone().unwrap();
    let tracker = WpTracker { uffd, pagemap, range, unit };
    mapping.write_at(0, b"x");
    assert_eq!(tracker.peek().unwrap(), [0]);
    let WpTracker { uffd, pagemap, .. } = tracker;
    drop(uffd);
    let rest = WpTracker { uffd: Userfaultfd::create().unwrap(), pagemap, range, unit };
    assert_eq!(rest.peek().unwrap(), [0], "the duplicate keeps tracking alive");
    drop(duplicate);
    assert_eq!(errno(rest.peek()), Errno::EPERM, "PM_SCAN_CHECK_WPASYNC detects the end of tracking");
    rest.peek_unchecked().unwrap();
}

#[test]
fn range_belongs_to_one_userfaultfd_at_a_time() {
    let tracked = TrackedMemfd::new(PageKind::Shmem, 8).unwrap();
    let other = Userfaultfd::create().unwrap();
    other.api(fdmap_tests::tracked::asynchronous()).unwrap();
    assert_eq!(errno(other.register_wp(tracked.tracker.range)), Errno::EBUSY);
    tracked.tracker.uffd.unregister(tracked.tracker.range).unwrap();
    other.register_wp(tracked.tracker.range).unwrap();
}
