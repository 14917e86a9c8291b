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
use crate::tracking::observe::byte_range as range;

mod devices;
mod mapping_calls;
mod other_calls;
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
