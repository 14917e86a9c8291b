//! Connections that their user may not have, with descriptors whose close waits: the kernel passes them (before Linux 6.16), and a process
//! closes them that the service waits for never.

use std::io::BufRead as _;
use std::os::fd::AsFd as _;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use fdmap_client::Endpoint;
use fdmap_sys::{pidfd, scm};
use fdmap_tests::host::{children_of, read};
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::raw::lingering_socket;
use fdmap_tests::reported::create_file;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::victim::{GROUP, become_user};
use nix::libc;
use nix::sys::signal::Signal;

const CLIENT: &str = "refused-client";
const ATTACKER: u32 = 65534;
/// Connections that a user may have.
const MAX_SESSIONS: u32 = 4;
/// Connections of one attack.
const CONNECTIONS: usize = 24;
/// A guest without KVM is slower than a host, for which other tests assert shorter times. A blocked close takes an hour.
const MAX_CALL: Duration = Duration::from_secs(5);
const MAX_STOP: Duration = Duration::from_secs(10);
const SETTLED: Duration = Duration::from_secs(20);

/// Runs this process as the client of an attack, if its arguments request that.
pub fn main() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [CLIENT, runtime_dir] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] else {
        return None;
    };
    let endpoint = Endpoint::in_runtime_dir(runtime_dir);
    become_user(ATTACKER).unwrap();
    println!("ok");
    let mut sockets = Vec::new();
    for kind in std::io::stdin().lock().lines() {
        for _ in 0..CONNECTIONS {
            let socket = match kind.as_deref().unwrap() {
                "fdpass" => scm::connect_to(&endpoint.fdpass, SETTLED).unwrap(),
                _ => scm::connect_stream_to(&endpoint.socket, SETTLED).unwrap(),
            };
            scm::send(socket.as_fd(), b"PRI * HTTP/2.0\r\n\r\n", &[lingering_socket().as_fd()]).unwrap();
            sockets.push(socket);
        }
        println!("ok");
    }
    Some(ExitCode::SUCCESS)
}

/// Threads that wait in close(2).
fn closing_threads(pid: u32) -> usize {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    let close = libc::SYS_close.to_string();
    let calls = threads.flatten().filter_map(|thread| read(thread.path().join("syscall")).ok());
    calls.filter(|call| call.split(' ').next() == Some(&close)).count()
}

/// Calls of another user on both sockets.
async fn assert_served(service: &Service, name: &str) {
    let started = Instant::now();
    create_file(&service.client().await.unwrap(), name, 4096).await.unwrap();
    service.fdpass().unwrap().open(&named(name), true).unwrap();
    assert!(started.elapsed() < MAX_CALL, "{name}: {:?}", started.elapsed());
}

async fn refused_connections_are_closed_elsewhere(kind: &str) {
    let arguments = ["--group", &GROUP.to_string(), "--max-sessions-per-user", &MAX_SESSIONS.to_string()];
    let mut service = Service::start(&arguments).unwrap();
    let mut command = Command::new("/proc/self/exe");
    command.arg(CLIENT).arg(service.folder());
    let mut client = LineProcess::start(command, None).unwrap();
    assert_eq!(client.receive().unwrap(), "ok");
    assert_served(&service, "before").await;
    // They wait in the queue of the listening socket until all descriptors are sent.
    service.stop();
    client.send(kind).unwrap();
    assert_eq!(client.receive().unwrap(), "ok");
    service.signal(Signal::SIGCONT);
    let children = || children_of(service.pid()).unwrap();
    let is_refuser = |pid: &u32| {
        let arguments = read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.starts_with("fdmapd\0fdpass-receiver\0refused\0")
    };
    let is_blocked = |pid: &u32| is_refuser(pid) && closing_threads(*pid) > 0;
    let started = Instant::now();
    while !children().iter().any(is_blocked) {
        assert!(started.elapsed() < SETTLED, "no refuser closes a descriptor: {}", service.log());
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(service.log().contains("refusing"), "{}", service.log());
    for name in ["first", "second"] {
        assert_served(&service, name).await;
        assert_eq!(closing_threads(service.pid()), 0, "the service closes a descriptor");
    }
    let children = children();
    assert!(children.iter().any(is_blocked), "the close was short");
    service.signal(Signal::SIGTERM);
    assert!(service.ended(MAX_STOP), "SIGTERM does not end the service");
    service.restart().unwrap();
    assert_served(&service, "after a restart").await;
    drop(client);
    let started = Instant::now();
    while let Some(left) = children.iter().find(|pid| pidfd::owner(**pid).is_ok()) {
        assert!(started.elapsed() < SETTLED, "process {left} is left");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test(flavor = "multi_thread")]
async fn descriptors_of_refused_grpc_connections_block_the_refuser_only() {
    refused_connections_are_closed_elsewhere("grpc").await;
}

#[test(flavor = "multi_thread")]
async fn descriptors_of_refused_fdpass_connections_block_the_refuser_only() {
    refused_connections_are_closed_elsewhere("fdpass").await;
}
