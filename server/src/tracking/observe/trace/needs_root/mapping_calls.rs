//! Calls that name memory by its address.

use std::ffi::c_void;
use std::os::fd::FromRawFd as _;

use fdmap_sys::uffd::{UffdFeatures, Userfaultfd};

use super::*;

const PAGE: usize = 4096;
/// Attempts of a call whose mapping another thread of this test program may have locked, or another process of the host.
const MAX_ATTEMPTS: usize = 50;

/// A mapping that is changed by raw calls.
#[derive(Clone, Copy)]
struct TestMapping {
    address: usize,
    len: usize,
}

impl TestMapping {
    /// Maps `pages` pages of a file from page `first` on.
    fn of(fd: RawFd, first: usize, pages: usize) -> Self {
        let (len, protection) = (pages * PAGE, libc::PROT_READ | libc::PROT_WRITE);
        let offset = to_u64(first * PAGE).cast_signed();
        // SAFETY: without MAP_FIXED, mmap changes no existing mapping.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, offset) };
        Self::checked(at, len)
    }

    fn checked(at: *mut c_void, len: usize) -> Self {
        assert_ne!(at, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Self { address: at.expose_provenance(), len }
    }

    fn page(self, page: usize) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.address + page * PAGE)
    }

    fn remap(self, old_len: usize, len: usize, flags: i32) -> Self {
        let (flags, hint) = (libc::MREMAP_MAYMOVE | flags, ptr::null_mut::<c_void>());
        // SAFETY: the range was mapped for a test, which has no references to it.
        Self::checked(unsafe { libc::mremap(self.page(0), old_len, len, flags, hint) }, len)
    }

    /// madvise(MADV_REMOVE) of `pages` pages from `first` on.
    fn remove(self, first: usize, pages: usize) {
        // SAFETY: the pages belong to a file, and no reference to their content exists.
        succeeded(unsafe { libc::madvise(self.page(first), pages * PAGE, libc::MADV_REMOVE) });
    }

    fn unmap(self) {
        // SAFETY: the range was mapped for a test, which does not use it any more.
        succeeded(unsafe { libc::munmap(self.page(0), self.len) });
    }
}

/// How often calls counted as mappings of the file, and of any file.
fn counted(bench: &Bench, calls: impl FnOnce()) -> (u64, u64) {
    let now = || {
        let of_file = bench.trace.counter(bench.followed.slot(), Counter::Mapped).load(Ordering::SeqCst);
        (of_file, bench.trace.mappings_of_any_file())
    };
    let before = now();
    calls();
    let after = now();
    (after.0 - before.0, after.1 - before.1)
}

/// Asserts that a call counts as a mapping of the file at least this often, or as one of any file where that is unknown.
#[track_caller]
fn assert_counts(bench: &Bench, times: u64, what: &str, mut call: impl FnMut()) {
    for _ in 0..MAX_ATTEMPTS {
        let (of_file, of_any) = counted(bench, &mut call);
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
    let map = || TestMapping::of(bench.raw(), 0, 16);
    let begun_and_ended = 2;
    assert_counts(&bench, begun_and_ended + begun_and_ended, "old length 0", || {
        let mapping = map();
        mapping.remap(0, 4 * PAGE, 0).unmap();
        mapping.unmap();
    });
    for (what, old_len, len, flags) in [
        ("grown", 16, 32, 0),
        ("shrunk", 16, 8, 0),
        ("kept", 16, 16, 0),
        ("moved and left behind", 16, 16, libc::MREMAP_DONTUNMAP),
    ] {
        assert_counts(&bench, begun_and_ended + begun_and_ended, what, || {
            let mapping = map();
            mapping.remap(old_len * PAGE, len * PAGE, flags).unmap();
            if flags != 0 {
                mapping.unmap();
            }
        });
    }
    assert_counts(&bench, begun_and_ended + begun_and_ended, "remap_file_pages", || {
        let mapping = map();
        // SAFETY: the range was mapped for this test, which has no references to it.
        succeeded(unsafe { libc::syscall(libc::SYS_remap_file_pages, mapping.address, PAGE, 0, 100, 0) });
        mapping.unmap();
    });
    assert!(bench.trace.drain(bench.followed).mapped);
}

#[test]
fn mapping_calls_on_other_memory_do_not_count() {
    let (bench, other) = (Bench::new(), file());
    let mapping = TestMapping::of(other.as_raw_fd(), 0, 16);
    let quiet = (0..MAX_ATTEMPTS).any(|_| {
        counted(&bench, || {
            mapping.remap(0, 4 * PAGE, 0).unmap();
            // SAFETY: address 1 is not a page, so the kernel returns EINVAL.
            unsafe { libc::mremap(mapping.page(1).wrapping_byte_add(1), PAGE, PAGE, 0) };
        }) == (0, 0)
    });
    assert!(quiet);
    let (of_file, of_any) = counted(&bench, || {
        // SAFETY: nothing is mapped there, so the kernel returns EFAULT.
        unsafe { libc::mremap(ptr::without_provenance_mut(PAGE), PAGE, 2 * PAGE, 0) };
    });
    assert!(of_file == 0 && of_any > 0, "the file is unknown");
    mapping.unmap();
}

/// A System V segment, removed on drop.
struct Segment(i32);

impl Segment {
    fn new() -> Self {
        // SAFETY: the call takes integers.
        Self(i32::try_from(succeeded(unsafe { libc::shmget(libc::IPC_PRIVATE, 16 * PAGE, 0o600) })).unwrap())
    }

    fn attach(&self) -> *mut c_void {
        // SAFETY: the kernel chooses a free range.
        let at = unsafe { libc::shmat(self.0, ptr::null(), 0) };
        assert_ne!(at.addr(), usize::MAX, "{}", io::Error::last_os_error());
        at
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the call takes integers.
        unsafe { libc::shmctl(self.0, libc::IPC_RMID, ptr::null_mut()) };
    }
}

#[test]
fn attached_segment_counts() {
    let (segment, other) = (Segment::new(), Segment::new());
    let attach = |segment: &Segment| {
        // SAFETY: the segment was attached just now, and no reference to it exists.
        succeeded(unsafe { libc::shmdt(segment.attach()) });
    };
    let (trace, at) = (start(), segment.attach().addr());
    let path = format!("/proc/self/map_files/{at:x}-{:x}", at + 16 * PAGE);
    let fd: OwnedFd = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap().into();
    let followed = trace.follow(fd.as_fd()).unwrap();
    let bench = Bench { trace, fd, followed };
    assert_counts(&bench, 1, "shmat", || attach(&segment));
    assert!((0..MAX_ATTEMPTS).any(|_| counted(&bench, || attach(&other)) == (0, 0)));
    // SAFETY: no reference to the segment exists.
    succeeded(unsafe { libc::shmdt(ptr::without_provenance(at)) });
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

/// process_madvise(MADV_REMOVE) of this process. Returns the number of bytes, or -1.
fn process_remove(ranges: &[(*mut c_void, usize)]) -> i64 {
    let own = succeeded(
        // SAFETY: the call takes integers.
        unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) },
    );
    // SAFETY: the kernel just returned this descriptor, so nothing else owns it.
    let own = unsafe { OwnedFd::from_raw_fd(i32::try_from(own).unwrap()) };
    let vector: Vec<_> =
        ranges.iter().map(|(at, len)| libc::iovec { iov_base: *at, iov_len: *len }).collect();
    let number = libc::SYS_process_madvise;
    // SAFETY: vector outlives the call. The ranges belong to files, and no reference to their content exists.
    unsafe { libc::syscall(number, own.as_raw_fd(), vector.as_ptr(), vector.len(), libc::MADV_REMOVE, 0) }
}

#[test]
fn removal_reports_the_range_of_the_file() {
    let bench = Bench::new();
    let mapping = TestMapping::of(bench.raw(), 16, 32);
    let pages = |first: usize, pages: usize| bytes(to_u64(first * PAGE), to_u64(pages * PAGE));
    assert_removes(&bench, &[pages(18, 3)], "one mapping", || mapping.remove(2, 3));
    assert_removes(&bench, &[pages(18, 1)], "the upper half of an int is unused", || {
        let advice = 1_i64 << 32 | i64::from(libc::MADV_REMOVE);
        // SAFETY: the pages belong to a file, and no reference to their content exists.
        succeeded(unsafe { libc::syscall(libc::SYS_madvise, mapping.page(2), 100, advice) });
    });
    // SAFETY: no reference to the page exists.
    succeeded(unsafe { libc::mprotect(mapping.page(4), PAGE, libc::PROT_READ) });
    assert_removes(&bench, &[pages(19, 4)], "three VMAs", || mapping.remove(3, 4));
    let (at, flags) = (mapping.page(12), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
    // SAFETY: no reference to the page exists.
    TestMapping::checked(unsafe { libc::mmap(at, PAGE, libc::PROT_READ, flags, -1, 0) }, PAGE);
    assert_removes(&bench, &[pages(26, 2), pages(29, 1)], "a part, then an error", || {
        // SAFETY: the pages belong to a file or to no test, and no reference to their content exists.
        assert_eq!(unsafe { libc::madvise(mapping.page(10), 4 * PAGE, libc::MADV_REMOVE) }, -1);
    });
    let both = [(mapping.page(0), PAGE), (mapping.page(8), 2 * PAGE)];
    let before = bench.trace.host_counters().unmatched;
    let removed = process_remove(&both);
    if removed == -1 {
        let error = io::Error::last_os_error();
        eprintln!("not run: this kernel refuses process_madvise(MADV_REMOVE): {error}");
    } else {
        assert_eq!(removed, 3 * 4096);
        assert_removes(&bench, &[pages(16, 1), pages(24, 2)], "process_madvise", || {
            process_remove(&both);
        });
        let many: Vec<_> = (0..5).map(|page| (mapping.page(page), PAGE)).collect();
        process_remove(&many);
        assert!(bench.trace.host_counters().unmatched >= before + 2, "too many ranges to examine");
    }
    let other = file();
    let elsewhere = TestMapping::of(other.as_raw_fd(), 0, 16);
    assert_removes(&bench, &[], "another file", || elsewhere.remove(2, 3));
    mapping.unmap();
    elsewhere.unmap();
}

#[test]
fn removal_of_unknown_ranges_is_counted() {
    let bench = Bench::new();
    let mapping = TestMapping::of(bench.raw(), 0, 32);
    let counts = |what: &str, remove: &dyn Fn()| {
        let before = bench.trace.host_counters().unmatched;
        remove();
        assert!(bench.trace.host_counters().unmatched >= before + 2, "{what}");
    };
    counts("nothing is mapped", &|| {
        // SAFETY: the kernel maps nothing at this address.
        assert_eq!(unsafe { libc::madvise(ptr::without_provenance_mut(PAGE), 1, libc::MADV_REMOVE) }, -1);
    });
    for page in (1..32).step_by(2) {
        // SAFETY: no reference to the page exists.
        succeeded(unsafe { libc::mprotect(mapping.page(page), PAGE, libc::PROT_READ) });
    }
    counts("too many VMAs", &|| mapping.remove(0, 32));
    counts("ranges that cannot be read", &|| {
        // SAFETY: the kernel cannot read the ranges either.
        unsafe { libc::syscall(libc::SYS_process_madvise, -1, 1, 1, libc::MADV_REMOVE, 0) };
    });
    mapping.unmap();
}

#[test]
fn calls_of_32_bit_programs_are_reported() {
    let bench = Bench::new();
    let (flags, protection) = (libc::MAP_SHARED | libc::MAP_32BIT, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: without MAP_FIXED, mmap changes no existing mapping.
    let at = unsafe { libc::mmap(ptr::null_mut(), 8 * PAGE, protection, flags, bench.raw(), 0) };
    let mapping = TestMapping::checked(at, 8 * PAGE);
    let (mremap, madvise, address) = (163, 219, to_u64(mapping.address));
    let remove = [address + 4096, 4096, 9, 0];
    // SAFETY: the pages belong to a file, and no reference to their content exists.
    let result = unsafe { call_of_32_bits(madvise, remove) };
    if result != 0 {
        eprintln!("not run: this kernel lacks 32-bit system calls: {result}");
        return;
    }
    let _ = bench.ended();
    assert_removes(&bench, &[bytes(4096, 4096)], "madvise", || {
        // SAFETY: as above.
        assert_eq!(unsafe { call_of_32_bits(madvise, remove) }, 0);
    });
    let mut second = None;
    assert_counts(&bench, 2, "mremap", || {
        // SAFETY: with an old length of 0 the call leaves the mapping alone and maps its pages a second time.
        let result = unsafe { call_of_32_bits(mremap, [address, 0, 4096, 1]) };
        assert!(!(-4095..0).contains(&result), "{result}");
        let address = usize::try_from(result & i64::from(u32::MAX)).unwrap();
        if let Some(second) = second.replace(TestMapping { address, len: PAGE }) {
            second.unmap();
        }
    });
    second.unwrap().unmap();
    mapping.unmap();
}

/// Anonymous memory that blocks each thread that reads it, until the userfaultfd is closed.
fn blocking_memory() -> (Userfaultfd, TestMapping) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: without MAP_FIXED, mmap changes no existing mapping.
    let at = unsafe { libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ, flags, -1, 0) };
    let memory = TestMapping::checked(at, PAGE);
    let uffd = Userfaultfd::create().unwrap();
    uffd.api(UffdFeatures::empty()).unwrap();
    // struct uffdio_register of linux/userfaultfd.h: start, length, mode, and a field for the kernel.
    let (uffdio_register, missing) = (0xc020_aa00, 1);
    let mut register = [to_u64(memory.address), to_u64(PAGE), missing, 0];
    // SAFETY: register has the layout and size of the argument, and outlives the call.
    succeeded(unsafe { libc::ioctl(uffd.as_fd().as_raw_fd(), uffdio_register, register.as_mut_ptr()) });
    (uffd, memory)
}

#[test]
fn removal_is_in_flight_until_it_ends() {
    let bench = &Bench::new();
    let mapping = TestMapping::of(bench.raw(), 0, 32);
    let calls = [bytes(0, 10), bytes(4 * 4096, 2 * 4096)];
    for _ in 0..MAX_ATTEMPTS {
        let removals = bench.trace.host_counters().unmatched;
        let is_known = || bench.trace.host_counters().unmatched == removals;
        let in_flight = std::thread::scope(|scope| {
            let (uffd, memory) = blocking_memory();
            // The write holds the lock of the inode until it can read its source, and the removal waits for that lock.
            // SAFETY: memory has a page.
            let writing = scope.spawn(move || unsafe { libc::pwrite(bench.raw(), memory.page(0), 10, 0) });
            bench.until_in_flight(true);
            let removing = scope.spawn(move || mapping.remove(4, 2));
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
            assert_eq!(writing.join().unwrap(), 10);
            removing.join().unwrap();
            memory.unmap();
            in_flight
        });
        let ended = bench.ended();
        if is_known() {
            assert_eq!((in_flight.as_slice(), ended.as_slice()), (calls.as_slice(), calls.as_slice()));
            mapping.unmap();
            return;
        }
    }
    panic!("the mapping was unknown in each attempt");
}
