//! Mappings that system calls make from other mappings, and pages that they remove, count for the file that is mapped there, and
//! for no other.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fdmap_client::proto::units::{Generation, PageIndex};
use fdmap_client::proto::{Checkpoint, ClientMapping};
use fdmap_client::{Client, FdpassClient};
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::testing::raw_mapping::RawMapping;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{SyscallError, fd, memfd};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::programs::Compiled;
use fdmap_tests::reported::{Reported, create_file};
use fdmap_tests::service::{Service, named};
use fdmap_tests::{HarnessError, HarnessResult, test};
use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::ProtFlags;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: usize = 4096;
/// Pages of the file, of which the first half is mapped and tracked.
const PAGES: usize = 64;
/// Half of the file in bytes.
const HALF: usize = PAGES / 2 * PAGE;
/// Generations that each test repeats its writes in.
const ROUNDS: usize = 5;
/// Other processes of the host may make a generation conservative.
const MAX_ATTEMPTS: usize = 50;
/// Pages to which the kernel may hold a reference at a checkpoint: `PAGEVEC_SIZE` of linux/pagevec.h.
const MAX_STRAY_PAGES: u64 = 31;

/// Maps the first half of a file where as much address space behind it is free.
fn map(file: BorrowedFd<'_>) -> RawMapping {
    let mapping = RawMapping::reserve(2 * HALF).unwrap().resize(HALF, false).unwrap();
    mapping.replace(0, HALF, Some((file, 0)), ProtFlags::PROT_READ | ProtFlags::PROT_WRITE).unwrap();
    mapping
}

/// Reads the page, which maps it, and stores to it.
fn write(mapping: &RawMapping, page: usize) {
    let before = mapping.read(page * PAGE).unwrap();
    mapping.write(page * PAGE, before.wrapping_add(1)).unwrap();
}

fn remove(mapping: &RawMapping, page: usize) {
    mapping.advise(page * PAGE, PAGE, libc::MADV_REMOVE).unwrap();
}

/// process_madvise(MADV_REMOVE) of a page by the process itself.
fn process_remove(mapping: &RawMapping, page: usize) -> Result<usize, SyscallError> {
    mapping.process_advise(&[(page * PAGE, PAGE)], libc::MADV_REMOVE)
}

/// A service with a file whose pages all have data.
struct Fixture {
    client: Client,
    file: OwnedFd,
    _session: FdpassClient,
    _service: Service,
}

impl Fixture {
    /// Also returns a mapping of the first half of the file, which is tracked.
    async fn new() -> (Self, RawMapping) {
        require(root());
        let service = Service::start(&[]).unwrap();
        let client = service.client().await.unwrap();
        create_file(&client, "ram", 2 * HALF as u64).await.unwrap();
        let mut session = service.fdpass().unwrap();
        let (file, _) = session.open(&named("ram"), true).unwrap();
        let mapping = map(file.as_fd());
        let (address, length_bytes) = (mapping.address() as u64, HALF as u64);
        let tracked = ClientMapping { address, length_bytes, first_page: PageIndex(0) };
        let (uffd, pagemap) = (Userfaultfd::create().unwrap(), Pagemap::open(None).unwrap());
        let maps = Maps::open(std::process::id()).unwrap();
        session
            .track(&named("ram"), uffd.as_fd(), Some(pagemap.as_fd()), Some(maps.as_fd()), &[tracked])
            .unwrap();
        // The file is written while it is tracked, so that no earlier write may be in progress.
        fd::write_at(file.as_fd(), 0, &[7; PAGES * PAGE]).unwrap();
        (Self { client, file, _session: session, _service: service }, mapping)
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
    async fn next(&self, since: Generation) -> (Checkpoint, Reported) {
        let made = self.checkpoint().await;
        (made, Reported::since(&self.client, &named("ram"), since).await.unwrap())
    }

    /// Asserts that in each round the page is reported that `write` writes, and returns.
    async fn assert_reported(&self, what: &str, mut write: impl FnMut(usize) -> usize) {
        for round in 0..ROUNDS {
            let since = self.settle().await;
            let page = write(round) as u64;
            let (_, reported) = self.next(since).await;
            reported.assert_contains(page, &format!("{what}, round {round}"));
        }
    }

    /// Asserts that a generation exists, among some attempts, in which exactly these pages are reported, and all as exact.
    async fn assert_exact(&self, what: &str, expected: &[u64], write: impl Fn()) {
        let mut last = None;
        for _ in 0..MAX_ATTEMPTS {
            let since = self.settle().await;
            write();
            let (made, reported) = self.next(since).await;
            for page in expected {
                reported.assert_contains(*page, what);
            }
            if made.coverage.exact && made.conservative_pages == 0 && reported.pages == expected {
                return;
            }
            last = Some((made.coverage, reported.pages));
        }
        panic!("{what}: {last:?}");
    }
}

#[test(flavor = "multi_thread")]
async fn second_mapping_made_by_mremap_is_reported() {
    let (fixture, mapping) = Fixture::new().await;
    fixture
        .assert_reported("old length 0", |round| {
            write(&mapping.duplicate(0, HALF).unwrap(), 1 + round);
            // A write through the tracked mapping explains the change of ctime.
            write(&mapping, 0);
            1 + round
        })
        .await;
}

/// F_SEAL_FUTURE_WRITE refuses writable mappings by mmap, and none by mremap.
#[test(flavor = "multi_thread")]
async fn second_mapping_of_a_sealed_file_is_reported() {
    let (fixture, mapping) = Fixture::new().await;
    fixture.client.seal_writers(&named("ram")).await.unwrap();
    fixture
        .assert_reported("sealed, old length 0", |round| {
            write(&mapping.duplicate(0, HALF).unwrap(), 1 + round);
            write(&mapping, 0);
            1 + round
        })
        .await;
}

#[test(flavor = "multi_thread")]
async fn grown_part_of_a_tracked_mapping_is_reported() {
    let (fixture, mapping) = Fixture::new().await;
    let mut mapping = Some(mapping);
    fixture
        .assert_reported("grown in place", |round| {
            let grown = mapping.take().unwrap().resize(2 * HALF, false).unwrap();
            // A write in the tracked part explains the change of ctime.
            write(&grown, 0);
            let page = PAGES / 2 + round;
            write(&grown, page);
            mapping = Some(grown.resize(HALF, false).unwrap());
            page
        })
        .await;
}

#[test(flavor = "multi_thread")]
async fn page_that_a_process_removes_from_itself_is_reported() {
    let (fixture, mapping) = Fixture::new().await;
    require(supported(process_remove(&mapping, 0)));
    fixture
        .assert_reported("process_madvise", |round| {
            process_remove(&mapping, 1 + round).unwrap();
            // A traced write explains the change of ctime, and the inotify event.
            fd::write_at(fixture.file.as_fd(), 0, b"x").unwrap();
            1 + round
        })
        .await;
}

/// Whether this kernel has a call, given its result.
fn supported(result: Result<usize, SyscallError>) -> HarnessResult<()> {
    match result {
        Err(error) if matches!(error.errno, Errno::EINVAL | Errno::EPERM) => {
            Err(HarnessError::Missing("process_madvise(MADV_REMOVE)".to_owned()))
        }
        Ok(_) => Ok(()),
        Err(error) => panic!("{error}: {}", error.errno),
    }
}

#[test(flavor = "multi_thread")]
async fn removed_pages_are_reported_and_no_others() {
    let (fixture, mapping) = Fixture::new().await;
    fixture.assert_exact("madvise", &[5], || remove(&mapping, 5)).await;
}

#[test(flavor = "multi_thread")]
async fn calls_on_other_mappings_leave_the_coverage_exact() {
    let (fixture, mapping) = Fixture::new().await;
    let other = memfd::create("other", None).unwrap();
    memfd::resize(other.as_fd(), 2 * HALF as u64).unwrap();
    let elsewhere = map(other.as_fd());
    fixture
        .assert_exact("removal", &[3], || {
            write(&mapping, 3);
            write(&elsewhere, 7);
            remove(&elsewhere, 7);
        })
        .await;
    fixture
        .assert_exact("second mapping", &[3], || {
            write(&mapping, 3);
            write(&elsewhere.duplicate(0, HALF).unwrap(), 7);
        })
        .await;
}

/// Their files cannot be looked up.
#[test(flavor = "multi_thread")]
async fn calls_of_other_processes_whose_lock_is_taken_leave_the_coverage_exact() {
    const CHECKPOINTS: usize = 40;
    let (fixture, mapping) = Fixture::new().await;
    let program = require(Compiled::new("remaps"));
    let mut remaps = LineProcess::start(Command::new(program.path()), None).unwrap();
    assert_eq!(remaps.receive().unwrap(), "ready");
    fixture.settle().await;
    let mut exact = 0;
    for round in 0..CHECKPOINTS {
        write(&mapping, round % 8);
        exact += usize::from(fixture.checkpoint().await.coverage.exact);
    }
    // A kernel thread may hold a reference to a page that was written.
    assert!(exact >= CHECKPOINTS * 3 / 4, "{exact} of {CHECKPOINTS} are exact");
}

#[test(flavor = "multi_thread")]
async fn second_mapping_is_reported_if_the_lock_of_the_process_is_taken() {
    let (fixture, mapping) = Fixture::new().await;
    let ended = Arc::new(AtomicBool::new(false));
    let locking = [(); 2].map(|()| {
        let ended = Arc::clone(&ended);
        std::thread::spawn(move || {
            while !ended.load(Ordering::SeqCst) {
                drop(RawMapping::reserve(64 * PAGE).unwrap());
            }
        })
    });
    for round in 0..10 * ROUNDS {
        let since = fixture.checkpoint().await.generation;
        let page = round % 8;
        write(&mapping.duplicate(0, HALF).unwrap(), page);
        let (_, reported) = fixture.next(since).await;
        reported.assert_contains(page as u64, &format!("second mapping, round {round}"));
    }
    ended.store(true, Ordering::SeqCst);
    locking.into_iter().for_each(|thread| thread.join().unwrap());
}
