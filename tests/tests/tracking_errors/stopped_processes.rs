//! Clients that unmap during a checkpoint, stopped clients, and a stopped service.

use std::time::{Duration, Instant};

use fdmap_client::proto::Backing;
use fdmap_client::proto::units::Generation;
use fdmap_tests::HarnessResult;
use fdmap_tests::host::{children_of, read};
use fdmap_tests::incidents;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::scenario::Scenario;
use fdmap_tests::pattern::Pattern;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::test_agent::command::{Command, WriterCommand};
use fdmap_tests::test_agent::{MappingEnd, Run, TestAgent};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fixture::{assert_service_works, changed, service};

const PAGES: u64 = 1 << 12;
/// The longest time that a stopped process may delay a call: far more than any call takes on a loaded host.
const BOUND: Duration = Duration::from_secs(10);

fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid as i32), signal).unwrap();
}

async fn start_scenario<'a>(service: &'a Service, name: &str, lanes: usize) -> (Scenario<'a>, TestAgent) {
    let log = Log::create(lanes, 1 << 18).unwrap();
    let mut scenario = Scenario::new(service, name, PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    scenario.consumer(1, true).await.unwrap();
    (scenario, writer)
}

/// Asserts that every write of the scenario is reported in its generation.
async fn assert_sound(mut scenario: Scenario<'_>, what: &str) {
    scenario.first().step(true).await.unwrap();
    for outcome in scenario.finish().await.unwrap() {
        eprintln!("{what}: {}", outcome.verdict);
        assert_eq!((outcome.verdict.lost, outcome.verdict.unchecked), (0, 0), "{what}: {}", outcome.verdict);
        assert_eq!(outcome.stale.unwrap_or_default().count(), 0, "{what}: the mirror differs");
    }
}

#[test(flavor = "multi_thread")]
async fn client_that_unmaps_during_checkpoints_loses_no_write() {
    let service = Service::start(&[]).unwrap();
    let (mut scenario, mut writer) = start_scenario(&service, "vanishing", 3).await;
    writer.start_run(Run::new("vanish vanish store", 2000, 5, 0..PAGES, 0)).unwrap();
    let (began, mut checkpoints) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_millis(1900) {
        let called = Instant::now();
        scenario.first().step(checkpoints % 2 == 0).await.unwrap();
        assert!(called.elapsed() < BOUND, "a checkpoint took {:?}", called.elapsed());
        checkpoints += 1;
    }
    assert!(checkpoints > 5, "only {checkpoints} checkpoints");
    writer.reply().unwrap();
    assert_sound(scenario, "vanishing").await;
    drop(writer);
}

#[test(flavor = "multi_thread")]
async fn writes_before_exec_are_reported() {
    let (service, client) = service().await;
    let mut agent = TestAgent::start(None).unwrap();
    agent.map(&service, "ram", true).unwrap();
    let before = client.checkpoint(&named("ram"), true, None).await.unwrap();
    assert_eq!(before.coverage.tracked_mappings, 1);
    let log = Log::create(1, 100).unwrap();
    agent.use_log(&log).unwrap();
    agent.write_all(0, 1, 8..16, 0).unwrap();
    agent.call(&Command::Exec).unwrap();
    let after = client.checkpoint(&named("ram"), false, None).await.unwrap();
    let reported = changed(&client, "ram", before.generation).await;
    assert!((8..16).all(|page| reported.contains(&page)), "{reported:?}");
    let pid = agent.pid();
    let gap = after.coverage.gaps.iter().find(|gap| gap.pid == Some(pid));
    assert!(gap.is_some_and(|gap| gap.detail.contains("ended")), "{:?}", after.coverage);
    assert_eq!(client.coverage(&named("ram")).await.unwrap().mappings, []);
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn stopped_client_does_not_delay_checkpoints() {
    let service = Service::start(&[]).unwrap();
    let (mut scenario, mut writer) = start_scenario(&service, "still", 4).await;
    writer.start_run(Run::new("store fork pwrite remap", 1500, 5, 0..PAGES, 0)).unwrap();
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(7)).await;
        signal(writer.pid(), Signal::SIGSTOP);
        for exact in [true, false, true] {
            let called = Instant::now();
            scenario.first().step(exact).await.unwrap();
            assert!(called.elapsed() < BOUND, "a checkpoint took {:?}", called.elapsed());
        }
        signal(writer.pid(), Signal::SIGCONT);
    }
    writer.reply().unwrap();
    assert_sound(scenario, "still").await;
    drop(writer);
}

/// Runs an action of a client, and asserts that it takes at most [`BOUND`].
fn within_bound(what: &str, action: impl FnOnce() -> HarnessResult<()>) {
    let began = Instant::now();
    action().unwrap();
    assert!(began.elapsed() < BOUND, "{what} took {:?}", began.elapsed());
}

/// The companion process of the service, which reads fork events.
fn companion(service: &Service) -> u32 {
    let companions = companions(service);
    assert_eq!(companions.len(), 1, "the service has one companion");
    companions[0]
}

fn companions(service: &Service) -> Vec<u32> {
    let is_companion = |pid: &u32| {
        read(format!("/proc/{pid}/cmdline")).is_ok_and(|arguments| arguments.contains("forks-companion"))
    };
    let mut children = children_of(service.pid()).unwrap();
    children.retain(is_companion);
    children
}

#[test(flavor = "multi_thread")]
async fn stopped_service_does_not_delay_clients() {
    const METHODS: &str = "fork store pwrite punch remove";
    let service = Service::start(&[]).unwrap();
    let (mut scenario, mut writer) = start_scenario(&service, "held", 6).await;
    // Punching a hole into a hole is not a write.
    writer.write_all(0, 3, 0..PAGES, 5).unwrap();
    let mut second = scenario.writer(None).unwrap();
    scenario.map(&mut second, true).unwrap();
    scenario.map(&mut second, true).unwrap();
    // Write-protects all pages again.
    scenario.first().step(true).await.unwrap();
    writer.start_run(Run::new(METHODS, 3000, 7, 0..PAGES, 0)).unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    service.stop();
    let counts = || (0..5).map(|lane| scenario.log().writes(lane).len()).collect::<Vec<_>>();
    let began = Instant::now();
    let mut before = counts();
    while began.elapsed() < Duration::from_millis(1500) {
        let since = Instant::now();
        let mut after = counts();
        // A thread whose lane is full has ended.
        while after.iter().zip(&before).any(|(after, before)| after == before && *after < 200_000) {
            assert!(since.elapsed() < BOUND, "of {METHODS}, some make no progress: {before:?}, {after:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
            after = counts();
        }
        before = after;
    }
    within_bound("page out", || second.writer(WriterCommand::PageOut(0)).map(drop));
    within_bound("munmap", || second.end_mapping(0, MappingEnd::Unmap));
    within_bound("mremap", || second.end_mapping(1, MappingEnd::Move));
    within_bound("stores", || second.write_pattern(1, Pattern { seed: 9, percent: 50 }, 0..PAGES, 5));
    writer.reply().unwrap();
    service.signal(Signal::SIGCONT);
    for _ in 0..3 {
        scenario.first().step(false).await.unwrap();
    }
    assert_sound(scenario, "held").await;
    drop((writer, second));
}

#[test(flavor = "multi_thread")]
async fn killed_companion_is_replaced() {
    let service = Service::start(&[]).unwrap();
    let (mut scenario, mut writer) = start_scenario(&service, "companion", 2).await;
    for seed in 0..5 {
        let before = companion(&service);
        signal(before, Signal::SIGKILL);
        within_bound("forks", || writer.run(Run::new("fork", 20, seed, 0..PAGES, 0)));
        within_bound("stores", || writer.run(Run::new("store", 5, seed, 0..PAGES, 0)));
        scenario.first().step(seed % 2 == 0).await.unwrap();
        assert_ne!(companion(&service), before);
    }
    assert_eq!(incidents::count(&service, "companion-ended"), 5);
    incidents::assert_reported(&service, "companion-ended", "the process that reads fork events ended");
    // The companion is killed repeatedly while processes fork.
    writer.start_run(Run::new("fork store", 1500, 9, 0..PAGES, 0)).unwrap();
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(1400) {
        if let Some(one) = companions(&service).first() {
            // It may have been replaced just now.
            let _ = kill(Pid::from_raw(*one as i32), Signal::SIGKILL);
        }
        tokio::time::sleep(Duration::from_millis(150)).await;
        scenario.first().step(false).await.unwrap();
    }
    writer.reply().unwrap();
    let made = scenario.first().since();
    assert!(made > Generation::NONE);
    assert_sound(scenario, "companion").await;
    drop(writer);
}
