//! Page tables of tracked mappings, of their children, and of mappings that are no longer tracked.

use std::time::{Duration, Instant};

use fdmap_client::Client;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::Access;
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::test_agent::command::{ChildrenCommand, Command as AgentCommand, WriterCommand};

use crate::{
    FILE, OTHER, UNEXPLAINED, USER, agent, changed, checkpoint, exact, fork, service_with, tracked_agent,
    tracked_children,
};

/// A file whose page tables take 6 MiB and some.
const FILE_BYTES: u64 = 3 << 30;
const TABLE_BYTES: u64 = FILE_BYTES / 512;
/// Twice as many, but not three times.
const MAX_TABLE_BYTES: u64 = 16 << 20;
const LIMIT: [&str; 2] = ["--max-page-table-bytes-per-user", "16777216"];

async fn create_large(client: &Client, uid: u32, name: &str) {
    let access = Some(Access::from_mode(uid, USER, 0o600));
    let file = CreateFile { name: name.to_owned(), size_bytes: FILE_BYTES, access, ..CreateFile::default() };
    client.create(file).await.unwrap();
}

/// Ends the tracking of a mapping, which stays.
fn detach(service: &Service, pid: u32, file: &str) {
    let detached = service.fdpass().unwrap().detach(Some(pid), &named(file), &[]).unwrap();
    assert_eq!(detached, 1);
}

fn unmap(agent: &mut TestAgent, mapping: usize) {
    agent.call(&AgentCommand::Writer(WriterCommand::Unmap(mapping))).unwrap();
}

/// Asserts that the agent may have no further page tables for a large file.
#[track_caller]
fn refused(service: &Service, agent: &mut TestAgent) {
    let error = agent.map(service, "ram", true).unwrap_err().to_string();
    assert!(error.contains("bytes of page tables of tracked mappings"), "{error}");
}

/// Page tables that tracking allocates, and that the kernel charges to the service, are those of the whole mapping, which holds no data.
#[test(flavor = "multi_thread")]
async fn page_tables_of_tracked_mappings_are_bounded() {
    require(root());
    let arguments =
        ["--group", "65534", "--allow-keep", "all", "--max-page-table-bytes-per-user", "16777216"];
    let service = Service::start_with_fd_store(&arguments).unwrap();
    let client = service.client().await.unwrap();
    for uid in [USER, OTHER] {
        create_large(&client, uid, "ram").await;
    }
    let mut agents = [agent(&service, USER), agent(&service, USER)];
    for agent in &mut agents {
        agent.map(&service, "ram", true).unwrap();
        assert!(page_table_bytes(agent.pid()) >= TABLE_BYTES);
    }
    let [first, second] = &mut agents;
    refused(&service, first);
    tracked_agent(&service, OTHER);
    // A mapping that is no longer tracked counts until it is unmapped.
    detach(&service, first.pid(), FILE);
    refused(&service, second);
    unmap(first, 0);
    map_when_freed(&service, second);
    refused(&service, first);
    // A restarted service charges for what it recovers.
    service.kill().unwrap();
    service.restart().unwrap();
    refused(&service, first);
    unmap(second, 0);
    unmap(second, 1);
    let began = Instant::now();
    while agents[0].map(&service, "ram", true).is_err() {
        assert!(began.elapsed() < UNEXPLAINED, "page tables of mappings that ended count");
        service.client().await.unwrap().checkpoint(&named(FILE), true, None).await.unwrap();
    }
}

/// Children beyond the page tables of children are not tracked, and leave those of Track requests.
#[test(flavor = "multi_thread")]
async fn page_tables_of_children_are_bounded_apart_from_those_of_track_requests() {
    let (service, client) = service_with(&LIMIT).await;
    create_large(&client, USER, "large").await;
    let mut agent = agent(&service, USER);
    agent.map(&service, "large", true).unwrap();
    exact(&client, "65534/large").await;
    fork(&mut agent, 4);
    let since = checkpoint(&client, "65534/large").await;
    assert!(!since.coverage.exact);
    assert_eq!(tracked_children(&client, "65534/large").await, 2, "of 6 MiB each");
    let written = [7, 8, 9, 10];
    for (child, page) in written.into_iter().enumerate() {
        agent.children(0, ChildrenCommand::Write { child, page }).unwrap();
    }
    checkpoint(&client, "65534/large").await;
    let reported = changed(&client, "65534/large", since.generation).await;
    assert!(written.iter().all(|page| reported.contains(page)), "{} pages", reported.len());
    agent.map(&service, "large", true).unwrap();
}

/// A user who tracks, ends that, and tracks again, with ever more memory mapped.
#[test(flavor = "multi_thread")]
async fn page_tables_that_tracking_left_count_until_they_are_freed() {
    require(root());
    let service = Service::start(&[&["--group", "65534"][..], &LIMIT].concat()).unwrap();
    let client = service.client().await.unwrap();
    create_large(&client, USER, "ram").await;
    let mut agents = [agent(&service, USER), agent(&service, USER)];
    let [first, second] = &mut agents;
    let before = page_table_bytes(first.pid());
    for mapping in 0..2 {
        first.map(&service, "ram", true).unwrap();
        detach(&service, first.pid(), FILE);
        assert!(page_table_bytes(first.pid()) >= before + (mapping + 1) * TABLE_BYTES);
    }
    refused(&service, first);
    refused(&service, second);
    assert!(page_table_bytes(first.pid()) <= before + MAX_TABLE_BYTES);
    unmap(first, 0);
    for mapping in 0..4 {
        map_when_freed(&service, second);
        refused(&service, second);
        unmap(second, mapping);
        checkpoint(&client, FILE).await;
    }
    // A file that is deleted is mapped as before.
    map_when_freed(&service, second);
    client.delete(&named(FILE)).await.unwrap();
    create_large(&client, USER, "ram").await;
    refused(&service, first);
    let [mut first, second] = agents;
    second.kill().unwrap();
    map_when_freed(&service, &mut first);
    refused(&service, &mut first);
    detach(&service, first.pid(), FILE);
    await_pagemaps(&service, 1);
    first.kill().unwrap();
    // A sweep drops what the service has of a process that ended.
    await_pagemaps(&service, 0);
    let mut third = agent(&service, USER);
    for _ in 0..2 {
        map_when_freed(&service, &mut third);
    }
}

/// Maps and tracks the large file, after page tables were freed. On a host under load, that takes longer than Track waits for it.
#[track_caller]
fn map_when_freed(service: &Service, agent: &mut TestAgent) {
    let began = Instant::now();
    while let Err(error) = agent.map(service, "ram", true) {
        assert!(began.elapsed() < UNEXPLAINED, "{error}");
    }
}

/// Waits until the service has this many pagemaps open.
#[track_caller]
fn await_pagemaps(service: &Service, count: usize) {
    let open = || {
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", service.pid())).unwrap();
        let targets = descriptors.flatten().flat_map(|entry| std::fs::read_link(entry.path()));
        targets.filter(|target| target.ends_with("pagemap")).count()
    };
    let began = Instant::now();
    while open() != count {
        assert!(began.elapsed() < UNEXPLAINED, "{} pagemaps are open, not {count}", open());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Children that are no longer tracked, since their file was deleted.
#[test(flavor = "multi_thread")]
async fn page_tables_that_children_left_count_until_they_are_freed() {
    let (service, client) = service_with(&LIMIT).await;
    let mut agent = agent(&service, USER);
    let mut children = Vec::new();
    for name in ["65534/first", "65534/second", "65534/third"] {
        create_large(&client, USER, name.strip_prefix("65534/").unwrap()).await;
        agent.map(&service, name.strip_prefix("65534/").unwrap(), true).unwrap();
        exact(&client, name).await;
        let mapping = children.len();
        agent.children(mapping, ChildrenCommand::Fork { count: 1 }).unwrap();
        checkpoint(&client, name).await;
        children.push(tracked_children(&client, name).await);
        client.delete(&named(name)).await.unwrap();
        unmap(&mut agent, mapping);
    }
    assert_eq!(children, [1, 1, 0]);
    let mapping = children.len();
    create_large(&client, USER, "last").await;
    agent.map(&service, "last", true).unwrap();
    exact(&client, "65534/last").await;
    agent.children(mapping, ChildrenCommand::End).unwrap();
    let began = Instant::now();
    let mut tracked = 0;
    while tracked == 0 {
        assert!(began.elapsed() < UNEXPLAINED, "page tables of children that ended count");
        agent.children(mapping, ChildrenCommand::Fork { count: 1 }).unwrap();
        checkpoint(&client, "65534/last").await;
        tracked = tracked_children(&client, "65534/last").await;
    }
}

/// The page tables of process `pid`: `VmPTE` of `/proc/PID/status`, in bytes.
fn page_table_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
