//! Mappings that system calls make from other mappings, and pages that they remove, count for the file that is mapped there, and
//! for no other.

use std::ffi::c_void;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use fdmap_client::grpc::{ChangedBatch, ChangesOptions, CreateFile};
use fdmap_client::proto::units::{Generation, PageIndex};
use fdmap_client::proto::{Checkpoint, ClientMapping};
use fdmap_client::{Client, FdpassClient};
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{fd, memfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::service::{Service, named};
use fdmap_tests::{HarnessError, HarnessResult, test};
use nix::errno::Errno;
use nix::libc;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: usize = 4096;
/// Pages of the file, of which the first half is mapped and tracked.
const PAGES: usize = 64;
/// Generations that each test repeats its writes in.
const ROUNDS: usize = 5;
/// Other processes of the host may make a generation conservative.
const MAX_ATTEMPTS: usize = 50;
/// Pages to which the kernel may hold a reference at a checkpoint: `PAGEVEC_SIZE` of linux/pagevec.h.
const MAX_STRAY_PAGES: u64 = 31;

/// An address range that raw calls map. It is unmapped on drop, whatever is mapped there.
struct Range {
    address: usize,
    pages: usize,
}

impl Range {
    /// Reserves an address range.
    fn reserve(pages: usize) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: without MAP_FIXED, mmap changes no existing mapping.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, libc::PROT_NONE, flags, -1, 0) };
        Self::new(at, pages)
    }

    fn new(at: *mut c_void, pages: usize) -> Self {
        assert_ne!(at, libc::MAP_FAILED, "{}", Errno::last());
        Self { address: at.expose_provenance(), pages }
    }

    /// Maps the first `pages` pages of a file at the beginning of the range, and unmaps the rest of it.
    fn map(&self, file: BorrowedFd<'_>, pages: usize) {
        let (flags, protection) = (libc::MAP_SHARED | libc::MAP_FIXED, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: the range is reserved, and nothing refers to it.
        let at = unsafe { libc::mmap(self.page(0), pages * PAGE, protection, flags, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED, "{}", Errno::last());
        if pages < self.pages {
            // SAFETY: as above.
            assert_eq!(unsafe { libc::munmap(self.page(pages), (self.pages - pages) * PAGE) }, 0);
        }
    }

    const fn page(&self, page: usize) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.address + page * PAGE)
    }

    /// mremap of `old` pages to `new` pages; `flags` 0: at the same address.
    fn remap(&self, old: usize, new: usize, flags: i32) -> *mut c_void {
        // SAFETY: the range belongs to this test, which has no references to it.
        unsafe { libc::mremap(self.page(0), old * PAGE, new * PAGE, flags) }
    }

    /// Reads the page, which maps it, and stores to it.
    fn write(&self, page: usize) {
        let byte = self.page(page).cast::<u8>();
        // SAFETY: the page is mapped, readable, and accessed by raw pointers only.
        let before = unsafe { byte.read_volatile() };
        // SAFETY: as above, and writable.
        unsafe { byte.write_volatile(before.wrapping_add(1)) };
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the range belongs to this test, which has no references to it.
        unsafe { libc::munmap(self.page(0), self.pages * PAGE) };
    }
}

/// A service with a file whose pages all have data, and whose first half this process maps and has tracked.
struct Fixture {
    client: Client,
    file: OwnedFd,
    range: Range,
    _session: FdpassClient,
    _service: Service,
}

impl Fixture {
    async fn new() -> Self {
        require(root());
        let service = Service::start(&[]).unwrap();
        let client = service.client().await.unwrap();
        let size_bytes = (PAGES * PAGE) as u64;
        client
            .create(CreateFile { name: "ram".to_owned(), size_bytes, ..CreateFile::default() })
            .await
            .unwrap();
        let mut session = service.fdpass().unwrap();
        let (file, _) = session.open(&named("ram"), true).unwrap();
        let range = Range::reserve(PAGES);
        range.map(file.as_fd(), PAGES / 2);
        let mapping = ClientMapping {
            address: range.address as u64,
            length_bytes: (PAGES / 2 * PAGE) as u64,
            first_page: PageIndex(0),
        };
        let (uffd, pagemap) = (Userfaultfd::create().unwrap(), Pagemap::open(None).unwrap());
        let maps = Maps::open(std::process::id()).unwrap();
        session
            .track(&named("ram"), uffd.as_fd(), Some(pagemap.as_fd()), Some(maps.as_fd()), &[mapping])
            .unwrap();
        // The file is written while it is tracked, so that no earlier write may be in progress.
        fd::write_at(file.as_fd(), 0, &[7; PAGES * PAGE]).unwrap();
        Self { client, file, range, _session: session, _service: service }
    }

    async fn checkpoint(&self) -> Checkpoint {
        self.client.checkpoint(&named("ram"), false, None).await.unwrap()
    }

    /// Makes checkpoints until one finds nothing that was written. Returns its generation.
    async fn settle(&self) -> Generation {
        let mut last = None;
        for _ in 0..MAX_ATTEMPTS {
            let made = self.checkpoint().await;
            let written = made.observed_pages != 0 || made.conservative_pages > MAX_STRAY_PAGES;
            if made.coverage.exact && !written {
                return made.generation;
            }
            last = Some(made);
        }
        panic!("every generation has writes: {last:?}");
    }

    /// The next checkpoint, and the pages that changed after generation `since`.
    async fn next(&self, since: Generation) -> (Checkpoint, Vec<u64>) {
        let made = self.checkpoint().await;
        let options = ChangesOptions { since, ..ChangesOptions::default() };
        let mut changes = self.client.changes(&named("ram"), options).await.unwrap();
        let mut pages = Vec::new();
        while let Some(ChangedBatch::Runs(runs)) = changes.next().await.unwrap() {
            pages.extend(runs.iter().flat_map(|run| run.run.range.start().0..run.run.range.end().0));
        }
        (made, pages)
    }

    /// Asserts that in each round the page is reported that `write` writes, and returns.
    async fn assert_reported(&self, what: &str, write: impl Fn(usize) -> usize) {
        for round in 0..ROUNDS {
            let since = self.settle().await;
            let page = write(round) as u64;
            let (_, pages) = self.next(since).await;
            assert!(pages.contains(&page), "{what}, round {round}: page {page} is not in {pages:?}");
        }
    }

    /// Asserts that a generation exists, among some attempts, in which exactly these pages are reported, and all as exact.
    async fn assert_exact(&self, what: &str, expected: &[u64], write: impl Fn()) {
        let mut last = None;
        for _ in 0..MAX_ATTEMPTS {
            let since = self.settle().await;
            write();
            let (made, pages) = self.next(since).await;
            for page in expected {
                assert!(pages.contains(page), "{what}: {pages:?}");
            }
            if made.coverage.exact && made.conservative_pages == 0 && pages == expected {
                return;
            }
            last = Some((made.coverage, pages));
        }
        panic!("{what}: {last:?}");
    }
}

/// process_madvise(MADV_REMOVE) of a page by the process itself.
fn process_remove(range: &Range, page: usize) -> Result<(), Errno> {
    // SAFETY: the call takes integers.
    let own = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) };
    // SAFETY: the kernel just returned this descriptor, so nothing else owns it.
    let own = unsafe { OwnedFd::from_raw_fd(i32::try_from(Errno::result(own)?).unwrap()) };
    let part = libc::iovec { iov_base: range.page(page), iov_len: PAGE };
    let number = libc::SYS_process_madvise;
    // SAFETY: part outlives the call. The page belongs to a file, and no reference to its content exists.
    let removed = unsafe { libc::syscall(number, own.as_raw_fd(), &raw const part, 1, libc::MADV_REMOVE, 0) };
    Errno::result(removed).map(drop)
}

fn remove(range: &Range, page: usize) {
    // SAFETY: the page belongs to a file, and no reference to its content exists.
    assert_eq!(unsafe { libc::madvise(range.page(page), PAGE, libc::MADV_REMOVE) }, 0);
}

#[test(flavor = "multi_thread")]
async fn second_mapping_made_by_mremap_is_reported() {
    let fixture = Fixture::new().await;
    fixture
        .assert_reported("old length 0", |round| {
            let second = Range::new(fixture.range.remap(0, PAGES / 2, libc::MREMAP_MAYMOVE), PAGES / 2);
            second.write(1 + round);
            // A write through the tracked mapping explains the change of ctime.
            fixture.range.write(0);
            1 + round
        })
        .await;
}

#[test(flavor = "multi_thread")]
async fn grown_part_of_a_tracked_mapping_is_reported() {
    let fixture = Fixture::new().await;
    let half = PAGES / 2;
    fixture
        .assert_reported("grown in place", |round| {
            assert_eq!(fixture.range.remap(half, PAGES, 0), fixture.range.page(0), "{}", Errno::last());
            // A write in the tracked part explains the change of ctime.
            fixture.range.write(0);
            fixture.range.write(half + round);
            assert_eq!(fixture.range.remap(PAGES, half, 0), fixture.range.page(0), "{}", Errno::last());
            half + round
        })
        .await;
}

#[test(flavor = "multi_thread")]
async fn page_that_a_process_removes_from_itself_is_reported() {
    let fixture = Fixture::new().await;
    require(supported(process_remove(&fixture.range, 0)));
    fixture
        .assert_reported("process_madvise", |round| {
            process_remove(&fixture.range, 1 + round).unwrap();
            // A traced write explains the change of ctime, and the inotify event.
            fd::write_at(fixture.file.as_fd(), 0, b"x").unwrap();
            1 + round
        })
        .await;
}

/// Whether this kernel has a call, given its result.
fn supported(result: Result<(), Errno>) -> HarnessResult<()> {
    match result {
        Err(Errno::EINVAL | Errno::EPERM) => {
            Err(HarnessError::Missing("process_madvise(MADV_REMOVE)".to_owned()))
        }
        Ok(()) => Ok(()),
        Err(errno) => panic!("process_madvise: {errno}"),
    }
}

#[test(flavor = "multi_thread")]
async fn removed_pages_are_reported_and_no_others() {
    let fixture = Fixture::new().await;
    fixture
        .assert_exact("madvise", &[5], || {
            remove(&fixture.range, 5);
        })
        .await;
}

#[test(flavor = "multi_thread")]
async fn calls_on_other_mappings_leave_the_coverage_exact() {
    let fixture = Fixture::new().await;
    let other = memfd::create("other", None).unwrap();
    memfd::resize(other.as_fd(), (PAGES * PAGE) as u64).unwrap();
    let elsewhere = Range::reserve(PAGES);
    elsewhere.map(other.as_fd(), PAGES / 2);
    fixture
        .assert_exact("removal", &[3], || {
            fixture.range.write(3);
            elsewhere.write(7);
            remove(&elsewhere, 7);
        })
        .await;
    fixture
        .assert_exact("second mapping", &[3], || {
            fixture.range.write(3);
            let second = Range::new(elsewhere.remap(0, PAGES / 2, libc::MREMAP_MAYMOVE), PAGES / 2);
            second.write(7);
        })
        .await;
}
