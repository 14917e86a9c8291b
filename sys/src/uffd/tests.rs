use super::*;
use crate::mapping::SharedMapping;
use crate::memfd;
use crate::pagemap::{PageRegion, Pagemap, ScanFlags};

const PAGE: u64 = 4096;
const WP: ScanFlags = ScanFlags::WP_MATCHING.union(ScanFlags::CHECK_WPASYNC);

fn asynchronous() -> UffdFeatures {
    UffdFeatures::WP_ASYNC | UffdFeatures::WP_UNPOPULATED | UffdFeatures::WP_HUGETLBFS_SHMEM
}

/// Maps a new memfd of 8 pages.
fn mapped() -> (OwnedFd, SharedMapping, AddressRange) {
    let fd = memfd::create("tracked", None).unwrap();
    memfd::resize(fd.as_fd(), 8 * PAGE).unwrap();
    let mapping = SharedMapping::shared(&fd, 0, 8 * 4096, true).unwrap();
    let start = u64::try_from(mapping.as_ptr().addr()).unwrap();
    (fd, mapping, AddressRange::at(start, 8 * PAGE).unwrap())
}

fn written(pagemap: &Pagemap, range: AddressRange, flags: ScanFlags) -> Vec<(u64, u64)> {
    let mut regions = [PageRegion::default(); 8];
    let scanned = pagemap.scan(range, flags, &mut regions).unwrap();
    assert_eq!(scanned.walk_end, range.end);
    let page = |address| (address - range.start) / PAGE;
    regions[..scanned.count].iter().map(|region| (page(region.start), page(region.end))).collect()
}

#[test]
fn written_pages_are_reported_exactly_once() {
    let (_fd, mapping, range) = mapped();
    let uffd = Userfaultfd::create().unwrap();
    assert!(uffd.api(asynchronous()).unwrap().contains(UffdFeatures::WP_ASYNC));
    uffd.register_wp(range).unwrap();
    let pagemap = Pagemap::open(None).unwrap();
    pagemap.scan(range, WP, &mut []).unwrap();
    assert_eq!(written(&pagemap, range, WP), []);
    mapping.write_at(2 * 4096, b"x");
    mapping.write_at(5 * 4096, b"x");
    mapping.write_at(6 * 4096, b"x");
    let check = ScanFlags::CHECK_WPASYNC;
    assert_eq!(
        written(&pagemap, range, check),
        [(2, 3), (5, 7)],
        "a scan without WP_MATCHING keeps the written bits"
    );
    assert_eq!(written(&pagemap, range, WP), [(2, 3), (5, 7)]);
    assert_eq!(written(&pagemap, range, WP), []);
    assert!(uffd.read_event().unwrap().is_none());

    let duplicate = Userfaultfd::from_fd(uffd.try_clone().unwrap().into()).unwrap();
    drop(uffd);
    mapping.write_at(0, b"x");
    assert_eq!(written(&pagemap, range, WP), [(0, 1)], "a second descriptor keeps tracking alive");
    duplicate.unregister(range).unwrap();
    let error = pagemap.scan(range, WP, &mut []).unwrap_err();
    assert_eq!(error.errno, Errno::EPERM);
}

#[test]
fn scan_stops_when_its_regions_are_full() {
    let (_fd, mapping, range) = mapped();
    let uffd = Userfaultfd::create().unwrap();
    uffd.api(asynchronous()).unwrap();
    uffd.register_wp(range).unwrap();
    uffd.write_protect(range, true).unwrap();
    let pagemap = Pagemap::open(None).unwrap();
    for page in [1, 3, 7] {
        mapping.write_at(page * 4096, b"x");
    }
    let mut regions = [PageRegion::default(); 1];
    let (mut written_pages, mut rest) = (vec![], range);
    while !rest.is_empty() {
        let scanned = pagemap.scan(rest, WP, &mut regions).unwrap();
        written_pages
            .extend(regions[..scanned.count].iter().map(|region| (region.start - range.start) / PAGE));
        rest.start = scanned.walk_end;
    }
    assert_eq!(written_pages, [1, 3, 7]);
    assert_eq!(written(&pagemap, range, WP), []);
}

#[test]
fn failed_api_call_can_be_retried_until_it_succeeds() {
    let uffd = Userfaultfd::create().unwrap();
    let unknown = UffdFeatures::from_bits_retain(1 << 63);
    assert_eq!(uffd.api(unknown).unwrap_err().errno, Errno::EINVAL);
    let error = uffd.register_wp(AddressRange { start: 0x1000, end: 0x2000 }).unwrap_err();
    assert_eq!(error.errno, Errno::EINVAL, "before UFFDIO_API succeeds");
    let supported = uffd.api(asynchronous()).unwrap();
    assert!(supported.contains(asynchronous()), "{supported}");
    assert_eq!(uffd.api(asynchronous()).unwrap_err().errno, Errno::EINVAL, "UFFDIO_API succeeds only once");
}

#[test]
fn events_arrive_in_order_and_unblock_the_thread_that_caused_them() {
    let (_fd, mapping, range) = mapped();
    let uffd = Userfaultfd::create().unwrap();
    uffd.api(asynchronous() | UffdFeatures::EVENT_REMOVE | UffdFeatures::EVENT_UNMAP).unwrap();
    uffd.register_wp(range).unwrap();
    mapping.write_at(0, b"x");
    let other = std::thread::spawn(move || {
        // SAFETY: only this thread uses the mapping, and the file keeps the content of the dropped pages.
        unsafe {
            nix::sys::mman::madvise(
                std::ptr::NonNull::new(mapping.as_ptr().cast()).unwrap(),
                4096,
                nix::sys::mman::MmapAdvise::MADV_DONTNEED,
            )
        }
        .unwrap();
        drop(mapping);
    });
    let next = || loop {
        if let Some(event) = uffd.read_event().unwrap() {
            return event;
        }
        std::thread::yield_now();
    };
    let first = AddressRange::at(range.start, PAGE).unwrap();
    assert!(matches!(next(), UffdEvent::Remove(dropped) if dropped == first));
    assert!(matches!(next(), UffdEvent::Unmap(unmapped) if unmapped == range));
    other.join().unwrap();
}

#[test]
fn only_a_userfaultfd_descriptor_is_accepted() {
    let other = nix::sys::eventfd::EventFd::new().unwrap();
    assert_eq!(Userfaultfd::from_fd(other.into()).unwrap_err().errno, Errno::EINVAL);
    let file = tempfile::Builder::new().prefix("anon_inode:[userfaultfd]").tempfile().unwrap();
    assert_eq!(Userfaultfd::from_fd(file.into_file().into()).unwrap_err().errno, Errno::EINVAL);
}
