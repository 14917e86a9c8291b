//! The processes of an attack, which this test program runs as: a server of a FUSE file system that leaves requests unanswered,
//! and a client that passes the files of it, and other descriptors that are slow to close.

use std::collections::HashSet;
use std::fs::File;
use std::io::BufRead as _;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use fdmap_client::{Endpoint, FdpassClient, Timeouts};
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_sys::testing::fuse::{self, Fuse};
use fdmap_sys::testing::mounts;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{Errno, memfd};
use fdmap_tests::attack::{self, await_effect};
use fdmap_tests::doctor::has_capability;
use fdmap_tests::host::{children_of, read};
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::raw::{RawSession, lingering_socket, packet, socket_lingering_for};
use fdmap_tests::service::{Service, named};
use fdmap_tests::victim::become_user;
use fdmap_tests::{HarnessError, HarnessResult};
use nix::libc::SYS_close;
use nix::sys::signal::Signal;

const FUSE_SERVER: &str = "fuse-server";
const CLIENT: &str = "client";
/// Sessions of one attack. Twice as many as the service has threads that handle requests, on a host with 8 processors.
pub const SESSIONS: usize = 16;
/// Connections of an attack that opens more than the user may have: fewer than the queue of the listening socket takes.
const CONNECTIONS: usize = 96;
/// Long enough for the service to notice that a close takes that long.
const BRIEFLY: Duration = Duration::from_secs(2);
/// Connections of a flood: more than the refuser gets while it cannot close them.
const FLOOD: usize = 17_000;
/// Requests that keep a receiver busy for some milliseconds. Their replies fit into the buffer of a socket.
const REQUESTS_BEFORE: usize = 50;

/// Runs this process as one of an attack, if its arguments request that.
pub fn main() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [FUSE_SERVER, folder, user] => serve_fuse(Path::new(folder), user.parse().unwrap()),
        [CLIENT, runtime_dir, files, user] => {
            run_client(runtime_dir, Path::new(files), user.parse().unwrap())
        }
        _ => return None,
    }
    Some(ExitCode::SUCCESS)
}

/// Serves a file system of a user, as a process of the user. Only the mount needs root, as the one by fusermount(1) does.
fn serve_fuse(folder: &Path, user: u32) {
    mounts::make_private().unwrap();
    let fuse = Fuse::mount_for(folder, user).unwrap();
    become_user(user).unwrap();
    println!("ok");
    // Until this process is killed, which ends all requests.
    fuse.serve_without(&[fuse::FLUSH, fuse::STATFS]).unwrap();
}

/// Sessions of an attack, and what became of the descriptors that they pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    pub sent: usize,
    /// The kernel refused to send them: EPERM.
    pub refused: usize,
}

/// Performs the attacks that it reads from standard input, and keeps their sessions open until it is killed.
fn run_client(runtime_dir: &str, files: &Path, user: u32) {
    become_user(user).unwrap();
    let endpoint = Endpoint::in_runtime_dir(runtime_dir);
    let open =
        |name: &str| OwnedFd::from(File::options().read(true).write(true).open(files.join(name)).unwrap());
    let (mute, fake_pagemap) = (open("mute"), open("pagemap"));
    let mut sessions = Vec::new();
    let mut tracked = None;
    println!("ok");
    for attack in std::io::stdin().lock().lines() {
        let attack = attack.unwrap();
        if attack == "track-fuse" {
            tracked = Some(create_tracked(&endpoint).unwrap());
        }
        let mut passed = Passed::default();
        let steps = match attack.as_str() {
            "connect-lingering" => CONNECTIONS,
            "adopt-briefly-lingering" => 1,
            _ => SESSIONS,
        };
        for _ in 0..steps {
            let descriptor = descriptor_of(&attack, &mute, &fake_pagemap);
            let step = match attack.as_str() {
                "adopt-fuse" | "adopt-lingering" | "adopt-briefly-lingering" => {
                    adopt(&endpoint, descriptor.as_fd())
                }
                "track-fuse" => track(&endpoint, descriptor.as_fd()),
                "queue-lingering" => queue(&endpoint, descriptor.as_fd()),
                "connect-lingering" => connect_only(&endpoint, descriptor.as_fd()),
                "grpc-lingering" => pass_on_grpc(&endpoint, descriptor.as_fd()),
                "greet" => RawSession::greeted(&endpoint).map(|session| (session, true)),
                "connect-flood" => connect_often(&endpoint),
                other => panic!("{other}"),
            };
            // Any close of a FUSE file would block this process, and the last one of a socket that was not sent.
            if attack.ends_with("-fuse") || !matches!(step, Ok((_, true))) {
                std::mem::forget(descriptor);
            } else if attack.starts_with("adopt-") {
                // If the receiver has closed it already, this is the last close.
                std::thread::spawn(move || drop(descriptor));
            }
            // The service may refuse any step.
            if let Ok((session, is_sent)) = step {
                passed.sent += usize::from(is_sent);
                passed.refused += usize::from(!is_sent);
                sessions.push(session);
            }
        }
        println!("ok {} {}", passed.sent, passed.refused);
    }
    drop(tracked);
}

/// The descriptor that a session of an attack passes.
fn descriptor_of(attack: &str, mute: &OwnedFd, fake_pagemap: &OwnedFd) -> OwnedFd {
    match attack {
        "track-fuse" => fake_pagemap.try_clone().unwrap(),
        "adopt-briefly-lingering" => socket_lingering_for(BRIEFLY),
        _ if attack.ends_with("-fuse") => mute.try_clone().unwrap(),
        _ if attack.ends_with("-lingering") => lingering_socket(),
        _ => File::open("/dev/null").unwrap().into(),
    }
}

/// A file that Track requests name.
fn create_tracked(endpoint: &Endpoint) -> HarnessResult<(FdpassClient, OwnedFd)> {
    let mut session = FdpassClient::connect(endpoint, Timeouts::default())?;
    let (file, _) = session.memfd_create("attacker", "attacker", 0)?;
    memfd::resize(file.as_fd(), 4096)?;
    Ok((session, file))
}

/// Sends a packet with a descriptor. False if the kernel refuses that, since the service receives no descriptors there.
fn is_sent(session: &RawSession, bytes: &[u8], descriptor: BorrowedFd<'_>) -> HarnessResult<bool> {
    match session.send(bytes, &[descriptor]) {
        Err(HarnessError::Syscall(error)) if error.errno == Errno::EPERM => Ok(false),
        sent => sent.map(|()| true),
    }
}

type Step = HarnessResult<(RawSession, bool)>;

/// A request that fails and changes nothing.
fn open_packet() -> Vec<u8> {
    packet(Op::Open(v1::Open { file: Some(named("none").into()), mode: 1 }))
}

fn adopt_packet() -> Vec<u8> {
    packet(Op::Adopt(v1::Adopt { name: "hostile".to_owned(), access: None, lifetime: 0 }))
}

/// The receiver passes other requests first. By the time it closes the descriptor, this process has closed its own: only the last
/// close blocks.
fn adopt(endpoint: &Endpoint, descriptor: BorrowedFd<'_>) -> Step {
    let session = RawSession::greeted(endpoint)?;
    for _ in 0..REQUESTS_BEFORE {
        session.send(&open_packet(), &[])?;
    }
    let is_sent = is_sent(&session, &adopt_packet(), descriptor)?;
    Ok((session, is_sent))
}

fn track(endpoint: &Endpoint, pagemap: BorrowedFd<'_>) -> Step {
    let session = RawSession::greeted(endpoint)?;
    let mapping = v1::ClientMapping { address: 1 << 20, length_bytes: 4096, ..Default::default() };
    let (file, mappings) = (Some(named("attacker").into()), vec![mapping]);
    let track = v1::Track { file, mappings, pagemap: true, maps: false, pid: 0 };
    let uffd = Userfaultfd::create_user_mode_only()?;
    session.send(&packet(Op::Track(track)), &[uffd.as_fd(), pagemap])?;
    Ok((session, true))
}

/// Leaves descriptors in the queue of a session that the service ends because the client reads no replies. This process has closed
/// its own descriptors by then.
fn queue(endpoint: &Endpoint, descriptor: BorrowedFd<'_>) -> Step {
    let session = RawSession::connect_with(endpoint, Duration::from_secs(5))?.greet()?;
    // The replies fill the buffer of this socket, and the service stops to receive.
    for _ in 0..400 {
        session.send(&open_packet(), &[])?;
    }
    for _ in 1..4 {
        is_sent(&session, &adopt_packet(), descriptor)?;
    }
    let is_sent = is_sent(&session, &adopt_packet(), descriptor)?;
    Ok((session, is_sent))
}

/// Passes a descriptor before the service knows the connection, which may be more than the user may have.
fn connect_only(endpoint: &Endpoint, descriptor: BorrowedFd<'_>) -> Step {
    let session = RawSession::connect(endpoint)?;
    let is_sent = is_sent(&session, &adopt_packet(), descriptor)?;
    Ok((session, is_sent))
}

/// Opens and closes connections.
fn connect_often(endpoint: &Endpoint) -> Step {
    for _ in 1..FLOOD.div_ceil(SESSIONS) {
        RawSession::connect(endpoint)?;
    }
    Ok((RawSession::connect(endpoint)?, true))
}

/// Passes a descriptor that read(2) of the service would discard.
fn pass_on_grpc(endpoint: &Endpoint, descriptor: BorrowedFd<'_>) -> Step {
    let stream = std::os::unix::net::UnixStream::connect(&endpoint.socket).unwrap();
    let session = RawSession::of(stream.into());
    let is_sent = is_sent(&session, b"PRI * HTTP/2.0\r\n\r\n", descriptor)?;
    Ok((session, is_sent))
}

/// The processes of an attack. The server of the file system is dropped first: while it runs, its files block the client's end.
#[derive(Debug)]
pub struct Attacker {
    _server: LineProcess,
    client: LineProcess,
}

impl Attacker {
    /// Starts the processes, which are of `user`.
    pub fn start(service: &Service, user: u32) -> HarnessResult<Self> {
        let folder = service.folder().join(format!("files-{user}"));
        std::fs::create_dir_all(&folder).unwrap();
        let itself = || Command::new("/proc/self/exe");
        let mut command = itself();
        command.arg(FUSE_SERVER).arg(&folder).arg(user.to_string());
        let mut server = LineProcess::start(command, None)?;
        server.receive()?;
        let files =
            PathBuf::from(format!("/proc/{}/root", server.pid())).join(folder.strip_prefix("/").unwrap());
        let mut command = itself();
        command.arg(CLIENT).arg(service.folder()).arg(files).arg(user.to_string());
        let mut client = LineProcess::start(command, None)?;
        client.receive()?;
        Ok(Self { _server: server, client })
    }

    /// Begins an attack, which may wait for the service.
    pub fn begin(&mut self, attack: &str) -> HarnessResult<()> {
        self.client.send(attack)
    }

    /// Performs an attack, and waits until all of its sessions have ended or are open.
    pub fn attack(&mut self, attack: &str) -> HarnessResult<Passed> {
        let answer = self.client.call(attack)?;
        let counts = answer.split_once(' ').and_then(|(sent, refused)| {
            Some(Passed { sent: sent.parse().ok()?, refused: refused.parse().ok()? })
        });
        counts.ok_or(HarnessError::Agent(answer))
    }
}

/// Asserts that so many descriptors were sent, or refused by the kernel where it can. Returns true if they were sent.
#[track_caller]
fn assert_sent(service: &Service, passed: Passed, count: usize) -> bool {
    let is_refused = has_capability(service, "refuse-descriptors");
    let (sent, refused) = if is_refused { (0, count) } else { (count, 0) };
    assert_eq!(passed, Passed { sent, refused });
    !is_refused
}

/// Waits until a process of the service closes a descriptor for longer.
#[track_caller]
pub fn await_blocked_close(service: &Service) {
    await_effect(service, "a close that does not return", || has_blocked_close(service));
}

/// True if a thread of a process that the service started is in the same close(2) at two looks.
fn has_blocked_close(service: &Service) -> bool {
    const INTERVAL: Duration = Duration::from_millis(200);
    let looks = [(); 2].map(|()| {
        let closes = closes(service);
        std::thread::sleep(INTERVAL);
        closes
    });
    !looks[0].is_disjoint(&looks[1])
}

/// The calls of close(2) in progress: thread, and descriptor, stack and program counter.
fn closes(service: &Service) -> HashSet<(PathBuf, String)> {
    let children = children_of(service.pid()).unwrap();
    let tasks = children.iter().flat_map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")));
    let paths = tasks.flatten().flatten().map(|task| task.path());
    let calls = paths.filter_map(|path| Some((read(path.join("syscall")).ok()?, path)));
    let is_close = |call: &str| call.starts_with(&format!("{SYS_close} "));
    calls.filter(|(call, _)| is_close(call)).map(|(call, path)| (path, call)).collect()
}

/// Passes descriptors on the gRPC socket, each on a connection of its own.
pub fn pass_on_grpc_socket(service: &Service) -> Attacker {
    let mut attacker = Attacker::start(service, attack::USER).unwrap();
    // So the last close is not one of the attacker.
    service.stop();
    let passed = attacker.attack("grpc-lingering");
    service.signal(Signal::SIGCONT);
    if assert_sent(service, passed.unwrap(), SESSIONS) {
        await_blocked_close(service);
    }
    attacker
}

/// Opens more connections than the user may have, and passes a descriptor on each of them before the service accepts it.
pub fn connect_too_often(service: &Service) -> Attacker {
    let mut attacker = Attacker::start(service, attack::USER).unwrap();
    let refused = || service.log().matches("refusing an fdpass connection").count();
    let before = refused();
    // All of them wait in the queue of the listening socket.
    service.stop();
    let passed = attacker.attack("connect-lingering");
    service.signal(Signal::SIGCONT);
    await_effect(service, "connections are refused", || refused() > before);
    if assert_sent(service, passed.unwrap(), CONNECTIONS) {
        await_blocked_close(service);
    }
    attacker
}
