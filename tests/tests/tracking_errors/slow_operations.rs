//! Operations that wait for a client are logged while they wait.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::time::{Duration, Instant};

use fdmap_sys::memfd;
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::mapper::LockHolder;
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;

use crate::fixture::service;

const LOG_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits for a line of the log that contains all of `words`.
async fn logged(service: &Service, words: &[&str]) {
    let began = Instant::now();
    loop {
        let log = service.log();
        if log.lines().any(|line| words.iter().all(|word| line.contains(word))) {
            return;
        }
        assert!(began.elapsed() < LOG_TIMEOUT, "no line with {words:?}:\n{log}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test(flavor = "multi_thread")]
async fn checkpoint_that_waits_for_a_process_is_logged_with_its_phase_and_pid() {
    require(root());
    let (service, client) = service().await;
    let file = memfd::create("held", None).unwrap();
    memfd::resize(file.as_fd(), 8192).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let mut holder = require(LockHolder::prepare(Path::new(&path)));
    let pid = holder.pid.to_string();
    let adopted = fdmap_as(&service, 0).unwrap().args(["adopt", "--pid", &pid, "--track"]).output().unwrap();
    assert!(adopted.status.success(), "{adopted:?}");
    let before = client.checkpoint(&named("held"), true, None).await.unwrap();
    assert_eq!(before.coverage.tracked_mappings, 1);

    holder.hold().unwrap();
    let waiting_client = client.clone();
    let checkpoint = tokio::spawn(async move { waiting_client.checkpoint(&named("held"), true, None).await });
    let waiting = format!("pid={pid}");
    let slow = "an operation is slow and still runs";
    logged(&service, &[slow, "operation=\"Checkpoint\"", "file=\"held\"", "phase=observation", &waiting])
        .await;
    assert!(!checkpoint.is_finished(), "the process still holds its lock");
    drop(holder);
    checkpoint.await.unwrap().unwrap();
    logged(&service, &["a slow operation ended", "operation=\"Checkpoint\"", "file=\"held\""]).await;
}
