//! No write is ever lost, however it was made: see `fdmap_tests::lost`. With `FDMAP_SOAK_SECONDS` the same goes on for that
//! long, with other seeds each time.

use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fdmap_client::proto::Backing;
use fdmap_tests::cleanup::{Cleanup, CleanupGuard};
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, output, vmstat};
use fdmap_tests::hugepages::{hugetlb_2m, shmem_thp};
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::method::Method;
use fdmap_tests::no_lost_writes::pages::PageSet;
use fdmap_tests::no_lost_writes::scenario::{Outcome, Scenario};
use fdmap_tests::pattern::mix;
use fdmap_tests::service::Service;
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::command::WriterCommand;
use fdmap_tests::test_agent::{Run, TestAgent};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

/// The number of tests that share the time of a soak.
const SCENARIOS: u64 = 14;

/// How long writers may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// Seeds of the rounds of a scenario: one, or as many as its share of a soak has time for.
fn rounds() -> impl Iterator<Item = u64> {
    let share = std::env::var("FDMAP_SOAK_SECONDS").ok().map(|seconds| {
        Duration::from_secs(seconds.parse::<u64>().expect("FDMAP_SOAK_SECONDS is a number") / SCENARIOS)
    });
    let begun = Instant::now();
    (0..).take_while(move |round| *round == 0 || share.is_some_and(|share| begun.elapsed() < share)).map(
        |round| {
            // Tests of today draw what those of yesterday did; a soak does not.
            let seed = mix(round) ^ if round == 0 { 0 } else { fdmap_sys::clock::monotonic_ns() };
            eprintln!("seed {seed}");
            seed
        },
    )
}

/// A file and its writers.
struct Workload<'a> {
    name: &'static str,
    pages: u64,
    backing: Backing,
    /// For each writing process, its threads' ways of writing.
    writers: &'a [&'a str],
    /// How long.
    time: Duration,
    /// Records of each thread's lane; a full one ends its thread.
    capacity: usize,
    /// Each page is written before.
    filled: bool,
    /// The file is writer-sealed, so that coverage is exact and no page is reported only because it might have been written.
    closed: bool,
    /// Microseconds between two checkpoints at most.
    pause: u64,
    consumers: u64,
    mirror: bool,
    /// What direct I/O reads.
    source: Option<&'a Path>,
}

impl Workload<'_> {
    const fn of(name: &'static str) -> Self {
        Workload {
            name,
            pages: 1 << 14,
            backing: Backing::Shmem,
            writers: &[],
            time: Duration::from_secs(4),
            capacity: 2_000_000,
            filled: false,
            closed: true,
            pause: 20_000,
            consumers: 1,
            mirror: true,
            source: None,
        }
    }

    /// Runs it in a service of its own.
    async fn run(&self, seed: u64) -> Vec<Outcome> {
        let service = Service::start(&[]).unwrap();
        let threads = self.writers.iter().map(|ways| ways.split(' ').count()).sum::<usize>();
        let log = Log::create(threads + 1, self.capacity).unwrap();
        let mut scenario = Scenario::new(&service, self.name, self.pages, self.backing, log).await.unwrap();
        let mut writers = Vec::new();
        let mut remote = None;
        for _ in self.writers {
            let mut writer = scenario.writer(None).unwrap();
            let mapped = scenario.map(&mut writer, true).unwrap();
            // Remote writers write to the first mapping of the first process.
            let (pid, mapping) = *remote.get_or_insert((writer.pid(), mapped));
            writer.set_remote(pid, mapping).unwrap();
            scenario.map(&mut writer, true).unwrap();
            if let Some(source) = self.source {
                writer.writer(WriterCommand::Source(source.to_owned())).unwrap();
            }
            writers.push(writer);
        }
        if self.filled {
            writers[0].write_all(0, seed, 0..self.pages, threads).unwrap();
        }
        // A loop device over the file.
        let device = Device::over(&scenario, self.writers);
        if let Some(device) = &device {
            writers
                .iter_mut()
                .for_each(|writer| drop(writer.writer(WriterCommand::Device(device.path.clone())).unwrap()));
        }
        if self.closed {
            scenario.seal_writers().await.unwrap();
        }
        for consumer in 0..self.consumers {
            scenario.consumer(seed ^ consumer, self.mirror).await.unwrap().hurry(self.pause);
        }
        let mut lane = 0;
        for (writer, ways) in writers.iter_mut().zip(self.writers) {
            let (millis, pages) = (self.time.as_millis() as u64, self.pages);
            writer.start_run(Run::new(ways, millis, seed ^ lane as u64, 0..pages, lane)).unwrap();
            lane += ways.split(' ').count();
        }
        let writers = scenario.watch(writers, self.time + STOP_TIMEOUT).await.unwrap();
        let outcomes = scenario.finish().await.unwrap();
        drop((device, writers));
        self.judge(&outcomes);
        outcomes
    }

    fn judge(&self, outcomes: &[Outcome]) {
        judge(self.name, outcomes);
        let ways =
            self.writers.iter().flat_map(|ways| ways.split(' ')).map(|way| way.split('@').next().unwrap());
        for way in ways.map(|way| way.parse().unwrap()).filter(|way| *way != Method::PageOut) {
            assert!(
                outcomes[0].verdict.writes.contains_key(&way),
                "{}: nothing was written by {way}",
                self.name
            );
        }
    }
}

fn judge(name: &str, outcomes: &[Outcome]) {
    judge_but(name, outcomes, 0);
}

/// The same where so many writes may have been cut off between what they did and their record.
fn judge_but(name: &str, outcomes: &[Outcome], unrecorded: u64) {
    for Outcome { verdict, stale } in outcomes {
        // Printed for passing rounds too: the log of a soak lists what it tried.
        let stale = stale.as_ref().map_or(0, PageSet::count);
        eprintln!("{name}: {verdict}; {stale} pages of an incremental backup differ");
        assert_eq!((verdict.lost, verdict.unchecked, stale), (0, 0, 0), "{name}");
        assert!(verdict.wrong <= unrecorded, "{name}: pages are exact that were not written");
    }
}

/// A loop device over a file, if a writer needs one.
struct Device {
    path: PathBuf,
    _attached: CleanupGuard,
}

impl Device {
    fn over(scenario: &Scenario<'_>, writers: &[&str]) -> Option<Self> {
        if !writers.iter().any(|ways| ways.split(' ').any(|way| way == "device")) {
            return None;
        }
        let fd = scenario.descriptor().unwrap();
        let file = format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
        let path = PathBuf::from(output("losetup", &["--find", "--show", &file]).unwrap().trim());
        let attached = CleanupGuard::new(Cleanup::DetachLoop(path.clone())).unwrap();
        Some(Self { path, _attached: attached })
    }
}

/// A file on a disk, no two pages of which are alike.
fn source() -> (PathBuf, CleanupGuard) {
    let (folder, guard) = fdmap_tests::host::temp_dir("fdmap-source-").unwrap();
    let path = folder.join("source");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    for word in 0..(32_u64 << 20) / 8 {
        file.write_all(&mix(word).to_le_bytes()).unwrap();
    }
    file.into_inner().unwrap().sync_all().unwrap();
    (path, guard)
}

#[test(flavor = "multi_thread")]
async fn stores_of_two_processes_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        let outcomes = Workload {
            pages: 1 << 16,
            writers: &["store store", "store store@1"],
            time: Duration::from_secs(90),
            capacity: 2_600_000,
            mirror: false,
            ..Workload::of("stores")
        };
        let outcomes = outcomes.run(seed).await;
        let writes = outcomes[0].verdict.count();
        assert!(writes >= 10_000_000, "only {writes} were written in time");
    }
}

#[test(flavor = "multi_thread")]
async fn stores_under_swap_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    let _swap = require(Swap::make(1 << 30, SwapKind::Any));
    // Pages are pushed out by hand: in a small cgroup that is written to at full speed, the kernel now and then finds nothing
    // to swap out in time, and kills the writer.
    for seed in rounds() {
        let scenario = Workload {
            pages: 1 << 15,
            writers: &["store store page-out"],
            time: Duration::from_secs(8),
            filled: true,
            // MADV_PAGEOUT skips pages that another process maps.
            mirror: false,
            ..Workload::of("swapped")
        };
        let before = vmstat("pswpout").unwrap();
        scenario.run(seed).await;
        let swapped = vmstat("pswpout").unwrap() - before;
        assert!(swapped > 10_000, "only {swapped} pages were swapped out");
    }
}

#[test(flavor = "multi_thread")]
async fn stores_to_hugetlb_pages_are_not_lost() {
    let host = HostLock::acquire().unwrap();
    let _pages = require(hugetlb_2m(&host, 32));
    for seed in rounds() {
        let backing = Backing::Hugetlb(2 << 20);
        let writers: &[_] = &["store fork", "vm store"];
        Workload { backing, writers, ..Workload::of("hugetlb") }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn stores_to_transparent_huge_pages_are_not_lost() {
    let host = HostLock::acquire().unwrap();
    let _setting = require(shmem_thp(&host));
    for seed in rounds() {
        let writers: &[_] = &["store store", "store fork"];
        Workload { backing: Backing::ShmemThp, writers, ..Workload::of("thp") }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn stores_of_forked_children_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        Workload { writers: &["fork fork store"], ..Workload::of("forked") }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn stores_to_remapped_mappings_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        Workload { writers: &["remap@1 store", "remap@1"], ..Workload::of("remapped") }.run(seed).await;
        // Of new mappings there can be none once the file is closed.
        let open = Workload { closed: false, time: Duration::from_secs(2), ..Workload::of("remapped-open") };
        Workload { writers: &["remap store", "remap"], ..open }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn stores_to_vanishing_and_untracked_mappings_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        let open = Workload { closed: false, ..Workload::of("vanishing") };
        Workload { writers: &["vanish passing", "vanish store"], ..open }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn writes_through_descriptors_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        let writers: &[_] = &["pwrite write writev splice", "copy sendfile uring-write punch"];
        Workload { pages: 1 << 12, writers, closed: false, ..Workload::of("descriptors") }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn writes_by_loop_device_and_aio_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    require(fdmap_tests::host::root());
    for seed in rounds() {
        let open = Workload { pages: 1 << 12, closed: false, ..Workload::of("silent") };
        Workload { writers: &["device store", "aio-write store"], ..open }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn kernel_writes_into_mappings_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        let writers: &[_] = &["read uring-read store", "vm mem"];
        Workload { writers, ..Workload::of("kernel") }.run(seed).await;
        // No memory can be taken from a file that is closed.
        let open = Workload { closed: false, time: Duration::from_secs(2), ..Workload::of("removed") };
        Workload { writers: &["read remove"], ..open }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn direct_reads_in_flight_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    let (source, _source) = source();
    for seed in rounds() {
        let writers: &[_] = &["aio uring", "uring-fixed store@1"];
        Workload { writers, source: Some(&source), ..Workload::of("direct") }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn two_consumers_lose_no_writes() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        Workload { writers: &["store store"], consumers: 2, ..Workload::of("shared") }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn stores_racing_a_write_fault_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        let writers: &[_] = &["seldom seldom", "seldom"];
        let quick = Workload { writers, pause: 300, pages: 1 << 12, ..Workload::of("seldom") };
        let outcomes = quick.run(seed).await;
        let (all, unchanged, _) = outcomes[0].verdict.checkpoints;
        assert!(unchanged > 20, "only {unchanged} of {all} checkpoints found nothing");
    }
}

/// A writer that is at work.
fn at_work(scenario: &Scenario<'_>, seed: u64, lane: usize) -> TestAgent {
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    writer.start_run(Run::new("store", 60_000, seed, 0..scenario.pages(), lane)).unwrap();
    writer
}

#[test(flavor = "multi_thread")]
async fn stores_of_killed_processes_are_not_lost() {
    const KILLED: usize = 24;
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        let service = Service::start(&[]).unwrap();
        let log = Log::create(KILLED, 200_000).unwrap();
        let mut scenario = Scenario::new(&service, "killed", 1 << 13, Backing::Shmem, log).await.unwrap();
        scenario.consumer(seed, true).await.unwrap();
        let mut word = seed;
        let mut running: Vec<_> = (0..2).map(|lane| at_work(&scenario, seed, lane)).collect();
        for lane in 2..=KILLED {
            word = mix(word);
            for _ in 0..word % 6 {
                scenario.first().step(word >> 9 & 1 == 1).await.unwrap();
                tokio::time::sleep(Duration::from_micros(word >> 7 & 0x3fff)).await;
            }
            running.swap_remove((word >> 5 & 1) as usize).kill().unwrap();
            if lane < KILLED {
                running.push(at_work(&scenario, seed ^ lane as u64, lane));
            }
        }
        running.pop().unwrap().kill().unwrap();
        scenario.first().step(true).await.unwrap();
        // One of each that is killed.
        judge_but("killed", &scenario.finish().await.unwrap(), KILLED as u64 + 1);
    }
}
