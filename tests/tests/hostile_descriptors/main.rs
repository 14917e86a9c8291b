//! Descriptors that are slow to close: a FUSE file whose FLUSH is never answered, a TCP socket with SO_LINGER. Passing them to the
//! service delays no other user, and neither its end nor the start of the next one. Nor does a file whose inode is locked.

mod attacker;
mod inode_lock;
mod older_kernels;

use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use fdmap_client::error::RefusalCode;
use fdmap_client::{FdpassClient, Timeouts};
use fdmap_sys::pidfd;
use fdmap_tests::footprint::Footprint;
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root};
use fdmap_tests::incidents;
use fdmap_tests::service::{Service, copied, named, program};
use fdmap_tests::test;
use fdmap_tests::victim::{self, GROUP, MAX_DELAY, Victim};
use nix::sys::signal::Signal;

use attacker::Attacker;

fn main() -> ExitCode {
    victim::main().or_else(attacker::main).unwrap_or_else(fdmap_tests::harness::main)
}

const ATTACKER: u32 = 65534;
/// A call of `fdmap` on a loaded host. A call that is blocked takes until its timeout of 30 s.
const MAX_CALL: Duration = Duration::from_secs(5);
/// The service disconnects a client that does not read its replies in this time.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_STOP: Duration = Duration::from_secs(5);
/// Within this time nothing of an attack is left: idle helpers end after 10 s, and the kernel gives up a lingering socket.
const MAX_RELEASE: Duration = Duration::from_secs(60);

/// Connections that a user may have: fewer than some attacks open.
const MAX_SESSIONS: u32 = 64;

fn service_with(max_sessions: u32) -> Service {
    let max_sessions = max_sessions.to_string();
    Service::start(&["--group", &GROUP.to_string(), "--max-sessions-per-user", &max_sessions]).unwrap()
}

fn service() -> Service {
    service_with(MAX_SESSIONS)
}

/// A call of `fdmap` as a user.
fn call(service: &Service, user: u32, arguments: &[&str]) -> Child {
    let mut command = Command::new(copied(service.folder(), "fdmap").unwrap());
    command.arg("--runtime-dir").arg(service.folder()).args(arguments).uid(user).gid(GROUP);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Asserts that calls of a user succeed, and wait for nothing.
#[track_caller]
fn assert_served(service: &Service, user: u32, moment: &str) {
    static FILES: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let file = format!("file-{}", FILES.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    for arguments in [
        &["create", &file, "--size", "64K"][..],
        &["open", &file, "--write", "--", "true"],
        &["snapshot", &file],
        &["pages", &file],
        &["checkpoint", &file],
        &["rm", &file],
    ] {
        let started = Instant::now();
        let mut child = call(service, user, arguments);
        while child.try_wait().unwrap().is_none() && started.elapsed() < 2 * MAX_CALL {
            std::thread::sleep(Duration::from_millis(2));
        }
        let elapsed = started.elapsed();
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(elapsed <= MAX_CALL, "{moment}: {arguments:?} took {elapsed:?} {errors}");
        assert!(output.status.success(), "{moment}: {arguments:?}: {errors}");
    }
}

/// The next service on the same directory, which is stopped when its test ends.
struct Next(Child);

impl Next {
    #[track_caller]
    fn start(service: &Service) -> Self {
        let mut command = Command::new(program("fdmapd").unwrap());
        command.arg("--runtime-dir").arg(service.folder()).stderr(Stdio::null());
        let mut next = Self(command.spawn().unwrap());
        let started = Instant::now();
        while FdpassClient::connect(&service.endpoint(), Timeouts::default()).is_err() {
            let ended = next.0.try_wait().unwrap();
            assert!(ended.is_none(), "the next service does not start: {ended:?}");
            assert!(started.elapsed() < Duration::from_secs(20), "the next service does not answer");
            std::thread::sleep(Duration::from_millis(10));
        }
        next
    }
}

impl Drop for Next {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Asserts that the processes end.
#[track_caller]
fn assert_gone(pids: &[u32]) {
    let started = Instant::now();
    while let Some(left) = pids.iter().find(|pid| pidfd::owner(**pid).is_ok()) {
        assert!(started.elapsed() < Duration::from_secs(10), "process {left} is left");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs attacks one after the other on one service, and stops the service while they last.
fn withstands(attacks: &[&str]) {
    require(root());
    let mut service = service();
    let mut victim = Victim::start(&service).unwrap();
    victim.assert_served("before the attack");
    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    let created = call(&service, ATTACKER, &["create", "attacker", "--size", "64K"]).wait().unwrap();
    assert!(created.success());
    for attack in attacks {
        attacker.attack(attack).unwrap();
        victim.assert_served(attack);
        // What the attack blocked is given up by then, and a session of a client that does not read is ended.
        std::thread::sleep(if attack.starts_with("queue") {
            SEND_TIMEOUT + MAX_DELAY
        } else {
            2 * MAX_DELAY
        });
        victim.assert_served(attack);
    }
    let children = children_of(service.pid()).unwrap();
    service.signal(Signal::SIGTERM);
    assert!(service.ended(MAX_STOP), "{attacks:?}: SIGTERM does not end the service");
    let next = Next::start(&service);
    attacker.end().unwrap();
    assert_gone(&children);
    drop(next);
}

/// When the attacker has ended, the service holds what it held before, and serves the victim.
#[test]
fn nothing_is_left_of_blocking_descriptors() {
    require(root());
    let service = service();
    let mut victim = Victim::start(&service).unwrap();
    victim.assert_served("before the attack");
    let before = Footprint::of(&service).unwrap();
    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    for attack in [
        "adopt-fuse",
        "track-fuse",
        "queue-lingering",
        "queue-fuse",
        "adopt-lingering",
        "connect-lingering",
        "grpc-lingering",
    ] {
        attacker.attack(attack).unwrap();
        std::thread::sleep(2 * MAX_DELAY);
        victim.assert_served(attack);
    }
    attacker.end().unwrap();
    victim.assert_served("after the attack");
    Footprint::wait_for(&service, &before, MAX_RELEASE).unwrap();
    victim.assert_served("when nothing is left");
}

#[test]
fn fuse_file_that_is_adopted_blocks_its_user_only() {
    withstands(&["adopt-fuse"]);
}

#[test]
fn fuse_file_in_place_of_a_pagemap_blocks_its_user_only() {
    withstands(&["track-fuse"]);
}

#[test]
fn lingering_socket_that_is_adopted_blocks_its_user_only() {
    withstands(&["adopt-lingering"]);
}

#[test]
fn descriptors_in_the_queue_of_an_ended_session_block_no_other_user() {
    withstands(&["queue-lingering", "queue-fuse"]);
}

#[test]
fn descriptors_of_refused_connections_block_no_other_user() {
    withstands(&["connect-lingering"; 6]);
}

#[test]
fn descriptors_on_the_grpc_socket_block_no_other_user() {
    withstands(&["grpc-lingering"]);
}

#[test]
fn attacks_in_sequence_block_no_other_user() {
    withstands(&["adopt-fuse", "adopt-fuse", "track-fuse", "adopt-lingering", "grpc-lingering"]);
}

/// Nothing that the kernel closes for a killed service can block it.
#[test]
fn service_that_is_killed_during_an_attack_is_replaced() {
    require(root());
    let mut service = service();
    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    for attack in ["adopt-fuse", "connect-lingering", "grpc-lingering"] {
        attacker.attack(attack).unwrap();
    }
    let children = children_of(service.pid()).unwrap();
    service.signal(Signal::SIGKILL);
    assert!(service.ended(MAX_STOP), "SIGKILL does not end the service");
    let next = Next::start(&service);
    attacker.end().unwrap();
    assert_gone(&children);
    drop(next);
}

/// An open of a file with a lease waits for its holder, by default 45 s.
#[test]
fn file_with_a_lease_is_refused_at_once() {
    let service = service();
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(4096).unwrap();
    fdmap_sys::process::ignore_signals(&[Signal::SIGIO]).unwrap();
    fdmap_sys::testing::calls::lease(file.as_fd()).unwrap();
    let started = Instant::now();
    let refused = service.fdpass().unwrap().adopt(file.as_fd(), "leased", None).unwrap_err();
    assert_eq!(refused.refusal(), Some(RefusalCode::FailedPrecondition));
    assert!(started.elapsed() <= MAX_DELAY, "{:?}", started.elapsed());
}

/// A call of the attacker's user that needs a session on the fdpass socket, and finds no file.
fn is_served(service: &Service) -> bool {
    let mut child = call(service, ATTACKER, &["open", "none", "--", "true"]);
    child.wait().unwrap().code() == Some(3)
}

#[test]
fn user_with_blocked_receivers_is_refused_until_the_attack_ends() {
    require(root());
    // Not the number of connections refuses the user.
    let service = service_with(4 * MAX_SESSIONS);
    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    assert!(is_served(&service));
    // Each attack blocks one receiver.
    for _ in 0..4 {
        attacker.attack("adopt-fuse").unwrap();
        std::thread::sleep(2 * MAX_DELAY);
    }
    assert!(!is_served(&service), "the user has four blocked receivers");
    assert_served(&service, victim::USER, "while the user is refused");
    assert!(service.log().contains("4 receivers"), "{}", service.log());
    assert_eq!(incidents::count(&service, "receiver-replaced"), 4);
    attacker.end().unwrap();
    let started = Instant::now();
    while !is_served(&service) {
        assert!(started.elapsed() < Duration::from_secs(10), "the user is still refused");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_served(&service, ATTACKER, "after the attack");
}

/// A receiver blocked by one session's descriptor still serves the others that it has.
#[test]
fn earlier_sessions_of_the_same_user_continue() {
    require(root());
    let service = service();
    let mut session = service.fdpass().unwrap();
    let mut attacker = Attacker::start(&service, 0).unwrap();
    attacker.attack("adopt-fuse").unwrap();
    session.memfd_create("earlier", "earlier", 0).unwrap();
    std::thread::sleep(2 * MAX_DELAY);
    session.open(&named("earlier"), true).unwrap();
    service.fdpass().unwrap().open(&named("earlier"), true).unwrap();
}

#[test]
fn receiver_is_named_and_ends_when_it_is_idle() {
    let service = service();
    let session = service.fdpass().unwrap();
    let receivers = || {
        let mut children = children_of(service.pid()).unwrap();
        children
            .retain(|pid| read(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm == "fdmapd-receiver\n"));
        children
    };
    let [receiver] = receivers()[..] else { panic!("{:?}", receivers()) };
    let user = nix::unistd::getuid();
    assert_eq!(
        read(format!("/proc/{receiver}/cmdline")).unwrap(),
        format!("fdmapd\0fdpass-receiver\0{user}\0{}\0", service.pid())
    );
    let locks = read("/proc/locks").unwrap();
    assert!(!locks.contains(&format!(" {receiver} ")), "{locks}");
    drop(session);
    let started = Instant::now();
    while !receivers().is_empty() {
        assert!(started.elapsed() < Duration::from_secs(30), "the idle receiver does not end");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(service.fdpass().is_ok(), "the next session starts another one");
}

/// Whatever ends a receiver, its sessions end and the next ones are served.
#[test]
fn killed_receiver_is_replaced() {
    let service = service();
    let mut session = service.fdpass().unwrap();
    for pid in children_of(service.pid()).unwrap() {
        // Fails if the process has just ended.
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
    }
    assert!(
        session.open(&named("none"), false).is_err_and(|error| error.refusal().is_none()),
        "the session ended"
    );
    // A connection may still reach the receiver that is ending.
    let is_served = || {
        let session = FdpassClient::connect(&service.endpoint(), Timeouts::default());
        let opened = session.and_then(|mut session| session.open(&named("none"), false));
        opened.is_err_and(|error| error.refusal() == Some(RefusalCode::NotFound))
    };
    let started = Instant::now();
    while !is_served() {
        assert!(started.elapsed() < Duration::from_secs(20), "no other receiver replaces it");
        std::thread::sleep(Duration::from_millis(50));
    }
    incidents::assert_reported(&service, "receiver-ended", "a receiver of descriptors ended");
}
