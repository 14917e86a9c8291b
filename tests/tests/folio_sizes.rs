//! Folios of every size, in memory and in swap, and their attributes.

use fdmap_client::grpc::{CreateFile, ScanRequest};
use fdmap_client::proto::attributes::{Mappers, PageAttributes, PageFlags};
use fdmap_client::proto::convert::AttributeSet;
use fdmap_client::proto::{Backing, PageIndex, PageRange, PageState, Run};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::testing::borrowed::BorrowedMapping;
use fdmap_sys::testing::kernel_access::RegisteredBuffer;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::doctor::has_capability;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, root};
use fdmap_tests::hugepages::{hugetlb_2m, shmem_64k, shmem_thp};
use fdmap_tests::pattern::Pattern;
use fdmap_tests::probe_pair::{ProbePair, data, expand, in_state, pages_of, runs_of};
use fdmap_tests::service::{Service, named};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::FileCommand;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

fn with_attributes() -> ScanRequest {
    ScanRequest { attributes: AttributeSet::ALL, ..ScanRequest::default() }
}

fn attributes(runs: &[Run], page: u64) -> PageAttributes {
    let run = runs.iter().find(|run| run.range.contains(PageIndex(page)));
    run.and_then(|run| run.attributes).expect("the request asked for attributes")
}

/// Checks pages in folios and large swap entries of `order`: written pages hold data, and the other pages with data
/// belong to the same folios.
async fn large_folios(both: &ProbePair, name: &str, order: u8) {
    let pages = 4096;
    let pattern = Pattern { seed: u64::from(order), percent: 5 };
    both.create(name, pages * PAGE, Backing::Shmem).await.unwrap();
    let cgroup = Cgroup::with_limit(256 << 20).unwrap();
    let mut agent = TestAgent::start(Some(&cgroup)).unwrap();
    agent.open(&both.xarray, name).unwrap();
    agent.file(FileCommand::AdviseHugePages).unwrap();
    agent.fill(pattern, 0, pages).unwrap();

    let folio = 1 << order;
    let rounded =
        |page: u64| (page / folio * folio..(page / folio + 1) * folio).any(|page| pattern.has(page));
    let check = |what: &str, states: &[fdmap_tests::probe_pair::Page]| {
        let data = data(states);
        let lost: Vec<_> = pattern.pages(pages).filter(|page| !data.contains(page)).collect();
        assert!(lost.is_empty(), "{name}, {what}: pages {lost:?} were written and are reported as holes");
        let invented: Vec<_> = data.iter().filter(|page| !rounded(**page)).collect();
        assert!(invented.is_empty(), "{name}, {what}: pages {invented:?} belong to no written folio");
    };
    let client = both.xarray.client().await.unwrap();
    let (runs, _) = runs_of(&client, name, &with_attributes()).await.unwrap();
    check("in memory", &expand(&runs));
    let large =
        pattern.pages(pages).filter(|page| attributes(&runs, *page).order == Some(order)).count() as u64;
    assert!(
        large * 2 > pattern.count(pages),
        "{name}: only {large} written pages are in folios of order {order}"
    );
    let mapped = pattern.pages(pages).next().unwrap();
    assert_eq!(
        attributes(&runs, mapped).mappers,
        Some(Mappers::One),
        "{name}: {:?}",
        attributes(&runs, mapped)
    );
    check("in memory", &both.pages(name).await.unwrap()[1]);

    agent.file(FileCommand::PageOut).unwrap();
    cgroup.limit(8 << 20).unwrap();
    let (runs, _) = runs_of(&client, name, &with_attributes()).await.unwrap();
    let states = expand(&runs);
    check("swapped", &states);
    let swapped = in_state(&states, PageState::Swapped);
    assert!(swapped.len() as u64 > pattern.count(pages) / 2, "{name}: {} pages are swapped", swapped.len());
    let mut slots: Vec<_> = swapped
        .iter()
        .map(|page| states[*page as usize].1.expect("the xarray probe reports slots"))
        .collect();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), swapped.len(), "{name}: each page has a slot of its own");
    let whole = swapped.iter().filter(|page| attributes(&runs, **page).order == Some(order)).count();
    assert!(whole > 0, "{name}: no large swap entry of order {order}");
    check("swapped", &both.pages(name).await.unwrap()[1]);
    // Large folios are swapped in whole, and must fit into memory.
    cgroup.limit(256 << 20).unwrap();
    assert_eq!(agent.wrong_pages(pattern, 0, pages).unwrap(), 0, "{name}: pages have wrong content");
}

#[test]
async fn folios_of_64_kib_are_reported_per_page() {
    let host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    let _swap = require(Swap::make(1 << 30, SwapKind::Any));
    let _setting = require(shmem_64k(&host));
    large_folios(&both, "folios-64k", 4).await;
}

#[test]
async fn folios_of_2_mib_are_reported_per_page() {
    let host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    let _swap = require(Swap::make(1 << 30, SwapKind::Any));
    let _setting = require(shmem_thp(&host));
    large_folios(&both, "folios-2m", 9).await;
}

#[test]
async fn thp_file_gets_huge_pages_when_mapped() {
    let host = HostLock::acquire().unwrap();
    require(root());
    let _setting = require(shmem_thp(&host));
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let client = service.client().await.unwrap();
    let (name, backing) = ("thp".to_owned(), Backing::ShmemThp);
    client.create(CreateFile { name, size_bytes: 8 * MIB, backing, ..CreateFile::default() }).await.unwrap();
    let mapped = service.fdpass().unwrap().map(&named("thp"), true).unwrap();
    assert!(mapped.write_at(3 * MIB, b"x"));
    let (runs, _) = runs_of(&client, "thp", &with_attributes()).await.unwrap();
    assert_eq!(data(&expand(&runs)), (512..1024).collect::<Vec<_>>());
    assert_eq!(attributes(&runs, 600).order, Some(9));
}

#[test]
async fn hugetlb_file_is_exact_by_xarray_and_unknown_by_syscalls() {
    let host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    let _pages = require(hugetlb_2m(&host, 8));
    both.create("huge", 16 * MIB, Backing::Hugetlb(2 * MIB)).await.unwrap();
    let mapped = both.xarray.fdpass().unwrap().map(&named("huge"), true).unwrap();
    assert!(mapped.write_at(0, b"x") && mapped.write_at(5 * MIB, b"x"));
    let [xarray, syscalls] = both.pages("huge").await.unwrap();
    let expected: Vec<u64> = (0..512).chain(1024..1536).collect();
    assert_eq!(data(&xarray), expected);
    assert_eq!(in_state(&xarray, PageState::Hole).len(), 4096 - expected.len());
    assert_eq!(in_state(&syscalls, PageState::Unknown).len(), 4096, "never a hole");
    let (_, provenance) = pages_of(&both.syscalls.client().await.unwrap(), "huge").await.unwrap();
    assert!(!provenance.exact());
    assert_eq!(provenance.uncertainty.unknown_pages, 4096);

    let (runs, _) = runs_of(&both.xarray.client().await.unwrap(), "huge", &with_attributes()).await.unwrap();
    let got = attributes(&runs, 1100);
    assert_eq!((got.order, got.map_count, got.maybe_pinned), (Some(9), Some(1), Some(false)));
}

#[test]
async fn fallocated_page_is_resident_to_probes_that_do_not_seek() {
    let _host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    both.create("allocated", 100 * PAGE, Backing::Shmem).await.unwrap();
    let mut agent = TestAgent::start(None).unwrap();
    agent.open(&both.xarray, "allocated").unwrap();
    agent.file(FileCommand::Allocate((10..20).into())).unwrap();
    agent.fill(Pattern { seed: 1, percent: 100 }, 15, 17).unwrap();
    let [xarray, syscalls] = both.pages("allocated").await.unwrap();
    let allocated: Vec<_> = (10..20).collect();
    assert_eq!(in_state(&xarray, PageState::Resident), allocated);
    if has_capability(&both.syscalls, "cachestat") {
        assert_eq!(in_state(&syscalls, PageState::Resident), allocated);
        assert_eq!(data(&syscalls), allocated);
    } else {
        assert_eq!(data(&syscalls), [15, 16], "the documented difference");
    }
}

#[test]
async fn swap_cached_pages_are_distinguished_on_request() {
    let _host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    // A file instead of zram: pages that are written to a slow area stay in the swap cache for a while.
    let _swap = require(Swap::make(128 << 20, SwapKind::File));
    let pages = 20_000;
    let cgroup = Cgroup::with_limit(256 << 20).unwrap();
    both.create("cached", pages * PAGE, Backing::Shmem).await.unwrap();
    let mut agent = TestAgent::start(Some(&cgroup)).unwrap();
    agent.open(&both.xarray, "cached").unwrap();
    agent.fill(Pattern { seed: 1, percent: 100 }, 0, pages).unwrap();
    agent.file(FileCommand::PageOut).unwrap();
    // A read swaps in adjacent pages too. They stay in the swap cache, because nothing maps them.
    for page in (0..pages).step_by(64) {
        agent.read(page, page + 1).unwrap();
    }
    let client = both.xarray.client().await.unwrap();
    let reported = ScanRequest { distinguish_swap_cached: true, ..ScanRequest::default() };
    let (runs, provenance) = runs_of(&client, "cached", &reported).await.unwrap();
    let distinguished = expand(&runs);
    assert!(provenance.swap_cached_distinguished);
    let cached = in_state(&distinguished, PageState::SwapCached);
    assert!(!cached.is_empty(), "no page is swap-cached");
    assert!(
        cached.iter().all(|page| distinguished[*page as usize].1.is_some()),
        "a swap-cached page has a slot"
    );
    let [folded, by_calls] = both.pages("cached").await.unwrap();
    for page in cached {
        assert_eq!(
            folded[page as usize].0,
            PageState::Swapped,
            "page {page}: by default it counts as swapped"
        );
        assert_eq!(by_calls[page as usize].0, PageState::Resident, "page {page} is in memory");
    }
    let mapped = distinguished
        .iter()
        .zip(&by_calls)
        .filter(|((tree, _), (calls, _))| *tree == PageState::Swapped && *calls == PageState::Resident);
    assert_eq!(mapped.count(), 0, "every resident page with a slot was distinguished");
}

#[test]
async fn mappers_are_counted() {
    let _host = HostLock::acquire().unwrap();
    require(root());
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let client = service.client().await.unwrap();
    let name = "counted".to_owned();
    client.create(CreateFile { name, size_bytes: 8 * PAGE, ..CreateFile::default() }).await.unwrap();
    let (fd, _) = service.fdpass().unwrap().open(&named("counted"), true).unwrap();
    let one = SharedMapping::shared(&fd, 0, 8 * 4096, true).unwrap();
    let two = SharedMapping::shared(&fd, 0, 8 * 4096, true).unwrap();
    assert!(one.write_at(4096, b"x") && one.write_at(2 * 4096, b"x") && two.write_at(2 * 4096, b"y"));
    nix::sys::uio::pwrite(&fd, b"z", 3 * 4096).unwrap();
    let (runs, _) = runs_of(&client, "counted", &with_attributes()).await.unwrap();
    let mappers = |page| attributes(&runs, page).mappers;
    assert_eq!(mappers(1), Some(Mappers::One));
    assert_eq!(mappers(2), Some(Mappers::Several));
    assert_eq!(mappers(3), Some(Mappers::None));
    assert_eq!(attributes(&runs, 1).map_count, Some(1));
    let flags = attributes(&runs, 1).flags.unwrap().valid();
    assert!(flags.contains(PageFlags::UPTODATE | PageFlags::SWAPBACKED), "{flags:?}");
    assert_eq!(attributes(&runs, 1).maybe_pinned, Some(false));
}

#[test]
async fn registered_buffer_pages_are_reported_as_pinned() {
    let _host = HostLock::acquire().unwrap();
    require(root());
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let client = service.client().await.unwrap();
    let name = "pinned".to_owned();
    client.create(CreateFile { name, size_bytes: 8 * PAGE, ..CreateFile::default() }).await.unwrap();
    let (fd, _) = service.fdpass().unwrap().open(&named("pinned"), true).unwrap();
    let mapping = SharedMapping::shared(&fd, 0, 8 * 4096, true).unwrap();
    assert!((0..8).all(|page| mapping.write_at(page * 4096, b"x")));
    let pinned = async || {
        let (runs, _) = runs_of(&client, "pinned", &with_attributes()).await.unwrap();
        (0..8).map(|page| attributes(&runs, page).maybe_pinned.unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(pinned().await, [false; 8]);
    // A registered buffer is pinned while the ring exists, like the target of a device's DMA.
    let buffer = RegisteredBuffer::new(&BorrowedMapping::of(&mapping), 2 * 4096, 3 * 4096).unwrap();
    assert_eq!(pinned().await, [false, false, true, true, true, false, false, false]);
    drop(buffer);
    // The kernel unpins the buffer a moment after the ring is closed.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while pinned().await != [false; 8] {
        assert!(std::time::Instant::now() < until, "still reported as pinned");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[test]
async fn sparse_terabyte_scans_in_under_a_second() {
    let _host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    let pages: u64 = 1 << 28;
    both.create("sparse", pages * PAGE, Backing::Shmem).await.unwrap();
    let (fd, _) = both.xarray.fdpass().unwrap().open(&named("sparse"), true).unwrap();
    let written = [0, 63, 4096, 1 << 18, (1 << 24) + 5, pages - 1];
    for page in written {
        nix::sys::uio::pwrite(&fd, b"x", (page * PAGE).cast_signed()).unwrap();
    }
    for service in [&both.xarray, &both.syscalls] {
        let client = service.client().await.unwrap();
        let (runs, provenance) = runs_of(&client, "sparse", &ScanRequest::default()).await.unwrap();
        let data: Vec<_> = runs.iter().filter(|run| run.state.is_data()).map(|run| run.range).collect();
        let expected: Vec<_> = written.iter().map(|page| PageRange::at(PageIndex(*page), 1)).collect();
        assert_eq!(data, expected);
        let nanos = provenance.end.monotonic_ns - provenance.begin.monotonic_ns;
        assert!(nanos < 1_000_000_000, "a sparse terabyte took {nanos} ns");
    }
}
