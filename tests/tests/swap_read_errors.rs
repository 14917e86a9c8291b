//! A page whose swap slot cannot be read is lost and reported as unknown: not as a hole, and not as swapped.

use std::time::Duration;

use fdmap_client::grpc::{CreateFile, ScanRequest};
use fdmap_client::proto::PageState;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, root};
use fdmap_tests::pattern::Pattern;
use fdmap_tests::probe_pair::{expand, in_state, pages_of, runs_of};
use fdmap_tests::service::Service;
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::FileCommand;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;

#[test]
async fn page_lost_to_a_failed_swap_read_is_unknown() {
    let _host = HostLock::acquire().unwrap();
    require(root());
    // Dropped after the service, whose end frees the slots: `swapoff` would try to read each of them.
    let swap = require(Swap::make(64 << 20, SwapKind::Loop));
    let service = Service::start(&["--probe", "xarray"]).unwrap();
    let client = service.client().await.unwrap();
    let pages = 4096;
    let name = "poisoned".to_owned();
    client.create(CreateFile { name, size_bytes: pages * PAGE, ..CreateFile::default() }).await.unwrap();
    let cgroup = Cgroup::with_limit(8 << 20).unwrap();
    let mut agent = TestAgent::start(Some(&cgroup)).unwrap();
    agent.open(&service, "poisoned").unwrap();
    agent.fill(Pattern { seed: 3, percent: 100 }, 0, pages).unwrap();
    agent.file(FileCommand::PageOut).unwrap();
    // A process whose own memory is in the area can die of that before it reads the file; this one is outside the cgroup.
    agent.kill().unwrap();
    let mut reader = TestAgent::start(None).unwrap();
    reader.open(&service, "poisoned").unwrap();
    // Reclaim would write to the broken area, which extends its file.
    cgroup.limit(64 << 20).unwrap();
    // Pending writes to the device must end before the device fails.
    tokio::time::sleep(Duration::from_secs(1)).await;
    // Only pages that are not in memory need the device.
    let reported = ScanRequest { distinguish_swap_cached: true, ..ScanRequest::default() };
    let before = expand(&runs_of(&client, "poisoned", &reported).await.unwrap().0);
    let swapped = in_state(&before, PageState::Swapped);
    assert!(swapped.len() > 1000, "only {} pages are swapped", swapped.len());

    swap.break_it().unwrap();
    // SIGBUS kills a process that touches such a page, and the kernel poisons the entry.
    let victim = swapped[swapped.len() / 2];
    assert!(reader.read(victim, victim + 1).is_err());
    let (after, provenance) = pages_of(&client, "poisoned").await.unwrap();
    let unknown = in_state(&after, PageState::Unknown);
    assert!(unknown.contains(&victim), "page {victim} is {:?}", after[victim as usize]);
    assert_eq!(provenance.uncertainty.unknown_pages, unknown.len() as u64);
    assert!(!provenance.exact());
    let lost = swapped.iter().filter(|page| after[**page as usize].0 == PageState::Hole).count();
    assert_eq!(lost, 0, "pages with data are reported as holes");
}
