//! Writes that a scan of the tracked mapping does not report.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::maps::{Maps, may_write};
use fdmap_sys::testing::aio::{Aio, Opcode};
use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_sys::testing::kernel_access::RegisteredBuffer;
use fdmap_sys::{Errno, fd, memfd};
use fdmap_tests::harness::require;
use fdmap_tests::test;
use fdmap_tests::tracked::{PAGE, PageKind, TrackedMemfd, range_of};
use fdmap_tests::{HarnessError, HarnessResult};
use nix::libc;
use nix::sys::mman::ProtFlags;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

const BYTES: usize = 16 << 20;
const PAGES: u64 = BYTES as u64 / PAGE;

/// The first byte of each page.
fn content(tracked: &TrackedMemfd) -> Vec<u8> {
    (0..PAGES).map(|page| tracked.read(page)).collect()
}

/// The directory for temporary files of the build, if it is on a disk.
fn disk() -> HarnessResult<&'static Path> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    if statfs(folder).unwrap().filesystem_type() == TMPFS_MAGIC {
        return Err(HarnessError::Missing("a target directory on a disk".to_owned()));
    }
    Ok(folder)
}

#[test]
fn direct_read_in_flight_is_unobserved_after_the_harvest() {
    let folder = require(disk());
    let mut disk = tempfile::tempfile_in(folder).unwrap();
    disk.write_all(&vec![0xd1; BYTES]).unwrap();
    disk.sync_all().unwrap();
    let path = format!("/proc/self/fd/{}", disk.as_raw_fd());
    let disk = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let tracked = TrackedMemfd::new(PageKind::Shmem, PAGES).unwrap();
    let aio = Aio::new(1).unwrap();
    for _ in 0..50 {
        fill(&tracked.file, 0);
        tracked.tracker.arm().unwrap();
        // SAFETY: the read ends below, before the mapping is unmapped, and there are no references to the mapping.
        unsafe { aio.submit(Opcode::Pread, disk.as_fd(), (tracked.at(0), BYTES), 0, 0) }.unwrap();
        let harvested = tracked.tracker.harvest().unwrap();
        let at_harvest = content(&tracked);
        assert_eq!(aio.wait(1, 1).unwrap(), [(0, BYTES as i64)]);
        let later = tracked.tracker.harvest().unwrap();
        assert!(content(&tracked).iter().all(|byte| *byte == 0xd1), "the read is complete");
        let lost: Vec<u64> =
            (0..PAGES).filter(|page| at_harvest[*page as usize] == 0 && !later.contains(page)).collect();
        if !lost.is_empty() {
            // The earlier harvest reported the pages when the kernel pinned them, before the read stored to them.
            assert!(lost.iter().all(|page| harvested.contains(page)));
            return;
        }
    }
    panic!("in 50 rounds, no read was in flight during a harvest");
}

/// Writes `byte` to all pages by write(2), which a scan does not report.
fn fill(file: &OwnedFd, byte: u8) {
    let file = File::from(file.try_clone().unwrap());
    file.write_all_at(&vec![byte; BYTES], 0).unwrap();
}

#[test]
fn io_uring_registered_buffer_is_written_unobserved() {
    let tracked = TrackedMemfd::armed(8).unwrap();
    let source = memfd::create("source", None).unwrap();
    nix::unistd::write(&source, &[7; 8192]).unwrap();
    let mapping = BorrowedMapping::of(&tracked.mapping);
    let mut buffer = RegisteredBuffer::new(&mapping, 2 * PAGE as usize, 8192).unwrap();
    assert_eq!(tracked.tracker.harvest().unwrap(), [2, 3], "pages are reported when they are pinned");
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    assert_eq!(buffer.fill(source.as_fd()), Ok(8192));
    assert_eq!((tracked.read(2), tracked.read(3)), (7, 7));
    assert_eq!(
        tracked.tracker.harvest().unwrap(),
        [0_u64; 0],
        "pages are not reported when they are written"
    );
}

#[test]
fn descriptor_write_is_not_seen_by_a_scan() {
    let tracked = TrackedMemfd::armed(8).unwrap();
    File::from(tracked.file.try_clone().unwrap()).write_all_at(b"x", 3 * PAGE).unwrap();
    assert_eq!(tracked.read(3), b'x');
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
}

#[test]
fn untracked_mapping_whose_page_was_read_is_written_without_a_trace() {
    let tracked = TrackedMemfd::armed(64).unwrap();
    let untracked = SharedMapping::shared(&tracked.file, 0, 64 * 4096, true).unwrap();
    let times = || {
        let stat = fd::stat(&tracked.file).unwrap();
        [stat.st_ctime, stat.st_ctime_nsec, stat.st_mtime, stat.st_mtime_nsec]
    };
    let before = times();
    assert!(untracked.read_at(3 * 4096, &mut [0]));
    assert!(untracked.write_at(3 * 4096, b"x"));
    // The read also mapped adjacent pages, up to fault_around_bytes (64 KiB).
    assert!(untracked.write_at(4 * 4096, b"x"));
    assert_eq!((tracked.read(3), tracked.read(4)), (b'x', b'x'));
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    assert_eq!(times(), before);
    // The times do change if the first access to a page is a write.
    assert!(untracked.write_at(40 * 4096, b"x"));
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    assert_ne!(times(), before);
}

fn make_writable(mapping: &SharedMapping) -> Result<(), Errno> {
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let made = BorrowedMapping::of(mapping).protect(0, mapping.len(), protection);
    made.map_err(|error| error.errno)
}

#[test]
fn read_only_mapping_of_a_writable_descriptor_becomes_writable() {
    let file = memfd::create("protected", None).unwrap();
    memfd::resize(file.as_fd(), 4096).unwrap();
    let read_only = fd::reopen(file.as_fd(), false).unwrap();
    let maps = Maps::open(std::process::id()).unwrap();
    for (opened, may) in [(file.as_fd(), true), (read_only.as_fd(), false)] {
        let mapping = SharedMapping::shared(opened, 0, 4096, false).unwrap();
        let vma = maps.vma_at_or_after(range_of(&mapping).start, true).unwrap().unwrap();
        assert!(vma.shared && !vma.writable, "shown as r--s");
        assert_eq!(may_write(std::process::id(), &vma), Ok(may));
        assert_eq!(make_writable(&mapping), if may { Ok(()) } else { Err(Errno::EACCES) });
    }
}
