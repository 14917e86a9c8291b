//! The processes of an attack, which this test program runs as: a server of a FUSE file system that leaves requests unanswered,
//! and a client that passes the files of it, and other descriptors that are slow to close.

use std::fs::File;
use std::io::BufRead as _;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use fdmap_client::Endpoint;
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_sys::scm;
use fdmap_sys::testing::fuse::{self, Fuse};
use fdmap_sys::testing::mounts;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::HarnessResult;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::raw::{RawSession, lingering_socket, packet};
use fdmap_tests::service::{Service, named};
use nix::unistd::{Gid, Uid};

const FUSE_SERVER: &str = "fuse-server";
const CLIENT: &str = "client";
/// Sessions of one attack. Twice as many as the service has threads that handle requests, on a host with 8 processors.
pub const SESSIONS: usize = 16;
/// Connections of a flood: more than the refuser gets while it cannot close them.
const FLOOD: usize = 17_000;

/// Runs this process as one of an attack, if its arguments request that.
pub fn main() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [FUSE_SERVER, folder] => serve_fuse(Path::new(folder)),
        [CLIENT, runtime_dir, files, user] => {
            run_client(runtime_dir, Path::new(files), user.parse().unwrap())
        }
        _ => return None,
    }
    Some(ExitCode::SUCCESS)
}

fn serve_fuse(folder: &Path) {
    mounts::make_private().unwrap();
    let fuse = Fuse::mount(folder).unwrap();
    println!("ok");
    // Until this process is killed, which ends all requests.
    fuse.serve_without(&[fuse::FLUSH, fuse::STATFS]).unwrap();
}

/// Performs the attacks that it reads from standard input, and keeps their sessions open until it is killed.
fn run_client(runtime_dir: &str, files: &Path, user: u32) {
    let endpoint = Endpoint::in_runtime_dir(runtime_dir);
    // Opened with the rights of the user who mounted the file system, as fusermount(1) would do it for any user.
    let open =
        |name: &str| OwnedFd::from(File::options().read(true).write(true).open(files.join(name)).unwrap());
    let (mute, fake_pagemap) = (open("mute"), open("pagemap"));
    nix::unistd::setgroups(&[]).unwrap();
    nix::unistd::setgid(Gid::from_raw(65534)).unwrap();
    nix::unistd::setuid(Uid::from_raw(user)).unwrap();
    let mut sessions = Vec::new();
    println!("ok");
    for attack in std::io::stdin().lock().lines() {
        for _ in 0..SESSIONS {
            // The service may refuse any step.
            let session = match attack.as_deref().unwrap() {
                "adopt-fuse" => adopt(&endpoint, mute.as_fd()),
                "adopt-lingering" => adopt(&endpoint, lingering_socket().as_fd()),
                "track-fuse" => track(&endpoint, fake_pagemap.as_fd()),
                "queue-lingering" => queue(&endpoint, lingering_socket().as_fd()),
                "queue-fuse" => queue(&endpoint, mute.as_fd()),
                "connect-lingering" => connect_only(&endpoint, lingering_socket().as_fd()),
                "greet" => RawSession::greeted(&endpoint),
                "connect-flood" => connect_often(&endpoint),
                "grpc-lingering" => pass_on_grpc(&endpoint, lingering_socket().as_fd()),
                other => panic!("{other}"),
            };
            sessions.push(session);
        }
        println!("ok");
    }
}

fn adopt_packet() -> Vec<u8> {
    packet(Op::Adopt(v1::Adopt { name: "hostile".to_owned(), access: None, lifetime: 0 }))
}

fn adopt(endpoint: &Endpoint, descriptor: BorrowedFd<'_>) -> HarnessResult<RawSession> {
    let session = RawSession::greeted(endpoint)?;
    session.send(&adopt_packet(), &[descriptor])?;
    Ok(session)
}

fn track(endpoint: &Endpoint, pagemap: BorrowedFd<'_>) -> HarnessResult<RawSession> {
    let session = RawSession::greeted(endpoint)?;
    let mapping = v1::ClientMapping { address: 1 << 20, length_bytes: 4096, ..Default::default() };
    let (file, mappings) = (Some(named("attacker").into()), vec![mapping]);
    let track = v1::Track { file, mappings, pagemap: true, maps: false, pid: 0 };
    let uffd = Userfaultfd::create_user_mode_only()?;
    session.send(&packet(Op::Track(track)), &[uffd.as_fd(), pagemap])?;
    Ok(session)
}

/// Leaves descriptors in the queue of a session that the service ends because the client reads no replies. This process has closed
/// its own descriptors by then.
fn queue(endpoint: &Endpoint, descriptor: BorrowedFd<'_>) -> HarnessResult<RawSession> {
    let session = RawSession::connect_with(endpoint, Duration::from_millis(100))?.greet()?;
    let open = packet(Op::Open(v1::Open { file: Some(named("none").into()), mode: 1 }));
    // The replies fill the buffer of this socket, and the service stops to receive.
    for _ in 0..400 {
        session.send(&open, &[])?;
    }
    for _ in 0..4 {
        session.send(&adopt_packet(), &[descriptor])?;
    }
    Ok(session)
}

/// Passes a descriptor before the service knows the connection, which may be more than the user may have.
fn connect_only(endpoint: &Endpoint, descriptor: BorrowedFd<'_>) -> HarnessResult<RawSession> {
    let session = RawSession::connect(endpoint)?;
    session.send(&adopt_packet(), &[descriptor])?;
    Ok(session)
}

/// Opens and closes connections.
fn connect_often(endpoint: &Endpoint) -> HarnessResult<RawSession> {
    for _ in 1..FLOOD.div_ceil(SESSIONS) {
        RawSession::connect(endpoint)?;
    }
    RawSession::connect(endpoint)
}

/// Passes a descriptor that read(2) of the service discards.
fn pass_on_grpc(endpoint: &Endpoint, descriptor: BorrowedFd<'_>) -> HarnessResult<RawSession> {
    let stream = std::os::unix::net::UnixStream::connect(&endpoint.socket).unwrap();
    let sent = scm::send(stream.as_fd(), b"PRI * HTTP/2.0\r\n\r\n", &[descriptor]);
    std::mem::forget(stream);
    sent?;
    RawSession::connect(endpoint)
}

/// The processes of an attack. The server of the file system is dropped first: while it runs, its files block the client's end.
#[derive(Debug)]
pub struct Attacker {
    server: Option<LineProcess>,
    client: Option<LineProcess>,
}

impl Attacker {
    /// Starts the processes; the client connects as `user`.
    pub fn start(service: &Service, user: u32) -> HarnessResult<Self> {
        let folder = service.folder().join(format!("files-{user}"));
        std::fs::create_dir(&folder).unwrap();
        let itself = || Command::new("/proc/self/exe");
        let mut command = itself();
        command.arg(FUSE_SERVER).arg(&folder);
        let mut server = LineProcess::start(command, None)?;
        server.receive()?;
        let files =
            PathBuf::from(format!("/proc/{}/root", server.pid())).join(folder.strip_prefix("/").unwrap());
        let mut command = itself();
        command.arg(CLIENT).arg(service.folder()).arg(files).arg(user.to_string());
        let mut attacker = Self { server: Some(server), client: Some(LineProcess::start(command, None)?) };
        attacker.client().receive()?;
        Ok(attacker)
    }

    fn client(&mut self) -> &mut LineProcess {
        self.client.as_mut().unwrap()
    }

    /// Performs an attack, without waiting for the end of it: an attack may wait for the service.
    pub fn attack(&mut self, attack: &str) -> HarnessResult<()> {
        self.client().send(attack)?;
        // Long enough for the sessions to be handled.
        std::thread::sleep(Duration::from_millis(500));
        Ok(())
    }

    /// Performs an attack, and waits until all of its sessions have ended or are open.
    pub fn attack_and_wait(&mut self, attack: &str) -> HarnessResult<()> {
        self.client().send(attack)?;
        self.client().receive().map(drop)
    }

    /// Kills all processes of the attack, and waits for them.
    pub fn end(&mut self) -> HarnessResult<()> {
        self.server.take().map_or(Ok(()), LineProcess::kill)?;
        self.client.take().map_or(Ok(()), LineProcess::kill)
    }
}
