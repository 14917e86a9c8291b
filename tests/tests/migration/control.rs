//! Programs that watch and steer `fdmap migrate` and `fdmap receive` over gRPC.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fdmap_client::Endpoint;
use fdmap_client::proto::Backing;
use fdmap_proto::v1;
use fdmap_proto::v1::migration_control_client::MigrationControlClient;
use fdmap_tests::no_lost_writes::log::Log;
use fdmap_tests::no_lost_writes::scenario::Scenario;
use fdmap_tests::raw;
use fdmap_tests::test;
use fdmap_tests::test_agent::Run;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::proxy::{Fault, Proxy};
use super::{Bed, PAGE, Receiving, error_of, random, write_at};

type Client = MigrationControlClient<Channel>;

/// Connects once the socket exists.
async fn connect(path: &Path) -> Client {
    let endpoint = Endpoint { socket: path.to_owned(), fdpass: path.to_owned() };
    for _ in 0..1000 {
        if let Ok(channel) = raw::channel(&endpoint, 1 << 16).await {
            return MigrationControlClient::new(channel);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("nothing listens at {}", path.display());
}

async fn finalize(client: &Client) -> Result<v1::FinalizeMigrationResponse, Status> {
    let answer = client.clone().finalize(v1::FinalizeMigrationRequest {}).await;
    answer.map(tonic::Response::into_inner)
}

async fn cancel(client: &Client) -> Result<v1::CancelMigrationResponse, Status> {
    client.clone().cancel(v1::CancelMigrationRequest {}).await.map(tonic::Response::into_inner)
}

/// Watches until a message is accepted.
async fn until(
    client: &Client,
    mut accepts: impl FnMut(&v1::MigrationProgress) -> bool,
) -> v1::MigrationProgress {
    let request = v1::WatchMigrationRequest { interval_ms: 100 };
    let mut messages = client.clone().watch(request).await.unwrap().into_inner();
    loop {
        let message = messages.message().await.unwrap().expect("the watch goes on");
        if accepts(&message) {
            return message;
        }
    }
}

/// All states that a watch reports, and the last message.
async fn all(client: Client) -> (Vec<v1::MigrationState>, v1::MigrationProgress) {
    let mut messages = client.clone().watch(v1::WatchMigrationRequest::default()).await.unwrap().into_inner();
    let (mut states, mut last) = (Vec::new(), None);
    while let Some(message) = messages.message().await.unwrap() {
        states.push(message.state());
        last = Some(message);
    }
    states.dedup();
    (states, last.unwrap())
}

fn spawned(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A migration that awaits Finalize, and both ends' sockets.
async fn steered(bed: &Bed, port: u16, options: &[&str]) -> (Child, Client) {
    let options = [&["--await-finalize", "--control", "control.sock"], options].concat();
    let source = spawned(bed.migrate(port, &options));
    (source, connect(&bed.folder.join("control.sock")).await)
}

fn receiving(bed: &Bed) -> Receiving {
    let path = bed.folder.join("receive.sock");
    bed.receive(&["--keep", "--reconnect-within", "2s", "--control", path.to_str().unwrap()])
}

/// A VMM pauses its guest when the rest fits the downtime, and has the migration finalized.
#[test(flavor = "multi_thread")]
async fn program_that_pauses_its_writers_has_the_migration_finalized() {
    const PAGES: u64 = 4096;
    let bed = Bed::new();
    let log = Log::create(2, 1 << 22).unwrap();
    let scenario = Scenario::new(&bed.source, "ram", PAGES, Backing::Shmem, log).await.unwrap();
    let mut writer = scenario.writer(None).unwrap();
    scenario.map(&mut writer, true).unwrap();
    writer.write_all(0, 1, 0..PAGES, 0).unwrap();
    writer.start_run(Run::new("store", 4000, 7, 0..PAGES / 100, 0)).unwrap();
    let pid = Pid::from_raw(writer.pid().cast_signed());

    let receiving = receiving(&bed);
    let destination = connect(&bed.folder.join("receive.sock")).await;
    let received = tokio::spawn(all(destination.clone()));
    let (source, client) = steered(&bed, receiving.port, &["--downtime", "1s", "--rounds", "3"]).await;
    let watched = tokio::spawn(all(client.clone()));
    let ready = until(&client, |now| now.state() == v1::MigrationState::Ready && now.round > 4).await;
    assert!(ready.connected && ready.expected_downtime_ns.unwrap() < 1_000_000_000, "{ready:?}");
    assert_eq!(ready.skipped_pages + ready.total_pages, PAGES, "{ready:?}");

    kill(pid, Signal::SIGSTOP).unwrap();
    while !std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("State:\tT") {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let copy = bed.content(&bed.source, "ram");
    let (one, other) = tokio::join!(finalize(&client), finalize(&client));
    let finalized = one.unwrap();
    assert_eq!(Some(finalized.downtime_ns), other.ok().map(|other| other.downtime_ns), "one result");
    assert_eq!(finalized.file.unwrap().name, "ram");
    assert!(bed.content(&bed.destination, "ram") == copy);

    use v1::MigrationState::{Committing, Completed, Copying, Ready};
    let (states, last) = watched.await.unwrap();
    assert!(states.contains(&Ready) && states.ends_with(&[Completed]), "{states:?}");
    let order: Vec<_> =
        [Ready, Committing, Completed].into_iter().filter(|one| states.contains(one)).collect();
    assert!(order.is_sorted() && last.reason.is_empty(), "{states:?}");
    let (states, last) = received.await.unwrap();
    assert!(states.ends_with(&[Copying, Completed]), "{states:?}");
    assert!(last.done_pages >= PAGES && last.total_pages == 0 && last.remaining_ns.is_none(), "{last:?}");
    let output = source.wait_with_output().unwrap();
    let lines = error_of(&output, 0);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["downtime_ns"], finalized.downtime_ns, "{report}");
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let line =
        lines.iter().find(|line| line["expected_downtime_ns"].is_u64()).expect("a line of a later round");
    assert!(line["progress"]["memory_pages"].is_u64() && line["pages_per_second"].is_number(), "{line}");
    assert_eq!(receiving.ended().0, Some(0));
    assert!(!bed.folder.join("control.sock").exists() && !bed.folder.join("receive.sock").exists());
    kill(pid, Signal::SIGCONT).unwrap();
    writer.reply().unwrap();
    writer.finish().unwrap();
}

/// The end of a call, or of its connection, changes nothing: another call gets the result.
#[test(flavor = "multi_thread")]
async fn finalize_outlives_its_calls() {
    let bed = Bed::new();
    let fd = bed.create("ram", 1024 * PAGE);
    write_at(&fd, 0, &random(1, 1024 * 4096));
    let receiving = bed.receive(&["--keep"]);
    let proxy = Proxy::start(receiving.port, Fault::Slow(1 << 15), 1);
    let (source, client) = steered(&bed, proxy.port, &[]).await;
    let mut call = Request::new(v1::FinalizeMigrationRequest {});
    call.set_timeout(Duration::from_millis(50));
    let status = client.clone().finalize(call).await.unwrap_err();
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    drop(client);
    let client = connect(&bed.folder.join("control.sock")).await;
    assert_eq!(finalize(&client).await.unwrap().file.unwrap().name, "ram");
    error_of(&source.wait_with_output().unwrap(), 0);
    assert_eq!(receiving.ended().0, Some(0));
    assert!(bed.content(&bed.destination, "ram") == super::content_of(&fd));
}

/// Cancel at either end leaves the source as it was. It is repeated, and comes too late after the end.
#[test(flavor = "multi_thread")]
async fn cancel_leaves_the_source_as_it_was() {
    for is_source in [true, false] {
        let bed = Bed::new();
        let fd = bed.create("ram", 1024 * PAGE);
        write_at(&fd, 0, &random(1, 1024 * 4096));
        let receiving = receiving(&bed);
        let destination = connect(&bed.folder.join("receive.sock")).await;
        let proxy = Proxy::start(receiving.port, Fault::Slow(1 << 14), 1);
        let (source, client) = steered(&bed, proxy.port, &["--reconnect-within", "1s"]).await;
        until(&destination, |now| now.done_pages > 0).await;
        let waiting = {
            let client = client.clone();
            tokio::spawn(async move { finalize(&client).await })
        };
        tokio::time::sleep(Duration::from_millis(50)).await;
        let cancelled = if is_source { &client } else { &destination };
        let (one, other) = tokio::join!(cancel(cancelled), cancel(cancelled));
        assert!(one.is_ok() && other.is_ok(), "{one:?} {other:?}");
        let status = waiting.await.unwrap().unwrap_err();
        assert_eq!(status.code(), Code::Aborted, "{status}");
        let code = if is_source { 7 } else { 6 };
        let error = error_of(&source.wait_with_output().unwrap(), code);
        assert!(error.contains(status.message()), "{error}: {status}");
        let (exit, _, error) = receiving.ended();
        assert_eq!(exit, Some(7), "{error}");
        bed.assert_not_migrated();
    }
}

#[test(flavor = "multi_thread")]
async fn calls_that_cannot_succeed_are_refused() {
    let bed = Bed::new();
    let fd = bed.create("ram", 1024 * PAGE);
    write_at(&fd, 0, &random(1, 1024 * 4096));
    let receiving = receiving(&bed);
    let destination = connect(&bed.folder.join("receive.sock")).await;
    let proxy = Proxy::start(receiving.port, Fault::Slow(1 << 15), 1);
    let source = spawned(bed.migrate(proxy.port, &["--paused", "--control", "control.sock"]));
    let client = connect(&bed.folder.join("control.sock")).await;
    for (client, reason) in [(&client, "--await-finalize"), (&destination, "does not await Finalize")] {
        let status = finalize(client).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains(reason), "{status}");
    }
    let request = v1::WatchMigrationRequest { interval_ms: 1 };
    assert_eq!(client.clone().watch(request).await.err().unwrap().code(), Code::InvalidArgument);
    // Neither has an effect on the migration.
    until(&client, |now| now.state() == v1::MigrationState::Copying).await;
    error_of(&source.wait_with_output().unwrap(), 0);
    assert_eq!(receiving.ended().0, Some(0));
    assert!(bed.content(&bed.destination, "ram") == super::content_of(&fd));
}

/// What a peer receives after the preface of HTTP/2.
fn answer_to(path: &Path, user: u32) -> String {
    let connect = "import socket,sys
s=socket.socket(socket.AF_UNIX)
s.settimeout(10)
try:
 s.connect(sys.argv[1])
 s.sendall(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n'+bytes([0,0,0,4,0,0,0,0,0]))
 print('served' if s.recv(9) else 'closed')
except (ConnectionError,PermissionError) as e:
 print('closed' if isinstance(e,ConnectionError) else 'denied')";
    let mut python = Command::new("python3");
    let output = python.args(["-c", connect]).arg(path).uid(user).gid(user).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test(flavor = "multi_thread")]
async fn socket_serves_its_user_only_and_replaces_no_other_file() {
    let bed = Bed::new();
    bed.create("ram", 16 * PAGE);
    let path = bed.folder.join("control.sock");
    let to_all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&bed.folder, to_all).unwrap();
    // A stale socket.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let receiving = bed.receive(&["--keep"]);
    let (source, client) = steered(&bed, receiving.port, &[]).await;
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!([answer_to(&path, 65_534), answer_to(&path, 0)], ["denied", "served"]);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!([answer_to(&path, 65_534), answer_to(&path, 0)], ["closed", "served"]);
    // A process listens there.
    let other = bed.migrate(receiving.port, &["--await-finalize", "--control", "control.sock"]).output();
    assert!(error_of(&other.unwrap(), 7).contains("listening on"));
    finalize(&client).await.unwrap();
    error_of(&source.wait_with_output().unwrap(), 0);
    assert_eq!(receiving.ended().0, Some(0));

    std::fs::write(&path, "data").unwrap();
    let other = bed.migrate(1, &["--paused", "--control", "control.sock"]).output();
    assert!(error_of(&other.unwrap(), 7).contains("listening on"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "data");
    let other = bed.migrate(1, &["--await-finalize"]).output();
    assert!(error_of(&other.unwrap(), 2).contains("--control"));
}
