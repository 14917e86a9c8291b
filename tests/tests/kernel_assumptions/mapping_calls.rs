//! madvise(MADV_REMOVE), by a process and by another one.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::{Errno, memfd, pidfd};
use fdmap_tests::memfd_agent::MemfdAgent;
use fdmap_tests::test;
use nix::libc;
use nix::sys::mman::ProtFlags;

const PAGE: usize = 4096;
const PAGES: usize = 8;

/// A memfd whose pages all have data.
fn file() -> OwnedFd {
    let file = memfd::create("advised", None).unwrap();
    memfd::resize(file.as_fd(), (PAGES * PAGE) as u64).unwrap();
    fdmap_sys::fd::write_at(file.as_fd(), 0, &[7; PAGES * PAGE]).unwrap();
    file
}

/// The first byte of each page.
fn content(file: &OwnedFd) -> [u8; PAGES] {
    let mapping = SharedMapping::shared(file, 0, PAGES * PAGE, false).unwrap();
    std::array::from_fn(|page| {
        let mut byte = [0];
        assert!(mapping.read_at(page * PAGE, &mut byte));
        byte[0]
    })
}

/// A mapping of the whole file.
fn map(file: &OwnedFd) -> RawMapping {
    RawMapping::shared(file.as_fd(), 0, PAGES * PAGE).unwrap()
}

/// madvise(MADV_REMOVE) of `bytes` bytes.
fn remove(mapping: &RawMapping, bytes: usize) -> Result<(), Errno> {
    mapping.advise(0, bytes, libc::MADV_REMOVE).map_err(|error| error.errno)
}

#[test]
fn removal_that_fails_has_removed_a_part_of_its_range() {
    let file = file();
    let mapping = map(&file);
    mapping.replace(PAGE, PAGE, None, ProtFlags::PROT_READ).unwrap();
    assert_eq!(remove(&mapping, 3 * PAGE), Err(Errno::EINVAL));
    assert_eq!(content(&file), [0, 7, 7, 7, 7, 7, 7, 7]);
}

#[test]
fn removal_rounds_its_length_up_to_pages() {
    let file = file();
    let mapping = map(&file);
    assert_eq!(remove(&mapping, PAGE + 1), Ok(()));
    assert_eq!(remove(&mapping, 0), Ok(()));
    assert_eq!(content(&file), [0, 0, 7, 7, 7, 7, 7, 7]);
}

#[test]
fn process_removes_no_pages_of_another_one() {
    let agent = MemfdAgent::start(PAGES as u64, None).unwrap();
    let range = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(agent.range.start as usize),
        iov_len: PAGE,
    };
    let other = pidfd::open(agent.agent.pid()).unwrap();
    let (call, raw) = (libc::SYS_process_madvise, other.as_fd().as_raw_fd());
    // SAFETY: range outlives the call, and names memory of another process.
    let removed = unsafe { libc::syscall(call, raw, &raw const range, 1, libc::MADV_REMOVE, 0) };
    assert_eq!(Errno::result(removed), Err(Errno::EINVAL));
}
