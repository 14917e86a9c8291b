//! Writes through descriptors: their inotify events and ctime.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use fdmap_sys::inotify::{Inotify, InotifyEvent};
use fdmap_sys::testing::{aio, uring};
use fdmap_sys::{fd, memfd};
use fdmap_tests::cleanup::{Cleanup, CleanupGuard};
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, output, root};
use fdmap_tests::test;
use nix::fcntl::{FallocateFlags, SpliceFFlags, copy_file_range, fallocate, splice};
use nix::sys::sendfile::sendfile;
use nix::sys::uio::pwrite;
use nix::unistd::{ftruncate, pipe, write};

use crate::change_time;

const BYTES: usize = 8192;

/// A watched memfd: the descriptor of `memfd_create`, and a reopened one.
struct Watched {
    original: OwnedFd,
    reopened: OwnedFd,
    inotify: Inotify,
}

impl Watched {
    fn new() -> Self {
        let original = memfd::create("watched", None).unwrap();
        memfd::resize(original.as_fd(), BYTES as u64).unwrap();
        let reopened = fd::reopen(original.as_fd(), true).unwrap();
        let inotify = Inotify::new().unwrap();
        inotify.watch_modify(reopened.as_fd()).unwrap();
        Self { original, reopened, inotify }
    }

    /// Returns true if inotify reports `change`, which must change ctime.
    fn reports(&self, change: impl FnOnce()) -> bool {
        let before = change_time(&self.reopened);
        change();
        assert_ne!(change_time(&self.reopened), before, "every change updates ctime");
        let mut seen = Vec::new();
        self.inotify.drain(&mut seen).unwrap();
        assert!(seen.iter().all(|one| matches!(one, InotifyEvent::Modified(_))));
        !seen.is_empty()
    }
}

/// Whether inotify reports a change through the reopened descriptor, and the same change through the original one.
fn reports(change: impl Fn(BorrowedFd<'_>)) -> (bool, bool) {
    let watched = Watched::new();
    let reopened = watched.reports(|| change(watched.reopened.as_fd()));
    (reopened, watched.reports(|| change(watched.original.as_fd())))
}

/// Another memfd, with data.
fn source() -> OwnedFd {
    let source = memfd::create("source", None).unwrap();
    pwrite(&source, b"12345678", 0).unwrap();
    source
}

const REOPENED_ONLY: (bool, bool) = (true, false);

#[test]
fn write_raises_in_modify_through_a_reopened_descriptor() {
    assert_eq!(reports(|fd| assert_eq!(write(fd, b"x"), Ok(1))), REOPENED_ONLY);
    assert_eq!(reports(|fd| assert_eq!(pwrite(fd, b"x", 5000), Ok(1))), REOPENED_ONLY);
}

#[test]
fn fallocate_raises_in_modify_through_a_reopened_descriptor() {
    let allocate = FallocateFlags::empty();
    assert_eq!(reports(|fd| fallocate(fd, allocate, 0, 8192).unwrap()), REOPENED_ONLY);
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    assert_eq!(reports(|fd| fallocate(fd, punch, 0, 4096).unwrap()), REOPENED_ONLY);
}

#[test]
fn ftruncate_raises_in_modify_through_any_descriptor() {
    let size = std::cell::Cell::new(0);
    let truncate = |fd: BorrowedFd<'_>| {
        size.set(size.get() + 4096);
        ftruncate(fd, size.get()).unwrap();
    };
    assert_eq!(reports(truncate), (true, true));
}

#[test]
fn splice_raises_in_modify_through_a_reopened_descriptor() {
    let (out, into) = pipe().unwrap();
    let change = |fd: BorrowedFd<'_>| {
        write(&into, b"12345678").unwrap();
        assert_eq!(splice(&out, None, fd, None, 8, SpliceFFlags::empty()), Ok(8));
    };
    assert_eq!(reports(change), REOPENED_ONLY);
}

#[test]
fn sendfile_raises_in_modify_through_a_reopened_descriptor() {
    let source = source();
    let change = |fd: BorrowedFd<'_>| {
        let mut offset = 0;
        assert_eq!(sendfile(fd, &source, Some(&mut offset), 8), Ok(8));
    };
    assert_eq!(reports(change), REOPENED_ONLY);
}

#[test]
fn copy_file_range_raises_in_modify_through_a_reopened_descriptor() {
    let source = source();
    let change = |fd: BorrowedFd<'_>| {
        let mut begin = 0;
        assert_eq!(copy_file_range(&source, Some(&mut begin), fd, None, 8), Ok(8));
    };
    assert_eq!(reports(change), REOPENED_ONLY);
}

#[test]
fn io_uring_write_raises_in_modify_through_a_reopened_descriptor() {
    let change = |fd: BorrowedFd<'_>| assert_eq!(uring::write(fd, b"12345678", 0), Ok(8));
    assert_eq!(reports(change), REOPENED_ONLY);
}

#[test]
fn native_aio_raises_no_in_modify() {
    let change = |fd: BorrowedFd<'_>| assert_eq!(aio::write(fd, b"12345678", 0), Ok(8));
    assert_eq!(reports(change), (false, false));
}

#[test]
fn loop_device_raises_no_in_modify() {
    let _host = HostLock::acquire().unwrap();
    require(root());
    let watched = Watched::new();
    let path = format!("/proc/{}/fd/{}", std::process::id(), watched.reopened.as_raw_fd());
    let device = require(output("losetup", &["--find", "--show", &path]));
    let device = std::path::PathBuf::from(device.trim());
    let _attached = CleanupGuard::new(Cleanup::DetachLoop(device.clone())).unwrap();
    let reported = watched.reports(|| {
        let mut disk = OpenOptions::new().write(true).open(&device).unwrap();
        disk.write_all(b"12345678").unwrap();
        disk.sync_all().unwrap();
    });
    assert!(!reported);
    let mut start = [0; 8];
    std::os::unix::fs::FileExt::read_exact_at(&File::from(watched.reopened), &mut start, 0).unwrap();
    assert_eq!(&start, b"12345678");
}
