//! Queries about many scattered pages of a file, many at once: they delay others by few scans, and by no work in the threads that serve
//! all users.

use std::time::{Duration, Instant};

use fdmap_client::grpc::SummaryOptions;
use fdmap_tests::attack::{assert_withstands, await_effect, service};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::service::named;
use fdmap_tests::test;

use super::ATTACKER;
use super::attacker::{Attacker, READABLE};
use super::checkpoints::readable_file;

/// Room for the pages of the queries.
const FILE_BYTES: u64 = 128 << 30;
/// Queries that wait at a time.
const WAITING: u64 = 256;

/// Each query needs a scan of its own, and the users whose queries wait for a scan are served in turn.
#[test(flavor = "multi_thread")]
async fn scans_for_a_reader_delay_those_for_the_owner_by_few() {
    require(root());
    let service = service(&[]);
    let client = readable_file(&service, FILE_BYTES).await;
    let mut reader = Attacker::start(&service, ATTACKER).unwrap();
    await_effect(&service, "scans are made", || reader.attack("attributes", WAITING).unwrap() > 20);
    let mut answered = || reader.attack("attributes", WAITING).unwrap();
    let mut between = Vec::new();
    for _ in 0..5 {
        let before = answered();
        client.summary(&named(READABLE), &SummaryOptions::default()).await.unwrap();
        between.push(answered() - before);
    }
    between.sort_unstable();
    // In the order of the requests, it would wait for all that wait.
    assert!(between[2] < 16, "the scans for the owner waited for {between:?} scans");
}

/// Answers from an earlier scan need no thread of their user.
#[test(flavor = "multi_thread")]
async fn answers_from_earlier_scans_delay_no_other_user() {
    require(root());
    let mut service = service(&[]);
    let _client = readable_file(&service, FILE_BYTES).await;
    assert_withstands(&mut service, |service| {
        let mut reader = Attacker::start(service, ATTACKER).unwrap();
        let began = Instant::now();
        while reader.attack("cached-states", WAITING).unwrap() < 2 * WAITING {
            assert!(began.elapsed() < Duration::from_secs(30), "few queries are answered");
            std::thread::sleep(Duration::from_millis(20));
        }
        reader
    });
}
