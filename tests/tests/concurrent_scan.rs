//! While a file is written, swapped, truncated and extended, a scan reports for each page the state at some moment of
//! the scan.

use std::time::{Duration, Instant};

use fdmap_client::proto::{Backing, PageState};
use fdmap_client::{Client, MappedFile};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::HostLock;
use fdmap_tests::pattern::Pattern;
use fdmap_tests::probe_pair::{Page, ProbePair, pages_of};
use fdmap_tests::service::named;
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::{Command, FileCommand, FileOf};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;

/// The two counters of a marching agent: pages begun, pages done.
struct Progress(MappedFile);

impl Progress {
    fn begun(&self) -> u64 {
        self.at(0)
    }

    fn done(&self) -> u64 {
        self.at(8)
    }

    fn at(&self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        assert!(self.0.read_at(offset, &mut bytes));
        u64::from_le_bytes(bytes)
    }
}

/// Asserts that pages written before the scan hold data, and that pages not begun when it ended are holes.
fn check(probe: &str, pages: &[Page], done_before: u64, begun_after: u64) {
    for (page, (state, _)) in (0_u64..).zip(pages) {
        assert_ne!(*state, PageState::Unknown, "{probe}: page {page}");
        if page < done_before {
            assert!(
                state.is_data(),
                "{probe}: page {page} was written before the scan and is reported as {state}"
            );
        }
        if page >= begun_after {
            assert!(!state.is_data(), "{probe}: page {page} was not written yet and is reported as {state}");
        }
    }
}

#[test(flavor = "multi_thread")]
async fn scan_brackets_sequential_writer_under_swap() {
    let _host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    let _swap = require(Swap::make(1 << 30, SwapKind::Any));
    let pages = 1 << 16;
    let cgroup = Cgroup::with_limit(48 << 20).unwrap();
    both.create("marched", pages * PAGE, Backing::Shmem).await.unwrap();
    both.create("progress", PAGE, Backing::Shmem).await.unwrap();
    let progress = Progress(both.xarray.fdpass().unwrap().map(&named("progress"), false).unwrap());
    let mut marcher = TestAgent::start(Some(&cgroup)).unwrap();
    let mut churner = TestAgent::start(Some(&cgroup)).unwrap();
    for agent in [&mut marcher, &mut churner] {
        agent.open(&both.xarray, "marched").unwrap();
    }
    marcher.file(FileCommand::MapProgress(FileOf::of(&both.xarray, "progress"))).unwrap();
    let (xarray, syscalls) = (both.xarray.client().await.unwrap(), both.syscalls.client().await.unwrap());

    // Some pages first, so that the churner has something to swap in and out.
    let head = 20_000;
    marcher.file(FileCommand::March((0..head).into())).unwrap();
    churner.send(&Command::File(FileCommand::Churn { seed: 5, pages: head, millis: 60_000 })).unwrap();
    marcher.send(&Command::File(FileCommand::March((head..pages).into()))).unwrap();
    let mut scans = 0;
    let mut swapped = 0;
    while progress.done() < pages {
        for (probe, client) in [("xarray", &xarray), ("syscalls", &syscalls)] {
            let done_before = progress.done();
            let (states, _) = pages_of(client, "marched").await.unwrap();
            let begun_after = progress.begun();
            check(probe, &states, done_before, begun_after);
            swapped = swapped.max(states.iter().filter(|(state, _)| state.is_swapped()).count());
            scans += 1;
        }
    }
    marcher.reply().unwrap();
    assert!(scans >= 6, "only {scans} scans during the march");
    assert!(swapped > 10_000, "only {swapped} pages were ever swapped");
    churner.kill().unwrap();
}

/// Scans while `busy` executes its command. Returns the number of scans.
async fn scan_while(client: &Client, name: &str, busy: &mut TestAgent, check: impl Fn(&[Page])) -> u64 {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || sender.send(busy.reply().map(drop)));
        let mut scans = 0;
        let started = Instant::now();
        loop {
            let states = tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(pages_of(client, name)).unwrap().0
            });
            check(&states);
            scans += 1;
            if let Ok(done) = receiver.try_recv() {
                done.unwrap();
                return scans;
            }
            assert!(started.elapsed() < Duration::from_secs(120), "the agent does not finish");
        }
    })
}

#[test(flavor = "multi_thread")]
async fn truncated_and_extended_file_keeps_its_first_page() {
    let _host = HostLock::acquire().unwrap();
    let both = require(ProbePair::start());
    let pages = 70_000;
    both.create("flapped", pages * PAGE, Backing::Shmem).await.unwrap();
    for (probe, service) in [("xarray", &both.xarray), ("syscalls", &both.syscalls)] {
        let mut agent = TestAgent::start(None).unwrap();
        agent.open(&both.xarray, "flapped").unwrap();
        agent.fill(Pattern { seed: 1, percent: 100 }, 0, 1).unwrap();
        let client = service.client().await.unwrap();
        // The tree loses and gains levels each time: its root alternates between a node and the single
        // entry at index 0.
        agent.send(&Command::File(FileCommand::Flap { seed: 3, pages, times: 3000 })).unwrap();
        let scans = scan_while(&client, "flapped", &mut agent, |states| {
            assert!(!states.is_empty());
            assert!(states[0].0.is_data(), "{probe}: page 0 holds data all the time");
            let unknown = states.iter().filter(|(state, _)| *state == PageState::Unknown).count();
            assert_eq!(unknown, 0, "{probe}: the probe retries a tree that changes");
        });
        let scans = scans.await;
        assert!(scans > 20, "{probe}: only {scans} scans");
    }
}
