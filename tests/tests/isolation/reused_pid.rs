//! A session whose process has ended, while another user's process has its pid.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fdmap_client::Client;
use fdmap_client::proto::file::{Access, Rights};
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_sys::memfd;
use fdmap_tests::attack::{assert_withstands, service};
use fdmap_tests::cleanup::{Cleanup, CleanupGuard};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::mapper::{LockHolder, path_of};
use fdmap_tests::raw::{RawSession, packet};
use fdmap_tests::reported::{Reported, create_file};
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::victim::{self, GROUP, Victim};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType};
use nix::unistd::Pid;
use tokio::runtime::Handle;
use tonic::Code;

use crate::ATTACKER;

/// Of half a second each: far more than the time in which a process starts and is adopted.
const CHECKPOINTS: usize = 24;
/// Time for these to reach the service.
const QUEUED: Duration = Duration::from_secs(1);

/// Connects the socket that is its standard input, and waits until it is killed.
const CONNECT: &str = "
import signal, socket, sys
socket.socket(fileno=0).connect(sys.argv[1])
print(flush=True)
signal.pause()
";

/// Maps the file that is its standard input, and writes to its first page when it receives SIGUSR1.
const MAP: &str = "
import mmap, os, signal, sys
mapped = mmap.mmap(0, 0)
def write(*_):
    mapped[0] = 1
    print(flush=True)
signal.signal(signal.SIGUSR1, write)
print(os.getpid(), flush=True)
while True:
    signal.pause()
";

/// Executes a program in a child that has a given pid: clone3(2) with set_tid.
pub(super) const EXECUTE_WITH_PID: &str = "
import ctypes, os, signal, struct, sys
pid, program = ctypes.c_int(int(sys.argv[1])), sys.argv[2:]
libc = ctypes.CDLL(None, use_errno=True)
# struct clone_args: exit_signal is the fifth field, set_tid and its size are the ninth and tenth.
clone_args = struct.pack('11Q', 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(pid), 1, 0)
CLONE3 = 435
child = libc.syscall(CLONE3, clone_args, len(clone_args))
if child == 0:
    os.execvp(program[0], program)
if child < 0:
    sys.exit('clone3: ' + os.strerror(ctypes.get_errno()))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
";

fn python(script: &str) -> Command {
    let mut command = Command::new("python3");
    command.args(["-c", script]);
    command
}

/// A process of the attacker's user that has opened a session and passed it on. Killed on drop.
struct Connected {
    process: Child,
    socket: OwnedFd,
    session: RawSession,
    _guard: CleanupGuard,
}

fn connect(service: &Service) -> Connected {
    let socket =
        socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    let theirs: OwnedFd = socket.try_clone().unwrap();
    let mut command = python(CONNECT);
    command.arg(service.endpoint().fdpass).stdin(theirs).stdout(Stdio::piped()).uid(ATTACKER).gid(GROUP);
    let mut process = command.spawn().unwrap();
    let _guard = CleanupGuard::new(Cleanup::process(process.id())).unwrap();
    // Its line is printed when it is connected.
    process.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let session = RawSession::of(socket.try_clone().unwrap()).greet().unwrap();
    Connected { process, socket, session, _guard }
}

impl Connected {
    /// Ends the process. Returns its pid, which another process can have now.
    fn end(&mut self) -> u32 {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.process.id()
    }
}

/// The victim, in a process with this pid.
fn victim_with_pid(service: &Service, pid: u32) -> Victim {
    let mut command = python(EXECUTE_WITH_PID);
    command.arg(pid.to_string()).arg(std::env::current_exe().unwrap());
    Victim::start_by(command, service.folder()).unwrap()
}

/// Lets all users write to the tracked file of the victim. Returns the pid of its mapping's process, and the mapping's id.
async fn share(client: &Client, file: &str) -> (u32, u64) {
    let access = Access { group: Rights::ALL, other: Rights::ALL, ..Access::private(victim::USER, GROUP) };
    client.set_access(&named(file), access).await.unwrap();
    let coverage = client.coverage(&named(file)).await.unwrap();
    let [mapping] = &coverage.mappings[..] else { panic!("{coverage:?}") };
    (mapping.pid, mapping.id.get())
}

/// Sends requests about the mapping of the next process by the session of the ended one. Returns both, which last.
async fn attack(service: &Service) -> (Connected, Victim) {
    let mut connected = connect(service);
    let pid = connected.end();
    let session = &connected.session;
    let mut tracked = victim_with_pid(service, pid);
    let name = format!("{}/{}", victim::USER, tracked.file());
    let (mapped_by, id) = share(&service.client().await.unwrap(), &name).await;
    assert_eq!(mapped_by, pid, "the pid is that of the ended process");

    let file = || Some(v1::FileRef::from(named(&name)));
    for operation in [
        Op::Untrack(v1::Untrack { file: file(), mapping_ids: vec![id] }),
        Op::Detach(v1::Detach { file: file(), pid: 0, mapping_ids: vec![] }),
        Op::Detach(v1::Detach { file: file(), pid, mapping_ids: vec![] }),
    ] {
        session.send(&packet(operation.clone()), &[]).unwrap();
        let error = session.error().unwrap();
        assert_eq!(error.code, i32::from(Code::FailedPrecondition), "{operation:?}: {error:?}");
    }
    tracked.assert_served("after the requests");
    let coverage = service.client().await.unwrap().coverage(&named(&name)).await.unwrap();
    assert_eq!(coverage.mappings.len(), 1, "{coverage:?}");
    (connected, tracked)
}

#[test(flavor = "multi_thread")]
async fn session_of_an_ended_process_concerns_no_mapping_of_the_next_one_with_its_pid() {
    require(root());
    let mut service = service(&[]);
    tokio::task::block_in_place(|| {
        assert_withstands(&mut service, |service| Handle::current().block_on(attack(service)));
    });
}

/// Checkpoints of files of the attacker, each of which waits for a process that holds its mmap_lock. They take its only thread, one
/// after the other, for half a second each.
fn block_thread(service: &Service) -> (Vec<LockHolder>, Vec<Child>) {
    let as_attacker = |arguments: &[&str]| {
        let mut command = fdmap_as(service, ATTACKER).unwrap();
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
        command
    };
    let program = require(LockHolder::compile());
    let mut holders = Vec::new();
    for number in 0..CHECKPOINTS {
        let file = memfd::create(&format!("held-{number}"), None).unwrap();
        memfd::resize(file.as_fd(), 8192).unwrap();
        let holder = LockHolder::prepare_by(&program, &path_of(&file), ATTACKER).unwrap();
        let adopt = as_attacker(&["adopt", "--pid", &holder.pid.to_string(), "--track"]).output().unwrap();
        assert!(adopt.status.success(), "{adopt:?}");
        holders.push(holder);
    }
    for holder in &mut holders {
        holder.hold().unwrap();
    }
    let checkpoint = |number| as_attacker(&["checkpoint", &format!("held-{number}")]).spawn().unwrap();
    let checkpoints = (0..CHECKPOINTS).map(checkpoint).collect();
    std::thread::sleep(QUEUED);
    (holders, checkpoints)
}

/// A process with this pid maps a file of the service, which root tracks.
fn tracked_mapper(service: &Service, pid: u32, file: OwnedFd) -> (Child, [CleanupGuard; 2]) {
    let mut command = python(EXECUTE_WITH_PID);
    let own = ["/usr/bin/env", "python3", "-c", MAP];
    command.arg(pid.to_string()).args(own).stdin(file).stdout(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let parent = CleanupGuard::new(Cleanup::process(process.id())).unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim(), pid.to_string());
    // It exists now.
    let guard = CleanupGuard::new(Cleanup::process(pid)).unwrap();
    let mut adopt = fdmap_as(service, 0).unwrap();
    let adopted = adopt.args(["adopt", "--pid", &pid.to_string(), "--fd", "0", "--track"]).output().unwrap();
    assert!(adopted.status.success(), "{adopted:?}");
    (process, [guard, parent])
}

/// True if a reply to the session has arrived.
fn has_reply(connected: &Connected) -> bool {
    let mut polled = [PollFd::new(connected.socket.as_fd(), PollFlags::POLLIN)];
    poll(&mut polled, PollTimeout::ZERO).unwrap() > 0
}

/// The process ends while its request waits for the only thread of its user.
#[test(flavor = "multi_thread")]
async fn request_that_waits_while_its_process_ends_concerns_no_mapping_of_the_next_one_with_its_pid() {
    require(root());
    let service = service(&["--max-threads-per-user", "1"]);
    let client = service.client().await.unwrap();
    create_file(&client, "shared", 8192).await.unwrap();
    let access = Access { other: Rights::ALL, ..Access::private(0, 0) };
    client.set_access(&named("shared"), access).await.unwrap();
    let (file, _) = service.fdpass().unwrap().open(&named("shared"), true).unwrap();

    let mut connected = connect(&service);
    let (_holders, checkpoints) = block_thread(&service);
    let shared = Some(v1::FileRef::from(named("0/shared")));
    let detach = Op::Detach(v1::Detach { file: shared, pid: 0, mapping_ids: vec![] });
    connected.session.send(&packet(detach), &[]).unwrap();
    // The request names the process before it waits.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let pid = connected.end();
    let (mut process, _guards) = tracked_mapper(&service, pid, file);
    assert!(!has_reply(&connected), "the request did not wait until the mapping was tracked");
    let closed = client.checkpoint(&named("shared"), false, None).await.unwrap();

    let error = connected.session.error().unwrap();
    let expected = format!("process {pid} has exited");
    assert_eq!((error.code, error.message), (i32::from(Code::FailedPrecondition), expected));
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGUSR1).unwrap();
    process.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let made = client.checkpoint(&named("shared"), false, None).await.unwrap();
    assert!(made.coverage.exact, "{made:?}");
    let written = Reported::since(&client, &named("shared"), closed.generation).await.unwrap();
    written.assert_exact(&[0], "the write of the next process");
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    process.wait().unwrap();
    for mut checkpoint in checkpoints {
        checkpoint.wait().unwrap();
    }
}
