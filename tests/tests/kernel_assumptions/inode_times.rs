//! The times of an inode as evidence of writes, and `F_SEAL_FUTURE_WRITE`.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fdmap_sys::inotify::{Inotify, InotifyEvent};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::maps::{Maps, may_write};
use fdmap_sys::uffd::{UffdEvent, UffdFeatures};
use fdmap_sys::{Errno, fd, memfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, root};
use fdmap_tests::hugepages::{hugetlb_2m, shmem_thp};
use fdmap_tests::memfd_agent::MemfdAgent;
use fdmap_tests::test;
use fdmap_tests::test_agent::command::MemfdCommand;
use fdmap_tests::tracked::{HUGE, PAGE, PageKind, TrackedMemfd, range_of};
use nix::fcntl::{FallocateFlags, fallocate};

use crate::{change_time, errno};

/// Counts the pages of which a write changes ctime.
fn changes(tracked: &TrackedMemfd, pages: impl Iterator<Item = u64>) -> usize {
    pages
        .filter(|page| {
            let before = change_time(&tracked.file);
            tracked.write(*page, 2);
            change_time(&tracked.file) != before
        })
        .count()
}

#[test]
fn every_write_to_a_protected_small_page_changes_ctime() {
    let tracked = TrackedMemfd::armed(3000).unwrap();
    assert_eq!(changes(&tracked, 0..3000), 3000);
    assert_eq!(changes(&tracked, 0..3000), 0, "the pages are no longer protected");
}

#[test]
fn every_write_to_a_protected_page_of_a_transparent_huge_one_changes_ctime() {
    let host = HostLock::acquire().unwrap();
    let _setting = require(shmem_thp(&host));
    let tracked = TrackedMemfd::new(PageKind::Thp, 2).unwrap();
    tracked.write(0, 1);
    tracked.write(HUGE / PAGE, 1);
    tracked.tracker.arm().unwrap();
    assert_eq!(changes(&tracked, 0..2 * HUGE / PAGE), 1024);
}

#[test]
fn no_write_to_a_hugetlb_page_changes_ctime() {
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, 4));
    let tracked = TrackedMemfd::new(PageKind::Hugetlb, 4).unwrap();
    let each = || (0..4).map(|huge| huge * HUGE / PAGE);
    tracked.tracker.arm().unwrap();
    assert_eq!(changes(&tracked, each()), 0, "the pages did not exist before");
    tracked.tracker.arm().unwrap();
    assert_eq!(changes(&tracked, each()), 0);
    assert_eq!(tracked.tracker.harvest().unwrap(), [0, 1, 2, 3]);
}

#[test]
fn write_changes_ctime_before_and_raises_in_modify_after_the_copy() {
    const BYTES: usize = 64 << 20;
    let bytes = vec![1; BYTES];
    for _ in 0..20 {
        let file = fd::reopen(memfd::create("slow", None).unwrap().as_fd(), true).unwrap();
        let inotify = Inotify::new().unwrap();
        let watch = inotify.watch_modify(file.as_fd()).unwrap();
        let before = change_time(&file);
        let writer = File::from(file.try_clone().unwrap());
        let done = AtomicBool::new(false);
        let mut seen = Vec::new();
        let in_time = std::thread::scope(|scope| {
            scope.spawn(|| {
                writer.write_all_at(&bytes, 0).unwrap();
                done.store(true, Ordering::SeqCst);
            });
            while change_time(&file) == before {}
            inotify.drain(&mut seen).unwrap();
            !done.load(Ordering::SeqCst) && fd::stat(&file).unwrap().st_size < BYTES as i64
        });
        if !in_time {
            continue;
        }
        let during_write = std::mem::take(&mut seen);
        inotify.drain(&mut seen).unwrap();
        assert_eq!((during_write, seen), (vec![], vec![InotifyEvent::Modified(watch)]));
        return;
    }
    panic!("the writer always finished before its file was examined");
}

fn access_time(file: &OwnedFd) -> (i64, i64) {
    let stat = fd::stat(file).unwrap();
    (stat.st_atime, stat.st_atime_nsec)
}

#[test]
fn mmap_changes_atime_unless_o_noatime() {
    // The kernel updates these times once per tick.
    let tick = || std::thread::sleep(Duration::from_millis(25));
    let file = fd::reopen(memfd::create("accessed", None).unwrap().as_fd(), true).unwrap();
    memfd::resize(file.as_fd(), PAGE).unwrap();
    let quiet = fd::reopen_for_probe(file.as_fd()).unwrap();
    let before = access_time(&file);
    tick();
    drop(SharedMapping::shared(&quiet, 0, 4096, false).unwrap());
    assert_eq!(access_time(&file), before, "opened with O_NOATIME");
    drop(SharedMapping::shared(&file, 0, 4096, true).unwrap());
    assert_ne!(access_time(&file), before);
}

#[test]
fn future_write_seal_stops_new_writers_and_keeps_mappings() {
    const F_SEAL_FUTURE_WRITE: u32 = 0x10;
    require(root());
    let mut agent = MemfdAgent::start(8, None).unwrap();
    let tracker = agent.track(UffdFeatures::EVENT_FORK).unwrap();
    tracker.arm().unwrap();
    memfd::add_seals(agent.file.as_fd(), F_SEAL_FUTURE_WRITE).unwrap();

    assert_eq!(errno(SharedMapping::shared(&agent.file, 0, 4096, true)), Errno::EPERM);
    let read_only = SharedMapping::shared(&agent.file, 0, 4096, false).unwrap();
    let maps = Maps::open(std::process::id()).unwrap();
    let vma = maps.vma_at_or_after(range_of(&read_only).start, true).unwrap().unwrap();
    assert_eq!(may_write(std::process::id(), &vma), Ok(false), "mprotect cannot make the mapping writable");
    let error = agent.file.write_at(b"x", 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::EPERM as i32));
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    assert_eq!(fallocate(&agent.file, punch, 0, 4096), Err(Errno::EPERM));
    let again = fd::reopen(agent.file.as_fd(), true).unwrap();
    assert_eq!(nix::unistd::write(&again, b"x"), Err(Errno::EPERM));

    agent.write(2).unwrap();
    assert_eq!(tracker.harvest().unwrap(), [2]);
    agent.send(MemfdCommand::Fork).unwrap();
    assert!(matches!(tracker.event().unwrap(), UffdEvent::Fork(_)));
    agent.agent.reply().unwrap();
    agent.call(MemfdCommand::ChildWrite(4)).unwrap();
    agent.write(3).unwrap();
    assert_eq!(tracker.harvest().unwrap(), [3]);
    let mut byte = [0];
    agent.file.read_exact_at(&mut byte, 4 * PAGE).unwrap();
    assert_eq!(byte, *b"w");
}
