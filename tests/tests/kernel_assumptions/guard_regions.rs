//! Guard regions in write-protected memory.

use fdmap_sys::Errno;
use fdmap_tests::HarnessError;
use fdmap_tests::harness::require;
use fdmap_tests::test;
use fdmap_tests::tracked::TrackedMemfd;
use nix::libc;

/// `MADV_GUARD_INSTALL` of asm-generic/mman-common.h.
const GUARD_INSTALL: libc::c_int = 102;

fn install(tracked: &TrackedMemfd, first: u64, pages: u64) -> Result<(), Errno> {
    tracked.advise(first, pages, GUARD_INSTALL).map_err(|error| error.errno)
}

/// The kernel cannot install guard regions in write-protected shmem, and tries for ever.
#[test]
fn guard_installation_returns_when_write_protection_is_removed_meanwhile() {
    let plain = TrackedMemfd::new(fdmap_tests::tracked::PageKind::Shmem, 4).unwrap();
    require(install(&plain, 0, 1).map_err(|_| HarnessError::Missing("guard regions in shmem".to_owned())));
    let tracked = TrackedMemfd::armed(64).unwrap();
    let (sender, running) = std::sync::mpsc::channel();
    let tracked = &tracked;
    std::thread::scope(|scope| {
        let installing = scope.spawn(move || {
            sender.send(()).unwrap();
            install(tracked, 4, 2)
        });
        running.recv().unwrap();
        // As often as needed: the first time may be before the call.
        tracked.tracker.uffd.write_protect(tracked.tracker.range, false).unwrap();
        assert_eq!(installing.join().unwrap(), Ok(()));
    });
    // Other pages are as before.
    assert_eq!(tracked.read(3), 1);
    tracked.write(6, 7);
}
