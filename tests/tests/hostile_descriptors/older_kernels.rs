//! Where the kernel passes descriptors on any unix socket (before Linux 6.16), the service receives and closes none: neither those that
//! arrive on the gRPC socket, nor those in the queue of a connection that it refuses, that it ends with, or that it never accepted.
//!
//! The descriptors are userfaultfds of a process that holds its own mmap_lock: the last close of one waits, uninterruptibly, until that process
//! releases it.

use std::path::PathBuf;
use std::time::Instant;

use fdmap_tests::attack::{
    self, USER as ATTACKER, assert_gone, assert_restarts_after, assert_withstands, await_effect,
};
use fdmap_tests::doctor::has_capability;
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

use super::attacker::{
    Attacker, Passed, SESSIONS, await_blocked_close, connect_too_often, pass_on_grpc_socket,
};
use super::{MAX_SESSIONS, block_receivers, call, is_served};

/// In one attack.
const USERFAULTFDS: u32 = 16;

/// The program that runs a service as on an older kernel.
fn launcher() -> Compiled {
    require(root());
    require(Compiled::new("without_passrights"))
}

/// A service that runs as on an older kernel.
fn service(launcher: &Compiled) -> Service {
    let (fdmapd, max_sessions) = (program("fdmapd").unwrap(), MAX_SESSIONS.to_string());
    let arguments = ["--max-sessions-per-user", &max_sessions];
    let service = attack::service_by(launcher.path().into(), &[fdmapd.to_str().unwrap()], &arguments);
    assert!(!has_capability(&service, "refuse-descriptors"));
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

#[test]
fn descriptors_on_the_grpc_socket_are_not_received() {
    let launcher = launcher();
    assert_withstands(&mut service(&launcher), |service| {
        let mut holder = Holder::start(service, USERFAULTFDS);
        let [(kind, path), _] = holder.sockets.clone();
        holder.process.connect(kind, &path).unwrap();
        holder.process.pass().unwrap();
        await_blocked_close(service);
        holder
    });
}

/// More connections than the user may have. They wait in the queue of the listening socket, which takes 128, until all descriptors are
/// sent. The services of both sockets run at a time.
#[test]
fn descriptors_of_refused_connections_are_not_closed_by_the_service() {
    let launcher = &launcher();
    std::thread::scope(|scope| {
        for at in 0..2 {
            scope.spawn(move || {
                assert_withstands(&mut service(launcher), |service| refused_holder(service, at));
            });
        }
    });
}

fn refused_holder(service: &Service, at: usize) -> Holder {
    let mut holder = Holder::start(service, MAX_SESSIONS as u32 + 40);
    let (kind, path) = holder.sockets[at].clone();
    let refused = || service.log().matches("refusing a").count();
    let before = refused();
    service.stop();
    let passed = holder.process.connect_and_pass(kind, &path);
    service.signal(Signal::SIGCONT);
    passed.unwrap();
    await_effect(service, "connections are refused", || refused() > before);
    await_blocked_close(service);
    holder
}

/// Asserts that a killed service ends, and that the next one serves a victim while the attack lasts. Ends the attack.
#[track_caller]
fn assert_replaced(service: &mut Service, attack: Holder) {
    let children = children_of(service.pid()).unwrap();
    assert_restarts_after(service, Signal::SIGKILL);
    drop(attack);
    assert_gone(&children);
}

/// Descriptors that the service has not read when it is killed.
#[test]
fn killed_service_closes_no_descriptors_in_queues() {
    let launcher = launcher();
    for at in 0..2 {
        let mut service = service(&launcher);
        let mut holder = Holder::start(&service, USERFAULTFDS);
        let (kind, path) = holder.sockets[at].clone();
        holder.process.connect(kind, &path).unwrap();
        // Until a receiver of the user has the connections.
        std::thread::sleep(MAX_DELAY);
        service.stop();
        holder.process.pass().unwrap();
        assert_replaced(&mut service, holder);
    }
}

#[test]
fn killed_service_closes_no_descriptors_of_connections_that_it_never_accepted() {
    let launcher = launcher();
    for at in 0..2 {
        let mut service = service(&launcher);
        let mut holder = Holder::start(&service, USERFAULTFDS);
        let (kind, path) = holder.sockets[at].clone();
        service.stop();
        holder.process.connect_and_pass(kind, &path).unwrap();
        assert_replaced(&mut service, holder);
    }
}

#[test]
fn lingering_sockets_block_no_other_user_on_an_older_kernel() {
    let launcher = launcher();
    assert_withstands(&mut service(&launcher), |service| {
        let mut adopting = Attacker::start(service, ATTACKER).unwrap();
        block_receivers(service, &mut adopting, "adopt-fuse");
        [adopting, pass_on_grpc_socket(service), connect_too_often(service)]
    });
}

/// The processes that close refused connections.
fn refusers(service: &Service) -> Vec<u32> {
    let mut children = children_of(service.pid()).unwrap();
    let arguments = |pid: &u32| read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    children.retain(|pid| arguments(pid).starts_with("fdmapd\0fdpass-receiver\0refused\0"));
    children
}

/// A refuser that cannot close a descriptor gets a bounded number of connections, and then another one gets the next. When the attack
/// ends, both stay for further connections.
#[test]
fn blocked_refuser_is_replaced_when_it_has_many_connections() {
    let launcher = launcher();
    let mut service = service(&launcher);
    let mut victim = Victim::start(&service).unwrap();
    attack::assert_served(&mut victim, "before the attack");
    let helpers = || children_of(service.pid()).unwrap().len();
    let before = helpers();
    let attacker = flood_refuser(&service);
    await_effect(&service, "a full refuser", || incidents::count(&service, "refuser-full") > 0);
    let reason = "a process has many refused connections to close: another one gets the next";
    incidents::assert_reported(&service, "refuser-full", reason);
    attack::assert_served(&mut victim, "during the attack");
    drop(attacker);
    attack::assert_served(&mut victim, "after the attack");
    assert_eq!(refusers(&service).len(), 2);
    let ended = Instant::now();
    while helpers() > before + 1 {
        assert!(ended.elapsed() < attack::MAX_RELEASE, "{} processes are left", helpers());
        std::thread::sleep(MAX_DELAY / 20);
    }
    assert_withstands(&mut service, flood_refuser);
}

/// Begins a flood of connections that are refused. The close of the first ones is blocked.
fn flood_refuser(service: &Service) -> Attacker {
    let mut attacker = Attacker::start(service, ATTACKER).unwrap();
    for _ in 0..MAX_SESSIONS / SESSIONS {
        assert_eq!(attacker.attack("greet").unwrap(), Passed { sent: SESSIONS, refused: 0 });
    }
    // Each connection is refused, with the descriptor in its queue.
    service.stop();
    let passed = attacker.attack("connect-lingering");
    service.signal(Signal::SIGCONT);
    assert_eq!(passed.unwrap().refused, 0);
    attacker.begin("connect-flood").unwrap();
    await_blocked_close(service);
    attacker
}

#[test]
fn refuser_that_ends_is_replaced() {
    let launcher = launcher();
    let service = service(&launcher);
    let first = refusers(&service)[0];
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(first.cast_signed()), Signal::SIGKILL).unwrap();
    let started = Instant::now();
    while refusers(&service).iter().all(|pid| *pid == first) {
        assert!(started.elapsed() < attack::MAX_STOP, "no other refuser");
        std::thread::sleep(MAX_DELAY / 20);
    }
    assert!(is_served(&service));
    // Connections whose clients pass nothing are served as on any kernel.
    let created = call(&service, ATTACKER, &["create", "file", "--size", "64K"]).wait().unwrap();
    assert!(created.success());
    let reason = "a process that closes refused connections ended: another one replaces it";
    incidents::assert_reported(&service, "refuser-ended", reason);
}

#[test]
fn connection_ends_with_its_receiver() {
    let launcher = launcher();
    let service = service(&launcher);
    let stream = std::os::unix::net::UnixStream::connect(service.endpoint().socket).unwrap();
    stream.set_read_timeout(Some(MAX_DELAY / 20)).unwrap();
    let user = nix::unistd::getuid();
    let receiver = || {
        let children = children_of(service.pid()).unwrap();
        let arguments = |pid: &u32| read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let start = format!("fdmapd\0fdpass-receiver\0{user}\0");
        children.into_iter().find(|pid| arguments(pid).starts_with(&start))
    };
    let started = Instant::now();
    // A receiver of an earlier connection may not have got this one yet.
    loop {
        if let Some(pid) = receiver() {
            // Fails if the process has just ended.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        }
        if read_to_close(&stream).is_ok() {
            break;
        }
        assert!(started.elapsed() < attack::MAX_STOP, "the connection does not end");
    }
}
