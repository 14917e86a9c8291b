//! Calls that write without naming a range: io_uring, native AIO, ioctl, truncation by path.

use super::*;

/// An io_uring that has one entry written to it.
fn submit(entry: &io_uring::squeue::Entry) -> i32 {
    let mut ring = io_uring::IoUring::new(4).unwrap();
    // SAFETY: the callers' buffers are static and only read.
    unsafe { ring.submission().push(entry) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap().result()
}

#[test]
fn io_uring_requests_count_for_their_own_file() {
    let bench = Bench::new();
    let other = file();
    let write = |fd: RawFd| io_uring::opcode::Write::new(io_uring::types::Fd(fd), b"abc".as_ptr(), 3).build();
    let requests = |bench: &Bench| bench.trace.drain(bench.followed).requests;
    assert!(!requests(&bench));
    assert_eq!(submit(&write(other.as_raw_fd())), 3);
    assert!(!requests(&bench), "the request is for another file");
    assert_eq!(submit(&write(bench.raw())), 3);
    assert!(requests(&bench) || !bench.trace.observes_io_uring());
    assert!(!requests(&bench), "it has ended");

    let mut ring = io_uring::IoUring::new(4).unwrap();
    ring.submitter().register_files(&[other.as_raw_fd(), bench.raw()]).unwrap();
    let fixed = io_uring::opcode::Write::new(io_uring::types::Fixed(1), b"abc".as_ptr(), 3).build();
    // SAFETY: the bytes are static and only read.
    unsafe { ring.submission().push(&fixed) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    let before = bench.trace.host_counters();
    assert!(requests(&bench) || !bench.trace.observes_io_uring(), "a registered file: {before:?}");
    assert!(!requests(&bench));
    // Without a completion event, the end of the request is not observed.
    let skipped = write(bench.raw()).flags(io_uring::squeue::Flags::SKIP_SUCCESS);
    let mut ring = io_uring::IoUring::new(4).unwrap();
    // SAFETY: the bytes are static and only read.
    unsafe { ring.submission().push(&skipped) }.unwrap();
    ring.submit().unwrap();
    assert!(requests(&bench) || !bench.trace.observes_io_uring());
    assert!(requests(&bench) || !bench.trace.observes_io_uring(), "in flight for ever");
}

#[test]
fn calls_that_do_not_name_the_file_are_counted_with_their_thread() {
    let bench = Bench::new();
    let own = BTreeSet::from([nix::unistd::gettid().as_raw().cast_unsigned()]);
    let others = |since| bench.trace.other_writers(&own, since);
    let begun = fdmap_sys::clock::monotonic_ns();
    assert!(others(begun).is_empty());
    let path = CString::new(format!("/proc/self/fd/{}", bench.raw())).unwrap();
    let before = bench.trace.host_counters();
    // SAFETY: path ends with a zero.
    succeeded(unsafe { libc::truncate(path.as_ptr(), SIZE.cast_signed()) });
    assert!(bench.trace.host_counters().paths >= before.paths + 2);
    assert_eq!(others(begun), own);
    assert!(others(fdmap_sys::clock::monotonic_ns()).is_empty(), "the call ended before");

    // To empty another file is harmless.
    let begun = fdmap_sys::clock::monotonic_ns();
    let other = file();
    std::fs::File::create(format!("/proc/self/fd/{}", other.as_raw_fd())).unwrap();
    assert!(others(begun).is_empty());
}

#[test]
fn native_aio_is_a_write_of_its_own_file() {
    let bench = Bench::new();
    let other = file();
    // struct iocb of linux/aio_abi.h, 64 bytes: the operation is at 16, the descriptor at 20.
    let request = |operation: u64, fd: i32| {
        let mut words = [0_u64; 8];
        words[2] = operation | u64::from(fd.cast_unsigned()) << 32;
        words
    };
    // True if the call counts as a write of the file: the context does not exist, so that none of them writes.
    let submitted = |requests: &[[u64; 8]]| {
        let before = bench.trace.host_counters().unmatched;
        let pointers: Vec<_> = requests.iter().map(|request| request.as_ptr()).collect();
        // SAFETY: the context does not exist, which the kernel detects before it reads anything.
        unsafe { libc::syscall(libc::SYS_io_submit, 0_u64, pointers.len(), pointers.as_ptr()) };
        let traced = bench.trace.drain(bench.followed);
        assert_eq!(traced.ended, [], "EINVAL is returned before anything is written");
        (!traced.threads.is_empty(), bench.trace.host_counters().unmatched >= before + 2)
    };
    let (read, write, write_vector, read_vector, newer) = (0, 1, 8, 7, 9);
    let (own, other) = (bench.raw(), other.as_raw_fd());
    assert_eq!(submitted(&[]), (false, false));
    let harmless = [request(write, other), request(read, own), request(read_vector, own)];
    assert_eq!(submitted(&harmless), (false, false));
    assert_eq!(submitted(&vec![request(read, own); 64]), (false, false));
    assert_eq!(submitted(&vec![request(read, own); 65]), (false, true), "too many to examine");
    for operation in [write, write_vector, newer] {
        assert_eq!(submitted(&[request(operation, own)]), (false, false));
    }
    aio_write(other);
    assert_eq!(bench.trace.drain(bench.followed).ended, []);
    aio_write(own);
    let traced = bench.trace.drain(bench.followed);
    assert_eq!((traced.ended, traced.threads.len(), traced.lost), (vec![EVERYTHING], 1, false));
}

/// Writes three bytes by native AIO.
fn aio_write(fd: RawFd) {
    let mut request = [0_u64; 8];
    request[2] = 1 | u64::from(fd.cast_unsigned()) << 32;
    (request[3], request[4]) = (b"abc".as_ptr() as u64, 3);
    let (mut context, list) = (0_u64, [request.as_ptr()]);
    // SAFETY: io_setup stores a number.
    succeeded(unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) });
    // SAFETY: the request, its list and its bytes outlive the request: io_destroy waits for it.
    assert_eq!(succeeded(unsafe { libc::syscall(libc::SYS_io_submit, context, 1_i64, list.as_ptr()) }), 1);
    // SAFETY: the call takes a number.
    succeeded(unsafe { libc::syscall(libc::SYS_io_destroy, context) });
}

/// Calls ioctl with a command that has the type `T` as its argument.
fn ioctl<T>(fd: RawFd, command: u64, argument: &T) -> i32 {
    // SAFETY: the commands of the tests read at most as many bytes as their argument has.
    unsafe { libc::ioctl(fd, command, std::ptr::from_ref(argument)) }
}

#[test]
fn ioctl_that_punches_or_attaches_the_file_is_traced() {
    const UNRESVSP64: u64 = 0x4030_582B;
    const RESVSP64: u64 = 0x4030_582A;
    const UDMABUF_CREATE: u64 = 0x4018_7542;
    let bench = Bench::new();
    // struct space_resv of linux/falloc.h: type i16, whence i16, start i64, length i64, and 24 bytes.
    let space = |start: u64, length: u64| [0, start, length, 0, 0, 0];
    succeeded(ioctl(bench.raw(), RESVSP64, &space(0, 4096)));
    let traced = bench.trace.drain(bench.followed);
    assert_eq!((traced.ended, traced.threads.len()), (vec![], 1), "no content changes");
    succeeded(ioctl(bench.raw(), UNRESVSP64, &space(0, 4096)));
    assert_eq!(bench.ended(), [EVERYTHING]);
    // The file is not a udmabuf device: the command decides, not the kind of the descriptor.
    let other = file();
    let create = |fd: i32| [u64::from(fd.cast_unsigned()), 0, 4096];
    assert_eq!(ioctl(other.as_raw_fd(), UDMABUF_CREATE, &create(other.as_raw_fd())), -1);
    assert!(!bench.trace.drain(bench.followed).attached);
    assert_eq!(ioctl(other.as_raw_fd(), UDMABUF_CREATE, &create(bench.raw())), -1);
    assert!(bench.trace.drain(bench.followed).attached);
    assert!(!bench.trace.drain(bench.followed).attached);
}

#[test]
fn preallocation_changes_no_content() {
    let bench = Bench::new();
    for mode in [0, libc::FALLOC_FL_KEEP_SIZE] {
        // SAFETY: fallocate takes integers.
        succeeded(unsafe { libc::fallocate(bench.raw(), mode, 0, 8192) });
        let traced = bench.trace.drain(bench.followed);
        assert_eq!((traced.ended, traced.threads.len()), (vec![], 1), "mode {mode}");
    }
    // SAFETY: fallocate takes integers.
    succeeded(unsafe {
        libc::fallocate(bench.raw(), libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 4096, 4096)
    });
    assert_eq!(bench.ended(), [bytes(4096, 4096)]);
}
