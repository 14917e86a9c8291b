//! Attacks by a process of an ordinary user that once delayed, starved or deceived other users: the calls of a victim are answered
//! in time during the attack and after it, nothing is left, and the service ends and starts again meanwhile.

mod abandoned_memory;
mod adopted_by_root;
mod attacker;
mod checkpoints;
mod ended_helpers;
mod held_locks;
mod invalid_requests;
mod page_queries;
mod pid_namespaces;
mod refused_connections;
mod reused_pid;
mod shared_file;
mod stopped_holders;
mod subordinate_users;
mod unclosed_userfaultfds;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use fdmap_client::proto::GapKind;
use fdmap_tests::attack::{
    MAX_RELEASE, USER as ATTACKER, assert_withstands, assert_withstands_without_descriptors, service,
    service_without_a_store,
};
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root};
use fdmap_tests::reported::create_file;
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::victim;

use attacker::Attacker;

fn main() -> ExitCode {
    victim::main().or_else(attacker::main).unwrap_or_else(fdmap_tests::harness::main)
}

/// Time in which a process that reads fork events is found.
const COMPANION_TIMEOUT: Duration = Duration::from_secs(5);

/// Track requests of a user at a time, by default.
const MAX_TRACKED: u64 = 1024;

/// Runs `fdmap` as a user, which succeeds.
#[track_caller]
fn run(service: &Service, user: u32, arguments: &[&str]) {
    let output = fdmap_as(service, user).unwrap().args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
}

/// An attack by a process of the attacker on a service with these arguments.
fn withstands(arguments: &[&str], attack: impl Fn(&mut Attacker)) {
    require(root());
    assert_withstands(&mut service(arguments), |service| {
        let mut attacker = Attacker::start(service, ATTACKER).unwrap();
        attack(&mut attacker);
        attacker
    });
}

/// The flag belongs to the open file description, which the client has as well: a read(2) by the service could last for ever. Only a
/// service without a descriptor store reads fork events.
#[test]
fn userfaultfd_that_its_client_makes_blocking_blocks_no_fork_of_others() {
    require(root());
    assert_withstands(&mut service_without_a_store(), |service| {
        let mut attacker = Attacker::start(service, ATTACKER).unwrap();
        assert!(attacker.attack("blocking-userfaultfds", 0).unwrap() > 0);
        assert!(reads_forks_of(service, ATTACKER), "no process reads the fork events of the attacker");
        attacker
    });
}

/// True if the service has a process that reads the fork events of a user. Its arguments are empty for a moment: the service goes on when
/// execve(2) has replaced the address space, and the kernel sets them afterwards.
fn reads_forks_of(service: &Service, user: u32) -> bool {
    let arguments = |pid: u32| read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let is_companion = |text: &str| text.contains("forks") && text.contains(&user.to_string());
    let is_found =
        || children_of(service.pid()).unwrap().into_iter().any(|pid| is_companion(&arguments(pid)));
    let began = Instant::now();
    while !is_found() {
        if began.elapsed() >= COMPANION_TIMEOUT {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

#[test]
fn flood_of_track_requests_takes_a_bounded_number_of_descriptors() {
    withstands(&[], |attacker| {
        assert_eq!(attacker.attack("tracks", MAX_TRACKED + 3000).unwrap(), MAX_TRACKED);
    });
}

/// A queue of 16384 events, the kernel's limit, would overflow, and all files would lose events.
#[test(flavor = "multi_thread")]
async fn flood_of_events_changes_no_answer_about_files_of_others() {
    const THREADS: u64 = 600;
    const PAGES: u64 = 4;
    require(root());
    let service = service(&[]);
    let client = service.client().await.unwrap();
    create_file(&client, "ram", PAGES * 4096).await.unwrap();
    let ram = named("ram");
    let mut mapped = service.fdpass().unwrap().map(&ram, true).unwrap();
    mapped.track().unwrap();
    let began = Instant::now();
    while !client.checkpoint(&ram, true, None).await.unwrap().coverage.exact {
        assert!(began.elapsed() < MAX_RELEASE, "coverage does not become exact");
    }
    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    let written = attacker.attack("events", THREADS).unwrap();
    assert!(written > 2 * 16_384, "{written} events");
    let made = client.checkpoint(&ram, true, None).await.unwrap();
    let lost = made.coverage.gaps.iter().find(|gap| gap.kind == GapKind::LostEvents);
    assert!(lost.is_none(), "{:?}", made.coverage);
    attacker.kill().unwrap();
}

/// Connections that cannot be accepted stay in the queue of the socket, which stays readable. Meanwhile no user is served: each call
/// begins with a connection.
#[test]
fn service_without_free_descriptors_pauses_and_logs_little() {
    require(root());
    assert_withstands_without_descriptors(&mut service(&[]), "Too many open files", |service| {
        let mut attacker = Attacker::start(service, ATTACKER).unwrap();
        // It waits for answers that do not come.
        attacker.begin("sessions", 128).unwrap();
        attacker
    });
}
