//! The service and its clients are killed at random moments. The FD store keeps the descriptors, and a new process of the
//! service continues: no write is lost, and files, cursors and page states are as before.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::{ChangedBatch, ChangesOptions, CreateFile};
use fdmap_client::proto::units::Generation;
use fdmap_client::proto::{Access, Backing, CoveragePolicy, FileInfo, PageState};
use fdmap_client::{Client, ClientError};
use fdmap_sys::{fd, memfd};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, SERVICE_START_TIMEOUT, root};
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::scenario::{Outcome, Scenario};
use fdmap_tests::pattern::{Pattern, mix};
use fdmap_tests::probe_pair::pages_of;
use fdmap_tests::service::{Service, named};
use fdmap_tests::swap::{Swap, SwapKind};
use fdmap_tests::test;
use fdmap_tests::test_agent::{Run, TestAgent};
use fdmap_tests::{HarnessError, HarnessResult};
use tokio::task::JoinHandle;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 1 << 12;
const PAGE: u64 = 4096;

fn assert_no_lost_writes(name: &str, outcomes: &[Outcome]) {
    for Outcome { verdict, stale } in outcomes {
        eprintln!("{name}: {verdict}");
        assert_eq!((verdict.lost, verdict.unchecked), (0, 0), "{name}: {verdict}");
        assert_eq!(verdict.wrong, 0, "{name}: {verdict}");
        assert_eq!(
            stale.as_ref().map(|stale| stale.count()),
            Some(0),
            "{name}: the mirror differs: {stale:?}"
        );
    }
}

/// Calls `write` with new seeds while `busy` is true. Returns the writer.
fn keep_writing(
    mut writer: TestAgent,
    busy: &Arc<AtomicBool>,
    mut word: u64,
    write: impl Fn(&mut TestAgent, u64) -> HarnessResult<()> + Send + 'static,
) -> JoinHandle<TestAgent> {
    let busy = Arc::clone(busy);
    tokio::task::spawn_blocking(move || {
        while busy.load(Ordering::Acquire) {
            word = mix(word);
            match write(&mut writer, word) {
                // Some methods need a descriptor from the service, which may be down.
                Err(HarnessError::Agent(message)) if message.contains("fdmapd") => {}
                other => other.unwrap(),
            }
            std::thread::sleep(Duration::from_micros(word >> 20 & 0x7fff));
        }
        writer
    })
}

/// Kills and restarts the service `kills` times. Returns the mean duration of a kill and of a restart.
fn kill_often(service: &Service, kills: u32, mut word: u64) -> (Duration, Duration) {
    let (mut killing, mut starting) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..kills {
        word = mix(word);
        std::thread::sleep(Duration::from_micros(word & 0xffff));
        let began = Instant::now();
        service.kill().unwrap();
        killing += began.elapsed();
        if word >> 30 & 3 == 0 {
            std::thread::sleep(Duration::from_micros(word >> 32 & 0x3fff));
        }
        let began = Instant::now();
        service.restart().unwrap();
        starting += began.elapsed();
    }
    (killing / kills, starting / kills)
}

/// Clears the fields that writes change.
fn without_allocation(info: FileInfo) -> FileInfo {
    FileInfo { allocated_bytes: 0, ..info }
}

async fn tracked(client: &Client, name: &str) -> BTreeSet<u64> {
    client.coverage(&named(name)).await.unwrap().mappings.iter().map(|mapping| mapping.id.get()).collect()
}

#[test(flavor = "multi_thread")]
async fn no_write_is_lost_over_200_service_kills() {
    const KILLS: u32 = 200;
    let service = Arc::new(Service::start_with_fd_store(&[]).unwrap());
    let busy = Arc::new(AtomicBool::new(true));
    let mut scenarios = Vec::new();
    let mut writing = Vec::new();
    for (name, seed) in [("open", 1), ("closed", 2)] {
        let log = Log::create(6, 4_000_000).unwrap();
        let mut scenario = Scenario::new(&service, name, PAGES, Backing::Shmem, log).await.unwrap();
        scenario.consumer(seed, true).await.unwrap();
        scenario.first().survive_restarts();
        for nth in 0..2 {
            let mut writer = scenario.writer(None).unwrap();
            scenario.map(&mut writer, true).unwrap();
            if nth == 0 {
                // Punching a hole into a hole is not a write.
                writer.write_all(0, seed, 0..PAGES, 5).unwrap();
            }
            writing.push(keep_writing(writer, &busy, seed << 8 | nth as u64, move |writer, word| {
                let pattern = Pattern { seed: word, percent: 1 + word % 4 };
                writer.write_pattern(0, pattern, 0..PAGES, nth)
            }));
        }
        if name == "open" {
            let mut writer = scenario.writer(None).unwrap();
            scenario.map(&mut writer, true).unwrap();
            writing.push(keep_writing(writer, &busy, 77, |writer, word| {
                let writers = ["pwrite punch", "writev", "fork"][(word % 3) as usize];
                writer.run(Run::new(writers, 1, word, 0..PAGES, 2))
            }));
        } else {
            service.client().await.unwrap().seal_writers(&named(name)).await.unwrap();
        }
        scenarios.push(scenario);
    }
    let client = service.client().await.unwrap();
    let before =
        (client.list().await.unwrap(), tracked(&client, "open").await, tracked(&client, "closed").await);
    assert_eq!((before.1.len(), before.2.len()), (3, 2));

    let mut closed = scenarios.pop().unwrap();
    let mut open = scenarios.pop().unwrap();
    let watched = Arc::new(AtomicBool::new(true));
    let killed = Arc::clone(&service);
    let workload = async {
        let took = tokio::task::spawn_blocking(move || kill_often(&killed, KILLS, 5)).await.unwrap();
        busy.store(false, Ordering::Release);
        let mut writers = Vec::new();
        for writer in writing {
            writers.push(writer.await.unwrap());
        }
        watched.store(false, Ordering::Release);
        (took, writers)
    };
    let ((took, writers), one, other) =
        tokio::join!(workload, open.watch_while(&watched), closed.watch_while(&watched));
    one.unwrap();
    other.unwrap();

    let client = service.client().await.unwrap();
    let after =
        (client.list().await.unwrap(), tracked(&client, "open").await, tracked(&client, "closed").await);
    let all_without_allocation =
        |files: Vec<FileInfo>| files.into_iter().map(without_allocation).collect::<Vec<_>>();
    assert_eq!(
        (all_without_allocation(after.0), after.1, after.2),
        (all_without_allocation(before.0), before.1, before.2)
    );
    let retried = open.first().retried() + closed.first().retried();
    eprintln!("mean time of a kill and of a restart: {took:?}; {retried} requests were retried");
    assert!(retried > u64::from(KILLS) / 4, "most kills interrupted no request");
    writers.into_iter().for_each(|writer| writer.finish().unwrap());
    assert_no_lost_writes("open", &open.finish().await.unwrap());
    assert_no_lost_writes("closed", &closed.finish().await.unwrap());
}

/// Kills the service between the harvest of written bits and the stamping of their pages. Many runs of pages make
/// that interval long enough.
#[test(flavor = "multi_thread")]
async fn no_write_is_lost_when_killed_within_checkpoints() {
    const ROUNDS: u64 = 60;
    const PAGES: u64 = 1 << 15;
    let service = Arc::new(Service::start_with_fd_store(&[]).unwrap());
    let log = Log::create(1, 2_400_000).unwrap();
    let mut scenario = Scenario::new(&service, "within", PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    service.client().await.unwrap().seal_writers(&named("within")).await.unwrap();
    scenario.consumer(6, false).await.unwrap();
    scenario.first().survive_restarts();
    let mut interrupted = 0;
    for round in 0..ROUNDS {
        let word = mix(round);
        writer.write_pattern(0, Pattern { seed: word, percent: 20 }, 0..PAGES, 0).unwrap();
        let killed = Arc::clone(&service);
        let killing = tokio::task::spawn_blocking(move || {
            std::thread::sleep(Duration::from_micros(word % 6000));
            killed.kill().unwrap();
            killed.restart().unwrap();
        });
        let reported = scenario.first().step(true).await.unwrap();
        interrupted += u64::from(reported.conservative.count() > 0);
        killing.await.unwrap();
    }
    scenario.first().step(true).await.unwrap();
    for Outcome { verdict, .. } in scenario.finish().await.unwrap() {
        eprintln!("within: {interrupted} of {ROUNDS} checkpoints were interrupted, {verdict}");
        assert_eq!((verdict.lost, verdict.unchecked, verdict.wrong), (0, 0, 0), "{verdict}");
    }
    assert!(interrupted > 0, "no kill interrupted a checkpoint");
}

/// Starts a writer with a tracked mapping. Retries while the service is down.
fn start_writer(log: &Log, service: &Service, name: &str, seed: u64, lane: usize) -> TestAgent {
    let mut writer = TestAgent::start(None).unwrap();
    writer.use_log(log).unwrap();
    let began = Instant::now();
    while let Err(error) = writer.map(service, name, true) {
        assert!(began.elapsed() < SERVICE_START_TIMEOUT, "{error}");
    }
    writer.start_run(Run::new("store", 60_000, seed, 0..PAGES, lane)).unwrap();
    writer
}

#[test(flavor = "multi_thread")]
async fn no_write_is_lost_when_service_and_clients_are_killed() {
    const CLIENTS: usize = 40;
    let service = Arc::new(Service::start_with_fd_store(&[]).unwrap());
    let log = Log::create(CLIENTS, 600_000).unwrap();
    let writers_log = Log::open(log.path().as_ref()).unwrap();
    let mut scenario = Scenario::new(&service, "both", PAGES, Backing::Shmem, log).await.unwrap();
    scenario.consumer(3, true).await.unwrap();
    scenario.first().survive_restarts();
    let (busy, watched) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(true)));
    let (watched_flag, writers_busy, writers_service) =
        (Arc::clone(&watched), Arc::clone(&busy), Arc::clone(&service));
    let working = tokio::task::spawn_blocking(move || {
        let mut word = 11;
        let mut running: Vec<_> =
            (0..3).map(|lane| start_writer(&writers_log, &writers_service, "both", 1, lane)).collect();
        for lane in 3..CLIENTS + 3 {
            word = mix(word);
            std::thread::sleep(Duration::from_micros(word & 0x3fff));
            running.swap_remove((word >> 20) as usize % running.len()).kill().unwrap();
            if lane < CLIENTS {
                running.push(start_writer(&writers_log, &writers_service, "both", word, lane));
            }
        }
        writers_busy.store(false, Ordering::Release);
    });
    let killed = Arc::clone(&service);
    let killing = tokio::task::spawn_blocking(move || {
        let mut word = 13;
        while busy.load(Ordering::Acquire) {
            word = mix(word);
            kill_often(&killed, 1, word);
            // The pause is sometimes long enough for a client to be tracked.
            std::thread::sleep(Duration::from_micros(word >> 8 & 0x1_ffff));
        }
    });
    let working = async {
        working.await.unwrap();
        killing.await.unwrap();
        watched_flag.store(false, Ordering::Release);
    };
    let ((), seen) = tokio::join!(working, scenario.watch_while(&watched));
    seen.unwrap();
    let client = service.client().await.unwrap();
    assert!(tracked(&client, "both").await.is_empty(), "mappings of killed clients are still tracked");
    assert_no_lost_writes("both", &scenario.finish().await.unwrap());
}

async fn create(client: &Client, name: &str) -> FileInfo {
    let file = CreateFile { name: name.to_owned(), size_bytes: PAGES * PAGE, ..CreateFile::default() };
    client.create(file).await.unwrap()
}

/// The changed pages of a cursor's frozen set, or after a generation.
async fn changed(
    client: &Client,
    name: &str,
    since: Generation,
    cursor: Option<&str>,
) -> Result<Vec<u64>, ClientError> {
    let cursor = cursor.map(str::to_owned);
    let mut changes =
        client.changes(&named(name), ChangesOptions { since, cursor, ..Default::default() }).await?;
    let mut pages = Vec::new();
    while let Some(ChangedBatch::Runs(runs)) = changes.next().await? {
        pages.extend(runs.iter().flat_map(|run| run.run.range.start().0..run.run.range.end().0));
    }
    Ok(pages)
}

#[test(flavor = "multi_thread")]
async fn cursors_and_settings_survive_and_frozen_sets_do_not() {
    let service = Service::start_with_fd_store(&[]).unwrap();
    let client = service.client().await.unwrap();
    create(&client, "ram").await;
    client.set_access(&named("ram"), Access::from_mode(12, 34, 0o640)).await.unwrap();
    let name = "12/ram";
    let ram = named(name);
    client.set_coverage_policy(&ram, CoveragePolicy::Refuse).await.unwrap();
    let mut mapped = service.fdpass().unwrap().map(&ram, true).unwrap();
    mapped.track().unwrap();
    let ids = tracked(&client, name).await;
    assert_eq!(ids.len(), 1);
    client.create_cursor(&ram, "backup", Generation::NONE).await.unwrap();
    assert!(mapped.write_at(7 * PAGE, b"x") && mapped.write_at(9 * PAGE, b"x"));
    let begun = client.begin_cursor(&ram, "backup", true).await.unwrap();
    assert_eq!(changed(&client, name, Generation::NONE, Some("backup")).await.unwrap(), [7, 9]);
    let before = client.get(&ram).await.unwrap();
    assert!(mapped.write_at(11 * PAGE, b"x"));

    service.kill().unwrap();
    assert!(mapped.write_at(13 * PAGE, b"x"), "mappings stay writable without the service");
    service.restart().unwrap();
    let client = service.client().await.unwrap();
    assert_eq!(without_allocation(client.get(&ram).await.unwrap()), without_allocation(before));
    assert_eq!(tracked(&client, name).await, ids);
    assert_eq!(client.coverage(&ram).await.unwrap().policy, CoveragePolicy::Refuse);
    let cursors = client.cursors(&ram).await.unwrap();
    assert_eq!(cursors.len(), 1);
    assert_eq!((cursors[0].generation, cursors[0].until_generation), (Generation::NONE, None));
    let lost = changed(&client, name, Generation::NONE, Some("backup")).await.unwrap_err();
    assert_eq!(lost.refusal(), Some(RefusalCode::FailedPrecondition), "{lost}");
    let late =
        client.commit_cursor(&ram, "backup", begun.cursor.until_generation.unwrap()).await.unwrap_err();
    assert_eq!(late.refusal(), Some(RefusalCode::FailedPrecondition), "the cursor has not begun: {late}");

    let again = client.begin_cursor(&ram, "backup", false).await.unwrap();
    assert!(again.cursor.until_generation > begun.cursor.until_generation);
    assert_eq!(changed(&client, name, Generation::NONE, Some("backup")).await.unwrap(), [7, 9, 11, 13]);
    let until_generation = again.cursor.until_generation.unwrap();
    assert!(!again.coverage.exact, "the service was down: {:?}", again.coverage);
    client.commit_cursor(&ram, "backup", until_generation).await.unwrap();
    service.kill().unwrap();
    service.restart().unwrap();
    let client = service.client().await.unwrap();
    let cursors = client.cursors(&ram).await.unwrap();
    assert_eq!((cursors[0].generation, cursors[0].until_generation), (until_generation, None));
    // After a restart, the coverage of the generations before it is unknown.
    let options = ChangesOptions::default();
    assert!(!client.changes(&ram, options).await.unwrap().header().coverage.exact);

    mapped.untrack().unwrap();
    client.delete(&ram).await.unwrap();
    service.fd_store().settle().unwrap();
    assert!(service.fd_store().names().is_empty(), "{:?}", service.fd_store().names());
}

#[test(flavor = "multi_thread")]
async fn page_states_survive_a_restart() {
    let _host = HostLock::acquire().unwrap();
    require(root());
    let _swap = require(Swap::make(128 << 20, SwapKind::Any));
    let service = Service::start_with_fd_store(&[]).unwrap();
    create(&service.client().await.unwrap(), "swapped").await;
    let cgroup = Cgroup::with_limit(PAGES * PAGE / 2).unwrap();
    let mut agent = TestAgent::start(Some(&cgroup)).unwrap();
    agent.open(&service, "swapped").unwrap();
    let pattern = Pattern { seed: 4, percent: 80 };
    agent.fill(pattern, 0, PAGES).unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (before, _) = pages_of(&service.client().await.unwrap(), "swapped").await.unwrap();
    assert!(before.iter().filter(|(state, _)| state.is_swapped()).count() > 500);
    for _ in 0..3 {
        service.kill().unwrap();
        service.restart().unwrap();
        let (after, provenance) = pages_of(&service.client().await.unwrap(), "swapped").await.unwrap();
        assert!(provenance.exact());
        // No process touches the pages, and nothing else needs memory in that cgroup.
        assert!(after == before, "states or slots have changed");
    }
    assert_eq!(
        before.iter().filter(|(state, _)| *state != PageState::Hole).count() as u64,
        pattern.count(PAGES)
    );
    assert_eq!(agent.wrong_pages(pattern, 0, PAGES).unwrap(), 0);
}

fn sealed(bytes: &[u8], seals: u32) -> OwnedFd {
    let memfd = memfd::create("damaged", None).unwrap();
    fd::write_at(memfd.as_fd(), 0, bytes).unwrap();
    memfd::add_seals(memfd.as_fd(), seals).unwrap();
    memfd
}

#[test(flavor = "multi_thread")]
async fn damaged_journal_costs_its_own_file_only() {
    let service = Service::start_with_fd_store(&[]).unwrap();
    let client = service.client().await.unwrap();
    let intact = create(&client, "intact").await;
    let mapped = service.fdpass().unwrap().map(&named("intact"), true).unwrap();
    assert!(mapped.write_at(5 * PAGE, b"x"));
    let made = client.checkpoint(&named("intact"), true, None).await.unwrap();
    let mut bad = Vec::new();
    for name in ["garbage", "empty", "cut", "shrinkable", "another's", "no-memfd", "missing", "no-file"] {
        bad.push(create(&client, name).await);
    }
    service.kill().unwrap();
    let fd_store = service.fd_store();
    let journal = |info: &FileInfo| format!("fdmap.{}.journal", info.id);
    let intact_journal = fd_store.replace(&journal(&intact), Some(sealed(b"", 0))).unwrap();
    let mut head = vec![0; 1 << 16];
    let read = fd::read_at(intact_journal.as_fd(), 0, &mut head).unwrap();
    for info in &bad {
        let damaged = match info.name.as_str() {
            "garbage" => Some(sealed(
                &(0..1_u64 << 21).map(|at| mix(at) as u8).collect::<Vec<_>>(),
                memfd::SEAL_SHRINK,
            )),
            "empty" => Some(sealed(b"", memfd::SEAL_SHRINK)),
            "cut" => Some(sealed(&head[..read], memfd::SEAL_SHRINK)),
            "shrinkable" => Some(sealed(&head[..read], 0)),
            "another's" => Some(intact_journal.try_clone().unwrap()),
            "no-memfd" => Some(std::fs::File::open("/dev/null").unwrap().into()),
            _ => None,
        };
        if info.name == "no-file" {
            fd_store.replace(&format!("fdmap.{}.file", info.id), None).unwrap();
        } else {
            fd_store.replace(&journal(info), damaged).unwrap();
        }
    }
    fd_store.replace(&journal(&intact), Some(intact_journal)).unwrap();
    for name in ["nonsense", "fdmap", "fdmap.0000000000000007.uffd.0000000000000001", "fdmap.7.file"] {
        fd_store.put(name, sealed(b"x", 0));
    }
    service.restart().unwrap();

    let log = service.log();
    for info in &bad {
        let id = info.id.to_string();
        let line =
            log.lines().find(|line| line.contains(&id) && line.contains("cannot recover a stored file"));
        let line = line.unwrap_or_else(|| panic!("the log does not name {}: {log}", info.name));
        assert!(line.contains("ERROR"), "{line}");
        eprintln!("{}: {line}", info.name);
    }
    assert!(log.contains("nonsense"), "unknown descriptors are logged: {log}");
    let client = service.client().await.unwrap();
    let files = client.list().await.unwrap();
    assert_eq!(files.iter().map(|file| file.id).collect::<Vec<_>>(), [intact.id]);
    assert!(mapped.write_at(6 * PAGE, b"x"));
    client.checkpoint(&named("intact"), true, None).await.unwrap();
    let pages = changed(&client, "intact", made.generation, None).await.unwrap();
    assert!(pages.contains(&6), "{pages:?}");
    create(&client, "garbage").await;
}

#[test(flavor = "multi_thread")]
async fn lost_mapping_stays_conservative_over_two_restarts() {
    let service = Service::start_with_fd_store(&[]).unwrap();
    let client = service.client().await.unwrap();
    create(&client, "ram").await;
    let ram = named("ram");
    let mut mapped = service.fdpass().unwrap().map(&ram, true).unwrap();
    mapped.track().unwrap();
    // A new page would change the size that the file occupies, which is reported too.
    assert!(mapped.write_at(7 * PAGE, b"before"));
    client.seal_writers(&ram).await.unwrap();
    client.checkpoint(&ram, false, None).await.unwrap();
    let since = client.checkpoint(&ram, false, None).await.unwrap().generation;

    assert!(mapped.write_at(7 * PAGE, b"x"));
    service.kill().unwrap();
    let names = service.fd_store().names();
    let userfaultfd = names.iter().find(|name| name.contains(".uffd.")).expect("the mapping is stored");
    drop(service.fd_store().replace(userfaultfd, None).unwrap());
    drop(mapped);
    service.restart().unwrap();
    service.kill().unwrap();
    service.restart().unwrap();
    let client = service.client().await.unwrap();
    let checkpoint = client.checkpoint(&ram, false, None).await.unwrap();
    assert!(!checkpoint.coverage.exact, "{:?}", checkpoint.coverage);
    let pages = changed(&client, "ram", since, None).await.unwrap();
    assert!(pages.contains(&7), "{pages:?}");
}
