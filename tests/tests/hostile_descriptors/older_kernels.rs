//! Where the kernel passes descriptors on any unix socket (before Linux 6.16), the service receives and closes none: neither those that
//! arrive on the gRPC socket, nor those in the queue of a connection that it refuses, that it ends with, or that it never accepted.
//!
//! The descriptors are userfaultfds of a process that holds its own mmap_lock: the last close of one waits, uninterruptibly, until that process
//! releases it.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root};
use fdmap_tests::incidents;
use fdmap_tests::mapper::LockHolder;
use fdmap_tests::programs::Compiled;
use fdmap_tests::raw::read_to_close;
use fdmap_tests::service::{Service, program};
use fdmap_tests::test;
use fdmap_tests::victim::{GROUP, MAX_DELAY, Victim};
use nix::sys::signal::Signal;
use tempfile::NamedTempFile;

use super::attacker::{Attacker, SESSIONS};
use super::{ATTACKER, MAX_SESSIONS, MAX_STOP, Next, assert_gone, call, is_served};

/// In one attack.
const USERFAULTFDS: u32 = 16;

/// A service that runs as on an older kernel.
fn service() -> Service {
    require(root());
    let launcher = require(Compiled::new("without_passrights"));
    let mut command = Command::new(launcher.path());
    command.arg(program("fdmapd").unwrap()).args(["--group", &GROUP.to_string()]);
    command.args(["--max-sessions-per-user", &MAX_SESSIONS.to_string()]);
    let service = Service::start_command(command).unwrap();
    assert!(service.log().contains("refuse-descriptors"), "{}", service.log());
    service
}

/// A process that holds its mmap_lock, with userfaultfds.
struct Holder {
    process: LockHolder,
    sockets: [(&'static str, PathBuf); 2],
    /// A file that it maps.
    _file: NamedTempFile,
}

impl Holder {
    fn start(service: &Service, userfaultfds: u32) -> Self {
        let file = NamedTempFile::new_in("/dev/shm").unwrap();
        file.as_file().set_len(2 * 4096).unwrap();
        std::os::unix::fs::chown(file.path(), Some(ATTACKER), Some(GROUP)).unwrap();
        let mut process = require(LockHolder::prepare_as(file.path(), ATTACKER));
        process.create_userfaultfds(userfaultfds).unwrap();
        process.hold().unwrap();
        let endpoint = service.endpoint();
        let sockets = [("stream", endpoint.socket), ("seqpacket", endpoint.fdpass)];
        Self { process, sockets, _file: file }
    }
}

/// Asserts that the service ends, and that the next one starts while the attack lasts. Ends the attack.
#[track_caller]
fn assert_ends(mut service: Service, signal: Signal, attack: impl FnOnce()) {
    let children = children_of(service.pid()).unwrap();
    service.signal(signal);
    assert!(service.ended(MAX_STOP), "{signal} does not end the service");
    let next = Next::start(&service);
    attack();
    assert_gone(&children);
    drop(next);
}

#[test]
fn descriptors_on_the_grpc_socket_are_not_received() {
    let service = service();
    let mut victim = Victim::start(&service).unwrap();
    let mut holder = Holder::start(&service, USERFAULTFDS);
    let [(kind, path), _] = holder.sockets.clone();
    holder.process.connect(kind, &path).unwrap();
    holder.process.pass().unwrap();
    for moment in ["after the attack", "after the end of its connections"] {
        victim.assert_served(moment);
        std::thread::sleep(2 * MAX_DELAY);
    }
    assert_ends(service, Signal::SIGTERM, || drop(holder));
}

/// More connections than the user may have. They wait in the queue of the listening socket, which takes 128, until all descriptors are
/// sent.
#[test]
fn descriptors_of_refused_connections_are_not_closed_by_the_service() {
    const CONNECTIONS: u32 = MAX_SESSIONS + 40;
    for at in 0..2 {
        let service = service();
        let mut victim = Victim::start(&service).unwrap();
        let mut holder = Holder::start(&service, CONNECTIONS);
        let (kind, path) = holder.sockets[at].clone();
        service.stop();
        holder.process.connect_and_pass(kind, &path).unwrap();
        service.signal(Signal::SIGCONT);
        for _ in 0..2 {
            victim.assert_served(kind);
            std::thread::sleep(2 * MAX_DELAY);
        }
        assert!(service.log().contains("refusing"), "{}", service.log());
        assert_ends(service, Signal::SIGTERM, || drop(holder));
    }
}

/// Descriptors that the service has not read when it is killed.
#[test]
fn killed_service_closes_no_descriptors_in_queues() {
    for at in 0..2 {
        let service = service();
        let mut holder = Holder::start(&service, USERFAULTFDS);
        let (kind, path) = holder.sockets[at].clone();
        holder.process.connect(kind, &path).unwrap();
        // Until a receiver of the user has the connections.
        std::thread::sleep(MAX_DELAY);
        service.stop();
        holder.process.pass().unwrap();
        assert_ends(service, Signal::SIGKILL, || drop(holder));
    }
}

#[test]
fn killed_service_closes_no_descriptors_of_connections_that_it_never_accepted() {
    for at in 0..2 {
        let service = service();
        let mut holder = Holder::start(&service, USERFAULTFDS);
        let (kind, path) = holder.sockets[at].clone();
        service.stop();
        holder.process.connect_and_pass(kind, &path).unwrap();
        assert_ends(service, Signal::SIGKILL, || drop(holder));
    }
}

#[test]
fn lingering_sockets_block_no_other_user_on_an_older_kernel() {
    let service = service();
    let mut victim = Victim::start(&service).unwrap();
    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    for attack in ["grpc-lingering", "connect-lingering", "connect-lingering", "adopt-fuse"] {
        attacker.attack(attack).unwrap();
        victim.assert_served(attack);
        std::thread::sleep(2 * MAX_DELAY);
        victim.assert_served(attack);
    }
    assert_ends(service, Signal::SIGTERM, || attacker.end().unwrap());
}

/// The processes that close refused connections.
fn refusers(service: &Service) -> Vec<u32> {
    let mut children = children_of(service.pid()).unwrap();
    let arguments = |pid: &u32| read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    children.retain(|pid| arguments(pid).starts_with("fdmapd\0fdpass-receiver\0refused\0"));
    children
}

/// A refuser that cannot close a descriptor gets a bounded number of connections, and then another one gets the next.
#[test]
fn blocked_refuser_is_replaced_when_it_has_many_connections() {
    const FLOOD_TIMEOUT: Duration = Duration::from_secs(60);
    let service = service();
    let mut victim = Victim::start(&service).unwrap();
    let mut attacker = Attacker::start(&service, ATTACKER).unwrap();
    for _ in 0..MAX_SESSIONS as usize / SESSIONS {
        attacker.attack_and_wait("greet").unwrap();
    }
    // Each connection is refused, with the descriptor in its queue.
    service.stop();
    attacker.attack_and_wait("connect-lingering").unwrap();
    service.signal(Signal::SIGCONT);
    attacker.attack("connect-flood").unwrap();
    let started = Instant::now();
    while refusers(&service).len() < 2 {
        victim.assert_served("during the flood");
        assert!(started.elapsed() < FLOOD_TIMEOUT, "{}", service.log());
    }
    let reason = "a process has many refused connections to close: another one gets the next";
    incidents::assert_reported(&service, "refuser-full", reason);
    victim.assert_served("after the flood");
    assert_ends(service, Signal::SIGTERM, || attacker.end().unwrap());
}

#[test]
fn refuser_that_ends_is_replaced() {
    let service = service();
    let first = refusers(&service)[0];
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(first.cast_signed()), Signal::SIGKILL).unwrap();
    let started = Instant::now();
    while refusers(&service).iter().all(|pid| *pid == first) {
        assert!(started.elapsed() < MAX_STOP, "no other refuser");
        std::thread::sleep(MAX_DELAY / 20);
    }
    assert!(is_served(&service));
    // Connections whose clients pass nothing are served as on any kernel.
    let created = call(&service, ATTACKER, &["create", "file", "--size", "64K"]).wait().unwrap();
    assert!(created.success());
}

#[test]
fn connection_ends_with_its_receiver() {
    let service = service();
    let stream = std::os::unix::net::UnixStream::connect(service.endpoint().socket).unwrap();
    stream.set_read_timeout(Some(MAX_STOP)).unwrap();
    let user = nix::unistd::getuid();
    let receiver = || {
        let children = children_of(service.pid()).unwrap();
        let arguments = |pid: &u32| read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let start = format!("fdmapd\0fdpass-receiver\0{user}\0");
        children.into_iter().find(|pid| arguments(pid).starts_with(&start))
    };
    let started = Instant::now();
    let pid = loop {
        if let Some(pid) = receiver() {
            break pid;
        }
        assert!(started.elapsed() < MAX_STOP, "no receiver keeps the connection");
        std::thread::sleep(MAX_DELAY / 20);
    };
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    read_to_close(&stream).unwrap();
}
