//! Traces real system calls.

use std::arch::asm;
use std::ffi::CString;
use std::io;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use fdmap_sys::memfd;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};

use super::*;

mod mapping_calls;
mod races;

const SIZE: u64 = 16 << 20;
const EVERYTHING: ByteRange = ByteRange { offset: 0, length: u64::MAX };

fn start() -> WriteTracer {
    WriteTracer::start().unwrap_or_else(|error| panic!("no call trace: {error}"))
}

/// A memfd that was reopened by path, as the service passes it to clients.
fn file() -> OwnedFd {
    let fd = memfd::create("traced", None).unwrap();
    memfd::resize(fd.as_fd(), SIZE).unwrap();
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap().into()
}

fn bytes(offset: u64, length: u64) -> ByteRange {
    ByteRange::new(offset, length)
}

/// The result of a call, which must not be an error.
fn succeeded(result: impl TryInto<i64>) -> u64 {
    let result: i64 = result.try_into().unwrap_or(-1);
    u64::try_from(result).unwrap_or_else(|_| panic!("{}", io::Error::last_os_error()))
}

/// A tracer with one followed file.
struct Bench {
    trace: WriteTracer,
    fd: OwnedFd,
    followed: FollowedId,
}

impl Bench {
    fn new() -> Self {
        let trace = start();
        let fd = file();
        let followed = trace.follow(fd.as_fd()).unwrap();
        let bench = Self { trace, fd, followed };
        // Calls of other tests that began before the file was followed are reported as writes of the whole file.
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            pwrite(bench.raw(), 1, 0);
            if bench.trace.drain(followed).ended == [bytes(0, 1)] {
                return bench;
            }
            assert!(Instant::now() < end, "a write of one byte is not reported as such");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn ended(&self) -> Vec<ByteRange> {
        let traced = self.trace.drain(self.followed);
        assert!(!traced.lost);
        assert_eq!(traced.in_flight, []);
        traced.ended
    }

    /// Waits until a call is in flight (`some`), or until none is.
    fn until_in_flight(&self, some: bool) -> TracedWrites {
        let end = Instant::now() + Duration::from_secs(10);
        let mut all = Vec::new();
        loop {
            let traced = self.trace.drain(self.followed);
            all.extend(traced.ended.iter().copied());
            if traced.in_flight.is_empty() != some {
                return TracedWrites { ended: all, ..traced };
            }
            assert!(Instant::now() < end, "{traced:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn lseek(fd: RawFd, to: i64) {
    // SAFETY: the call accesses no memory.
    succeeded(unsafe { libc::lseek(fd, to, libc::SEEK_SET) });
}

fn pwrite(fd: RawFd, length: usize, offset: i64) {
    let data = vec![7_u8; length];
    // SAFETY: data has length bytes.
    assert_eq!(succeeded(unsafe { libc::pwrite(fd, data.as_ptr().cast(), length, offset) }), to_u64(length));
}

fn write(fd: RawFd, length: usize) -> isize {
    let data = vec![7_u8; length];
    // SAFETY: data has length bytes.
    unsafe { libc::write(fd, data.as_ptr().cast(), length) }
}

/// A pipe with `length` bytes in it.
fn full_pipe(length: usize) -> (OwnedFd, OwnedFd) {
    let (read, fill) = nix::unistd::pipe().unwrap();
    assert_eq!(write(fill.as_raw_fd(), length), length.cast_signed());
    (read, fill)
}

fn splice(pipe: RawFd, file: RawFd, offset: Option<&mut i64>, length: usize) -> isize {
    let offset = offset.map_or(ptr::null_mut(), ptr::from_mut);
    // SAFETY: offset is null or outlives the call.
    unsafe { libc::splice(pipe, ptr::null_mut(), file, offset, length, 0) }
}

#[test]
fn each_call_reports_its_byte_range() {
    let bench = Bench::new();
    let fd = bench.raw();
    assert_eq!(bench.ended(), []);

    pwrite(fd, 100, 5000);
    assert_eq!(bench.ended(), [bytes(5000, 100)], "pwrite64");

    lseek(fd, 7000);
    write(fd, 10);
    write(fd, 20);
    assert_eq!(bench.ended(), [bytes(7000, 30)], "write");

    let parts = [b"abc".as_slice(), b"defgh".as_slice()];
    let vector =
        parts.map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() });
    // SAFETY: the vector has two elements, whose bytes are only read.
    succeeded(unsafe { libc::writev(fd, vector.as_ptr(), 2) });
    assert_eq!(bench.ended(), [bytes(7030, 8)], "writev");
    // SAFETY: as above.
    succeeded(unsafe { libc::pwritev(fd, vector.as_ptr(), 2, 9000) });
    assert_eq!(bench.ended(), [bytes(9000, 8)], "pwritev");
    // SAFETY: as above.
    succeeded(unsafe { libc::pwritev2(fd, vector.as_ptr(), 2, 9100, 0) });
    // SAFETY: as above.
    succeeded(unsafe { libc::pwritev2(fd, vector.as_ptr(), 2, -1, 0) });
    assert_eq!(bench.ended(), [bytes(7038, 8), bytes(9100, 8)], "pwritev2, and at the position");

    let source = file();
    lseek(fd, 20_000);
    let mut from = 0;
    // SAFETY: from outlives the call.
    succeeded(unsafe { libc::sendfile(fd, source.as_raw_fd(), &raw mut from, 5000) });
    assert_eq!(bench.ended(), [bytes(20_000, 5000)], "sendfile");

    let (pipe, _fill) = full_pipe(1000);
    let mut at = 30_000;
    assert_eq!(splice(pipe.as_raw_fd(), fd, Some(&mut at), 600), 600);
    assert_eq!(splice(pipe.as_raw_fd(), fd, None, 400), 400);
    assert_eq!(bench.ended(), [bytes(25_000, 400), bytes(30_000, 600)], "splice, and at the position");

    let (mut from, mut to) = (0_i64, 50_000_i64);
    // SAFETY: from and to outlive the call.
    succeeded(unsafe { libc::copy_file_range(source.as_raw_fd(), &raw mut from, fd, &raw mut to, 3000, 0) });
    assert_eq!(bench.ended(), [bytes(50_000, 3000)], "copy_file_range");

    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the call accesses no memory.
    succeeded(unsafe { libc::fallocate(fd, punch, 4096, 8192) });
    assert_eq!(bench.ended(), [bytes(4096, 8192)], "fallocate");
    memfd::resize(bench.fd.as_fd(), 1 << 20).unwrap();
    assert_eq!(bench.ended(), [bytes(1 << 20, range::TO_THE_END)], "ftruncate");

    let path = CString::new(format!("/proc/self/fd/{fd}")).unwrap();
    // SAFETY: path ends with a zero.
    let again = succeeded(unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_TRUNC) });
    assert_eq!(bench.ended(), [EVERYTHING], "open with O_TRUNC");
    // SAFETY: the descriptor was opened just now and has no other user.
    succeeded(unsafe { libc::close(i32::try_from(again).unwrap()) });
}

#[test]
fn calls_that_write_nothing_are_not_reported() {
    let bench = Bench::new();
    let other = file();
    pwrite(other.as_raw_fd(), 10, 0);
    let mut buffer = [0; 10];
    nix::sys::uio::pread(&bench.fd, &mut buffer, 0).unwrap();
    lseek(bench.raw(), 100);
    let read_only = fdmap_sys::fd::reopen_for_probe(bench.fd.as_fd()).unwrap();
    assert_eq!(write(read_only.as_raw_fd(), 10), -1, "the descriptor is read-only");
    assert_eq!(bench.ended(), []);
    assert!(!bench.trace.drain(bench.followed).mapped);
    drop(SharedMapping::shared(&bench.fd, 0, 4096, false).unwrap());
    assert!(bench.trace.drain(bench.followed).mapped);
    assert!(!bench.trace.drain(bench.followed).mapped, "mapped is reported once");
}

#[test]
fn writes_by_any_process_are_reported() {
    let bench = Bench::new();
    let path = format!("/proc/{}/fd/{}", std::process::id(), bench.raw());
    let done = std::process::Command::new("dd")
        .args(["if=/dev/zero", "bs=1000", "count=3", "seek=7", "conv=notrunc"])
        .arg(format!("of={path}"))
        .output()
        .unwrap();
    assert!(done.status.success());
    assert_eq!(bench.ended(), [bytes(7000, 3000)]);
}

#[test]
fn ambiguous_range_is_the_whole_file() {
    let bench = Bench::new();
    let path = CString::new(format!("/proc/self/fd/{}", bench.raw())).unwrap();
    // SAFETY: path ends with a zero.
    let appending = succeeded(unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_APPEND) });
    write(i32::try_from(appending).unwrap(), 10);
    assert_eq!(bench.ended(), [EVERYTHING], "at the end of the file");
    // SAFETY: the descriptor was opened just now and has no other user.
    succeeded(unsafe { libc::close(i32::try_from(appending).unwrap()) });
    // SAFETY: address 1 is not mapped, so the kernel returns EFAULT.
    assert_eq!(unsafe { libc::pwrite(bench.raw(), ptr::without_provenance(1), 64, 128) }, -1);
    assert_eq!(bench.ended(), [bytes(128, 64)], "EFAULT: the requested range");
}

#[test]
fn reading_through_a_pipe_writes_nothing_and_moves_the_position() {
    let bench = Bench::new();
    let (other, (_read, pipe)) = (file(), nix::unistd::pipe().unwrap());
    // SAFETY: without offsets, the call accesses no memory.
    succeeded(unsafe {
        libc::splice(bench.raw(), ptr::null_mut(), pipe.as_raw_fd(), ptr::null_mut(), 100, 0)
    });
    // SAFETY: as above.
    succeeded(unsafe { libc::sendfile(other.as_raw_fd(), bench.raw(), ptr::null_mut(), 100) });
    assert_eq!(bench.ended(), []);
    write(bench.raw(), 10);
    assert_eq!(bench.ended(), [bytes(200, 10)]);
    // After a copy between two followed files, no position of the source is trusted any more.
    let both = bench.trace.follow(other.as_fd()).unwrap();
    // SAFETY: as above.
    succeeded(unsafe { libc::sendfile(other.as_raw_fd(), bench.raw(), ptr::null_mut(), 100) });
    assert_eq!(bench.trace.drain(both).ended, [bytes(100, 100)]);
    assert_eq!(bench.ended(), []);
    write(bench.raw(), 10);
    assert_eq!(bench.ended(), [EVERYTHING]);
    pwrite(bench.raw(), 10, 100);
    assert_eq!(bench.ended(), [bytes(100, 10)]);
}

#[test]
fn unlocked_file_position_is_not_trusted() {
    let trace = start();
    let fd = memfd::create("traced", None).unwrap();
    let followed = trace.follow(fd.as_fd()).unwrap();
    write(fd.as_raw_fd(), 10);
    assert_eq!(trace.drain(followed).ended, [EVERYTHING]);
    pwrite(fd.as_raw_fd(), 10, 100);
    assert_eq!(trace.drain(followed).ended, [bytes(100, 10)]);
}

/// A call by the 32-bit system call interface. Returns its result, or a negative errno.
///
/// # Safety
/// As for the call. Memory that it accesses is below 4 GiB.
unsafe fn call_of_32_bits(number: i64, arguments: [u64; 4]) -> i64 {
    let (mut result, [first, second, third, fourth]) = (number, arguments);
    // SAFETY: int 0x80 takes its number in eax and arguments in ebx, ecx, edx and esi, and clobbers only rax and r8 to r11.
    // The code restores rbx, which is reserved for the compiler. The caller answers for the call.
    unsafe {
        asm!("xchg {first}, rbx", "int 0x80", "xchg {first}, rbx", first = inout(reg) first => _,
            inout("rax") result, in("rcx") second, in("rdx") third, in("rsi") fourth,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    result
}

#[test]
fn calls_of_32_bit_programs_are_reported() {
    let bench = Bench::new();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
    // SAFETY: without MAP_FIXED, mmap changes no existing mapping.
    let low = unsafe { libc::mmap(ptr::null_mut(), 4096, libc::PROT_READ, flags, -1, 0) };
    assert_ne!(low, libc::MAP_FAILED);
    let (write, fd) = (4, u64::from(bench.raw().cast_unsigned()));
    // SAFETY: the data are below 4 GiB and are only read.
    match unsafe { call_of_32_bits(write, [fd, to_u64(low.addr()), 100, 0]) } {
        100 => assert_eq!(bench.ended(), [EVERYTHING]),
        error => eprintln!("not run: this kernel lacks 32-bit system calls: {error}"),
    }
    // SAFETY: the mapping was created above and is not used any more.
    unsafe { libc::munmap(low, 4096) };
}

#[test]
fn call_is_in_flight_until_it_ends() {
    let bench = Bench::new();
    let (pipe, fill) = nix::unistd::pipe().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut at = 4096;
            splice(pipe.as_raw_fd(), bench.raw(), Some(&mut at), 100)
        });
        let traced = bench.until_in_flight(true);
        assert_eq!((traced.ended, traced.in_flight), (vec![], vec![EVERYTHING]));
        pwrite(bench.raw(), 10, 0);
        let traced = bench.trace.drain(bench.followed);
        assert_eq!((traced.ended, traced.in_flight), (vec![bytes(0, 10)], vec![EVERYTHING]));
        write(fill.as_raw_fd(), 50);
        assert_eq!(waiting.join().unwrap(), 50);
        assert_eq!(bench.ended(), [bytes(4096, 50)]);
    });
}

#[test]
fn killed_process_leaves_no_call_in_flight() {
    let bench = Bench::new();
    let (pipe, _fill) = nix::unistd::pipe().unwrap();
    // SAFETY: the child only makes system calls, which is permitted after fork() in a process with threads.
    let child = match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            splice(pipe.as_raw_fd(), bench.raw(), None, 100);
            // SAFETY: _exit does not return.
            unsafe { libc::_exit(0) }
        }
    };
    bench.until_in_flight(true);
    kill(child, Signal::SIGKILL).unwrap();
    waitpid(child, None).unwrap();
    assert_eq!(bench.ended(), [EVERYTHING], "it may have written");
}

#[test]
fn earlier_call_is_reported_when_it_ends() {
    let trace = start();
    let (pipe, fill) = nix::unistd::pipe().unwrap();
    let fd = file();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| splice(pipe.as_raw_fd(), fd.as_raw_fd(), None, 100));
        std::thread::sleep(Duration::from_millis(50));
        let followed = trace.follow(fd.as_fd()).unwrap();
        assert_eq!(trace.drain(followed), TracedWrites::default());
        write(fill.as_raw_fd(), 50);
        waiting.join().unwrap();
        assert_eq!(trace.drain(followed).ended, [EVERYTHING]);
    });
}

#[test]
fn file_can_be_followed_once_at_a_time() {
    let bench = Bench::new();
    let again = bench.trace.follow(bench.fd.as_fd()).unwrap_err();
    assert!(again.to_string().ends_with("the file is already followed, or is not followed"), "{again}");
    pwrite(bench.raw(), 10, 0);
    bench.trace.unfollow(bench.followed);
    assert!(bench.trace.drain(bench.followed).lost, "its writes are unknown");
    pwrite(bench.raw(), 10, 100);
    let again_followed = bench.trace.follow(bench.fd.as_fd()).unwrap();
    assert_ne!(again_followed, bench.followed);
    assert_eq!(bench.trace.drain(again_followed), TracedWrites::default(), "earlier writes are not reported");
    pwrite(bench.raw(), 10, 200);
    assert_eq!(bench.trace.drain(again_followed).ended, [bytes(200, 10)]);
}

#[test]
fn overflow_is_reported_and_recovers() {
    let bench = Bench::new();
    for nth in 0..140_000 {
        nix::sys::uio::pwrite(&bench.fd, b"x", nth * 2).unwrap();
    }
    let traced = bench.trace.drain(bench.followed);
    assert!(traced.lost && !traced.ended.is_empty());
    pwrite(bench.raw(), 10, 0);
    assert_eq!(bench.ended(), [bytes(0, 10)]);
    for nth in 0..140_000 {
        nix::sys::uio::pwrite(&bench.fd, b"x", nth * 2).unwrap();
        if nth % 50_000 == 0 {
            assert!(!bench.trace.drain(bench.followed).lost);
        }
    }
    assert!(!bench.trace.drain(bench.followed).lost, "the ring buffer was drained in time");
}

#[test]
fn overflow_by_another_file_is_reported_and_recovers() {
    let bench = Bench::new();
    let other = file();
    let busy = bench.trace.follow(other.as_fd()).unwrap();
    for nth in 0..500_000 {
        nix::sys::uio::pwrite(&other, b"x", nth * 2).unwrap();
    }
    pwrite(bench.raw(), 10, 0);
    assert!(bench.trace.drain(bench.followed).lost, "the records of the other file fill the ring buffer");
    pwrite(bench.raw(), 10, 0);
    assert_eq!(bench.ended(), [bytes(0, 10)], "the drain made room, although it found no record of its file");
    bench.trace.unfollow(busy);
}

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
    // SAFETY: the request, its list and its bytes outlive the calls, and io_destroy waits for the request.
    unsafe {
        succeeded(libc::syscall(libc::SYS_io_setup, 1, &raw mut context));
        assert_eq!(succeeded(libc::syscall(libc::SYS_io_submit, context, 1_i64, list.as_ptr())), 1);
        succeeded(libc::syscall(libc::SYS_io_destroy, context));
    }
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
