//! Descriptors that are slow to close: a FUSE file whose FLUSH is never answered, a TCP socket with SO_LINGER. Passing them to the
//! service delays no other user, and neither its end nor the start of the next one. Nor does a file whose inode is locked.

mod attacker;
mod inode_lock;
mod older_kernels;

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use fdmap_client::error::RefusalCode;
use fdmap_client::{FdpassClient, Timeouts};
use fdmap_tests::attack::{
    self, USER as ATTACKER, assert_gone, assert_restarts_after, assert_withstands, await_effect,
};
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root};
use fdmap_tests::incidents;
use fdmap_tests::service::{Service, copied, named};
use fdmap_tests::test;
use fdmap_tests::victim::{self, GROUP, MAX_DELAY};
use nix::sys::signal::Signal;

use attacker::Attacker;

fn main() -> ExitCode {
    victim::main().or_else(attacker::main).unwrap_or_else(fdmap_tests::harness::main)
}

/// Connections that a user may have: fewer than some attacks open.
const MAX_SESSIONS: usize = 64;

/// A service whose unused files stay, restarted with the same arguments.
fn service() -> Service {
    let (group, max_sessions) = (GROUP.to_string(), MAX_SESSIONS.to_string());
    Service::start_with_fd_store(&["--group", &group, "--max-sessions-per-user", &max_sessions]).unwrap()
}

/// A call of `fdmap` as a user.
fn call(service: &Service, user: u32, arguments: &[&str]) -> Child {
    let mut command = Command::new(copied(service.folder(), "fdmap").unwrap());
    command.arg("--runtime-dir").arg(service.folder()).args(arguments).uid(user).gid(GROUP);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A service with so many connections per user withstands an attack.
fn withstands<A>(max_sessions: usize, attack: impl FnMut(&Service) -> A) {
    require(root());
    let max_sessions = max_sessions.to_string();
    assert_withstands(&mut attack::service(&["--max-sessions-per-user", &max_sessions]), attack);
}

/// The same with descriptors that block a receiver.
fn withstands_blocked_receiver(attack: &str) {
    withstands(MAX_SESSIONS, |service| {
        let mut attacker = Attacker::start(service, ATTACKER).unwrap();
        block_receivers(service, &mut attacker, attack);
        attacker
    });
}

/// Time after which an attack without an effect is made again.
const REPEAT_INTERVAL: Duration = Duration::from_secs(5);

/// Makes an attack, and waits until a further receiver is blocked.
fn block_receivers(service: &Service, attacker: &mut Attacker, attack: &str) {
    block_further(service, attacker, attack, incidents::count(service, "receiver-replaced"));
}

/// The same, where `before` receivers had been replaced.
fn block_further(service: &Service, attacker: &mut Attacker, attack: &str, before: u64) {
    attacker.begin(attack).unwrap();
    let mut began = Instant::now();
    await_effect(service, attack, || {
        // Its sessions may all have met a receiver that an earlier attack blocked. One that tracks a file has a name for one only.
        if began.elapsed() >= REPEAT_INTERVAL && attack != "track-fuse" {
            attacker.begin(attack).unwrap();
            began = Instant::now();
        }
        incidents::count(service, "receiver-replaced") > before
    });
}

#[test]
fn fuse_file_that_is_adopted_blocks_its_user_only() {
    withstands_blocked_receiver("adopt-fuse");
}

#[test]
fn fuse_file_in_place_of_a_pagemap_blocks_its_user_only() {
    withstands_blocked_receiver("track-fuse");
}

#[test]
fn lingering_socket_that_is_adopted_blocks_its_user_only() {
    withstands_blocked_receiver("adopt-lingering");
}

/// The service ends these sessions after 10 s. A FUSE file in a queue blocks nothing: only close(2) sends FLUSH.
#[test]
fn descriptors_in_the_queue_of_an_ended_session_block_no_other_user() {
    withstands_blocked_receiver("queue-lingering");
}

#[test]
fn descriptors_of_refused_connections_block_no_other_user() {
    withstands(MAX_SESSIONS, attacker::connect_too_often);
}

#[test]
fn descriptors_on_the_grpc_socket_block_no_other_user() {
    withstands(MAX_SESSIONS, attacker::pass_on_grpc_socket);
}

/// Nothing that the kernel closes for a killed service can block it.
#[test]
fn service_that_is_killed_during_an_attack_is_replaced() {
    require(root());
    let mut service = service();
    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    block_receivers(&service, &mut attacker, "adopt-fuse");
    let attackers =
        [attacker, attacker::pass_on_grpc_socket(&service), attacker::connect_too_often(&service)];
    let children = children_of(service.pid()).unwrap();
    assert_restarts_after(&mut service, Signal::SIGKILL);
    drop(attackers);
    assert_gone(&children);
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
    const ATTACKS: [&str; 4] = ["adopt-fuse", "adopt-lingering", "adopt-fuse", "track-fuse"];
    // Not the number of connections refuses the user.
    withstands(8 * MAX_SESSIONS, |service| {
        assert!(is_served(service), "the user has no blocked receiver");
        let replaced = || incidents::count(service, "receiver-replaced");
        let (before, logged) = (replaced(), service.log().len());
        let mut attackers = Vec::new();
        for attack in ATTACKS {
            // The sessions of one attack block two receivers if the first one was replaced meanwhile.
            let seen = replaced();
            if seen < before + 4 {
                let mut attacker = Attacker::start(service, ATTACKER).unwrap();
                block_further(service, &mut attacker, attack, seen);
                attackers.push(attacker);
            }
        }
        assert!(!is_served(service), "the user has four blocked receivers");
        // The log arrives by a pipe.
        await_effect(service, "the refusal is logged", || service.log()[logged..].contains("4 receivers"));
        assert_eq!(replaced(), before + 4);
        attackers
    });
}

/// A session keeps its receiver, which is blocked for a moment only.
#[test]
fn user_whose_receivers_are_blocked_in_turn_has_a_bounded_number_of_them() {
    const ROUNDS: usize = 10;
    const MAX_RECEIVERS: usize = 4;
    withstands(MAX_SESSIONS, |service| {
        let mut attacker = Attacker::start(service, ATTACKER).unwrap();
        for _ in 0..ROUNDS {
            block_receivers(service, &mut attacker, "adopt-briefly-lingering");
            let receivers = receivers_of(service, ATTACKER);
            assert!(receivers.len() <= MAX_RECEIVERS, "{receivers:?}");
        }
        assert!(receivers_of(service, ATTACKER).len() > 1, "no session keeps a receiver that was replaced");
        let began = Instant::now();
        while !is_served(service) {
            assert!(began.elapsed() < Duration::from_secs(10), "the receivers are blocked for a moment only");
        }
        attacker
    });
}

/// The receivers of a user.
fn receivers_of(service: &Service, user: u32) -> Vec<u32> {
    let arguments = format!("fdmapd\0fdpass-receiver\0{user}\0");
    let mut children = children_of(service.pid()).unwrap();
    children
        .retain(|pid| read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(&arguments)));
    children
}

/// A receiver blocked by one session's descriptor still serves the others that it has.
#[test]
fn earlier_sessions_of_the_same_user_continue() {
    require(root());
    let service = service();
    let mut session = service.fdpass().unwrap();
    let mut attacker = Attacker::start(&service, 0).unwrap();
    block_receivers(&service, &mut attacker, "adopt-fuse");
    session.memfd_create("earlier", "earlier", 0).unwrap();
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

/// Until it executes its program, a new process has the descriptors of the thread that starts it. The last close of one can block.
#[test]
fn processes_start_without_descriptors_of_clients() {
    let service = service();
    let mut session = service.fdpass().unwrap();
    session.memfd_create("file", "file", 0).unwrap();
    let is_file = |target: &Path| target.starts_with("/memfd:file (deleted)");
    let folder = PathBuf::from(format!("/proc/{}", service.pid()));
    assert!(targets_in(&folder).values().any(|target| is_file(target)), "the service has the file");
    let tasks = std::fs::read_dir(folder.join("task")).unwrap().map(|task| task.unwrap().path());
    let is_starter = |task: &PathBuf| read(task.join("comm")).is_ok_and(|name| name == "starter\n");
    let starters: Vec<_> = tasks.filter(is_starter).collect();
    assert!(!starters.is_empty());
    for starter in starters {
        let further = || targets_in(&starter).split_off(&3).into_values().collect::<Vec<_>>();
        let is_socket =
            |targets: &[PathBuf]| matches!(targets, [one] if one.to_string_lossy().starts_with("socket:"));
        let started = Instant::now();
        // It has more for a moment when a process starts.
        while !is_socket(&further()) {
            assert!(started.elapsed() < Duration::from_secs(10), "{:?}", further());
        }
        let status = read(starter.join("status")).unwrap();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
        let is_blocked =
            |signal: Signal| u64::from_str_radix(blocked, 16).unwrap() >> (signal as i32 - 1) & 1 == 1;
        assert!([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().all(is_blocked), "{blocked}");
    }
}

/// The targets of descriptors by their numbers.
fn targets_in(folder: &Path) -> BTreeMap<u32, PathBuf> {
    let descriptors = std::fs::read_dir(folder.join("fd")).unwrap().flatten();
    let targets = descriptors.flat_map(|fd| {
        let target = std::fs::read_link(fd.path()).ok()?;
        Some((fd.file_name().to_str()?.parse().ok()?, target))
    });
    targets.collect()
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
