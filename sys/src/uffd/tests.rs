use super::*;
use crate::mapping::Mapping;
use crate::memfd;
use crate::pagemap::{PageRegion, Pagemap, ScanFlags};

const PAGE: u64 = 4096;
const WP: ScanFlags = ScanFlags { write_protect: true, check_async: true };

fn asynchronous() -> Features {
    Features::WP_ASYNC | Features::WP_UNPOPULATED | Features::WP_HUGETLBFS_SHMEM
}

/// A mapped memfd of 8 pages and where it is.
fn mapped() -> (OwnedFd, Mapping, AddressRange) {
    let fd = memfd::create("tracked", None).unwrap();
    memfd::resize(fd.as_fd(), 8 * PAGE).unwrap();
    let mapping = Mapping::shared(&fd, 0, 8 * 4096, true).unwrap();
    let start = u64::try_from(mapping.as_ptr().addr()).unwrap();
    (fd, mapping, AddressRange::at(start, 8 * PAGE).unwrap())
}

fn written(pagemap: &Pagemap, range: AddressRange, flags: ScanFlags) -> Vec<(u64, u64)> {
    let mut regions = [PageRegion::default(); 8];
    let scanned = pagemap.scan(range, flags, &mut regions).unwrap();
    assert_eq!(scanned.walked_to, range.end);
    let page = |address| (address - range.start) / PAGE;
    regions[..scanned.count].iter().map(|one| (page(one.start), page(one.end))).collect()
}

#[test]
fn writes_are_reported_once_and_only_those() {
    let (_fd, mapping, range) = mapped();
    let uffd = Userfaultfd::create().unwrap();
    assert!(uffd.api(asynchronous()).unwrap().contains(Features::WP_ASYNC));
    uffd.register_wp(range).unwrap();
    let pagemap = Pagemap::open(None).unwrap();
    pagemap.scan(range, WP, &mut []).unwrap();
    assert_eq!(written(&pagemap, range, WP), []);
    mapping.write_at(2 * 4096, b"x");
    mapping.write_at(5 * 4096, b"x");
    mapping.write_at(6 * 4096, b"x");
    let check = ScanFlags { write_protect: false, check_async: true };
    assert_eq!(written(&pagemap, range, check), [(2, 3), (5, 7)], "asked without protecting");
    assert_eq!(written(&pagemap, range, WP), [(2, 3), (5, 7)]);
    assert_eq!(written(&pagemap, range, WP), []);
    assert!(uffd.read_event().unwrap().is_none());

    let twin = Userfaultfd::from_fd(uffd.try_clone().unwrap().into()).unwrap();
    drop(uffd);
    mapping.write_at(0, b"x");
    assert_eq!(written(&pagemap, range, WP), [(0, 1)], "a second descriptor keeps it going");
    twin.unregister(range).unwrap();
    let error = pagemap.scan(range, WP, &mut []).unwrap_err();
    assert_eq!(error.errno, Errno::EPERM);
}

#[test]
fn scan_stops_where_the_regions_are_full() {
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
    let (mut seen, mut rest) = (vec![], range);
    while !rest.is_empty() {
        let scanned = pagemap.scan(rest, WP, &mut regions).unwrap();
        seen.extend(regions[..scanned.count].iter().map(|one| (one.start - range.start) / PAGE));
        rest.start = scanned.walked_to;
    }
    assert_eq!(seen, [1, 3, 7]);
    assert_eq!(written(&pagemap, range, WP), []);
}

#[test]
fn agreement_can_be_tried_again_after_it_failed() {
    let uffd = Userfaultfd::create().unwrap();
    let unknown = Features(1 << 63);
    assert_eq!(uffd.api(unknown).unwrap_err().errno, Errno::EINVAL);
    let error = uffd.register_wp(AddressRange { start: 0x1000, end: 0x2000 }).unwrap_err();
    assert_eq!(error.errno, Errno::EINVAL, "without an agreement");
    let got = uffd.api(asynchronous()).unwrap();
    assert!(got.contains(asynchronous()), "{got}");
    assert_eq!(uffd.api(asynchronous()).unwrap_err().errno, Errno::EINVAL, "and only until it succeeds");
}

#[test]
fn events_come_in_order_and_let_their_cause_go_on() {
    let (_fd, mapping, range) = mapped();
    let uffd = Userfaultfd::create().unwrap();
    uffd.api(asynchronous() | Features::EVENT_REMOVE | Features::EVENT_UNMAP).unwrap();
    uffd.register_wp(range).unwrap();
    mapping.write_at(0, b"x");
    let other = std::thread::spawn(move || {
        // SAFETY: the mapping is this thread's own, and that its pages are dropped is the point: the file has them.
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
    assert!(matches!(next(), Event::Remove(dropped) if dropped == first));
    assert!(matches!(next(), Event::Unmap(gone) if gone == range));
    other.join().unwrap();
}

#[test]
fn other_descriptors_are_not_taken_for_a_userfaultfd() {
    let other = nix::sys::eventfd::EventFd::new().unwrap();
    assert_eq!(Userfaultfd::from_fd(other.into()).unwrap_err().errno, Errno::EINVAL);
    let file = tempfile::Builder::new().prefix("anon_inode:[userfaultfd]").tempfile().unwrap();
    assert_eq!(Userfaultfd::from_fd(file.into_file().into()).unwrap_err().errno, Errno::EINVAL);
}
