//! A session whose process has ended, while another user's process has its pid.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use fdmap_client::Client;
use fdmap_client::proto::file::{Access, Rights};
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_tests::attack::{assert_withstands, service};
use fdmap_tests::cleanup::{Cleanup, CleanupGuard};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::raw::{RawSession, packet};
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::victim::{self, GROUP, Victim};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType};
use tokio::runtime::Handle;
use tonic::Code;

use crate::ATTACKER;

/// Connects the socket that is its standard input, and waits until it is killed.
const CONNECT: &str = "
import signal, socket, sys
socket.socket(fileno=0).connect(sys.argv[1])
print(flush=True)
signal.pause()
";

/// Executes a program in a child that has a given pid: clone3(2) with set_tid.
const EXECUTE_WITH_PID: &str = "
import ctypes, os, signal, struct, sys
pid, program = ctypes.c_int(int(sys.argv[1])), sys.argv[2:]
libc = ctypes.CDLL(None, use_errno=True)
# struct clone_args: exit_signal is the fifth field, set_tid and its size are the ninth and tenth.
clone_args = struct.pack('11Q', 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(pid), 1, 0)
CLONE3 = 435
child = libc.syscall(CLONE3, clone_args, len(clone_args))
if child == 0:
    os.execv(program[0], program)
if child < 0:
    sys.exit('clone3: ' + os.strerror(ctypes.get_errno()))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
";

fn python(script: &str) -> Command {
    let mut command = Command::new("python3");
    command.args(["-c", script]);
    command
}

/// A session that a process of the attacker's user has opened and passed on, and the pid of that process, which has ended.
fn session_of_ended_process(service: &Service) -> (RawSession, u32) {
    let socket =
        socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    let theirs: OwnedFd = socket.try_clone().unwrap();
    let mut command = python(CONNECT);
    command.arg(service.endpoint().fdpass).stdin(theirs).stdout(Stdio::piped()).uid(ATTACKER).gid(GROUP);
    let mut process = command.spawn().unwrap();
    let guard = CleanupGuard::new(Cleanup::process(process.id())).unwrap();
    // Its line is printed when it is connected.
    process.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let session = RawSession::of(socket).greet().unwrap();
    process.kill().unwrap();
    process.wait().unwrap();
    drop(guard);
    (session, process.id())
}

/// The victim, in a process with this pid.
fn victim_with_pid(service: &Service, pid: u32) -> Victim {
    let mut command = python(EXECUTE_WITH_PID);
    command.arg(pid.to_string()).arg(std::env::current_exe().unwrap());
    Victim::start_by(command, service.folder()).unwrap()
}

/// Lets all users write to the tracked file of the victim. Returns the pid of its mapping's process, and the mapping's id.
async fn share(client: &Client, file: &str) -> (u32, u64) {
    let access = Access { other: Rights::ALL, ..Access::private(victim::USER, GROUP) };
    client.set_access(&named(file), access).await.unwrap();
    let coverage = client.coverage(&named(file)).await.unwrap();
    let [mapping] = &coverage.mappings[..] else { panic!("{coverage:?}") };
    (mapping.pid, mapping.id.get())
}

/// Sends requests about the mapping of the next process by the session of the ended one. Returns both, which last.
async fn attack(service: &Service) -> (RawSession, Victim) {
    let (session, pid) = session_of_ended_process(service);
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
        let expected = [Code::FailedPrecondition, Code::NotFound, Code::PermissionDenied].map(i32::from);
        assert!(expected.contains(&error.code), "{operation:?}: {error:?}");
    }
    tracked.assert_served("after the requests");
    let coverage = service.client().await.unwrap().coverage(&named(&name)).await.unwrap();
    assert_eq!(coverage.mappings.len(), 1, "{coverage:?}");
    (session, tracked)
}

#[test(flavor = "multi_thread")]
async fn session_of_an_ended_process_concerns_no_mapping_of_the_next_one_with_its_pid() {
    require(root());
    let mut service = service(&[]);
    tokio::task::block_in_place(|| {
        assert_withstands(&mut service, |service| Handle::current().block_on(attack(service)));
    });
}
