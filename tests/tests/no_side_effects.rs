//! Queries have no side effects: no page is swapped in or out, allocated, or moved in an LRU list.

use std::time::Duration;

use fdmap_client::grpc::{ScanEncoding, ScanRequest, SummaryOptions};
use fdmap_client::proto::convert::AttributeSet;
use fdmap_client::proto::shared_snapshot::BodyLayout;
use fdmap_client::proto::{Backing, PageIndex, PageState};
use fdmap_sys::cachestat::{self, CacheCounts};
use fdmap_sys::fd;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, settle_lru_lists};
use fdmap_tests::pattern::Pattern;
use fdmap_tests::probe_pair::{ProbePair, in_state};
use fdmap_tests::service::{Service, named};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;
const PAGES: u64 = 1 << 16;

/// Everything that a query could disturb. The counters cover this file and this cgroup only, because other processes
/// of the host swap too.
#[derive(Debug, PartialEq, Eq)]
struct Counters {
    cgroup_usage: u64,
    cgroup_shmem: u64,
    cgroup_faults: u64,
    cgroup_major_faults: u64,
    active: u64,
    inactive: u64,
    allocated_bytes: u64,
    cached: CacheCounts,
    agent_faults: (u64, u64),
}

fn counters(cgroup: &Cgroup, agent: &TestAgent, file: impl std::os::fd::AsFd) -> Counters {
    let stat = |name| cgroup.stat(name).unwrap();
    // Version 1 and 2 of the controller count shared memory under the same names.
    Counters {
        cgroup_usage: cgroup.usage().unwrap(),
        cgroup_shmem: stat("shmem"),
        cgroup_faults: stat("pgfault"),
        cgroup_major_faults: stat("pgmajfault"),
        active: stat("active_anon"),
        inactive: stat("inactive_anon"),
        allocated_bytes: u64::try_from(fd::stat(&file).unwrap().st_blocks).unwrap() * 512,
        cached: cachestat::count(file.as_fd(), 0, 0).unwrap(),
        agent_faults: agent.faults().unwrap(),
    }
}

async fn run_all_queries(service: &Service) {
    let client = service.client().await.unwrap();
    let name = named("still");
    let bitmaps = ScanEncoding::Bitmaps { slots: true };
    for encoding in [ScanEncoding::Auto, ScanEncoding::Runs, bitmaps, ScanEncoding::Entries] {
        let options = ScanRequest { encoding, ..ScanRequest::default() };
        let mut scan = client.scan(&name, &options).await.unwrap();
        while scan.next().await.unwrap().is_some() {}
    }
    let all = ScanRequest {
        distinguish_swap_cached: true,
        attributes: AttributeSet::ALL,
        ..ScanRequest::default()
    };
    client.scan(&name, &all).await.unwrap().runs().await.unwrap();
    let retain_for = Duration::from_secs(60);
    let summary =
        client.summary(&name, &SummaryOptions { retain_for, ..SummaryOptions::default() }).await.unwrap();
    let mut diff = client.diff(&name, summary.snapshot.unwrap(), None, None, Duration::ZERO).await.unwrap();
    while diff.next().await.unwrap().is_some() {}
    let some: Vec<_> = (0..PAGES).step_by(97).map(PageIndex).collect();
    client.lookup(&name, &some, AttributeSet::ALL, Duration::ZERO, true).await.unwrap();
    for layout in [BodyLayout::Entries, BodyLayout::States] {
        service.fdpass().unwrap().snapshot(&name, None, layout, Duration::ZERO).unwrap();
    }
}

#[test]
async fn queries_leave_a_half_swapped_file_unchanged() {
    let _host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    let _swap = require(Swap::make(1 << 30, SwapKind::Any));
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 2).unwrap();
    both.create("still", PAGES * PAGE, Backing::Shmem).await.unwrap();
    let mut agent = TestAgent::start(Some(&cgroup)).unwrap();
    agent.open(&both.xarray, "still").unwrap();
    // The file also has holes: a query that read them would allocate them.
    agent.fill(Pattern { seed: 4, percent: 80 }, 0, PAGES).unwrap();
    let swapped = in_state(&both.pages("still").await.unwrap()[0], PageState::Swapped).len() as u64;
    assert!((PAGES / 5..PAGES * 3 / 4).contains(&swapped), "{swapped} pages are swapped");

    let (file, _) = both.xarray.fdpass().unwrap().open(&named("still"), false).unwrap();
    // From here on the agent sleeps, and nothing is reclaimed. Pending writeback ends.
    cgroup.limit(PAGES * PAGE).unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    for service in [&both.xarray, &both.syscalls] {
        settle_lru_lists().unwrap();
        let before = counters(&cgroup, &agent, &file);
        run_all_queries(service).await;
        let after = counters(&cgroup, &agent, &file);
        assert_eq!(before, after);
    }
}
