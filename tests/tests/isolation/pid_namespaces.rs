//! Clients in other pid namespaces than the service. One in a namespace of its own can have the pid that a victim has on the host,
//! and name pids of both; several outside of the namespace of the service all have pid 0 for it. None concerns a mapping of another
//! process.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use fdmap_client::error::RefusalCode;
use fdmap_client::{ClientError, FdpassClient, Timeouts};
use fdmap_sys::pidfd;
use fdmap_sys::testing::credentials::become_user;
use fdmap_tests::attack::{assert_served, assert_withstands, service};
use fdmap_tests::harness::require;
use fdmap_tests::host::{children_of, read, root};
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::raw::RawSession;
use fdmap_tests::service::{Service, copied, program};
use fdmap_tests::test;
use fdmap_tests::test_agent::command::{ChildrenCommand, WriterCommand};
use fdmap_tests::test_agent::{PROGRAM, TestAgent};
use fdmap_tests::victim::{GROUP, USER as VICTIM, Victim};
use tokio::runtime::Handle;
use tonic::Code;

use super::ATTACKER;
use super::reused_pid::EXECUTE_WITH_PID;
use super::shared_file::{SharedFile, assert_refused, assert_unknown, detach, detached, track, untrack};

/// A user without files and processes.
const OTHER: u32 = 4321;

/// The descriptor of the session of a [`Tracked`] process.
const SESSION: i32 = 100;
/// Becomes a user, connects to the fdpass socket, and executes a program that has the session as a descriptor.
const CONNECT_AND_EXECUTE: &str = "
import os, socket, sys
user, group, descriptor = map(int, sys.argv[1:4])
os.setgroups([])
os.setgid(group)
os.setuid(user)
session = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
session.connect(sys.argv[4])
os.dup2(session.fileno(), descriptor)
os.execv(sys.argv[5], sys.argv[5:])
";

/// Executes a program, which its last arguments name.
fn on_host() -> Command {
    Command::new("env")
}

/// The same in a pid namespace of its own, where the process has this pid.
fn in_own_namespace(pid: u32) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.args(["python3", "-c", EXECUTE_WITH_PID, &pid.to_string()]);
    command
}

/// The same in the pid namespace of a process.
fn in_namespace_of(pid: u32) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &pid.to_string(), "--pid", "--mount"]);
    command
}

/// The process that the commands above execute the program in.
fn last_descendant_of(mut pid: u32) -> u32 {
    while let Some(child) = children_of(pid).unwrap().first() {
        pid = *child;
    }
    pid
}

/// The pid of a process in its own pid namespace.
fn own_pid_of(pid: u32) -> u32 {
    let status = read(format!("/proc/{pid}/status")).unwrap();
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
    pids.split_whitespace().last().unwrap().parse().unwrap()
}

/// A process with a session and a tracked mapping of a file, by another session.
struct Tracked {
    agent: TestAgent,
    session: RawSession,
    /// The pid on the host.
    pid: u32,
}

impl Tracked {
    fn start(service: &Service, mut command: Command, user: u32, file: &str) -> Self {
        command.args(["python3", "-c", CONNECT_AND_EXECUTE]);
        command
            .args([user.to_string(), GROUP.to_string(), SESSION.to_string()])
            .arg(service.endpoint().fdpass);
        command.arg(copied(service.folder(), PROGRAM).unwrap());
        let mut agent = TestAgent::start_by(command, None).unwrap();
        agent.map(service, file, true).unwrap();
        let pid = last_descendant_of(agent.pid());
        let session = pidfd::open(pid).unwrap().descriptor(SESSION).unwrap();
        Self { agent, session: RawSession::of(session).greet().unwrap(), pid }
    }

    fn write(&mut self, mapping: usize, page: u64) {
        self.agent.poke(mapping, page, page + 1).unwrap();
    }
}

/// Processes of an attack, which last.
type Processes = (Vec<Tracked>, LineProcess);

/// Uses the pids of two victims. One has the own pid of the attacker on the host, the other one has the pid of a process of the
/// attacker as its own.
async fn attack(service: &Service) -> Processes {
    let mut command = Command::new("cat");
    command.uid(ATTACKER).gid(GROUP);
    let second = LineProcess::start(command, None).unwrap();
    let mut file = SharedFile::create(service, format!("shared-{}", second.pid())).await;
    let mut victim = Tracked::start(service, on_host(), VICTIM, &file.name);
    let mut nested = Tracked::start(service, in_own_namespace(second.pid()), VICTIM, &file.name);
    let mut attacker = Tracked::start(service, in_own_namespace(victim.pid), ATTACKER, &file.name);
    assert_eq!((own_pid_of(attacker.pid), own_pid_of(nested.pid)), (victim.pid, second.pid()));
    file.settle().await;
    let mappings = file.mappings().await;
    let mut pids = [victim.pid, nested.pid, attacker.pid];
    pids.sort_unstable();
    assert_eq!(mappings.iter().map(|(pid, _)| *pid).collect::<Vec<_>>(), pids);

    let session = &attacker.session;
    for (_, id) in mappings.iter().filter(|(pid, _)| *pid != attacker.pid) {
        for operation in
            [untrack(&file, vec![*id]), detach(&file, 0, vec![*id]), detach(&file, second.pid(), vec![*id])]
        {
            assert_refused(session, operation, Code::NotFound);
        }
    }
    assert_unknown(session, ATTACKER, &file, &[victim.pid, nested.pid, 1]);
    assert_eq!(detached(session, &file, second.pid()), 0);
    for (page, process) in [&mut victim, &mut nested, &mut attacker].into_iter().enumerate() {
        process.write(0, page as u64);
    }
    file.next().await.assert_exact(&[0, 1, 2], "after the requests");
    assert_eq!(file.mappings().await, mappings);
    fork_and_untrack(service, &mut file, [&mut victim, &mut nested], &mut attacker).await;
    (vec![victim, nested, attacker], second)
}

/// Forks, untracks, tracks and detaches mappings of the attacker.
async fn fork_and_untrack(
    service: &Service,
    file: &mut SharedFile,
    mut victims: [&mut Tracked; 2],
    attacker: &mut Tracked,
) {
    let mut write = |first: u64| {
        for (page, victim) in (first..).zip(&mut victims) {
            victim.write(0, page);
        }
    };
    for command in [ChildrenCommand::Fork { count: 1 }, ChildrenCommand::Write { child: 0, page: 5 }] {
        attacker.agent.children(0, command).unwrap();
    }
    write(3);
    let reported = file.next().await;
    [3, 4, 5].into_iter().for_each(|page| reported.assert_contains(page, "after a fork"));
    attacker.agent.children(0, ChildrenCommand::End).unwrap();
    file.settle().await;

    attacker.write(0, 8);
    attacker.agent.writer(WriterCommand::Unmap(0)).unwrap();
    write(6);
    file.next().await.assert_exact(&[6, 7, 8], "after Untrack");
    assert_eq!(file.mappings().await.len(), 2);

    attacker.agent.map(service, &file.name, true).unwrap();
    file.settle().await;
    attacker.write(1, 11);
    assert_eq!(detached(&attacker.session, file, 0), 1);
    write(9);
    let reported = file.next().await;
    [9, 10, 11].into_iter().for_each(|page| reported.assert_contains(page, "after Detach"));
    assert_eq!(file.mappings().await.len(), 2);
    attacker.agent.writer(WriterCommand::Unmap(1)).unwrap();
    file.settle().await;
    write(12);
    file.next().await.assert_exact(&[12, 13], "after the end of the mapping");
}

#[test(flavor = "multi_thread")]
async fn client_that_has_the_pid_of_a_victim_in_another_namespace_concerns_no_mapping_of_it() {
    require(root());
    let mut service = service(&[]);
    tokio::task::block_in_place(|| {
        assert_withstands(&mut service, |service| Handle::current().block_on(attack(service)));
    });
}

/// A session of a user outside of the pid namespace of the service, which may not track a mapping.
fn session_outside(service: &Service, user: u32, file: &SharedFile) -> RawSession {
    let connect = || {
        become_user(user, GROUP).unwrap();
        let mut session = FdpassClient::connect(&service.endpoint(), Timeouts::default()).unwrap();
        match session.map(&file.named(), true).unwrap().track() {
            Err(ClientError::Refused { code: RefusalCode::FailedPrecondition, .. }) => {}
            other => panic!("{other:?}"),
        }
        RawSession::greeted(&service.endpoint()).unwrap()
    };
    std::thread::scope(|scope| scope.spawn(connect).join().unwrap())
}

#[test(flavor = "multi_thread")]
async fn clients_outside_of_the_pid_namespace_of_the_service_concern_no_mapping() {
    require(root());
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(program("fdmapd").unwrap());
    command.args(["--group", &GROUP.to_string(), "--unused-file-timeout", "1", "--helper-idle-timeout", "1"]);
    let service = Service::start_command(command).unwrap();
    let fdmapd = children_of(service.pid()).unwrap()[0];
    let mut inside = in_namespace_of(fdmapd);
    inside.arg(std::env::current_exe().unwrap());
    let mut served = Victim::start_by(inside, service.folder()).unwrap();
    assert_served(&mut served, "before the attack");

    let mut file = SharedFile::create(&service, "shared".to_owned()).await;
    let mut victim = Tracked::start(&service, in_namespace_of(fdmapd), VICTIM, &file.name);
    let own_pid = own_pid_of(victim.pid);
    let mappings = file.mappings().await;
    assert_eq!(mappings.iter().map(|(pid, _)| *pid).collect::<Vec<_>>(), [own_pid]);
    let sessions = [ATTACKER, OTHER].map(|user| (user, session_outside(&service, user, &file)));
    file.next().await;
    for (page, (user, session)) in (0..).zip(&sessions) {
        let ids = || vec![mappings[0].1];
        for operation in [untrack(&file, ids()), detach(&file, 0, ids()), detach(&file, 0, vec![])] {
            assert_refused(session, operation, Code::FailedPrecondition);
        }
        assert_eq!(track(session, &file, 0).code, i32::from(Code::FailedPrecondition));
        assert_unknown(session, *user, &file, &[own_pid, victim.pid, 1]);
        // Coverage is never exact here: the service does not see all tasks of the host.
        victim.write(0, page);
        let (reported, observed) = file.next_observed().await;
        reported.assert_contains(page, "after the requests");
        assert_eq!((observed, file.mappings().await), (1, mappings.clone()), "{reported:?}");
        served.assert_served("during the attack");
    }
    drop(sessions);
    victim.write(0, 7);
    let (reported, observed) = file.next_observed().await;
    reported.assert_contains(7, "after the attack");
    assert_eq!(observed, 1, "{reported:?}");
    assert_served(&mut served, "after the attack");
}
