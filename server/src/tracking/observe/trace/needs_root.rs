//! Traces real system calls.

use std::fs::OpenOptions;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::memfd;
use fdmap_sys::testing::calls::NumberBits;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::testing::{calls, calls32};
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, SpliceFFlags, copy_file_range, fallocate, fcntl};
use nix::sys::mman::{MapFlags, ProtFlags};
use nix::sys::sendfile::sendfile;
use nix::sys::signal::{Signal, kill};
use nix::sys::uio;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{ForkResult, Whence, fork};

use super::*;
use crate::tracking::observe::byte_range::TO_THE_END;

mod devices;
mod earlier_calls;
mod mapping_calls;
mod other_calls;
mod races;

const SIZE: u64 = 16 << 20;
/// Attempts that another test, or another process of the host, may disturb: it locks an address space, or makes calls on any file.
const MAX_ATTEMPTS: usize = 50;
const EVERYTHING: ByteRange = ByteRange { offset: 0, length: u64::MAX };
const PUNCH: FallocateFlags = FallocateFlags::FALLOC_FL_PUNCH_HOLE.union(FallocateFlags::FALLOC_FL_KEEP_SIZE);

fn start() -> WriteTracer {
    WriteTracer::start().unwrap_or_else(|error| panic!("no call trace: {error}"))
}

/// Follows a file, and searches for earlier calls on it.
fn follow(trace: &WriteTracer, fd: BorrowedFd<'_>) -> FollowedId {
    let followed = trace.follow(fd).unwrap();
    trace.find_earlier_calls(followed);
    followed
}

/// A memfd that was reopened by path, as the service passes it to clients.
fn file() -> OwnedFd {
    let fd = memfd::create("traced", None).unwrap();
    memfd::resize(fd.as_fd(), SIZE).unwrap();
    OpenOptions::new().read(true).write(true).open(path_of(&fd)).unwrap().into()
}

/// The path of a file of this process.
fn path_of(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

fn bytes(offset: u64, length: u64) -> ByteRange {
    ByteRange::new(offset, length)
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
        let followed = follow(&trace, fd.as_fd());
        let bench = Self { trace, fd, followed };
        // Calls of other tests that began before the file was followed are reported as writes of the whole file.
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            pwrite(&bench.fd, 1, 0);
            let traced = bench.trace.drain(followed);
            if traced.ended == [bytes(0, 1)] && !traced.lost {
                return bench;
            }
            assert!(Instant::now() < end, "a write of one byte is not reported as such");
            std::thread::sleep(Duration::from_millis(1));
        }
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

fn lseek(fd: impl AsFd, to: i64) {
    assert_eq!(nix::unistd::lseek(fd, to, Whence::SeekSet), Ok(to));
}

fn pwrite(fd: impl AsFd, length: usize, offset: i64) {
    assert_eq!(uio::pwrite(fd, &vec![7; length], offset), Ok(length));
}

fn write(fd: impl AsFd, length: usize) -> nix::Result<usize> {
    nix::unistd::write(fd, &vec![7; length])
}

/// A pipe with `length` bytes in it.
fn full_pipe(length: usize) -> (OwnedFd, OwnedFd) {
    let (read, fill) = nix::unistd::pipe().unwrap();
    assert_eq!(write(&fill, length), Ok(length));
    (read, fill)
}

fn splice(pipe: &OwnedFd, file: &OwnedFd, offset: Option<&mut i64>, length: usize) -> nix::Result<usize> {
    nix::fcntl::splice(pipe, None, file, offset, length, SpliceFFlags::empty())
}

#[test]
fn each_call_reports_its_byte_range() {
    let bench = Bench::new();
    let fd = &bench.fd;
    assert_eq!(bench.ended(), []);

    pwrite(fd, 100, 5000);
    assert_eq!(bench.ended(), [bytes(5000, 100)], "pwrite64");

    lseek(fd, 7000);
    assert_eq!(write(fd, 10), Ok(10));
    assert_eq!(write(fd, 20), Ok(20));
    assert_eq!(bench.ended(), [bytes(7000, 30)], "write");

    let parts = [IoSlice::new(b"abc"), IoSlice::new(b"defgh")];
    assert_eq!(uio::writev(fd, &parts), Ok(8));
    assert_eq!(bench.ended(), [bytes(7030, 8)], "writev");
    assert_eq!(uio::pwritev(fd, &parts, 9000), Ok(8));
    assert_eq!(bench.ended(), [bytes(9000, 8)], "pwritev");
    assert_eq!(calls::pwritev2(fd.as_fd(), &parts, 9100, 0), Ok(8));
    assert_eq!(calls::pwritev2(fd.as_fd(), &parts, -1, 0), Ok(8));
    assert_eq!(bench.ended(), [bytes(7038, 8), bytes(9100, 8)], "pwritev2, and at the position");

    let source = file();
    lseek(fd, 20_000);
    assert_eq!(sendfile(fd, &source, Some(&mut 0), 5000), Ok(5000));
    assert_eq!(bench.ended(), [bytes(20_000, 5000)], "sendfile");

    let (pipe, _fill) = full_pipe(1000);
    assert_eq!(splice(&pipe, fd, None, 400), Ok(400));
    assert_eq!(bench.ended(), [bytes(25_000, 400)], "splice at the position");
    // An offset in memory is not trusted.
    assert_eq!(splice(&pipe, fd, Some(&mut 30_000), 600), Ok(600));
    assert_eq!(bench.ended(), [EVERYTHING], "splice");
    assert_eq!(copy_file_range(&source, Some(&mut 0), fd, Some(&mut 50_000), 3000), Ok(3000));
    assert_eq!(bench.ended(), [EVERYTHING], "copy_file_range");

    fallocate(fd, PUNCH, 4096, 8192).unwrap();
    assert_eq!(bench.ended(), [bytes(4096, 8192)], "fallocate");
    memfd::resize(fd.as_fd(), 1 << 20).unwrap();
    assert_eq!(bench.ended(), [bytes(1 << 20, TO_THE_END)], "ftruncate");

    let _again = OpenOptions::new().read(true).write(true).truncate(true).open(path_of(fd)).unwrap();
    assert_eq!(bench.ended(), [EVERYTHING], "open with O_TRUNC");
}

#[test]
fn calls_that_write_nothing_are_not_reported() {
    let bench = Bench::new();
    let other = file();
    pwrite(&other, 10, 0);
    let mut buffer = [0; 10];
    uio::pread(&bench.fd, &mut buffer, 0).unwrap();
    lseek(&bench.fd, 100);
    let read_only = fdmap_sys::fd::reopen_for_probe(bench.fd.as_fd()).unwrap();
    assert_eq!(write(&read_only, 10), Err(Errno::EBADF), "the descriptor is read-only");
    assert_eq!(bench.ended(), []);
    assert!(!bench.trace.drain(bench.followed).mapped);
    drop(SharedMapping::shared(&bench.fd, 0, 4096, false).unwrap());
    assert!(bench.trace.drain(bench.followed).mapped);
    assert!(!bench.trace.drain(bench.followed).mapped, "mapped is reported once");
}

#[test]
fn writes_by_any_process_are_reported() {
    let bench = Bench::new();
    let path = format!("/proc/{}/fd/{}", std::process::id(), bench.fd.as_raw_fd());
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
    let appending = OpenOptions::new().append(true).open(path_of(&bench.fd)).unwrap();
    assert_eq!(write(&appending, 10), Ok(10));
    assert_eq!(bench.ended(), [EVERYTHING], "at the end of the file");
    drop(appending);
    assert_eq!(calls::pwrite_from_nowhere(bench.fd.as_fd(), 64, 128), Err(Errno::EFAULT));
    assert_eq!(bench.ended(), [bytes(128, 64)], "EFAULT: the requested range");
}

#[test]
fn reading_through_a_pipe_writes_nothing_and_moves_the_position() {
    let bench = Bench::new();
    let (other, (_read, pipe)) = (file(), nix::unistd::pipe().unwrap());
    assert_eq!(splice(&bench.fd, &pipe, None, 100), Ok(100));
    assert_eq!(sendfile(&other, &bench.fd, None, 100), Ok(100));
    assert_eq!(bench.ended(), []);
    assert_eq!(write(&bench.fd, 10), Ok(10));
    assert_eq!(bench.ended(), [bytes(200, 10)]);
    // After a copy between two followed files, no position of the source is trusted any more.
    let both = follow(&bench.trace, other.as_fd());
    assert_eq!(sendfile(&other, &bench.fd, None, 100), Ok(100));
    assert_eq!(bench.trace.drain(both).ended, [bytes(100, 100)]);
    assert_eq!(bench.ended(), []);
    assert_eq!(write(&bench.fd, 10), Ok(10));
    assert_eq!(bench.ended(), [EVERYTHING]);
    pwrite(&bench.fd, 10, 100);
    assert_eq!(bench.ended(), [bytes(100, 10)]);
}

#[test]
fn unlocked_file_position_is_not_trusted() {
    let trace = start();
    let fd = memfd::create("traced", None).unwrap();
    let followed = follow(&trace, fd.as_fd());
    assert_eq!(write(&fd, 10), Ok(10));
    assert_eq!(trace.drain(followed).ended, [EVERYTHING]);
    pwrite(&fd, 10, 100);
    assert_eq!(trace.drain(followed).ended, [bytes(100, 10)]);
}

#[test]
fn calls_of_32_bit_programs_are_reported() {
    let bench = Bench::new();
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_32BIT;
    let low = RawMapping::map(None, 4096, ProtFlags::PROT_READ, flags).unwrap();
    match calls32::write(bench.fd.as_fd(), &low, (0, 100)) {
        Ok(100) => assert_eq!(bench.ended(), [EVERYTHING]),
        other => eprintln!("not run: this kernel lacks 32-bit system calls: {other:?}"),
    }
}

#[test]
fn x32_call_is_reported_also_by_kernels_that_lack_it() {
    let bench = Bench::new();
    let wrote = calls::pwrite_numbered(NumberBits::X32, bench.fd.as_fd(), b"abc", 7000);
    assert!(matches!(wrote, Ok(3) | Err(Errno::ENOSYS)), "{wrote:?}");
    assert_eq!(bench.ended(), [bytes(7000, 3)]);
}

#[test]
fn upper_half_of_the_number_of_a_call_is_ignored() {
    let bench = Bench::new();
    assert_eq!(calls::pwrite_numbered(NumberBits::UpperHalf, bench.fd.as_fd(), b"abc", 7000), Ok(3));
    assert_eq!(bench.ended(), [bytes(7000, 3)]);
}

#[test]
fn call_is_in_flight_until_it_ends() {
    let bench = Bench::new();
    let (pipe, fill) = nix::unistd::pipe().unwrap();
    std::thread::scope(|scope| {
        lseek(&bench.fd, 4096);
        let waiting = scope.spawn(|| splice(&pipe, &bench.fd, None, 100));
        let traced = bench.until_in_flight(true);
        assert_eq!((traced.ended, traced.in_flight), (vec![], vec![EVERYTHING]));
        pwrite(&bench.fd, 10, 0);
        let traced = bench.trace.drain(bench.followed);
        assert_eq!((traced.ended, traced.in_flight), (vec![bytes(0, 10)], vec![EVERYTHING]));
        assert_eq!(write(&fill, 50), Ok(50));
        assert_eq!(waiting.join().unwrap(), Ok(50));
        assert_eq!(bench.ended(), [bytes(4096, 50)]);
    });
}

/// The kernel may have read the descriptor before or after it was replaced.
#[test]
fn call_whose_descriptor_is_replaced_counts_for_both_files() {
    let bench = Bench::new();
    let (pipe, fill) = nix::unistd::pipe().unwrap();
    let other = file();
    let followed = follow(&bench.trace, other.as_fd());
    let target = bench.fd.try_clone().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| splice(&pipe, &target, Some(&mut 0), 100));
        bench.until_in_flight(true);
        calls::replace_descriptor(target.as_fd(), other.as_fd()).unwrap();
        assert_eq!(write(&fill, 50), Ok(50));
        assert_eq!(waiting.join().unwrap(), Ok(50));
    });
    assert_eq!(bench.ended(), [EVERYTHING]);
    assert_eq!(bench.trace.drain(followed).ended, [EVERYTHING]);
}

#[test]
fn killed_process_leaves_no_call_in_flight() {
    let bench = Bench::new();
    let (pipe, _fill) = nix::unistd::pipe().unwrap();
    // SAFETY: the child only makes system calls, which is permitted after fork() in a process with threads.
    let child = match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let _ = splice(&pipe, &bench.fd, None, 100);
            calls::exit_now(0)
        }
    };
    bench.until_in_flight(true);
    kill(child, Signal::SIGKILL).unwrap();
    waitpid(child, None).unwrap();
    assert_eq!(bench.ended(), [EVERYTHING], "it may have written");
}

#[test]
fn append_that_is_set_and_cleared_during_a_call_is_reported() {
    let bench = Bench::new();
    let (path, stop) = (path_of(&bench.fd), AtomicBool::new(false));
    let target = OpenOptions::new().write(true).open(path).unwrap();
    let (appended, missed) = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for flags in [OFlag::O_APPEND, OFlag::empty()] {
                    fcntl(&target, FcntlArg::F_SETFL(flags)).unwrap();
                }
            }
        });
        let end = Instant::now() + Duration::from_secs(60);
        let size = || target.metadata().map_or(0, |metadata| metadata.len());
        let (mut appended, mut calls, mut missed) = (0, 0, None);
        while missed.is_none() && (calls < 20_000 || appended == 0) && Instant::now() < end {
            let before = size();
            let wrote = uio::pwrite(&target, b"x", 0);
            let written = if size() == before { 0 } else { before };
            let ended = bench.trace.drain(bench.followed).ended;
            let is_reported = ended.iter().any(|range| range.offset <= written && written < range.end());
            missed = (wrote != Ok(1) || !is_reported).then_some((written, ended));
            appended += u32::from(written != 0);
            calls += 1;
        }
        stop.store(true, Ordering::Relaxed);
        (appended, missed)
    });
    assert_eq!(missed, None);
    assert!(appended > 0, "the flag was never set when the kernel read it");
}

#[test]
fn file_can_be_followed_once_at_a_time() {
    let bench = Bench::new();
    let again = bench.trace.follow(bench.fd.as_fd()).unwrap_err();
    assert!(again.to_string().ends_with("the file is already followed, or is not followed"), "{again}");
    pwrite(&bench.fd, 10, 0);
    bench.trace.unfollow(bench.followed);
    assert!(bench.trace.drain(bench.followed).lost, "its writes are unknown");
    pwrite(&bench.fd, 10, 100);
    let again_followed = follow(&bench.trace, bench.fd.as_fd());
    assert_ne!(again_followed, bench.followed);
    assert_eq!(bench.trace.drain(again_followed), TracedWrites::default(), "earlier writes are not reported");
    pwrite(&bench.fd, 10, 200);
    assert_eq!(bench.trace.drain(again_followed).ended, [bytes(200, 10)]);
}

#[test]
fn overflow_is_reported_and_recovers() {
    let bench = Bench::new();
    for nth in 0..140_000 {
        uio::pwrite(&bench.fd, b"x", nth * 2).unwrap();
    }
    let traced = bench.trace.drain(bench.followed);
    assert!(traced.lost && !traced.ended.is_empty());
    pwrite(&bench.fd, 10, 0);
    assert_eq!(bench.ended(), [bytes(0, 10)]);
    for nth in 0..140_000 {
        uio::pwrite(&bench.fd, b"x", nth * 2).unwrap();
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
    let busy = follow(&bench.trace, other.as_fd());
    for nth in 0..500_000 {
        uio::pwrite(&other, b"x", nth * 2).unwrap();
    }
    pwrite(&bench.fd, 10, 0);
    assert!(bench.trace.drain(bench.followed).lost, "the records of the other file fill the ring buffer");
    pwrite(&bench.fd, 10, 0);
    assert_eq!(bench.ended(), [bytes(0, 10)], "the drain made room, although it found no record of its file");
    bench.trace.unfollow(busy);
}
