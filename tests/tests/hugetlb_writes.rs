//! hugetlb files: the written bit of a page is lost when it is zapped, and neither a write through a mapping nor a removal of
//! pages changes the ctime. The next generation nevertheless reports the pages.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::{Backing, ClientMapping, PageIndex};
use fdmap_client::{FdpassClient, MappedFile};
use fdmap_sys::memfd;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::testing::space::{self, SpaceCall};
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::hugepages::hugetlb_2m;
use fdmap_tests::memory;
use fdmap_tests::no_lost_writes::consumer::Consumer;
use fdmap_tests::no_lost_writes::pages::PageSet;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::tracked::{HUGE, PAGE};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const HUGE_PAGES: u64 = 8;
const PER_HUGE: u64 = HUGE / PAGE;
const PAGES: u64 = HUGE_PAGES * PER_HUGE;

/// The base pages of these huge pages.
fn pages_of(huge_pages: &[u64]) -> PageSet {
    let mut set = PageSet::of(PAGES);
    set.extend(huge_pages.iter().flat_map(|page| page * PER_HUGE..(page + 1) * PER_HUGE));
    set
}

fn advise(mapping: &RawMapping, huge_page: u64, advice: libc::c_int) {
    let (offset, bytes) = (usize::try_from(huge_page * HUGE).unwrap(), usize::try_from(HUGE).unwrap());
    mapping.advise(offset, bytes, advice).unwrap();
}

/// A consumer for which all earlier writes are in closed generations. An unnotified write may be in progress for some time after
/// a change of the ctime: waits until the service excludes that.
async fn consumer(service: &Service) -> Consumer {
    const MAX_STEPS: u32 = 150;
    let mut consumer = Consumer::new(service.client().await.unwrap(), named("huge"), PAGES, 1);
    for _ in 0..MAX_STEPS {
        if consumer.step(true).await.unwrap().changed.count() == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    consumer
}

/// A hugetlb file of the service without content, tracked in this process, and sealed against other writers.
async fn tracked_file(service: &Service) -> MappedFile {
    let client = service.client().await.unwrap();
    let (name, backing) = ("huge".to_owned(), Backing::Hugetlb(HUGE));
    let size_bytes = HUGE_PAGES * HUGE;
    client.create(CreateFile { name, size_bytes, backing, ..CreateFile::default() }).await.unwrap();
    let mut mapped = service.fdpass().unwrap().map(&named("huge"), true).unwrap();
    mapped.track().unwrap();
    client.seal_writers(&named("huge")).await.unwrap();
    mapped
}

#[test(flavor = "multi_thread")]
async fn zapped_pages_are_reported_if_they_were_written() {
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, HUGE_PAGES));
    let service = Service::start(&[]).unwrap();
    let mapped = tracked_file(&service).await;
    for page in [0, 1, 2] {
        assert!(mapped.write_at(page * HUGE, b"before"));
    }
    let mut consumer = consumer(&service).await;
    for round in 0..3 {
        // Page 5 has no content in the first round.
        for page in [1, 5, 6] {
            assert!(mapped.write_at(page * HUGE, b"after"));
        }
        for page in [1, 2, 5] {
            advise(&memory::pages_of(&mapped).mapping(), page, libc::MADV_DONTNEED);
        }
        let reported = consumer.step(false).await.unwrap();
        assert_eq!(reported.changed, pages_of(&[1, 5, 6]), "round {round}");
        assert_eq!(reported.conservative.count(), 0, "round {round}: {:?}", reported.conservative);
        let again = consumer.step(true).await.unwrap();
        assert_eq!(again.changed.count(), 0, "round {round}: the pages are armed again: {:?}", again.changed);
    }
}

/// A memfd that the service adopted. This process keeps the descriptor of memfd_create, which raises no inotify event, and a
/// mapping of it, which is tracked.
struct Adopted {
    memfd: OwnedFd,
    mapping: RawMapping,
    _session: FdpassClient,
}

impl Adopted {
    fn new(service: &Service) -> Self {
        let memfd = memfd::create("huge", Some(HUGE)).unwrap();
        memfd::resize(memfd.as_fd(), HUGE_PAGES * HUGE).unwrap();
        let len = usize::try_from(HUGE_PAGES * HUGE).unwrap();
        let mapping = RawMapping::shared(memfd.as_fd(), 0, len).unwrap();
        for page in 0..HUGE_PAGES {
            mapping.write_all(usize::try_from(page * HUGE).unwrap(), b"before").unwrap();
        }
        let mut session = service.fdpass().unwrap();
        session.adopt(memfd.as_fd(), "huge", None).unwrap();
        let uffd = Userfaultfd::create().unwrap();
        let whole = ClientMapping {
            address: mapping.address() as u64,
            length_bytes: HUGE_PAGES * HUGE,
            first_page: PageIndex(0),
        };
        session.track(&named("huge"), uffd.as_fd(), None, None, &[whole]).unwrap();
        Self { memfd, mapping, _session: session }
    }

    /// Removes a huge page in this way, without a descriptor that raises inotify events.
    fn remove(&self, how: &str, huge_page: u64) {
        let offset = huge_page * HUGE;
        match how {
            "fallocate" => {
                let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                fallocate(&self.memfd, punch, offset.cast_signed(), HUGE.cast_signed()).unwrap();
            }
            "madvise" => advise(&self.mapping, huge_page, libc::MADV_REMOVE),
            "ioctl" => space::change(self.memfd.as_fd(), SpaceCall::Unreserve, offset, HUGE).unwrap(),
            _ => panic!("{how} removes nothing"),
        }
    }
}

/// Removes pages that were not written since the last checkpoint: no page table shows it.
async fn removals_are_reported(arguments: &[&str]) {
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, HUGE_PAGES));
    let service = Service::start(arguments).unwrap();
    let adopted = Adopted::new(&service);
    let mut consumer = consumer(&service).await;
    let mut missing = Vec::new();
    // A removal without a known range makes later generations conservative: it comes last.
    for (page, how) in [(1, "fallocate"), (3, "ioctl"), (5, "madvise")] {
        adopted.remove(how, page);
        let reported = consumer.step(false).await.unwrap();
        if pages_of(&[page]).without(&reported.changed).count() > 0 {
            missing.push(how);
        }
        eprintln!("{how}: {:?}, {:?}", reported.changed, reported.gaps);
        consumer.step(true).await.unwrap();
    }
    assert!(missing.is_empty(), "removals by {missing:?} are not reported");
}

#[test(flavor = "multi_thread")]
async fn removals_from_an_adopted_file_are_reported() {
    removals_are_reported(&[]).await;
}

#[test(flavor = "multi_thread")]
async fn untraced_removals_from_an_adopted_file_are_reported() {
    removals_are_reported(&["--no-call-trace"]).await;
}
