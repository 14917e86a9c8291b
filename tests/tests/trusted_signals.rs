//! What the service does not take on trust: that a client no longer writes to a mapping that it untracks, and that a reference to
//! a page is a short one.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use fdmap_client::proto::{ClientMapping, GapKind, MappingId, PageIndex};
use fdmap_client::{FdpassClient, MappedFile};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::splice;
use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::no_lost_writes::consumer::Consumer;
use fdmap_tests::no_lost_writes::pages::PageSet;
use fdmap_tests::reported::create_file;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::tracked::PAGE;
use nix::sys::mman::ProtFlags;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 64;

/// A service with the file "ram", all pages of which have data.
async fn service() -> Service {
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create_file(&client, "ram", PAGES * PAGE).await.unwrap();
    let mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    for page in 0..PAGES {
        assert!(mapped.write_at(page * PAGE, b"before"));
    }
    service
}

/// A consumer for which all earlier writes are in closed generations.
async fn consumer(service: &Service) -> Consumer {
    let mut consumer = Consumer::new(service.client().await.unwrap(), named("ram"), PAGES, 1);
    for _ in 0..3 {
        consumer.step(true).await.unwrap();
    }
    consumer
}

/// A mapping of this process that is tracked without the client library.
struct Raw {
    session: FdpassClient,
    mapping: SharedMapping,
    ids: Vec<MappingId>,
}

impl Raw {
    /// Maps "ram", tracks it, and seals the file, so that no signal but that of the mapping is needed.
    async fn new(service: &Service) -> Self {
        let mut session = service.fdpass().unwrap();
        let (fd, _) = session.open(&named("ram"), true).unwrap();
        let mapping = SharedMapping::shared(&fd, 0, usize::try_from(PAGES * PAGE).unwrap(), true).unwrap();
        let whole = ClientMapping {
            address: mapping.as_ptr().addr() as u64,
            length_bytes: PAGES * PAGE,
            first_page: PageIndex(0),
        };
        let uffd = Userfaultfd::create().unwrap();
        let ids = session.track(&named("ram"), uffd.as_fd(), None, None, &[whole]).unwrap();
        service.client().await.unwrap().seal_writers(&named("ram")).await.unwrap();
        Self { session, mapping, ids }
    }

    fn untrack(&mut self) {
        self.session.untrack(&named("ram"), &self.ids).unwrap();
    }

    fn write(&self, page: u64) {
        assert!(self.mapping.write_at(usize::try_from(page * PAGE).unwrap(), b"after"));
    }
}

fn missing(pages: &[u64], reported: &PageSet) -> u64 {
    let mut written = PageSet::of(PAGES);
    written.extend(pages.iter().copied());
    written.without(reported).count()
}

#[test(flavor = "multi_thread")]
async fn writes_after_untrack_of_a_writable_mapping_are_reported() {
    let service = service().await;
    let mut raw = Raw::new(&service).await;
    let mut consumer = consumer(&service).await;
    raw.write(3);
    raw.untrack();
    raw.write(5);
    // Unmaps it.
    drop(raw.mapping);
    let reported = consumer.step(false).await.unwrap();
    assert_eq!(missing(&[3, 5], &reported.changed), 0, "{:?}", reported.changed);
    assert!(reported.gaps.contains(&GapKind::EndedMapping), "{:?}", reported.gaps);
}

fn make_writable(mapping: &SharedMapping) {
    let writable = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    BorrowedMapping::of(mapping).protect(0, mapping.len(), writable).unwrap();
}

#[test(flavor = "multi_thread")]
async fn writes_to_a_mapping_that_is_writable_again_after_untrack_are_reported() {
    require(root());
    for read_only_again in [false, true] {
        let service = service().await;
        let mut raw = Raw::new(&service).await;
        let mut consumer = consumer(&service).await;
        raw.mapping.protect_read_only().unwrap();
        raw.untrack();
        make_writable(&raw.mapping);
        raw.write(5);
        if read_only_again {
            raw.mapping.protect_read_only().unwrap();
        }
        drop(raw.mapping);
        let reported = consumer.step(true).await.unwrap();
        assert_eq!(missing(&[5], &reported.changed), 0, "{:?}", reported.changed);
        assert!(reported.gaps.contains(&GapKind::EndedMapping), "{:?}", reported.gaps);
    }
}

/// A mapping that is read-only and untracked, but still mapped: a checkpoint comes between Untrack and munmap.
async fn announced_end(service: &Service) -> (Raw, Consumer) {
    let mut raw = Raw::new(service).await;
    let mut consumer = consumer(service).await;
    raw.mapping.protect_read_only().unwrap();
    raw.untrack();
    consumer.step(true).await.unwrap();
    (raw, consumer)
}

#[test(flavor = "multi_thread")]
async fn mapping_that_outlives_its_announced_end_is_not_trusted() {
    let service = service().await;
    let (raw, mut consumer) = announced_end(&service).await;
    make_writable(&raw.mapping);
    raw.write(7);
    let reported = consumer.step(false).await.unwrap();
    assert_eq!(missing(&[7], &reported.changed), 0, "{:?}", reported.changed);
    assert_eq!(reported.conservative.count(), 0, "it is still tracked");
    raw.write(9);
    drop(raw.mapping);
    let reported = consumer.step(false).await.unwrap();
    assert_eq!(missing(&[9], &reported.changed), 0, "{:?}", reported.changed);
}

#[test(flavor = "multi_thread")]
async fn announced_end_of_a_read_only_mapping_is_no_gap() {
    let service = service().await;
    let (raw, mut consumer) = announced_end(&service).await;
    drop(raw.mapping);
    let reported = consumer.step(true).await.unwrap();
    assert!(!reported.gaps.contains(&GapKind::EndedMapping), "{:?}", reported.gaps);
    assert_eq!(reported.changed.count(), reported.conservative.count(), "{:?}", reported.changed);
}

/// A file that is tracked in this process and sealed.
async fn tracked(service: &Service) -> MappedFile {
    let mut mapped = service.fdpass().unwrap().map(&named("ram"), true).unwrap();
    mapped.track().unwrap();
    service.client().await.unwrap().seal_writers(&named("ram")).await.unwrap();
    mapped
}

#[test(flavor = "multi_thread")]
async fn referenced_page_is_conservative_until_the_reference_is_dropped() {
    const REFERENCE_TIME: Duration = Duration::from_millis(1500);
    const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
    require(root());
    let service = service().await;
    let mapped = tracked(&service).await;
    let mut consumer = consumer(&service).await;
    assert!(mapped.write_at(5 * PAGE, b"after"));
    let (read, write) = nix::unistd::pipe().unwrap();
    // The pipe references the page until it is closed.
    splice::into_pipe(mapped.as_fd(), 5 * PAGE, write.as_fd(), 10).unwrap();
    assert!(consumer.step(false).await.unwrap().changed.contains(5));
    let begun = Instant::now();
    let mut steps = 0;
    while begun.elapsed() < REFERENCE_TIME || steps < 20 {
        let reported = consumer.step(false).await.unwrap();
        assert!(reported.conservative.contains(5), "step {steps}: {:?}", reported.changed);
        assert_eq!(reported.gaps, BTreeSet::from([GapKind::Pinned]), "step {steps}");
        steps += 1;
    }
    drop((read, write));
    // The file becomes idle: nothing is reported, and no generation is closed. A descriptor write that began before tracking may
    // be in progress for some seconds.
    let begun = Instant::now();
    while !consumer.step(false).await.unwrap().unchanged {
        assert!(begun.elapsed() < IDLE_TIMEOUT, "the file is not idle");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
