//! Checkpoints and scans of one user, many at once, and checkpoints that hold their threads: they take no thread of others.

use std::os::fd::AsFd as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

use fdmap_client::Client;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::file::{Access, Rights};
use fdmap_sys::memfd;
use fdmap_tests::attack::{assert_withstands, await_effect, service};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::incidents;
use fdmap_tests::mapper::{LockHolder, path_of};
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;

use super::attacker::{Attacker, READABLE};
use super::{ATTACKER, run};

/// Threads for the calls of one user, by default.
const MAX_THREADS_PER_USER: u64 = 16;
/// Other threads that may start meanwhile: for a call of the victim, four for ends of its files, the sweep.
const MAX_OTHERS: u64 = 7;
/// Files with a process that holds its lock: more than the user and the others may have threads.
const HELD: u64 = 40;
/// Files whose checkpoints occupy the only thread of a user for 4 s: 500 ms each.
const HELD_ONE_BY_ONE: u64 = 8;
/// Less than the 500 ms that a call may wait for a process.
const HOLD: Duration = Duration::from_millis(300);

/// The number of threads of a service.
fn threads(service: &Service) -> u64 {
    std::fs::read_dir(format!("/proc/{}/task", service.pid())).unwrap().count() as u64
}

/// The largest number of threads of the service while calls hold theirs.
fn most_threads(service: &Service) -> u64 {
    let (began, mut most) = (Instant::now(), 0);
    while began.elapsed() < HOLD {
        most = most.max(threads(service));
        std::thread::sleep(Duration::from_millis(5));
    }
    most
}

/// Processes that hold their locks, each of which the attacker tracks for a file of its own.
fn tracked_holders(service: &Service, count: u64) -> Vec<LockHolder> {
    let program = require(LockHolder::compile());
    let start = |number: u64| {
        let file = memfd::create(&format!("held-{number}"), None).unwrap();
        memfd::resize(file.as_fd(), 8192).unwrap();
        let mut holder = LockHolder::prepare_by(&program, &path_of(&file), ATTACKER).unwrap();
        run(service, ATTACKER, &["adopt", "--pid", &holder.pid.to_string(), "--track"]);
        holder.hold().unwrap();
        holder
    };
    (0..count).map(start).collect()
}

/// Each checkpoint waits for 500 ms with its thread.
#[test]
fn checkpoints_of_processes_that_hold_their_locks_take_no_thread_of_others() {
    require(root());
    assert_withstands(&mut service(&[]), |service| {
        let holders = tracked_holders(service, HELD);
        let mut attacker = Attacker::start(service, ATTACKER).unwrap();
        let before = threads(service);
        let late = || incidents::count(service, "holder-late");
        let late_before = late();
        attacker.begin("held-checkpoints", HELD).unwrap();
        let mut most = most_threads(service);
        await_effect(service, "calls are late", || {
            most = most.max(most_threads(service));
            late() >= late_before + MAX_THREADS_PER_USER
        });
        assert_eq!(attacker.accepted().unwrap(), HELD);
        let max = before + MAX_THREADS_PER_USER + MAX_OTHERS;
        assert!(most > before && most <= max, "{before} threads before, and {most} during the attack");
        (attacker, holders)
    });
}

#[test]
fn flood_of_checkpoints_takes_no_thread_of_others() {
    require(root());
    assert_withstands(&mut service(&[]), |service| {
        let mut attacker = Attacker::start(service, ATTACKER).unwrap();
        assert!(attacker.attack("checkpoints", 0).unwrap() > 0);
        attacker
    });
}

/// Calls of a reader that wait at a time.
const WAITING: u64 = 512;

/// A client of root, and a file of root that others have only the right to inspect.
pub async fn readable_file(service: &Service, size_bytes: u64) -> Client {
    let client = service.client().await.unwrap();
    let access = Some(Access { other: Rights::INSPECT, ..Access::private(0, 0) });
    let (_, name) = READABLE.split_once('/').unwrap();
    let file = CreateFile { name: name.to_owned(), size_bytes, access, ..CreateFile::default() };
    client.create(file).await.unwrap();
    client
}

/// A user who keeps calls about the readable file waiting. Also returns a client of root.
async fn busy_reader(service: &Service) -> (Client, Attacker) {
    let client = readable_file(service, 1 << 20).await;
    let mut reader = Attacker::start(service, ATTACKER).unwrap();
    let effect = "calls wait";
    await_effect(service, effect, || reader.attack("coverage", WAITING).unwrap() > 2 * WAITING);
    (client, reader)
}

/// The users whose calls wait for a file are served in turn.
#[test]
async fn calls_of_a_reader_delay_those_of_the_owner_by_few() {
    require(root());
    let service = service(&[]);
    let (client, mut reader) = busy_reader(&service).await;
    let mut answered = || reader.attack("coverage", WAITING).unwrap();
    let mut between = Vec::new();
    for _ in 0..9 {
        let before = answered();
        client.checkpoint(&named(READABLE), true, None).await.unwrap();
        between.push(answered() - before);
    }
    between.sort_unstable();
    assert!(between[4] > 0, "no call was answered beside a checkpoint: {between:?}");
    // In the order of the requests, it would wait for all that wait.
    assert!(between[4] < WAITING / 2, "the checkpoints waited for {between:?} calls");
}

/// A call that waits for its turn needs the right when its turn comes.
#[test]
async fn calls_that_wait_fail_when_their_right_is_revoked() {
    require(root());
    let service = service(&[]);
    let (client, mut reader) = busy_reader(&service).await;
    client.set_access(&named(READABLE), Access::private(0, 0)).await.unwrap();
    let answered = reader.attack("coverage", WAITING).unwrap();
    // This call comes after those of the reader that wait: each in its turn.
    for _ in 0..WAITING {
        client.coverage(&named(READABLE)).await.unwrap();
    }
    let more = reader.attack("coverage", WAITING).unwrap() - answered;
    assert!(more < WAITING / 4, "{more} calls were answered after the change");
}

/// A call that waits for a thread needs the right when it has one.
#[test]
async fn scan_that_waits_for_a_thread_fails_when_its_right_is_revoked() {
    const SEND_TIME: Duration = Duration::from_millis(500);
    require(root());
    let service = service(&["--max-threads-per-user", "1"]);
    let client = readable_file(&service, 1 << 20).await;
    let _holders = tracked_holders(&service, HELD_ONE_BY_ONE);
    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    attacker.begin("held-checkpoints", HELD_ONE_BY_ONE).unwrap();
    await_effect(&service, "a checkpoint has the thread", || incidents::count(&service, "holder-late") > 0);
    let mut scan = fdmap_as(&service, ATTACKER).unwrap();
    scan.args(["pages", READABLE]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let scan = scan.spawn().unwrap();
    std::thread::sleep(SEND_TIME);
    client.set_access(&named(READABLE), Access::private(0, 0)).await.unwrap();
    let output = scan.wait_with_output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("not found"), "{error}");
    assert_eq!(attacker.accepted().unwrap(), HELD_ONE_BY_ONE);
}
