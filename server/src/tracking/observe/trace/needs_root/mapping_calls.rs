//! Calls that name memory by its address.

use fdmap_sys::testing::segment::Segment;
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};
use nix::libc::{MADV_DONTNEED, MADV_REMOVE};

use super::*;

const PAGE: usize = 4096;

/// Maps `pages` pages of a file from page `first` on.
fn map(fd: &OwnedFd, first: usize, pages: usize) -> RawMapping {
    RawMapping::shared(fd.as_fd(), to_u64(first * PAGE), pages * PAGE).unwrap()
}

/// madvise(MADV_REMOVE) of `pages` pages from `first` on.
fn remove(mapping: &RawMapping, first: usize, pages: usize) {
    mapping.advise(first * PAGE, pages * PAGE, MADV_REMOVE).unwrap();
}

/// How often calls counted as mappings of the file, and of any file.
fn counted(bench: &Bench, calls: impl FnOnce()) -> (u64, u64) {
    let now = || {
        let of_file =
            bench.trace.counters.of_file(bench.followed.slot(), Counter::Mapped).load(Ordering::SeqCst);
        (of_file, bench.trace.counters.mappings_of_any_file())
    };
    let before = now();
    calls();
    let after = now();
    (after.0 - before.0, after.1 - before.1)
}

/// Asserts that a call counts as a mapping of the file this often. Where its file is unknown, it counts as often as one of any file:
/// when it begins, in `any_begun`.
#[track_caller]
fn assert_counts(bench: &Bench, times: u64, what: &str, mut call: impl FnMut()) {
    let any_begun = || bench.trace.counters.of_host(offset_of!(WriteControl, any_begun));
    for _ in 0..MAX_ATTEMPTS {
        let before = any_begun();
        let (of_file, of_any) = counted(bench, &mut call);
        let of_any = of_any + (any_begun() - before);
        assert!(of_file + of_any >= times, "{what}: {of_file} of the file, {of_any} of any file");
        if of_file == times {
            return;
        }
    }
    panic!("{what}: the file was unknown in each attempt");
}

#[test]
fn each_call_that_maps_counts_when_it_begins_and_when_it_ends() {
    let bench = Bench::new();
    let map = || map(&bench.fd, 0, 16);
    // When it begins, and twice when it ends: by its arguments and by its entry.
    let begun_and_ended = 3;
    assert_counts(&bench, begun_and_ended + begun_and_ended, "old length 0", || {
        drop(map().duplicate(0, 4 * PAGE).unwrap());
    });
    for (what, len) in [("grown", 32), ("shrunk", 8), ("kept", 16)] {
        assert_counts(&bench, begun_and_ended + begun_and_ended, what, || {
            drop(map().resize(len * PAGE, true).unwrap());
        });
    }
    assert_counts(&bench, begun_and_ended + begun_and_ended, "moved and left behind", || {
        drop(map().move_away().unwrap());
    });
    assert_counts(&bench, begun_and_ended + begun_and_ended, "remap_file_pages", || {
        map().remap_file_pages(0, PAGE, 100).unwrap();
    });
    assert!(bench.trace.drain(bench.followed).mapped);
}

#[test]
fn mapping_calls_on_other_memory_do_not_count() {
    let (bench, other) = (Bench::new(), file());
    let mapping = map(&other, 0, 16);
    let quiet = (0..MAX_ATTEMPTS).any(|_| {
        counted(&bench, || {
            drop(mapping.duplicate(0, 4 * PAGE).unwrap());
            let beside_a_page = mapping.address() + PAGE + 1;
            assert_eq!(calls::expand_in_place(beside_a_page, PAGE, PAGE), Err(Errno::EINVAL));
        }) == (0, 0)
    });
    assert!(quiet);
    let expand_nothing = || assert_eq!(calls::expand_unmapped(), Err(Errno::EFAULT));
    assert!(
        (0..MAX_ATTEMPTS).any(|_| counted(&bench, expand_nothing) == (0, 0)),
        "a failed call maps nothing"
    );
}

#[test]
fn attached_segment_counts() {
    let (segment, other) = (Segment::new(16 * PAGE).unwrap(), Segment::new(16 * PAGE).unwrap());
    let attach = |segment: &Segment| segment.attach_and_detach().unwrap();
    let (trace, attached) = (start(), segment.attach().unwrap());
    let path = format!("/proc/self/map_files/{:x}-{:x}", attached.address(), attached.address() + 16 * PAGE);
    let fd: OwnedFd = OpenOptions::new().read(true).write(true).open(path).unwrap().into();
    let followed = follow(&trace, fd.as_fd());
    let bench = Bench { trace, fd, followed };
    assert_counts(&bench, 1, "shmat", || attach(&segment));
    assert!((0..MAX_ATTEMPTS).any(|_| counted(&bench, || attach(&other)) == (0, 0)));
}

/// Asserts that a removal is reported as these ranges, or as one of any file where its mappings are unknown.
#[track_caller]
fn assert_removes(bench: &Bench, expected: &[ByteRange], what: &str, remove: impl Fn()) {
    for _ in 0..MAX_ATTEMPTS {
        let before = bench.trace.host_counters().unmatched;
        remove();
        let ended = bench.ended();
        if bench.trace.host_counters().unmatched == before {
            assert_eq!(ended, expected, "{what}");
            return;
        }
    }
    panic!("{what}: the mapping was unknown in each attempt");
}

#[test]
fn removal_reports_the_range_of_the_file() {
    let bench = Bench::new();
    let mapping = map(&bench.fd, 16, 32);
    let pages = |first: usize, pages: usize| bytes(to_u64(first * PAGE), to_u64(pages * PAGE));
    assert_removes(&bench, &[pages(18, 3)], "one mapping", || remove(&mapping, 2, 3));
    assert_removes(&bench, &[pages(18, 1)], "the upper half of an int is unused", || {
        let advice = 1_i64 << 32 | i64::from(MADV_REMOVE);
        calls::advise_with_64_bits(&mapping, (2 * PAGE, 100), advice).unwrap();
    });
    mapping.protect(4 * PAGE, PAGE, ProtFlags::PROT_READ).unwrap();
    assert_removes(&bench, &[pages(19, 4)], "three VMAs", || remove(&mapping, 3, 4));
    mapping.replace(12 * PAGE, PAGE, None, ProtFlags::PROT_READ).unwrap();
    assert_removes(&bench, &[pages(26, 2), pages(29, 1)], "a part, then an error", || {
        mapping.advise(10 * PAGE, 4 * PAGE, MADV_REMOVE).unwrap_err();
    });
    let both = [(0, PAGE), (8 * PAGE, 2 * PAGE)];
    let before = bench.trace.host_counters().unmatched;
    match mapping.process_advise(&both, MADV_REMOVE) {
        Err(error) => {
            assert!(error.call.starts_with("process_madvise"), "{error}");
            eprintln!("not run: this kernel refuses process_madvise(MADV_REMOVE): {}", error.errno);
        }
        Ok(removed) => {
            assert_eq!(removed, 3 * 4096);
            assert_removes(&bench, &[pages(16, 1), pages(24, 2)], "process_madvise", || {
                let _ = mapping.process_advise(&both, MADV_REMOVE);
            });
            let many: Vec<_> = (0..5).map(|page| (page * PAGE, PAGE)).collect();
            let _ = mapping.process_advise(&many, MADV_REMOVE);
            assert!(bench.trace.host_counters().unmatched >= before + 2, "too many ranges to examine");
        }
    }
    let other = file();
    let elsewhere = map(&other, 0, 16);
    assert_removes(&bench, &[], "another file", || remove(&elsewhere, 2, 3));
}

#[test]
fn removal_of_unknown_ranges_is_counted() {
    let bench = Bench::new();
    let mapping = map(&bench.fd, 0, 32);
    let counts = |what: &str, remove: &dyn Fn()| {
        let before = bench.trace.host_counters().unmatched;
        remove();
        assert!(bench.trace.host_counters().unmatched >= before + 2, "{what}");
    };
    counts("nothing is mapped", &|| {
        calls::advise_unmapped(MADV_REMOVE).unwrap_err();
    });
    for page in (1..32).step_by(2) {
        mapping.protect(page * PAGE, PAGE, ProtFlags::PROT_READ).unwrap();
    }
    counts("too many VMAs", &|| remove(&mapping, 0, 32));
    counts("ranges that cannot be read", &|| {
        calls::process_advise_unreadable(MADV_REMOVE).unwrap_err();
    });
}

#[test]
fn calls_of_32_bit_programs_are_reported() {
    let bench = Bench::new();
    let (flags, protection) =
        (MapFlags::MAP_SHARED | MapFlags::MAP_32BIT, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE);
    let mapping = RawMapping::map(Some((bench.fd.as_fd(), 0)), 8 * PAGE, protection, flags).unwrap();
    let remove = || calls32::madvise(&mapping, (PAGE, PAGE), MADV_REMOVE);
    if let Err(error) = remove() {
        eprintln!("not run: this kernel lacks 32-bit system calls: {}", error.errno);
        return;
    }
    let _ = bench.ended();
    assert_removes(&bench, &[bytes(4096, 4096)], "madvise", || remove().unwrap());
    let mut second = None;
    assert_counts(&bench, 3, "mremap", || second = Some(calls32::duplicate(&mapping, PAGE).unwrap()));
    assert!(second.is_some());
}

/// Anonymous memory that blocks each thread that reads it, until the userfaultfd is closed.
fn blocking_memory() -> (Userfaultfd, RawMapping) {
    let memory = RawMapping::map(None, PAGE, ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE).unwrap();
    let uffd = Userfaultfd::create().unwrap();
    uffd.api(UffdFeatures::empty()).unwrap();
    calls::block_access(&uffd, &memory).unwrap();
    (uffd, memory)
}

#[test]
fn removal_is_in_flight_until_it_ends() {
    let bench = Bench::new();
    let mapping = map(&bench.fd, 0, 32);
    let calls = [bytes(0, 10), bytes(4 * 4096, 2 * 4096)];
    for _ in 0..MAX_ATTEMPTS {
        let removals = bench.trace.host_counters().unmatched;
        let is_known = || bench.trace.host_counters().unmatched == removals;
        let (uffd, memory) = blocking_memory();
        let in_flight = std::thread::scope(|scope| {
            let uffd = uffd;
            // The write holds the lock of the inode until it can read its source, and the removal waits for that lock.
            let writing = scope.spawn(|| calls::pwrite_from(bench.fd.as_fd(), memory.at(0), 10, 0));
            bench.until_in_flight(true);
            let removing = scope.spawn(|| remove(&mapping, 4, 2));
            let end = Instant::now() + Duration::from_secs(10);
            let in_flight = loop {
                let in_flight = bench.trace.drain(bench.followed).in_flight;
                if in_flight.len() == calls.len() || !is_known() {
                    break in_flight;
                }
                assert!(Instant::now() < end, "{in_flight:?}");
                std::thread::sleep(Duration::from_millis(1));
            };
            drop(uffd);
            assert_eq!(writing.join().unwrap(), Ok(10));
            removing.join().unwrap();
            in_flight
        });
        let ended = bench.ended();
        if is_known() {
            assert_eq!((in_flight.as_slice(), ended.as_slice()), (calls.as_slice(), calls.as_slice()));
            return;
        }
    }
    panic!("the mapping was unknown in each attempt");
}

/// Asserts that the file counts as mapped in drains while `call` is blocked. Returns whether it does in the one after its end.
fn maps_until_it_ends(bench: &Bench, uffd: Userfaultfd, call: impl FnOnce() + Send) -> bool {
    let mapped = || bench.trace.drain(bench.followed).mapped;
    std::thread::scope(|scope| {
        let calling = scope.spawn(call);
        let end = Instant::now() + Duration::from_secs(10);
        // Calls of other programs may count for any file before the call begins.
        let mut mapped_in_a_row = 0;
        while mapped_in_a_row < 6 {
            assert!(Instant::now() < end, "{mapped_in_a_row} drains in a row while the call is in flight");
            std::thread::sleep(Duration::from_millis(10));
            mapped_in_a_row = if mapped() { mapped_in_a_row + 1 } else { 0 };
        }
        assert!(!calling.is_finished(), "the call does not block");
        drop(uffd);
        calling.join().unwrap();
    });
    let ended = mapped();
    // Calls of other programs may count for any file.
    assert!((0..MAX_ATTEMPTS).any(|_| !mapped()), "the call is in flight for ever");
    ended
}

#[test]
fn file_counts_as_mapped_while_a_call_that_maps_it_is_in_flight() {
    let bench = Bench::new();
    // Other tests of this program map nothing below 4 GiB where there are free addresses behind this mapping.
    let flags = MapFlags::MAP_SHARED | MapFlags::MAP_LOCKED | MapFlags::MAP_32BIT;
    let all = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let mapping = RawMapping::map(Some((bench.fd.as_fd(), 0)), 32 * PAGE, all, flags).unwrap();
    // Leaves free addresses behind the mapping.
    let mapping = mapping.resize(16 * PAGE, false).unwrap();
    fallocate(&bench.fd, PUNCH, 16 * 4096, 16 * 4096).unwrap();
    let uffd = Userfaultfd::create().unwrap();
    uffd.api(UffdFeatures::empty()).unwrap();
    calls::block_access(&uffd, &mapping).unwrap();
    bench.ended();
    // The kernel populates what it added to a locked mapping before the call returns.
    let grow = || drop(mapping.resize(32 * PAGE, false).unwrap());
    assert!(maps_until_it_ends(&bench, uffd, grow), "the call has ended since the last drain");
}

#[test]
fn any_file_counts_as_mapped_while_a_call_with_unknown_arguments_is_in_flight() {
    let bench = Bench::new();
    let arguments = calls32::ZeroArguments::new().unwrap();
    if arguments.mmap().unwrap_err().errno == Errno::ENOSYS {
        eprintln!("not run: this kernel lacks 32-bit system calls");
        return;
    }
    let uffd = Userfaultfd::create().unwrap();
    uffd.api(UffdFeatures::empty()).unwrap();
    arguments.memory().advise(0, PAGE, MADV_DONTNEED).unwrap();
    calls::block_access(&uffd, arguments.memory()).unwrap();
    bench.ended();
    // A call that fails maps nothing: whether the file counts as mapped after its end depends on calls of other programs.
    let _ = maps_until_it_ends(&bench, uffd, || assert!(arguments.mmap().is_err()));
}
