//! Events of tracked address spaces that the service does not cause: calls of other processes that take written bits, forks,
//! and guard regions. Pages written before such an event are reported.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fdmap_client::grpc::{ChangedBatch, ChangesOptions, CreateFile};
use fdmap_client::proto::{Backing, Checkpoint, ClientMapping, CoverageGap, GapKind, PageIndex};
use fdmap_client::{Client, FdpassClient};
use fdmap_sys::address::AddressRange;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::{PageRegion, Pagemap, ScanFlags};
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, root};
use fdmap_tests::hugepages::hugetlb_2m;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::{Command, Reply, WriterCommand};
use fdmap_tests::tracked::range_of;
use fdmap_tests::{HarnessError, HarnessResult};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 64;
const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;
/// A call that takes longer never returns.
const MAX_WAIT: Duration = Duration::from_secs(30);

async fn start(name: &str, backing: Backing, bytes: u64) -> (Service, Client) {
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    let file = CreateFile { name: name.to_owned(), size_bytes: bytes, backing, ..CreateFile::default() };
    client.create(file).await.unwrap();
    (service, client)
}

/// Closes the generations in which all pages count as written because tracking began.
async fn settle(client: &Client) {
    for _ in 0..2 {
        client.checkpoint(&named("ram"), true, None).await.unwrap();
    }
}

/// Makes a checkpoint. Returns it and the pages of its generation.
async fn next(client: &Client, force_scan: bool) -> (Checkpoint, Vec<u64>) {
    let since = client.coverage(&named("ram")).await.unwrap().generation;
    let made = client.checkpoint(&named("ram"), force_scan, None).await.unwrap();
    let mut changes =
        client.changes(&named("ram"), ChangesOptions { since, ..ChangesOptions::default() }).await.unwrap();
    let mut pages = Vec::new();
    while let Some(ChangedBatch::Runs(runs)) = changes.next().await.unwrap() {
        pages.extend(runs.iter().flat_map(|run| run.run.range.start().0..run.run.range.end().0));
    }
    (made, pages)
}

fn has_gap(made: &Checkpoint) -> bool {
    made.coverage.gaps.iter().any(|gap| gap.kind == GapKind::BitsTaken)
}

/// A mapping of this process, which keeps a copy of the userfaultfd that it passed to the service.
struct OwnMapping {
    mapping: SharedMapping,
    uffd: Userfaultfd,
    _session: FdpassClient,
    _file: OwnedFd,
}

impl OwnMapping {
    fn track(service: &Service) -> Self {
        let mut session = service.fdpass().unwrap();
        let (file, _) = session.open(&named("ram"), true).unwrap();
        let mapping = SharedMapping::shared(&file, 0, (PAGES * PAGE) as usize, true).unwrap();
        let range = range_of(&mapping);
        let uffd = Userfaultfd::create().unwrap();
        let (pagemap, maps) = (Pagemap::open(None).unwrap(), Maps::open(std::process::id()).unwrap());
        let whole =
            ClientMapping { address: range.start, length_bytes: range.len(), first_page: PageIndex(0) };
        session
            .track(&named("ram"), uffd.as_fd(), Some(pagemap.as_fd()), Some(maps.as_fd()), &[whole])
            .unwrap();
        Self { mapping, uffd, _session: session, _file: file }
    }

    fn write(&self, page: u64) {
        assert!(self.mapping.write_at((page * PAGE) as usize, b"w"));
    }

    fn range(&self, page: u64) -> AddressRange {
        AddressRange::at(range_of(&self.mapping).start + page * PAGE, PAGE).unwrap()
    }
}

/// Takes the written bits of a range.
fn take_bits(pagemap: &Pagemap, range: AddressRange) {
    let flags = ScanFlags::WP_MATCHING | ScanFlags::CHECK_WPASYNC;
    let scanned = pagemap.scan(range, flags, &mut [PageRegion::default(); 4]).unwrap();
    assert_eq!(scanned.count, 1, "the page was written");
}

/// The next checkpoint reports both pages, although the written bit of the second one was taken. The one after it is exact.
async fn assert_reported(client: &Client, how: &str) {
    let (made, pages) = next(client, false).await;
    assert!([7, 9].iter().all(|page| pages.contains(page)), "{how}: {pages:?}");
    assert!(!made.coverage.exact && has_gap(&made), "{how}: {:?}", made.coverage);
    let (made, _) = next(client, true).await;
    assert!(!has_gap(&made), "{how}: {:?}", made.coverage);
}

#[test(flavor = "multi_thread")]
async fn page_is_reported_whose_bit_the_client_took_by_its_own_userfaultfd() {
    require(root());
    let (service, client) = start("ram", Backing::Shmem, PAGES * PAGE).await;
    let own = OwnMapping::track(&service);
    settle(&client).await;
    for protect in [true, false] {
        own.write(7);
        own.write(9);
        own.uffd.write_protect(own.range(9), protect).unwrap();
        assert_reported(&client, &format!("UFFDIO_WRITEPROTECT, {protect}")).await;
    }
    own.write(7);
    own.write(9);
    own.uffd.unregister(own.range(9)).unwrap();
    let (made, pages) = next(&client, false).await;
    assert!([7, 9].iter().all(|page| pages.contains(page)) && has_gap(&made), "{pages:?}");
}

#[test(flavor = "multi_thread")]
async fn page_is_reported_whose_bit_the_client_took_by_its_own_pagemap() {
    require(root());
    let (service, client) = start("ram", Backing::Shmem, PAGES * PAGE).await;
    let own = OwnMapping::track(&service);
    settle(&client).await;
    own.write(7);
    own.write(9);
    take_bits(&Pagemap::open(None).unwrap(), own.range(9));
    assert_reported(&client, "PAGEMAP_SCAN of /proc/self/pagemap").await;
}

#[test(flavor = "multi_thread")]
async fn page_is_reported_whose_bit_another_process_took() {
    require(root());
    let (service, client) = start("ram", Backing::Shmem, PAGES * PAGE).await;
    let mut agent = TestAgent::start(None).unwrap();
    let mapping = agent.map(&service, "ram", true).unwrap();
    settle(&client).await;
    // The file is sealed in the last round, so that no other signal of the write remains.
    for sealed in [false, true] {
        if sealed {
            client.seal_writers(&named("ram")).await.unwrap();
            settle(&client).await;
        }
        agent.poke(0, 7, 8).unwrap();
        agent.poke(0, 9, 10).unwrap();
        let pagemap = Pagemap::open(Some(agent.pid())).unwrap();
        take_bits(&pagemap, AddressRange::at(mapping.address as u64 + 9 * PAGE, PAGE).unwrap());
        assert_reported(&client, &format!("PAGEMAP_SCAN of another process, sealed: {sealed}")).await;
    }
    agent.poke(0, 7, 8).unwrap();
    let (made, pages) = next(&client, false).await;
    assert_eq!((pages, made.coverage.exact), (vec![7], true), "{:?}", made.coverage);
    agent.kill().unwrap();
}

#[test(flavor = "multi_thread")]
async fn calls_that_take_bits_are_a_gap_where_they_are_not_traced() {
    require(root());
    let service = Service::start(&["--no-call-trace"]).unwrap();
    let client = service.client().await.unwrap();
    let file = CreateFile { name: "ram".to_owned(), size_bytes: PAGES * PAGE, ..CreateFile::default() };
    client.create(file).await.unwrap();
    let own = OwnMapping::track(&service);
    client.seal_writers(&named("ram")).await.unwrap();
    settle(&client).await;
    own.write(7);
    let (made, pages) = next(&client, false).await;
    assert_eq!(pages, [7]);
    assert!(has_gap(&made) && !made.coverage.exact, "{:?}", made.coverage);
}

#[test(flavor = "multi_thread")]
async fn page_is_reported_that_an_unnoticed_child_wrote() {
    require(root());
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, 8));
    let (service, client) = start("ram", Backing::Hugetlb(HUGE), 4 * HUGE).await;
    let mut agent = TestAgent::start(None).unwrap();
    agent.map(&service, "ram", true).unwrap();
    let huge = HUGE / PAGE;
    agent.poke(0, 0, 4 * huge).unwrap();
    client.seal_writers(&named("ram")).await.unwrap();
    settle(&client).await;
    let (made, pages) = next(&client, true).await;
    assert_eq!((pages, made.coverage.exact), (vec![], true), "no child exists: {:?}", made.coverage);
    for page in [huge, 2 * huge] {
        agent.writer(WriterCommand::ForkUnnoticed { mapping: 0, page }).unwrap();
        let (made, pages) = next(&client, false).await;
        assert!(pages.contains(&page), "{pages:?}");
        assert!(!made.coverage.exact, "{:?}", made.coverage);
    }
    let (made, pages) = next(&client, true).await;
    assert_eq!((pages, made.coverage.exact), (vec![], true), "{:?}", made.coverage);
    agent.kill().unwrap();
}

/// Where calls are not traced, no fork of the process is counted, but the kernel counts all tasks that it creates.
#[test(flavor = "multi_thread")]
async fn unnoticed_child_is_a_gap_where_calls_are_not_traced() {
    require(root());
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, 8));
    let service = Service::start(&["--no-call-trace"]).unwrap();
    let client = service.client().await.unwrap();
    let (name, backing) = ("ram".to_owned(), Backing::Hugetlb(HUGE));
    let file = CreateFile { name, size_bytes: 4 * HUGE, backing, ..CreateFile::default() };
    client.create(file).await.unwrap();
    let mut agent = TestAgent::start(None).unwrap();
    agent.map(&service, "ram", true).unwrap();
    agent.poke(0, 0, 4 * (HUGE / PAGE)).unwrap();
    client.seal_writers(&named("ram")).await.unwrap();
    settle(&client).await;
    agent.writer(WriterCommand::ForkUnnoticed { mapping: 0, page: HUGE / PAGE }).unwrap();
    let (made, _) = next(&client, false).await;
    let unknown = made.coverage.gaps.iter().any(|gap| gap.kind == GapKind::UnknownMappers);
    assert!(unknown && !made.coverage.exact, "{:?}", made.coverage);
    agent.kill().unwrap();
}

/// Waits for the reply of an agent. Kills it if there is none.
fn reply_of(agent: &mut TestAgent) -> HarnessResult<Reply> {
    let (pid, replied) = (agent.pid(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let began = Instant::now();
            while !replied.load(Ordering::Acquire) && began.elapsed() < MAX_WAIT {
                std::thread::sleep(Duration::from_millis(5));
            }
            if !replied.load(Ordering::Acquire) {
                kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
            }
        });
        let reply = agent.reply();
        replied.store(true, Ordering::Release);
        reply
    })
}

/// Waits until the coverage lists a page as guarded. The service receives the record of a call that did not block after its end.
async fn until_guarded(client: &Client, page: u64) {
    let began = Instant::now();
    loop {
        let gaps = client.coverage(&named("ram")).await.unwrap().coverage.gaps;
        let mut guards = gaps.iter().filter(|gap| gap.remedy.contains("MADV_GUARD_REMOVE"));
        if guards.any(|gap| gap.range.is_some_and(|range| range.contains(PageIndex(page)))) {
            return;
        }
        assert!(began.elapsed() < MAX_WAIT, "page {page} is not guarded: {gaps:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test(flavor = "multi_thread")]
async fn guard_region_is_installed_and_its_range_is_conservative() {
    require(root());
    let (service, client) = start("ram", Backing::Shmem, PAGES * PAGE).await;
    let mut agent = TestAgent::start(None).unwrap();
    agent.map(&service, "ram", true).unwrap();
    agent.poke(0, 0, PAGES).unwrap();
    client.seal_writers(&named("ram")).await.unwrap();
    settle(&client).await;
    for process in [false, true] {
        let pages = (8..12).into();
        agent.send(&Command::Writer(WriterCommand::Guard { mapping: 0, pages, process })).unwrap();
        match reply_of(&mut agent) {
            Ok(_) => {}
            Err(HarnessError::Agent(message)) if message.contains("EINVAL") => {
                require::<()>(Err(HarnessError::Missing("guard regions in shmem".to_owned())));
            }
            Err(error) => panic!("{}", fdmap_client::proto::error_chain(&error)),
        }
        // The range of process_madvise is not known.
        until_guarded(&client, if process { 30 } else { 8 }).await;
        settle(&client).await;
        for page in [9, 20] {
            agent.poke(0, page, page + 1).unwrap();
            let (made, pages) = next(&client, false).await;
            assert!(pages.contains(&page), "{pages:?}");
            assert!((8..12).all(|page| pages.contains(&page)), "{pages:?}");
            let gap = made.coverage.gaps.iter().find(|gap| gap.remedy.contains("MADV_GUARD_REMOVE"));
            assert!(gap.is_some_and(|gap| gap.range.is_some()), "{:?}", made.coverage);
            assert_eq!(pages.contains(&30), process, "process_madvise has no known range: {pages:?}");
        }
        let coverage = client.coverage(&named("ram")).await.unwrap().coverage;
        let is_guarded = |gap: &CoverageGap| gap.remedy.contains("MADV_GUARD_REMOVE");
        assert!(!coverage.exact && coverage.gaps.iter().any(is_guarded), "{coverage:?}");
    }
    agent.kill().unwrap();
}
