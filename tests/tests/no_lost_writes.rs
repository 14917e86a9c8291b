//! No write is lost, by whatever method it was made: see `fdmap_tests::no_lost_writes`. With `FDMAP_SOAK_SECONDS` the
//! tests repeat for that time, with new seeds in each round.

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
            // The first round uses the same seed every time; the other rounds of a soak use new seeds.
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
    /// For each writing process, the methods of its threads.
    writers: &'a [&'a str],
    /// Duration of the writes.
    time: Duration,
    /// Number of records in the lane of each thread. A thread ends when its lane is full.
    capacity: usize,
    /// Write each page before the other writers start.
    filled: bool,
    /// Seal the file against new writers. Coverage is then exact, and no page is reported only because a write is
    /// possible.
    writer_sealed: bool,
    /// Maximum pause between two checkpoints in microseconds.
    pause: u64,
    consumers: u64,
    mirror: bool,
    /// The file that direct I/O reads.
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
            writer_sealed: true,
            pause: 20_000,
            consumers: 1,
            mirror: true,
            source: None,
        }
    }

    /// Runs the workload on a new service, and checks the outcomes.
    async fn run(&self, seed: u64) -> Vec<Outcome> {
        let service = Service::start(&[]).unwrap();
        let threads = self.writers.iter().map(|methods| methods.split(' ').count()).sum::<usize>();
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
        let device = Device::attach(&scenario, self.writers);
        if let Some(device) = &device {
            writers
                .iter_mut()
                .for_each(|writer| drop(writer.writer(WriterCommand::Device(device.path.clone())).unwrap()));
        }
        if self.writer_sealed {
            scenario.seal_writers().await.unwrap();
        }
        for consumer in 0..self.consumers {
            scenario.consumer(seed ^ consumer, self.mirror).await.unwrap().set_max_pause(self.pause);
        }
        let mut lane = 0;
        for (writer, methods) in writers.iter_mut().zip(self.writers) {
            let (millis, pages) = (self.time.as_millis() as u64, self.pages);
            writer.start_run(Run::new(methods, millis, seed ^ lane as u64, 0..pages, lane)).unwrap();
            lane += methods.split(' ').count();
        }
        let writers = scenario.watch(writers, self.time + STOP_TIMEOUT).await.unwrap();
        let outcomes = scenario.finish().await.unwrap();
        drop((device, writers));
        self.assert_no_lost_writes(&outcomes);
        outcomes
    }

    fn assert_no_lost_writes(&self, outcomes: &[Outcome]) {
        assert_no_lost_writes(self.name, outcomes);
        let methods = self
            .writers
            .iter()
            .flat_map(|methods| methods.split(' '))
            .map(|method| method.split('@').next().unwrap());
        for method in
            methods.map(|method| method.parse().unwrap()).filter(|method| *method != Method::PageOut)
        {
            assert!(
                outcomes[0].verdict.writes.contains_key(&method),
                "{}: {method} wrote nothing",
                self.name
            );
        }
    }
}

fn assert_no_lost_writes(name: &str, outcomes: &[Outcome]) {
    assert_no_lost_writes_except(name, outcomes, 0);
}

/// The same for killed writers, of which up to `unrecorded` writes may be missing in the log.
fn assert_no_lost_writes_except(name: &str, outcomes: &[Outcome], unrecorded: u64) {
    for Outcome { verdict, stale } in outcomes {
        // Passing rounds are printed too, so that the log of a soak lists all rounds.
        let stale = stale.as_ref().map_or(0, PageSet::count);
        eprintln!("{name}: {verdict}; {stale} pages of an incremental backup differ");
        assert_eq!((verdict.lost, verdict.unchecked, stale), (0, 0, 0), "{name}");
        assert!(verdict.wrong <= unrecorded, "{name}: pages that were not written are reported as exact");
    }
}

/// A loop device over a file, if a writer needs one.
struct Device {
    path: PathBuf,
    _attached: CleanupGuard,
}

impl Device {
    fn attach(scenario: &Scenario<'_>, writers: &[&str]) -> Option<Self> {
        if !writers.iter().any(|methods| methods.split(' ').any(|method| method == "device")) {
            return None;
        }
        let fd = scenario.descriptor().unwrap();
        let file = format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
        let path = PathBuf::from(output("losetup", &["--find", "--show", &file]).unwrap().trim());
        let attached = CleanupGuard::new(Cleanup::DetachLoop(path.clone())).unwrap();
        Some(Self { path, _attached: attached })
    }
}

/// A file on a disk whose pages all differ.
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
    // The test pages out explicitly. In a small cgroup that is written to at full speed, the kernel sometimes finds
    // nothing to swap out in time, and kills the writer.
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
        // A writer-sealed file allows no new writable mappings.
        let open =
            Workload { writer_sealed: false, time: Duration::from_secs(2), ..Workload::of("remapped-open") };
        Workload { writers: &["remap store", "remap"], ..open }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn stores_to_vanishing_and_untracked_mappings_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        let open = Workload { writer_sealed: false, ..Workload::of("vanishing") };
        Workload { writers: &["vanish passing", "vanish store"], ..open }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn writes_through_descriptors_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        let writers: &[_] = &["pwrite write writev splice", "copy sendfile uring-write punch"];
        Workload { pages: 1 << 12, writers, writer_sealed: false, ..Workload::of("descriptors") }
            .run(seed)
            .await;
    }
}

#[test(flavor = "multi_thread")]
async fn writes_by_loop_device_and_aio_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    require(fdmap_tests::host::root());
    for seed in rounds() {
        let open = Workload { pages: 1 << 12, writer_sealed: false, ..Workload::of("unnotified") };
        Workload { writers: &["device store", "aio-write store"], ..open }.run(seed).await;
    }
}

#[test(flavor = "multi_thread")]
async fn kernel_writes_into_mappings_are_not_lost() {
    let _host = HostLock::acquire().unwrap();
    for seed in rounds() {
        let writers: &[_] = &["read uring-read store", "vm mem"];
        Workload { writers, ..Workload::of("kernel") }.run(seed).await;
        // A writer-sealed file does not allow MADV_REMOVE.
        let open = Workload { writer_sealed: false, time: Duration::from_secs(2), ..Workload::of("removed") };
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
        assert!(unchanged > 20, "only {unchanged} of {all} checkpoints were unchanged");
    }
}

/// Starts a process that stores to the file.
fn start_writer(scenario: &Scenario<'_>, seed: u64, lane: usize) -> TestAgent {
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
        let mut running: Vec<_> = (0..2).map(|lane| start_writer(&scenario, seed, lane)).collect();
        for lane in 2..=KILLED {
            word = mix(word);
            for _ in 0..word % 6 {
                scenario.first().step(word >> 9 & 1 == 1).await.unwrap();
                tokio::time::sleep(Duration::from_micros(word >> 7 & 0x3fff)).await;
            }
            running.swap_remove((word >> 5 & 1) as usize).kill().unwrap();
            if lane < KILLED {
                running.push(start_writer(&scenario, seed ^ lane as u64, lane));
            }
        }
        running.pop().unwrap().kill().unwrap();
        scenario.first().step(true).await.unwrap();
        // Each killed process may have one unrecorded write.
        assert_no_lost_writes_except("killed", &scenario.finish().await.unwrap(), KILLED as u64 + 1);
    }
}
