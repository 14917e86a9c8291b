//! Quotas of tracked address spaces: children of tracked processes, page tables, and address spaces that a restarted service recovers.

mod page_tables;

use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use fdmap_client::Client;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::units::Generation;
use fdmap_client::proto::{Access, Checkpoint};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::mapper::{LockHolder, path_of};
use fdmap_tests::reported::Reported;
use fdmap_tests::service::{Service, copied, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::test_agent::command::{ChildrenCommand, Command as AgentCommand, WriterCommand};
use fdmap_tests::test_agent::{TestAgent, number};

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGES: u64 = 128;
/// A user with a small quota, and its file.
const USER: u32 = 65534;
const FILE: &str = "65534/ram";
/// Another user of the same group, and its file.
const OTHER: u32 = 1234;
const OTHER_FILE: &str = "1234/ram";
/// Tracked children of one user.
const QUOTA: u64 = 8;
const ARGUMENTS: [&str; 4] = ["--group", "65534", "--max-tracked-children-per-user", "8"];
/// How long a fork, or a checkpoint of another user, may take.
const BOUND: Duration = Duration::from_secs(1);
/// How long a change of the inode that no harvest explains makes generations conservative, and some more.
const UNEXPLAINED: Duration = Duration::from_secs(20);
/// Descriptors that calls in progress use, and helper processes that start or end.
const OTHER_DESCRIPTORS: usize = 12;

async fn create(client: &Client, uid: u32) {
    let access = Some(Access::from_mode(uid, USER, 0o600));
    let file =
        CreateFile { name: "ram".to_owned(), size_bytes: PAGES * 4096, access, ..CreateFile::default() };
    client.create(file).await.unwrap();
}

/// A service with a file of each user.
async fn service() -> (Service, Client) {
    service_with(&[]).await
}

async fn service_with(arguments: &[&str]) -> (Service, Client) {
    require(root());
    let service = Service::start(&[&ARGUMENTS, arguments].concat()).unwrap();
    let client = service.client().await.unwrap();
    create(&client, USER).await;
    create(&client, OTHER).await;
    (service, client)
}

/// An agent of a user.
fn agent(service: &Service, uid: u32) -> TestAgent {
    let mut command = Command::new(copied(service.folder(), fdmap_tests::test_agent::PROGRAM).unwrap());
    command.uid(uid).gid(USER);
    TestAgent::start_by(command, None).unwrap()
}

/// An agent that has mapped the file of its user, tracked.
fn tracked_agent(service: &Service, uid: u32) -> TestAgent {
    let mut agent = agent(service, uid);
    agent.map(service, "ram", true).unwrap();
    agent
}

fn fork(agent: &mut TestAgent, count: u64) {
    let slowest = number(agent.children(0, ChildrenCommand::Fork { count }).unwrap()).unwrap();
    assert!(Duration::from_micros(slowest) < BOUND, "a fork took {slowest} us");
}

fn fork_briefly(agent: &mut TestAgent, count: u64, page: u64) {
    let slowest = agent.children(0, ChildrenCommand::ForkBriefly { count, page }).unwrap();
    let slowest = number(slowest).unwrap();
    assert!(Duration::from_micros(slowest) < BOUND, "a fork took {slowest} us");
}

async fn checkpoint(client: &Client, name: &str) -> Checkpoint {
    client.checkpoint(&named(name), true, None).await.unwrap()
}

async fn changed(client: &Client, name: &str, since: Generation) -> Vec<u64> {
    Reported::since(client, &named(name), since).await.unwrap().pages
}

/// Makes checkpoints until coverage is exact.
async fn exact(client: &Client, name: &str) -> Generation {
    let began = Instant::now();
    loop {
        let made = checkpoint(client, name).await;
        if made.coverage.exact {
            return made.generation;
        }
        assert!(began.elapsed() < UNEXPLAINED, "{:?}", made.coverage);
    }
}

/// Number of tracked mappings of children.
async fn tracked_children(client: &Client, name: &str) -> u64 {
    let mappings = client.coverage(&named(name)).await.unwrap().mappings;
    mappings.iter().filter(|mapping| mapping.inherited).count() as u64
}

fn descriptors(service: &Service) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", service.pid())).unwrap().count()
}

/// Asserts that the service soon has at most `max` descriptors. It drops those of further children when the companion has.
#[track_caller]
fn assert_descriptors(service: &Service, max: usize) {
    let began = Instant::now();
    while descriptors(service) > max {
        assert!(began.elapsed() < 2 * BOUND, "{} descriptors, of {max}", descriptors(service));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Children beyond the quota are not tracked: each costs no descriptor, and what it writes is reported.
#[test(flavor = "multi_thread")]
async fn children_beyond_the_quota_cost_nothing_and_lose_no_write() {
    const CHILDREN: u64 = 60;
    let (service, client) = service().await;
    let mut agent = tracked_agent(&service, USER);
    exact(&client, FILE).await;
    let max = descriptors(&service) + 3 * QUOTA as usize + OTHER_DESCRIPTORS;
    fork(&mut agent, CHILDREN);
    assert_descriptors(&service, max);
    let mut since = checkpoint(&client, FILE).await.generation;
    assert_eq!(tracked_children(&client, FILE).await, QUOTA);
    for first in [0, CHILDREN] {
        let written: Vec<u64> = (first..first + CHILDREN).collect();
        for (child, page) in written.iter().enumerate() {
            agent.children(0, ChildrenCommand::Write { child, page: *page }).unwrap();
        }
        let made = checkpoint(&client, FILE).await;
        assert!(!made.coverage.exact);
        let reported = changed(&client, FILE, since).await;
        let lost: Vec<_> = written.iter().filter(|page| !reported.contains(page)).collect();
        assert!(lost.is_empty(), "{lost:?} are not reported");
        assert_descriptors(&service, max);
        since = made.generation;
    }
    // Those that exit before the next checkpoint were forked after the last one.
    fork_briefly(&mut agent, 1000, 77);
    assert_descriptors(&service, max);
    checkpoint(&client, FILE).await;
    assert!(changed(&client, FILE, since).await.contains(&77));

    // Track requests have a quota of their own.
    agent.map(&service, "ram", true).unwrap();
    // Children that have ended no longer count.
    agent.children(0, ChildrenCommand::End).unwrap();
    exact(&client, FILE).await;
    assert_eq!(tracked_children(&client, FILE).await, 0);
    drop(agent);
    checkpoint(&client, FILE).await;
    let mut agent = tracked_agent(&service, USER);
    exact(&client, FILE).await;
    fork(&mut agent, QUOTA);
    checkpoint(&client, FILE).await;
    assert_eq!(tracked_children(&client, FILE).await, QUOTA);
    let since = exact(&client, FILE).await;
    agent.children(0, ChildrenCommand::Write { child: QUOTA as usize - 1, page: 5 }).unwrap();
    checkpoint(&client, FILE).await;
    assert_eq!(changed(&client, FILE, since).await, [5]);
}

/// Forks of one user change nothing for others.
#[test(flavor = "multi_thread")]
async fn children_of_another_user_are_tracked_exactly() {
    let (service, client) = service().await;
    let mut forking = tracked_agent(&service, USER);
    checkpoint(&client, FILE).await;
    let max = descriptors(&service) + 3 * QUOTA as usize + OTHER_DESCRIPTORS;
    fork(&mut forking, 30);
    // Forks all the time meanwhile.
    let command = ChildrenCommand::ForkBriefly { count: 4000, page: 3 };
    let command = WriterCommand::Children { mapping: 0, command };
    forking.send(&AgentCommand::Writer(command)).unwrap();

    let mut other = tracked_agent(&service, OTHER);
    let began = Instant::now();
    exact(&client, OTHER_FILE).await;
    fork(&mut other, 2);
    let mut since = exact(&client, OTHER_FILE).await;
    assert!(began.elapsed() < UNEXPLAINED);
    assert_eq!(tracked_children(&client, OTHER_FILE).await, 2);
    for round in 0..20 {
        other.children(0, ChildrenCommand::Write { child: round % 2, page: round as u64 }).unwrap();
        let began = Instant::now();
        let made = checkpoint(&client, OTHER_FILE).await;
        assert!(began.elapsed() < BOUND, "a checkpoint took {:?}", began.elapsed());
        assert!(made.coverage.exact, "{:?}", made.coverage);
        assert_eq!(changed(&client, OTHER_FILE, since).await, [round as u64]);
        since = made.generation;
        // Children that are in progress at this moment have a descriptor, too.
        assert_descriptors(&service, max + 3 * 3 + 64);
        checkpoint(&client, FILE).await;
    }
    let slowest = number(forking.reply().unwrap()).unwrap();
    assert!(Duration::from_micros(slowest) < BOUND, "a fork took {slowest} us");
}

/// In each round the agent forks children that exit, as many as its user may have, and one that stays, which is tracked after the next
/// checkpoint, or one within `patience`. From the fourth round on, a mapping exists that is not tracked.
async fn fork_in_rounds(service: &Service, client: &Client, agent: &mut TestAgent, patience: Duration) {
    let mut untracked = None;
    for round in 0..6 {
        if round == 3 {
            let mut mapping = self::agent(service, USER);
            mapping.map(service, "ram", false).unwrap();
            untracked = Some(mapping);
        }
        let since = client.coverage(&named(FILE)).await.unwrap().generation;
        fork_briefly(agent, QUOTA - round, 40 + round);
        checkpoint(client, FILE).await;
        assert!(changed(client, FILE, since).await.contains(&(40 + round)));
        fork(agent, 1);
        let began = Instant::now();
        loop {
            checkpoint(client, FILE).await;
            let tracked = tracked_children(client, FILE).await;
            if tracked == round + 1 {
                break;
            }
            assert!(began.elapsed() < patience, "{tracked} in round {round}");
        }
    }
    drop(untracked);
}

/// Each child that stays writes a page. Returns the pages.
fn write_in_children(agent: &mut TestAgent) -> [u64; 6] {
    let pages = [10, 11, 12, 13, 14, 15];
    for (child, page) in pages.into_iter().enumerate() {
        agent.children(0, ChildrenCommand::Write { child, page }).unwrap();
    }
    pages
}

#[test(flavor = "multi_thread")]
async fn children_that_exited_do_not_count_after_the_next_checkpoint() {
    let (service, client) = service().await;
    let mut agent = tracked_agent(&service, USER);
    fork_in_rounds(&service, &client, &mut agent, Duration::ZERO).await;
    let since = exact(&client, FILE).await;
    let written = write_in_children(&mut agent);
    let made = checkpoint(&client, FILE).await;
    assert!(made.coverage.exact, "{:?}", made.coverage);
    assert_eq!(changed(&client, FILE, since).await, written);
}

/// Without the kernel objects of userfaultfds, the userfaultfd of a child may be taken for that of its sibling.
#[test(flavor = "multi_thread")]
async fn children_that_are_identified_by_their_ancestor_lose_no_write_when_siblings_exit() {
    let (service, client) = service_with(&["--probe", "syscalls"]).await;
    let mut agent = tracked_agent(&service, USER);
    // On a host under load, a search of /proc for mappers may not end in its time.
    fork_in_rounds(&service, &client, &mut agent, UNEXPLAINED).await;
    for _ in 0..3 {
        let since = checkpoint(&client, FILE).await.generation;
        let written = write_in_children(&mut agent);
        checkpoint(&client, FILE).await;
        let reported = changed(&client, FILE, since).await;
        assert!(written.iter().all(|page| reported.contains(page)), "{reported:?}");
    }
}

/// Without a walk, the maps of all processes are read to find a child. One that holds its mmap_lock is in the way of no other.
#[test(flavor = "multi_thread")]
async fn child_is_identified_beside_a_process_that_holds_its_mmap_lock() {
    let (service, client) = service_with(&["--probe", "syscalls"]).await;
    let other = fdmap_sys::memfd::create("other", None).unwrap();
    fdmap_sys::fd::write_at(other.as_fd(), 0, &[1; 2 * 4096]).unwrap();
    // The pid of the agent is most likely a higher one.
    let holder = require(LockHolder::start(&path_of(&other)));
    let mut agent = tracked_agent(&service, USER);
    checkpoint(&client, FILE).await;
    fork(&mut agent, 1);
    let began = Instant::now();
    while tracked_children(&client, FILE).await == 0 {
        assert!(began.elapsed() < UNEXPLAINED, "the child is not found");
        checkpoint(&client, FILE).await;
    }
    assert!(holder.holds(), "the lock is still held");
}

#[test(flavor = "multi_thread")]
async fn children_of_root_are_not_limited() {
    let (service, client) = service().await;
    let mut agent = TestAgent::start(None).unwrap();
    agent.map(&service, FILE, true).unwrap();
    checkpoint(&client, FILE).await;
    fork(&mut agent, 3 * QUOTA);
    checkpoint(&client, FILE).await;
    assert_eq!(tracked_children(&client, FILE).await, 3 * QUOTA);
}

/// The address spaces that a restarted service recovers count for their users, also beyond a lower limit.
#[test(flavor = "multi_thread")]
async fn recovered_address_spaces_count() {
    require(root());
    let arguments = |max| ["--group", "65534", "--allow-keep", "all", "--max-tracked-per-user", max];
    let mut service = Service::start_with_fd_store(&arguments("4")).unwrap();
    let client = service.client().await.unwrap();
    create(&client, USER).await;
    let mut agents = [tracked_agent(&service, USER), tracked_agent(&service, USER)];
    agents[0].map(&service, "ram", true).unwrap();
    for max in ["4", "2", "4"] {
        service.kill().unwrap();
        service.restart_with(&arguments(max)).unwrap();
        let client = service.client().await.unwrap();
        let since = checkpoint(&client, FILE).await;
        assert_eq!(since.coverage.tracked_mappings, 3, "all of them are tracked");
        if max == "2" {
            let error = agents[1].map(&service, "ram", true).unwrap_err().to_string();
            assert!(error.contains("user 65534 has 3 tracked address spaces"), "{error}");
        }
        agents[1].poke(0, 9, 10).unwrap();
        checkpoint(&client, FILE).await;
        assert!(changed(&client, FILE, since.generation).await.contains(&9));
    }
    let client = service.client().await.unwrap();
    agents[1].map(&service, "ram", true).unwrap();
    let error = agents[1].map(&service, "ram", true).unwrap_err().to_string();
    assert!(error.contains("user 65534 has 4 tracked address spaces"), "{error}");
    // What ended no longer counts.
    let [first, mut second] = agents;
    first.kill().unwrap();
    checkpoint(&client, FILE).await;
    for _ in 0..2 {
        second.map(&service, "ram", true).unwrap();
    }
    second.map(&service, "ram", true).unwrap_err();
}

/// A process of the user, which runs a Python program that maps a memfd `adopted`, and that root tracks.
fn tracked_by_root(service: &Service, program: &str) -> LineProcess {
    let mut process = Command::new("python3");
    process.args(["-c", program]).uid(USER).gid(USER);
    let mut process = LineProcess::start(process, None).unwrap();
    assert_eq!(process.receive().unwrap(), "mapped");
    let (mut adopt, pid) = (fdmap_as(service, 0).unwrap(), process.pid().to_string());
    let output = adopt.args(["adopt", "--track", "--pid", &pid, "--uid", "65534"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    process
}

/// A user is limited also where root tracks its process.
#[test(flavor = "multi_thread")]
async fn children_of_a_process_that_root_tracks_count_for_its_user() {
    const FORKS: &str = "import mmap, os, sys
fd = os.memfd_create('adopted')
os.ftruncate(fd, 1 << 20)
memory = mmap.mmap(fd, 1 << 20)
ended, end = os.pipe()
print('mapped', flush=True)
for line in sys.stdin:
    for child in range(int(line)):
        if os.fork() == 0:
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
    print('forked', flush=True)";
    const ADOPTED: &str = "65534/adopted";
    let (service, client) = service().await;
    let mut process = tracked_by_root(&service, FORKS);
    checkpoint(&client, ADOPTED).await;
    process.send(&(2 * QUOTA).to_string()).unwrap();
    assert_eq!(process.receive().unwrap(), "forked");
    checkpoint(&client, ADOPTED).await;
    assert_eq!(tracked_children(&client, ADOPTED).await, QUOTA);
}

/// Root is charged for an address space that it tracks, before and after a restart of the service.
#[test(flavor = "multi_thread")]
async fn address_space_that_root_tracks_counts_for_root_over_a_restart() {
    const MAPS_MEMFD: &str = "import mmap, os, sys
fd = os.memfd_create('adopted')
os.ftruncate(fd, 1 << 20)
memory = mmap.mmap(fd, 1 << 20)
print('mapped', flush=True)
sys.stdin.read()";
    require(root());
    let refused_by = |service: &Service, agent: &mut TestAgent| {
        let error = agent.map(service, "ram", true).unwrap_err().to_string();
        assert!(error.contains("has 1 tracked address spaces"), "{error}");
    };
    let arguments = ["--group", "65534", "--allow-keep", "all", "--max-tracked-per-user", "1"];
    let service = Service::start_with_fd_store(&arguments).unwrap();
    create(&service.client().await.unwrap(), USER).await;
    let _process = tracked_by_root(&service, MAPS_MEMFD);
    assert!(is_tracked(&service.client().await.unwrap(), "65534/adopted").await);
    let mut agent = tracked_agent(&service, USER);
    refused_by(&service, &mut agent);
    service.kill().unwrap();
    service.restart().unwrap();
    assert!(is_tracked(&service.client().await.unwrap(), "65534/adopted").await);
    refused_by(&service, &mut agent);
    agent.call(&AgentCommand::Writer(WriterCommand::Unmap(0))).unwrap();
    let began = Instant::now();
    while let Err(error) = agent.map(&service, "ram", true) {
        assert!(began.elapsed() < UNEXPLAINED, "{error}");
        service.client().await.unwrap().checkpoint(&named(FILE), true, None).await.unwrap();
    }
}

async fn is_tracked(client: &Client, file: &str) -> bool {
    client.coverage(&named(file)).await.unwrap().mappings.iter().any(|mapping| !mapping.inherited)
}
