//! Invalid requests of write tracking.

use std::time::{Duration, Instant};

use fdmap_client::error::RefusalCode::{
    AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, OutOfRange, ResourceExhausted,
};
use fdmap_client::grpc::{ChangesOptions, CreateFile};
use fdmap_client::proto::units::Generation;
use fdmap_client::proto::{CoveragePolicy, Seal};
use fdmap_tests::pattern::Pattern;
use fdmap_tests::service::named;
use fdmap_tests::test;
use fdmap_tests::test_agent::TestAgent;

use crate::fixture::{PAGE, assert_service_works, map, refused, service};

fn generation(number: u64) -> Generation {
    Generation::new(number).unwrap()
}

#[test(flavor = "multi_thread")]
async fn checkpoint_is_refused_by_the_coverage_policy() {
    let (service, client) = service().await;
    let ram = named("ram");
    client.checkpoint(&ram, true, None).await.unwrap();
    client.set_coverage_policy(&ram, CoveragePolicy::Refuse).await.unwrap();
    let mut agent = TestAgent::start(None).unwrap();
    agent.open(&service, "ram").unwrap();
    for exact in [true, false] {
        let made = client.checkpoint(&ram, exact, None).await;
        let pid = agent.pid().to_string();
        refused(made, FailedPrecondition, &["policy", "refuse", &pid, "0..64"]);
    }
    let begun = client.dirty_rate(&ram, Duration::from_millis(1)).await;
    refused(begun, FailedPrecondition, &["policy"]);
    // The writes of the agent are reported after its end.
    let before = client.coverage(&ram).await.unwrap().generation;
    agent.fill(Pattern { seed: 1, percent: 100 }, 20, 24).unwrap();
    agent.kill().unwrap();
    for _ in 0..3 {
        client.checkpoint(&ram, true, None).await.unwrap();
    }
    let reported = crate::fixture::changed(&client, "ram", before).await;
    assert!((20..24).all(|page| reported.contains(&page)), "{reported:?}");
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn open_generation_is_out_of_range() {
    let (service, client) = service().await;
    let ram = named("ram");
    let closed = client.checkpoint(&ram, true, None).await.unwrap().generation;
    let next = closed.next().unwrap();
    for future in [next, generation(1 << 20)] {
        let options = ChangesOptions { since: future, ..ChangesOptions::default() };
        let words = [future.to_string(), closed.to_string()];
        let words: Vec<_> = words.iter().map(String::as_str).chain(["not closed"]).collect();
        refused(client.changes(&ram, options).await.map(drop), OutOfRange, &words);
        refused(client.create_cursor(&ram, "future", future).await, OutOfRange, &words);
    }
    let options = ChangesOptions { since: closed, ..ChangesOptions::default() };
    assert_eq!(client.changes(&ram, options).await.unwrap().header().until_generation, closed);
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn invalid_cursor_requests_are_refused() {
    let (service, client) = service().await;
    let ram = named("ram");
    let none = Generation::NONE;
    refused(client.begin_cursor(&ram, "backup", false).await, NotFound, &["no cursor", "backup"]);
    refused(client.commit_cursor(&ram, "backup", generation(1)).await, NotFound, &["backup"]);
    refused(client.abort_cursor(&ram, "backup").await, NotFound, &["backup"]);
    refused(client.delete_cursor(&ram, "backup").await, NotFound, &["backup"]);
    for name in ["", "a\nb", &"x".repeat(65)] {
        refused(client.create_cursor(&ram, name, none).await, InvalidArgument, &["cursor"]);
    }
    refused(client.create_cursor(&named("absent"), "backup", none).await, NotFound, &["absent"]);
    client.create_cursor(&ram, "backup", none).await.unwrap();
    refused(client.create_cursor(&ram, "backup", none).await, AlreadyExists, &["backup"]);
    let commit = client.commit_cursor(&ram, "backup", generation(1)).await;
    refused(commit, FailedPrecondition, &["backup", "not begun"]);
    let cursor = Some("backup".to_owned());
    let frozen = ChangesOptions { cursor: cursor.clone(), ..ChangesOptions::default() };
    refused(
        client.changes(&ram, frozen.clone()).await.map(drop),
        FailedPrecondition,
        &["backup", "not begun"],
    );
    let until_generation =
        client.begin_cursor(&ram, "backup", true).await.unwrap().cursor.until_generation.unwrap();
    let both = ChangesOptions { cursor, since: until_generation, ..ChangesOptions::default() };
    refused(client.changes(&ram, both).await.map(drop), InvalidArgument, &["since"]);
    let other = until_generation.next().unwrap();
    let words = ["backup".to_owned(), until_generation.to_string(), other.to_string()];
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    refused(client.commit_cursor(&ram, "backup", other).await, FailedPrecondition, &words);
    client.changes(&ram, frozen).await.unwrap();
    client.commit_cursor(&ram, "backup", until_generation).await.unwrap();
    client.commit_cursor(&ram, "backup", until_generation).await.unwrap();
    for nth in 1..256 {
        client.create_cursor(&ram, &format!("more {nth}"), none).await.unwrap();
    }
    refused(client.create_cursor(&ram, "too many", none).await, ResourceExhausted, &["256"]);
    assert_service_works(&service, &client).await;
}

#[test(flavor = "multi_thread")]
async fn dirty_rate_window_is_bounded() {
    let (service, client) = service().await;
    let ram = named("ram");
    let bad = [
        Duration::ZERO,
        Duration::from_micros(999),
        Duration::from_millis(60_001),
        Duration::from_secs(1 << 30),
    ];
    for window in bad {
        refused(client.dirty_rate(&ram, window).await, InvalidArgument, &["window"]);
    }
    let mapping = map(&mut service.fdpass().unwrap(), "ram");
    assert!(mapping.write_at(PAGE as usize, b"x"));
    let rate = client.dirty_rate(&ram, Duration::from_millis(1)).await.unwrap();
    assert!(rate.window >= Duration::from_millis(1));
    drop(mapping);
    assert_service_works(&service, &client).await;
}

/// A file that is deleted during the window of a DirtyRate ends at once: the call does not keep it.
#[test(flavor = "multi_thread")]
async fn dirty_rate_of_a_deleted_file_is_not_found() {
    let (service, client) = service().await;
    let ram = named("ram");
    let measured = {
        let (client, ram) = (client.clone(), ram.clone());
        tokio::spawn(async move { client.dirty_rate(&ram, Duration::from_secs(2)).await })
    };
    tokio::time::sleep(Duration::from_millis(500)).await;
    let is_open = || {
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", service.pid())).unwrap().flatten();
        let mut links = descriptors.flat_map(|entry| std::fs::read_link(entry.path()));
        links.any(|link| link.to_string_lossy().starts_with("/memfd:ram"))
    };
    assert!(is_open());
    client.delete(&ram).await.unwrap();
    let began = Instant::now();
    while is_open() {
        assert!(began.elapsed() < Duration::from_secs(1), "the service keeps the file");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    refused(measured.await.unwrap(), NotFound, &[]);
}

#[test(flavor = "multi_thread")]
async fn file_with_seal_seal_cannot_be_writer_sealed() {
    let (service, client) = service().await;
    let seals = [Seal::Seal].into_iter().collect();
    let sealed = CreateFile { name: "sealed".to_owned(), size_bytes: PAGE, seals, ..CreateFile::default() };
    client.create(sealed).await.unwrap();
    let closed = client.seal_writers(&named("sealed")).await;
    refused(closed, FailedPrecondition, &["sealing against new writers", "seal"]);
    assert!(!client.coverage(&named("sealed")).await.unwrap().writers_sealed);
    refused(client.seal_writers(&named("absent")).await, NotFound, &["absent"]);
    assert_service_works(&service, &client).await;
}
