//! Calls that write without naming a range: io_uring, native AIO, ioctl, truncation by path.

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;

use fdmap_sys::testing::aio::{self, Opcode};
use fdmap_sys::testing::space::{self, SpaceCall};
use fdmap_sys::testing::uring::{self, Flags, Ring, Target};

use super::*;

#[test]
fn io_uring_requests_count_for_their_own_file() {
    let bench = Bench::new();
    let other = file();
    let write = |fd: &OwnedFd| uring::write(fd.as_fd(), b"abc", 0);
    let requests = |bench: &Bench| bench.trace.drain(bench.followed).requests;
    assert!(!requests(&bench));
    assert_eq!(write(&other), Ok(3));
    assert!(!requests(&bench), "the request is for another file");
    assert_eq!(write(&bench.fd), Ok(3));
    assert!(requests(&bench) || !bench.trace.observes_io_uring());
    assert!(!requests(&bench), "it has ended");

    let mut ring = Ring::new().unwrap();
    ring.register(&[other.as_fd(), bench.fd.as_fd()]).unwrap();
    ring.submit_write(Target::Registered(1), b"abc", 0, Flags::empty()).unwrap();
    assert_eq!(ring.wait(), Ok(3));
    let before = bench.trace.host_counters();
    assert!(requests(&bench) || !bench.trace.observes_io_uring(), "a registered file: {before:?}");
    assert!(!requests(&bench));
    // Without a completion event, the end of the request is not observed.
    let mut ring = Ring::new().unwrap();
    ring.submit_write(Target::Descriptor(bench.fd.as_fd()), b"abc", 0, Flags::SKIP_SUCCESS).unwrap();
    assert!(requests(&bench) || !bench.trace.observes_io_uring());
    assert!(requests(&bench) || !bench.trace.observes_io_uring(), "in flight for ever");
}

/// In a thread without an io_uring before. `None`: a request of another test counts.
fn bench_without_skipped_requests() -> Option<Bench> {
    let (bench, other) = (Bench::new(), file());
    let mut ring = Ring::new().unwrap();
    ring.submit_write(Target::Descriptor(other.as_fd()), b"abc", 0, Flags::empty()).unwrap();
    assert_eq!(ring.wait(), Ok(3));
    let read_only = fdmap_sys::fd::reopen(bench.fd.as_fd(), false).unwrap();
    ring.submit_write(Target::Descriptor(read_only.as_fd()), b"abc", 0, Flags::empty()).unwrap();
    assert_eq!(ring.wait(), Ok(-(Errno::EBADF as i32)));
    assert!(!bench.trace.drain(bench.followed).requests, "the descriptor is read-only");
    let skipped = bench.trace.requests_were_skipped(bench.followed);
    (!skipped).then_some(bench)
}

#[test]
fn requests_without_a_completion_event_and_by_read_only_descriptors_are_told_apart() {
    if !start().observes_io_uring() {
        return eprintln!("not run: this kernel lacks tracepoints of io_uring");
    }
    let in_a_thread = || std::thread::spawn(bench_without_skipped_requests).join().unwrap();
    let bench = (0..MAX_ATTEMPTS).find_map(|_| in_a_thread()).unwrap();
    let (other, mut ring) = (file(), Ring::new().unwrap());
    ring.submit_write(Target::Descriptor(other.as_fd()), b"abc", 0, Flags::SKIP_SUCCESS).unwrap();
    assert!(bench.trace.requests_were_skipped(bench.followed), "its end is not observed");
    let followed = follow(&bench.trace, other.as_fd());
    assert!(bench.trace.requests_were_skipped(followed), "it was submitted before");
    let bench = Bench::new();
    assert!(bench.trace.requests_were_skipped(bench.followed), "the ring is older than the tracer");
    // The kernel forgets a closed ring some time later. Other tests have rings.
    drop(ring);
    let end = Instant::now() + Duration::from_secs(20);
    while bench.trace.requests_were_skipped(bench.followed) {
        assert!(Instant::now() < end, "the rings are closed");
        std::thread::sleep(Duration::from_millis(100));
        let _ = bench.trace.drain(bench.followed);
    }
}

#[test]
fn position_that_a_request_moved_is_not_trusted() {
    type Read = fn(&mut Ring, &OwnedFd) -> i32;
    let cases: [(&str, Read, bool); 3] = [
        ("offset", |ring, fd| ring.read(fd.as_fd(), Some(64)).unwrap(), true),
        ("position", |ring, fd| ring.read(fd.as_fd(), None).unwrap(), false),
        (
            "splice",
            |ring, fd| {
                let (_pipe, fill) = nix::unistd::pipe().unwrap();
                ring.splice(fd.as_fd(), fill.as_fd()).unwrap()
            },
            false,
        ),
    ];
    for (what, read, is_trusted) in cases {
        let bench = Bench::new();
        if !bench.trace.observes_io_uring() {
            return eprintln!("not run: this kernel lacks tracepoints of io_uring");
        }
        let mut ring = Ring::new().unwrap();
        assert_eq!(read(&mut ring, &bench.fd), 16, "{what}");
        let at = nix::unistd::lseek(&bench.fd, 0, Whence::SeekCur).unwrap();
        assert_eq!(at, if is_trusted { 0 } else { 16 }, "{what}");
        assert_eq!(write(&bench.fd, 10), Ok(10));
        let written = if is_trusted { bytes(0, 10) } else { EVERYTHING };
        assert_eq!(bench.ended(), [written], "{what}");
    }
}

#[test]
fn request_on_any_file_is_in_progress_until_it_ends() {
    let bench = Bench::new();
    if !bench.trace.observes_io_uring() {
        return eprintln!("not run: this kernel lacks tracepoints of io_uring");
    }
    let (pipe, fill) = nix::unistd::pipe().unwrap();
    let mut ring = Ring::new().unwrap();
    ring.submit_advice_behind(pipe.as_fd()).unwrap();
    for _ in 0..3 {
        assert!(bench.trace.drain(bench.followed).lost, "the request is in progress");
    }
    assert_eq!(nix::unistd::write(&fill, b"ready"), Ok(5));
    let results = [ring.wait().unwrap(), ring.wait().unwrap()];
    assert_eq!(results, [nix::libc::POLLIN.into(), 0]);
    let is_idle = || !bench.trace.drain(bench.followed).lost;
    // Other tests make calls that may write to any file.
    assert!((0..MAX_ATTEMPTS).any(|_| is_idle()), "{:?}", bench.trace.host_counters());
    ring.submit_canceled_advice().unwrap();
    assert!(ring.wait().unwrap() < 0);
    assert!((0..MAX_ATTEMPTS).any(|_| is_idle()), "the canceled request has no completion event");
}

#[test]
fn calls_that_do_not_name_the_file_are_counted_with_their_thread() {
    let bench = Bench::new();
    let own = BTreeSet::from([nix::unistd::gettid().as_raw().cast_unsigned()]);
    let others = |since| bench.trace.other_writers_among(&own, since);
    let begun = fdmap_sys::clock::monotonic_ns();
    assert!(others(begun).is_empty());
    let before = bench.trace.host_counters();
    nix::unistd::truncate(path_of(&bench.fd).as_str(), SIZE.cast_signed()).unwrap();
    assert!(bench.trace.host_counters().paths >= before.paths + 2);
    assert_eq!(others(begun), own);
    assert!(others(fdmap_sys::clock::monotonic_ns()).is_empty(), "the call ended before");

    // To empty another file is harmless.
    let begun = fdmap_sys::clock::monotonic_ns();
    let other = file();
    std::fs::File::create(path_of(&other)).unwrap();
    assert!(others(begun).is_empty());
}

#[test]
fn native_aio_is_a_write_of_its_own_file() {
    let bench = Bench::new();
    let other = file();
    // True if the call counts as a write of the file: the context does not exist, so that none of them writes.
    let submitted = |requests: &[(Opcode, BorrowedFd<'_>)]| {
        let before = bench.trace.host_counters().unmatched;
        assert_eq!(aio::submit_to_no_context(requests), Err(Errno::EINVAL));
        let traced = bench.trace.drain(bench.followed);
        assert_eq!(traced.ended, [], "EINVAL is returned before anything is written");
        (!traced.threads.is_empty(), bench.trace.host_counters().unmatched >= before + 2)
    };
    let (own, other) = (bench.fd.as_fd(), other.as_fd());
    assert_eq!(submitted(&[]), (false, false));
    let harmless = [(Opcode::Pwrite, other), (Opcode::Pread, own), (Opcode::Preadv, own)];
    assert_eq!(submitted(&harmless), (false, false));
    assert_eq!(submitted(&[(Opcode::Pread, own); 64]), (false, false));
    assert_eq!(submitted(&[(Opcode::Pread, own); 65]), (false, true), "too many to examine");
    for opcode in [Opcode::Pwrite, Opcode::Pwritev, Opcode::Unknown] {
        assert_eq!(submitted(&[(opcode, own)]), (false, false));
    }
    assert_eq!(aio::write(other, b"abc", 0), Ok(3));
    assert_eq!(bench.trace.drain(bench.followed).ended, []);
    assert_eq!(aio::write(own, b"abc", 0), Ok(3));
    let traced = bench.trace.drain(bench.followed);
    assert_eq!((traced.ended, traced.threads.len(), traced.lost), (vec![EVERYTHING], 1, false));
}

#[test]
fn ioctl_that_punches_or_attaches_the_file_is_traced() {
    let bench = Bench::new();
    space::change(bench.fd.as_fd(), SpaceCall::Reserve, 0, 4096).unwrap();
    let traced = bench.trace.drain(bench.followed);
    assert_eq!((traced.ended, traced.threads.len()), (vec![], 1), "no content changes");
    space::change(bench.fd.as_fd(), SpaceCall::Unreserve, 0, 4096).unwrap();
    assert_eq!(bench.ended(), [EVERYTHING]);
    // The file is not a udmabuf device: the command decides, not the kind of the descriptor.
    let other = file();
    let create = |file: &OwnedFd| calls::create_udmabuf(other.as_fd(), file.as_fd());
    create(&other).unwrap_err();
    assert!(!bench.trace.drain(bench.followed).attached);
    create(&bench.fd).unwrap_err();
    assert!(bench.trace.drain(bench.followed).attached);
    assert!(!bench.trace.drain(bench.followed).attached);
}

#[test]
fn preallocation_changes_no_content() {
    let bench = Bench::new();
    for mode in [FallocateFlags::empty(), FallocateFlags::FALLOC_FL_KEEP_SIZE] {
        fallocate(&bench.fd, mode, 0, 8192).unwrap();
        let traced = bench.trace.drain(bench.followed);
        assert_eq!((traced.ended, traced.threads.len()), (vec![], 1), "mode {mode:?}");
    }
    fallocate(&bench.fd, PUNCH, 4096, 4096).unwrap();
    assert_eq!(bench.ended(), [bytes(4096, 4096)]);
}
