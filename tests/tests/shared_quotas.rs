//! Limits of all users but root together: one user takes all that there is of a resource, the next one is refused, and root is served.

use std::any::Any;
use std::collections::BTreeSet;
use std::io::BufRead as _;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::{CreateFile, SummaryOptions};
use fdmap_client::proto::convert::FileName;
use fdmap_client::proto::shared_snapshot::BodyLayout;
use fdmap_client::proto::{Access, Checkpoint, GapKind, error_chain};
use fdmap_client::{Client, ClientError, Endpoint, FdpassClient, Timeouts};
use fdmap_proto::v1;
use fdmap_sys::fd;
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::line_process::LineProcess;
use fdmap_tests::reported::create_file;
use fdmap_tests::service::{Service, copied, named, program};
use fdmap_tests::test;
use fdmap_tests::test_agent::command::ChildrenCommand;
use fdmap_tests::test_agent::{PROGRAM, TestAgent};
use fdmap_tests::unread::{self, LARGEST_WINDOW, NO_WINDOW};
use fdmap_tests::victim::{GROUP, become_user};
use fdmap_tests::{HarnessError, HarnessResult};
use tokio::net::UnixStream;
use tonic::Status;

/// The first argument of this program as a user.
const ROLE: &str = "user";
/// The user who takes all, and the one who comes too late.
const FIRST: u32 = 65_534;
const SECOND: u32 = 1234;
/// The same, and root.
const USERS: [u32; 3] = [FIRST, SECOND, 0];
/// Each limit is lower.
const MAX_TAKEN: usize = 20;
const PAGE: u64 = 4096;
/// Pages of a block: those that share an array of stamps, or of states.
const BLOCK: u64 = 4096;
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Calls of which at least one meets others in progress.
const MAX_CALLS: usize = 10_000;
/// Tasks that make calls all the time.
const CALLING_TASKS: usize = 8;

/// A limit that refuses requests.
struct Limit {
    option: &'static str,
    value: u64,
    /// The text of a refusal after `all users together have`.
    refusal: &'static str,
}

/// Limits that refuse requests. That of ephemeral files has the same value as that of files, and is reached by root alone.
const REFUSING: [Limit; 14] = [
    limit("--max-files-per-user", 3, " 3 files; 1 more would exceed the limit of 3"),
    limit("--max-bytes-per-user", 1 << 20, " 1048576 bytes of files; 524288 more"),
    limit("--max-allocated-bytes-per-user", 1 << 16, " 65536 bytes of memory in files; the limit"),
    limit("--max-sessions-per-user", 3, " 3 connections; 1 more would exceed the limit of 3"),
    limit("--max-watches-per-user", 3, " 3 watches; 1 more would exceed the limit of 3"),
    limit("--max-streams-per-user", 3, " 3 streams; 1 more would exceed the limit of 3"),
    limit("--max-buffered-bytes-per-user", 1 << 16, " bytes of unread answers and of requests in progress; "),
    limit("--max-retained-snapshots-per-user", 3, " 3 retained snapshots; 1 more"),
    limit("--max-state-bytes-per-user", 1 << 15, " bytes of page states; "),
    limit("--max-shared-snapshots-per-user", 3, " 3 shared snapshots; 1 more"),
    limit("--max-shared-snapshot-bytes", 1 << 15, " bytes of shared snapshots; "),
    limit("--max-tracked-per-user", 3, " 3 tracked address spaces; 1 more"),
    limit("--max-page-table-bytes-per-user", 8 << 20, " bytes of page tables of tracked mappings; "),
    limit("--max-calls-per-user", 2, " 2 calls in progress; 1 more would exceed the limit of 2"),
];

/// Limits that refuse no request.
const OTHERS: [&str; 2] = [
    // `children_of_all_users_together_are_bounded` shows it.
    "--max-tracked-children-per-user",
    // Further calls wait. The limit of all users is a constant, whatever their limit of one is.
    "--max-threads-per-user",
];

const fn limit(option: &'static str, value: u64, refusal: &'static str) -> Limit {
    Limit { option, value, refusal }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [ROLE, runtime_dir, uid, option] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..]
    else {
        return fdmap_tests::harness::main();
    };
    become_user(uid.parse().unwrap()).unwrap();
    let mut user = User { endpoint: Endpoint::in_runtime_dir(runtime_dir), held: Vec::new() };
    // Two threads: a connection answers the pings of the service between two calls.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.unwrap().block_on(async {
        for _ in std::io::stdin().lock().lines() {
            match user.take(option).await {
                Ok(held) => {
                    user.held.push(held);
                    println!("ok");
                }
                Err(HarnessError::Client(ClientError::Refused { code, message })) => {
                    println!("{code:?}: {message}");
                }
                Err(error) => println!("{}", error_chain(&error)),
            }
        }
    });
    ExitCode::SUCCESS
}

/// A process of a user. It holds what it takes.
struct User {
    endpoint: Endpoint,
    held: Vec<Box<dyn Any>>,
}

impl User {
    /// Takes something that the option limits.
    async fn take(&self, option: &str) -> HarnessResult<Box<dyn Any>> {
        let nth = self.held.len();
        let mut session = FdpassClient::connect(&self.endpoint, Timeouts::default())?;
        if option == "--max-sessions-per-user" {
            return Ok(Box::new(session));
        }
        if option == "--max-buffered-bytes-per-user" {
            return self.leave_unread().await;
        }
        let client = Client::connect(&self.endpoint, Timeouts::default()).await?;
        let bytes = match option {
            "--max-bytes-per-user" => 512 << 10,
            // 6 MiB of page tables.
            "--max-page-table-bytes-per-user" => 3 << 30,
            "--max-state-bytes-per-user" => 16 * BLOCK * PAGE,
            _ => 16 * PAGE,
        };
        let name = format!("file-{nth}");
        create_file(&client, &name, bytes).await?;
        let name = named(&name);
        let (file, _) = session.open(&name, true)?;
        let held: Box<dyn Any> = match option {
            "--max-allocated-bytes-per-user" => {
                fd::write_at(file.as_fd(), 0, &vec![1; usize::try_from(bytes).unwrap()])?;
                Box::new(())
            }
            "--max-watches-per-user" | "--max-streams-per-user" => Box::new(client.watch().await?),
            "--max-retained-snapshots-per-user" | "--max-state-bytes-per-user" => {
                for first in (0..bytes).step_by(usize::try_from(BLOCK * PAGE).unwrap()) {
                    fd::write_at(file.as_fd(), first, &[1])?;
                }
                let retained =
                    SummaryOptions { retain_for: SETTLE_TIMEOUT * 10, ..SummaryOptions::default() };
                client.summary(&name, &retained).await?;
                Box::new(())
            }
            "--max-shared-snapshots-per-user" | "--max-shared-snapshot-bytes" => {
                Box::new(session.snapshot(&name, None, BodyLayout::Entries, Duration::ZERO)?)
            }
            "--max-tracked-per-user" | "--max-page-table-bytes-per-user" => {
                let mut mapping = session.map(&name, true)?;
                mapping.track()?;
                Box::new(mapping)
            }
            "--max-calls-per-user" => {
                self.call_until_refused(&client).await?;
                Box::new(())
            }
            _ => Box::new(()),
        };
        Ok(Box::new((file, client, held)))
    }

    /// Makes a call whose answer stays unread.
    async fn leave_unread(&self) -> HarnessResult<Box<dyn Any>> {
        let socket = UnixStream::connect(&self.endpoint.socket).await.unwrap();
        let channel = unread::channel(socket, [NO_WINDOW, LARGEST_WINDOW]).await;
        let answer =
            unread::call::<_, v1::InfoResponse>(&channel, "/fdmap.v1.Host/Info", v1::InfoRequest {}).await;
        let refused = |status: Status| ClientError::Refused {
            code: RefusalCode::from_number(status.code().into()),
            message: status.message().to_owned(),
        };
        Ok(Box::new(answer.map_err(refused)?))
    }

    /// Makes calls, which end soon. Only the first user makes several at a time.
    async fn call_until_refused(&self, client: &Client) -> HarnessResult<()> {
        let uid = nix::unistd::getuid().as_raw();
        let name = named("file-0");
        let tasks = if uid == FIRST { CALLING_TASKS } else { 0 };
        for _ in 0..tasks {
            let (client, name) = (client.clone(), name.clone());
            tokio::spawn(async move {
                loop {
                    // Most of them are refused.
                    let _ = client.checkpoint(&name, true, None).await;
                }
            });
        }
        for _ in 0..if uid == 0 { 1 } else { MAX_CALLS } {
            client.checkpoint(&name, true, None).await?;
        }
        Ok(())
    }
}

/// Starts a process of a user.
fn user(service: &Service, uid: u32, option: &str) -> LineProcess {
    let mut command = Command::new("/proc/self/exe");
    command.arg(ROLE).arg(service.folder()).args([&uid.to_string(), option]);
    LineProcess::start(command, None).unwrap()
}

/// Takes what the option limits until that is refused. Returns how often it succeeded, and the refusal.
#[track_caller]
fn take_all(user: &mut LineProcess, limit: &Limit) -> (usize, String) {
    for taken in 0..MAX_TAKEN {
        if let Err(error) = user.call("take") {
            return (taken, error.to_string());
        }
    }
    panic!("{}: nothing is refused", limit.option)
}

fn service(options: &[&str]) -> Service {
    let group = GROUP.to_string();
    // Files that no process uses stay.
    let all = ["--group", &group, "--unused-file-timeout", "600", "--max-users-at-limit", "1"];
    Service::start(&[&all, options].concat()).unwrap()
}

#[track_caller]
fn assert_shared(limit: &Limit) {
    let Limit { option, value, refusal } = limit;
    let value = value.to_string();
    let of_users = ["--max-allocated-bytes-of-users", &value];
    // This limit of all users has an option of its own.
    let of_users = if *option == "--max-allocated-bytes-per-user" { &of_users[..] } else { &[] };
    let service = service(&[&[*option, &value], of_users].concat());
    let mut first = user(&service, FIRST, option);
    let (taken, refused) = take_all(&mut first, limit);
    let mut second = user(&service, SECOND, option);
    let began = Instant::now();
    if *option == "--max-sessions-per-user" {
        // The service closes such a connection at once, and logs at most one a second.
        let together = format!("all users together have{refusal}");
        while !service.log().contains(&together) {
            assert!(began.elapsed() < SETTLE_TIMEOUT, "{option}: no line with {together:?}");
            second.call("take").expect_err(option);
        }
    } else {
        assert!(refused.contains(&format!("ResourceExhausted: user {FIRST} has")), "{option}: {refused}");
        let error = second.call("take").expect_err(option).to_string();
        assert!(error.contains("ResourceExhausted: all users together have"), "{option}: {error}");
        assert!(error.contains(refusal), "{option}: {error}");
    }
    // Root is not limited, and does not count.
    let mut administrator = user(&service, 0, option);
    for _ in 0..=taken {
        administrator.call("take").unwrap_or_else(|error| panic!("{option}: {}", error_chain(&error)));
    }
    println!("{option} {value}: one user takes {taken}");
}

#[test]
fn resource_that_one_user_has_taken_is_refused_to_the_next_one() {
    require(root());
    REFUSING.iter().for_each(assert_shared);
}

/// A new option of the service needs a line in one of the tables.
#[test]
fn every_limit_of_one_user_is_in_a_table() {
    let output = Command::new(program("fdmapd").unwrap()).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let is_limit = |word: &&str| word.starts_with("--max-") && word.ends_with("-per-user");
    let documented: BTreeSet<_> = help.split_whitespace().filter(is_limit).collect();
    let all = REFUSING.iter().map(|limit| limit.option).chain(OTHERS);
    let listed: BTreeSet<_> = all.filter(is_limit).collect();
    assert_eq!(listed, documented);
    assert!(documented.len() > 10, "{documented:?}");
}

/// A service with a sparse file of each user, and an agent of each that has mapped its file, tracked.
async fn tracked_agents(options: &[&str], pages: u64) -> (Service, Client, [TestAgent; 3]) {
    require(root());
    let service = service(options);
    let client = service.client().await.unwrap();
    for uid in USERS {
        let access = Some(Access::from_mode(uid, GROUP, 0o600));
        let (name, size_bytes) = ("ram".to_owned(), pages * PAGE);
        client.create(CreateFile { name, size_bytes, access, ..CreateFile::default() }).await.unwrap();
    }
    let agent = |uid| {
        let mut command = Command::new(copied(service.folder(), PROGRAM).unwrap());
        command.uid(uid).gid(GROUP);
        let mut agent = TestAgent::start_by(command, None).unwrap();
        agent.map(&service, "ram", true).unwrap();
        agent
    };
    let agents = USERS.map(agent);
    (service, client, agents)
}

fn file_of(uid: u32) -> FileName {
    named(&format!("{uid}/ram"))
}

async fn checkpoint(client: &Client, uid: u32) -> Checkpoint {
    client.checkpoint(&file_of(uid), true, None).await.unwrap()
}

/// Number of tracked children that have mapped the file of a user.
async fn tracked_children(client: &Client, uid: u32) -> usize {
    checkpoint(client, uid).await;
    let mappings = client.coverage(&file_of(uid)).await.unwrap().mappings;
    mappings.iter().filter(|mapping| mapping.inherited).count()
}

/// Children beyond the limit are not tracked.
#[test(flavor = "multi_thread")]
async fn children_of_all_users_together_are_bounded() {
    let options = ["--max-tracked-children-per-user", "2"];
    let (_service, client, mut agents) = tracked_agents(&options, 16).await;
    let mut tracked = Vec::new();
    for (agent, uid) in agents.iter_mut().zip(USERS) {
        checkpoint(&client, uid).await;
        agent.children(0, ChildrenCommand::Fork { count: 3 }).unwrap();
        tracked.push(tracked_children(&client, uid).await);
    }
    assert_eq!(tracked, [2, 0, 3]);
    let [mut first, mut second, _root] = agents;
    first.children(0, ChildrenCommand::End).unwrap();
    let began = Instant::now();
    while tracked_children(&client, SECOND).await == 0 {
        assert!(began.elapsed() < SETTLE_TIMEOUT, "children that ended count");
        tracked_children(&client, FIRST).await;
        second.children(0, ChildrenCommand::Fork { count: 1 }).unwrap();
    }
}

/// Beyond the limit, stamps are those of whole blocks.
#[test(flavor = "multi_thread")]
async fn stamps_of_all_users_together_are_bounded() {
    const BLOCKS: u64 = 100;
    // Room for the stamps of 32 blocks.
    let options = ["--max-state-bytes-per-user", "1048576"];
    let (_service, client, mut agents) = tracked_agents(&options, BLOCKS * BLOCK).await;
    let mut coarse = Vec::new();
    for (agent, uid) in agents.iter_mut().zip(USERS) {
        checkpoint(&client, uid).await;
        // The second user alone writes fewer than one user may.
        for block in 0..if uid == SECOND { 20 } else { BLOCKS } {
            agent.poke(0, block * BLOCK + 7, block * BLOCK + 8).unwrap();
        }
        let gaps = checkpoint(&client, uid).await.coverage.gaps;
        coarse.push(gaps.iter().any(|gap| gap.kind == GapKind::CoarseStamps));
    }
    assert_eq!(coarse, [true, true, false]);
}
