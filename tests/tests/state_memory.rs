//! The memory of the service for one user is limited: stamps, retained snapshots, and what open streams report. No write is lost where
//! the limit is reached.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output};

use fdmap_client::Client;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::units::Generation;
use fdmap_client::proto::{Access, Checkpoint, GapKind};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::reported::Reported;
use fdmap_tests::service::{Service, copied, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const USER: u32 = 65534;
const OTHER: u32 = 1234;
/// Pages of a block: those that share an array of stamps.
const BLOCK: u64 = 4096;
const BLOCKS: u64 = 100;
/// Room for the stamps of 32 blocks.
const ARGUMENTS: [&str; 4] = ["--group", "65534", "--max-state-bytes-per-user", "1048576"];

/// Creates a sparse file of a user.
async fn create(client: &Client, uid: u32) {
    let access = Some(Access::from_mode(uid, USER, 0o600));
    let size_bytes = BLOCKS * BLOCK * 4096;
    let file = CreateFile { name: "ram".to_owned(), size_bytes, access, ..CreateFile::default() };
    client.create(file).await.unwrap();
}

/// A service with a file of each user.
async fn service() -> (Service, Client) {
    service_with(&ARGUMENTS).await
}

async fn service_with(arguments: &[&str]) -> (Service, Client) {
    require(root());
    let service = Service::start(arguments).unwrap();
    let client = service.client().await.unwrap();
    for uid in [USER, OTHER] {
        create(&client, uid).await;
    }
    (service, client)
}

/// A process of a user that has mapped its file, tracked.
fn writer(service: &Service, uid: u32) -> TestAgent {
    let mut command = Command::new(copied(service.folder(), fdmap_tests::test_agent::PROGRAM).unwrap());
    command.uid(uid).gid(USER);
    let mut agent = TestAgent::start_by(command, None).unwrap();
    agent.map(service, "ram", true).unwrap();
    agent
}

/// Writes page `page` of each of the first `blocks` blocks. Returns the pages.
fn write(agent: &mut TestAgent, blocks: u64, page: u64) -> Vec<u64> {
    let pages: Vec<u64> = (0..blocks).map(|block| block * BLOCK + page).collect();
    for page in &pages {
        agent.poke(0, *page, page + 1).unwrap();
    }
    pages
}

async fn checkpoint(client: &Client, file: &str) -> Checkpoint {
    client.checkpoint(&named(file), true, None).await.unwrap()
}

async fn changed(client: &Client, file: &str, since: Generation) -> Reported {
    Reported::since(client, &named(file), since).await.unwrap()
}

#[test(flavor = "multi_thread")]
async fn writes_to_many_blocks_take_bounded_memory_and_none_is_lost() {
    let (service, client) = service().await;
    let (mut user, mut other) = (writer(&service, USER), writer(&service, OTHER));
    let first = checkpoint(&client, "65534/ram").await.generation;
    let first_of_other = checkpoint(&client, "1234/ram").await.generation;

    let written = write(&mut user, BLOCKS, 7);
    let made = checkpoint(&client, "65534/ram").await;
    let coarse = made.coverage.gaps.iter().filter(|gap| gap.kind == GapKind::CoarseStamps).count();
    assert!(!made.coverage.exact && coarse > 0, "{:?}", made.coverage);
    let reported = changed(&client, "65534/ram", first).await;
    let lost: Vec<_> = written.iter().filter(|page| reported.pages.binary_search(page).is_err()).collect();
    assert!(lost.is_empty(), "{lost:?} are not reported");
    assert!(reported.pages.len() as u64 > BLOCK, "whole blocks are reported");
    assert!(fdmap(&service, USER, &["pages", "ram"]).status.success(), "one answer is always possible");

    // Others have room of their own.
    let of_other = write(&mut other, 20, 7);
    checkpoint(&client, "1234/ram").await;
    changed(&client, "1234/ram", first_of_other).await.assert_exact(&of_other, "the other user");

    // What the user writes later is not lost either, in blocks with one stamp and in those with an array.
    let before = made.generation;
    let written = write(&mut user, BLOCKS, 9);
    checkpoint(&client, "65534/ram").await;
    let reported = changed(&client, "65534/ram", before).await;
    let lost: Vec<_> = written.iter().filter(|page| reported.pages.binary_search(page).is_err()).collect();
    assert!(lost.is_empty(), "{lost:?} are not reported");

    // The memory of a file comes back when the file ends.
    client.delete(&named("65534/ram")).await.unwrap();
    drop(user);
    create(&client, USER).await;
    let mut user = writer(&service, USER);
    let first = checkpoint(&client, "65534/ram").await.generation;
    let written = write(&mut user, 20, 7);
    checkpoint(&client, "65534/ram").await;
    changed(&client, "65534/ram", first).await.assert_exact(&written, "a new file");
}

/// Runs `fdmap` as a user in the group of the sockets.
fn fdmap(service: &Service, user: u32, arguments: &[&str]) -> Output {
    fdmap_as(service, user).unwrap().gid(USER).args(arguments).output().unwrap()
}

#[test(flavor = "multi_thread")]
async fn retained_snapshots_take_bounded_memory() {
    let (service, client) = service().await;
    let mut user = writer(&service, USER);
    write(&mut user, BLOCKS, 7);
    let retain = |uid: u32, file: &str| fdmap(&service, uid, &["stat", file, "--retain-for", "600s"]);
    let kept = (0..60).take_while(|_| retain(USER, "ram").status.success()).count();
    assert!((1..60).contains(&kept), "{kept} snapshots of {BLOCKS} blocks in 1 MiB");
    let refused = retain(USER, "ram");
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(error.contains("bytes of page states"), "{error}");
    assert!(retain(OTHER, "ram").status.success(), "another user");
    assert!(retain(0, "65534/ram").status.success(), "an administrator");
    drop(client);
}

/// A snapshot that takes more than half of the limit is retained and reported by one call, and counts once. Then a further stream has
/// to wait until it is dropped.
#[test(flavor = "multi_thread")]
async fn retained_snapshot_counts_once_and_streams_beyond_the_limit_are_refused() {
    let (service, _client) = service_with(&["--group", "65534", "--max-state-bytes-per-user", "98304"]).await;
    let mut user = writer(&service, USER);
    write(&mut user, BLOCKS, 7);
    let pages = |more: &[&str]| fdmap(&service, USER, &[&["pages", "ram", "--json"], more].concat());
    let retained = pages(&["--retain-for", "600s"]);
    assert!(retained.status.success(), "{retained:?}");
    let refused = pages(&[]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(error.contains("bytes of page states"), "{error}");
    let answer: serde_json::Value = serde_json::from_slice(&retained.stdout).unwrap();
    let dropped = fdmap(&service, USER, &["drop-snapshot", "ram", answer["snapshot_id"].as_str().unwrap()]);
    assert!(dropped.status.success(), "{dropped:?}");
    assert!(pages(&[]).status.success());
}

#[test(flavor = "multi_thread")]
async fn frozen_sets_of_cursors_take_bounded_memory() {
    let (service, _client) = service_with(&["--group", "65534", "--max-state-bytes-per-user", "98304"]).await;
    let mut user = writer(&service, USER);
    write(&mut user, BLOCKS, 7);
    let begin = |cursor: &str| {
        assert!(fdmap(&service, USER, &["cursor", "create", "ram", cursor]).status.success());
        fdmap(&service, USER, &["cursor", "begin", "ram", cursor])
    };
    let begun = (0..60).take_while(|nth| begin(&format!("cursor-{nth}")).status.success()).count();
    assert!((1..60).contains(&begun), "{begun} sets of {BLOCKS} blocks in 96 KiB");
    let error = String::from_utf8(begin("one-more").stderr).unwrap();
    assert!(error.contains("bytes of page states"), "{error}");
    // A set that exists is reported, and begun again, at the limit.
    assert!(fdmap(&service, USER, &["cursor", "begin", "ram", "cursor-0"]).status.success());
    assert!(fdmap(&service, USER, &["dirty", "ram", "--cursor", "cursor-0"]).status.success());
    assert!(fdmap(&service, USER, &["cursor", "abort", "ram", "cursor-0"]).status.success());
    assert!(fdmap(&service, USER, &["cursor", "begin", "ram", "one-more"]).status.success());
}
