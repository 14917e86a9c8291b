//! hugetlb files: the written bit of a page is lost when it is zapped, and a write through a mapping does not change the ctime.
//! The next generation nevertheless reports the page.

use std::time::Duration;

use fdmap_client::grpc::CreateFile;
use fdmap_client::MappedFile;
use fdmap_client::proto::Backing;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::hugepages::hugetlb_2m;
use fdmap_tests::no_lost_writes::consumer::Consumer;
use fdmap_tests::no_lost_writes::pages::PageSet;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::tracked::{HUGE, PAGE};
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

fn advise(start: *mut u8, huge_page: u64, advice: libc::c_int) {
    let (offset, bytes) = (usize::try_from(huge_page * HUGE).unwrap(), usize::try_from(HUGE).unwrap());
    // SAFETY: the range lies in the caller's mapping, into which no reference exists.
    let result = unsafe { libc::madvise(start.wrapping_add(offset).cast(), bytes, advice) };
    assert_eq!(result, 0, "madvise({advice})");
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
            advise(mapped.as_ptr(), page, libc::MADV_DONTNEED);
        }
        let reported = consumer.step(false).await.unwrap();
        assert_eq!(reported.changed, pages_of(&[1, 5, 6]), "round {round}");
        assert_eq!(reported.conservative.count(), 0, "round {round}: {:?}", reported.conservative);
        let again = consumer.step(true).await.unwrap();
        assert_eq!(again.changed.count(), 0, "round {round}: the pages are armed again: {:?}", again.changed);
    }
}
