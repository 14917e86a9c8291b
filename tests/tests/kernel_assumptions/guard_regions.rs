//! Guard regions in write-protected memory.

use fdmap_sys::Errno;
use fdmap_tests::HarnessError;
use fdmap_tests::harness::require;
use fdmap_tests::test;
use fdmap_tests::tracked::{PAGE, TrackedMemfd};
use nix::libc;

/// `MADV_GUARD_INSTALL` of asm-generic/mman-common.h.
const GUARD_INSTALL: libc::c_int = 102;

fn install(address: usize, pages: u64) -> Errno {
    // SAFETY: the range belongs to a mapping of a test, to which there are no references.
    let result = unsafe {
        libc::madvise(std::ptr::with_exposed_provenance_mut(address), (pages * PAGE) as usize, GUARD_INSTALL)
    };
    if result == 0 { Errno::from_raw(0) } else { Errno::last() }
}

/// The kernel cannot install guard regions in write-protected shmem, and tries for ever.
#[test]
fn guard_installation_returns_when_write_protection_is_removed_meanwhile() {
    let plain = TrackedMemfd::new(fdmap_tests::tracked::PageKind::Shmem, 4).unwrap();
    let supported = install(plain.at(0).expose_provenance(), 1) == Errno::from_raw(0);
    require(if supported { Ok(()) } else { Err(HarnessError::Missing("guard regions in shmem".to_owned())) });
    let tracked = TrackedMemfd::armed(64).unwrap();
    let address = tracked.at(4).expose_provenance();
    let (sender, running) = std::sync::mpsc::channel();
    let installing = std::thread::spawn(move || {
        sender.send(()).unwrap();
        install(address, 2)
    });
    running.recv().unwrap();
    // As often as needed: the first time may be before the call.
    tracked.tracker.uffd.write_protect(tracked.tracker.range, false).unwrap();
    assert_eq!(installing.join().unwrap(), Errno::from_raw(0));
    // Other pages are as before.
    assert_eq!(tracked.read(3), 1);
    tracked.write(6, 7);
}
