//! Writes by the kernel and by other processes to a tracked mapping. A scan reports all of them.

use std::fs::OpenOptions;
use std::io::IoSlice;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;

use fdmap_sys::Errno;
use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use fdmap_tests::memfd_agent::MemfdAgent;
use fdmap_tests::test;
use fdmap_tests::tracked::{PageKind, TrackedMemfd};
use io_uring::{IoUring, opcode, types};
use nix::libc;
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::{Pid, pipe, write};

/// The page that each test writes. Adjacent pages are not written.
const PAGE: u64 = 5;
/// Its offset in the mapping.
const AT: usize = PAGE as usize * 4096;

fn assert_seen(tracked: &TrackedMemfd, writer: impl FnOnce(&RawMapping)) {
    assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0]);
    let content = || {
        let mut bytes = [0; 8];
        assert!(tracked.mapping.read_at(AT, &mut bytes));
        bytes
    };
    let before = content();
    writer(&BorrowedMapping::of(&tracked.mapping));
    assert_ne!(content(), before, "the writer changed the page");
    assert_eq!(tracked.tracker.harvest().unwrap(), [PAGE]);
}

/// read(2) of 8 bytes from a pipe.
fn read_into(mapping: &RawMapping) {
    let (out, into) = pipe().unwrap();
    write(&into, b"12345678").unwrap();
    assert_eq!(mapping.read_from(AT, 8, out.as_fd(), None), Ok(8));
}

#[test]
fn read_is_seen() {
    assert_seen(&TrackedMemfd::armed(8).unwrap(), read_into);
}

#[test]
fn writes_of_the_kernel_are_seen_for_user_mode_only() {
    let uffd = Userfaultfd::create_user_mode_only().unwrap();
    let tracked = TrackedMemfd::with(PageKind::Shmem, 8, uffd, UffdFeatures::empty()).unwrap();
    tracked.tracker.arm().unwrap();
    assert_seen(&tracked, read_into);
}

#[test]
fn vmsplice_is_seen() {
    assert_seen(&TrackedMemfd::armed(8).unwrap(), |mapping| {
        let (out, into) = pipe().unwrap();
        write(&into, b"12345678").unwrap();
        assert_eq!(mapping.vmsplice(AT, 8, out.as_fd()), Ok(8));
    });
}

#[test]
fn futex_word_is_seen() {
    let tracked = TrackedMemfd::new(PageKind::Shmem, 8).unwrap();
    tracked.tracker.arm().unwrap();
    assert_seen(&tracked, |mapping| mapping.lock_pi(AT).unwrap());
}

#[test]
fn process_vm_writev_is_seen() {
    assert_seen(&TrackedMemfd::armed(8).unwrap(), |mapping| {
        let target = RemoteIoVec { base: mapping.address() + AT, len: 8 };
        assert_eq!(process_vm_writev(Pid::this(), &[IoSlice::new(b"12345678")], &[target]), Ok(8));
    });
}

#[test]
fn proc_mem_is_seen() {
    assert_seen(&TrackedMemfd::armed(8).unwrap(), |mapping| {
        let memory = OpenOptions::new().write(true).open("/proc/self/mem").unwrap();
        memory.write_all_at(b"12345678", (mapping.address() + AT) as u64).unwrap();
    });
}

#[test]
fn pokedata_is_seen() {
    let mut agent = MemfdAgent::start(8, None).unwrap();
    let tracker = agent.track(UffdFeatures::empty()).unwrap();
    tracker.arm().unwrap();
    let pid = agent.agent.pid().cast_signed();
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: attaching takes integers and accesses no memory of this process.
    let attached = unsafe { libc::ptrace(libc::PTRACE_ATTACH, pid, none, none) };
    assert_eq!(attached, 0, "{}", Errno::last());
    nix::sys::wait::waitpid(Pid::from_raw(pid), None).unwrap();
    let at = tracker.range.start + PAGE * 4096;
    // SAFETY: the address belongs to the agent. No memory of this process is accessed.
    let poked = unsafe { libc::ptrace(libc::PTRACE_POKEDATA, pid, at, 0x3132_3334_u64) };
    assert_eq!(poked, 0, "{}", Errno::last());
    // SAFETY: as for attaching.
    let detached = unsafe { libc::ptrace(libc::PTRACE_DETACH, pid, none, none) };
    assert_eq!(detached, 0, "{}", Errno::last());
    assert_eq!(tracker.harvest().unwrap(), [PAGE]);
}

#[test]
fn process_vm_writev_from_outside_is_seen() {
    let mut agent = MemfdAgent::start(8, None).unwrap();
    let tracker = agent.track(UffdFeatures::empty()).unwrap();
    tracker.arm().unwrap();
    let base = usize::try_from(tracker.range.start + PAGE * 4096).unwrap();
    let pid = Pid::from_raw(agent.agent.pid().cast_signed());
    let target = RemoteIoVec { base, len: 8 };
    assert_eq!(process_vm_writev(pid, &[IoSlice::new(b"12345678")], &[target]), Ok(8));
    assert_eq!(tracker.harvest().unwrap(), [PAGE]);
}

#[test]
fn io_uring_read_that_was_pending_over_a_harvest_is_seen() {
    let tracked = TrackedMemfd::armed(8).unwrap();
    assert_seen(&tracked, |mapping| {
        let mut ring = IoUring::new(2).unwrap();
        let (out, into) = pipe().unwrap();
        let entry = opcode::Read::new(types::Fd(out.as_raw_fd()), mapping.at(AT), 8).build();
        // SAFETY: the 8 bytes lie in the mapping, which outlives the ring.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit().unwrap();
        assert_eq!(tracked.tracker.harvest().unwrap(), [0_u64; 0], "the read is still pending");
        write(&into, b"12345678").unwrap();
        ring.submit_and_wait(1).unwrap();
        assert_eq!(ring.completion().next().unwrap().result(), 8);
    });
}
