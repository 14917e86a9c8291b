//! The page faults that tracking adds: at most one per page and generation, and none for a page that was written in this
//! generation and stayed in memory.

use fdmap_client::grpc::CreateFile;
use fdmap_client::{Client, MappedFile};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::memory::{Faults, Pages, Private, pages_of};
use fdmap_tests::service::{Service, named};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 4096;

/// A service with one tracked and one untracked file.
struct Fixture {
    client: Client,
    tracked: MappedFile,
    plain: MappedFile,
    _service: Service,
}

impl Fixture {
    /// Writes all pages of both files, and closes a generation after that.
    async fn new() -> Self {
        let service = Service::start(&[]).unwrap();
        let client = service.client().await.unwrap();
        let map = async |name: &str| {
            let file =
                CreateFile { name: name.to_owned(), size_bytes: PAGES * 4096, ..CreateFile::default() };
            client.create(file).await.unwrap();
            service.fdpass().unwrap().map(&named(name), true).unwrap()
        };
        let (mut tracked, plain) = (map("tracked").await, map("plain").await);
        tracked.track().unwrap();
        let fixture = Self { client, tracked, plain, _service: service };
        write(fixture.tracked());
        write(fixture.plain());
        fixture.checkpoint(PAGES).await;
        fixture
    }

    fn tracked(&self) -> Pages<'_> {
        pages_of(&self.tracked)
    }

    fn plain(&self) -> Pages<'_> {
        pages_of(&self.plain)
    }

    /// Closes a generation in which `written` pages were written.
    async fn checkpoint(&self, written: u64) {
        let made = self.client.checkpoint(&named("tracked"), true, None).await.unwrap();
        assert_eq!(made.observed_pages, written, "{made:?}");
    }
}

/// Writes each page. Returns the number of page faults.
fn write(pages: Pages<'_>) -> u64 {
    Faults::during(|| pages.write(0..PAGES, 2)).unwrap().all()
}

/// Reads each page. Returns the number of page faults.
fn read(pages: Pages<'_>) -> u64 {
    let mut sum = 0;
    let faults = Faults::during(|| sum = pages.read(0..PAGES)).unwrap();
    assert_eq!(sum, 2 * PAGES, "the pages have the written content");
    faults.all()
}

/// Writes all pages, closes a generation if `close` is true, and pages out all pages.
async fn write_and_page_out(fixture: &Fixture, pages: Pages<'_>, close: bool) {
    write(pages);
    if close {
        fixture.checkpoint(PAGES).await;
    }
    assert_eq!(pages.page_out().unwrap(), 0, "some pages are still mapped");
}

#[test]
async fn only_the_first_write_of_a_generation_faults() {
    let _host = HostLock::acquire().unwrap();
    let fixture = Fixture::new().await;
    for _ in 0..3 {
        assert_eq!(read(fixture.tracked()), 0);
        assert_eq!(write(fixture.tracked()), PAGES, "the first write to each page");
        assert_eq!((write(fixture.tracked()), read(fixture.tracked())), (0, 0), "later accesses");
        fixture.checkpoint(PAGES).await;
    }
    assert_eq!((read(fixture.plain()), write(fixture.plain())), (0, 0), "the untracked file");
}

#[test]
async fn swapped_page_takes_at_most_one_extra_fault() {
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::make(256 << 20, SwapKind::Any));
    let cgroup = require(Cgroup::with_limit(1 << 30));
    // Pages are charged to the cgroup of the process that allocates them.
    cgroup.add(std::process::id()).unwrap();
    let fixture = Fixture::new().await;
    let private = Private::new(PAGES).unwrap();
    write(private.pages());
    cgroup.give_back(std::process::id()).unwrap();

    // Without tracking, any access swaps a page in, and the page is writable from then on.
    for pages in [private.pages(), fixture.plain()] {
        write_and_page_out(&fixture, pages, false).await;
        assert_eq!((read(pages), write(pages)), (PAGES, 0));
        write_and_page_out(&fixture, pages, false).await;
        assert_eq!((write(pages), write(pages)), (PAGES, 0));
    }

    let tracked = fixture.tracked();
    // Written in this generation and swapped in by a write: the same as without tracking.
    write_and_page_out(&fixture, tracked, false).await;
    assert_eq!((write(tracked), write(tracked)), (PAGES, 0));
    // Swapped in by a read: the page is mapped read-only, like all pages of a tracked mapping.
    write_and_page_out(&fixture, tracked, false).await;
    assert_eq!(read(tracked), PAGES);
    let again = write(tracked);
    assert!(again <= PAGES, "{again} faults");
    assert_eq!(write(tracked), 0);

    // Written in the previous generation: the first write faults, because it must be reported.
    write_and_page_out(&fixture, tracked, true).await;
    assert_eq!((read(tracked), write(tracked), write(tracked)), (PAGES, PAGES, 0));
    write_and_page_out(&fixture, tracked, true).await;
    let first = write(tracked);
    assert!((PAGES..=2 * PAGES).contains(&first), "{first} faults");
    assert_eq!(write(tracked), 0);
    fixture.checkpoint(PAGES).await;
}
