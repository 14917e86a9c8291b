//! Requests that the service refuses, by thousands: guessed inodes, pids of other users, names that mislead readers of the log, and
//! bytes that are no messages.

use std::os::fd::AsFd as _;

use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::convert::FileName;
use fdmap_client::{Client, ClientError, Endpoint, FdpassClient, Timeouts};
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_tests::attack::{assert_withstands, service};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::raw::{RawSession, channel, packet};
use fdmap_tests::service::named;
use fdmap_tests::test;
use fdmap_tests::{HarnessError, HarnessResult};
use tokio::sync::mpsc;
use tonic::Code;
use tonic::codegen::http::uri::PathAndQuery;

use super::ATTACKER;
use super::attacker::Attacker;

/// Characters that change how a line of the log is displayed: bidirectional, zero-width, line and paragraph separators, control.
const MISLEADING: [char; 8] =
    ['\u{202e}', '\u{2066}', '\u{200b}', '\u{feff}', '\u{2028}', '\u{2029}', '\u{1b}', '\n'];
/// Inodes on either side of one of the attacker's own.
const GUESSES: u64 = 200;
/// Tasks, and threads, for each kind of request.
const TASKS: u64 = 4;
/// Rounds of all tasks and threads together whose answers are checked.
const ANSWERS: u64 = 8 * TASKS;
/// Calls to which a service can answer only that they are not messages.
const UNDECODABLE: [&str; 4] = [
    "/fdmap.v1.Pages/Lookup",
    "/fdmap.v1.Files/Create",
    "/fdmap.v1.Tracking/Checkpoint",
    "/fdmap.v1.Files/Delete",
];

fn wrong(what: &str, answer: impl std::fmt::Debug) -> HarnessError {
    HarnessError::Agent(format!("{what}: {answer:?}"))
}

/// The code of a refusal.
fn code<T: std::fmt::Debug>(
    what: &str,
    answer: Result<T, ClientError>,
) -> HarnessResult<(RefusalCode, String)> {
    match answer {
        Err(ClientError::Refused { code, message }) => Ok((code, message)),
        other => Err(wrong(what, other)),
    }
}

/// Sends all the kinds of requests at once, until the process ends. Returns the number of rounds whose answers were checked.
pub async fn start(endpoint: &Endpoint) -> HarnessResult<u64> {
    let client = Client::connect(endpoint, Timeouts::default()).await?;
    let mut session = FdpassClient::connect(endpoint, Timeouts::default())?;
    let name = own_name();
    let (own, _) = session.memfd_create(&name, &name, 0)?;
    let stat = fdmap_sys::fd::stat(&own)?;
    let (sender, mut answers) = mpsc::unbounded_channel();
    for _ in 0..TASKS {
        let (client, endpoint_of_task, sender) = (client.clone(), endpoint.clone(), sender.clone());
        let sender_of_thread = sender.clone();
        let endpoint_of_thread = endpoint.clone();
        tokio::spawn(async move {
            loop {
                let answered = call(&client, &endpoint_of_task, (stat.st_dev, stat.st_ino)).await;
                // Fails when enough of them were checked.
                let _ = sender.send(answered);
            }
        });
        std::thread::spawn(move || {
            loop {
                let answered =
                    track_processes(&endpoint_of_thread).and_then(|()| violate_protocol(&endpoint_of_thread));
                let _ = sender_of_thread.send(answered);
            }
        });
    }
    for _ in 0..ANSWERS {
        answers.recv().await.ok_or_else(|| wrong("the tasks", "none is left"))??;
    }
    // The file stays open.
    std::mem::forget(own);
    Ok(ANSWERS)
}

/// Sends all the kinds of requests of the gRPC socket.
async fn call(client: &Client, endpoint: &Endpoint, own: (u64, u64)) -> HarnessResult<()> {
    guess_inodes(client, own).await?;
    use_misleading_names(client).await?;
    send_undecodable(endpoint).await
}

/// The name of the file of this process.
fn own_name() -> String {
    format!("own-{}", std::process::id())
}

async fn guess_inodes(client: &Client, (device, own): (u64, u64)) -> HarnessResult<()> {
    for number in (own.saturating_sub(GUESSES)..own + GUESSES).filter(|number| *number != own) {
        let file = FileName::Inode { device, number };
        let got = client.get(&file).await;
        if got.as_ref().is_ok_and(|info| info.owned_by_caller) {
            // Of an earlier attacker.
            continue;
        }
        let answers = [code("Get", got)?, code("Delete", client.delete(&file).await)?];
        let expected = (RefusalCode::NotFound, format!("{file} not found"));
        if answers.iter().any(|answer| *answer != expected) {
            return Err(wrong("a guessed inode", answers));
        }
    }
    Ok(())
}

async fn use_misleading_names(client: &Client) -> HarnessResult<()> {
    for character in MISLEADING {
        let name = format!("guest{character}level=ERROR");
        let file = CreateFile { name, size_bytes: 4096, ..CreateFile::default() };
        let (code, message) = code("Create", client.create(file).await)?;
        if code != RefusalCode::InvalidArgument || message.contains(character) {
            return Err(wrong("a misleading name", (code, message)));
        }
    }
    Ok(())
}

async fn send_undecodable(endpoint: &Endpoint) -> HarnessResult<()> {
    let mut raw = tonic::client::Grpc::new(channel(endpoint, 1 << 16).await?);
    for path in UNDECODABLE {
        raw.ready().await.map_err(|error| wrong(path, error))?;
        // Field 1 of each of these requests is a message or a text, and here it is a number.
        let codec = tonic_prost::ProstCodec::<u64, v1::LookupResponse>::default();
        let answer = raw.unary(tonic::Request::new(7), PathAndQuery::from_static(path), codec).await;
        match answer {
            Err(status) if status.code() == Code::InvalidArgument => {}
            other => return Err(wrong(path, other)),
        }
    }
    Ok(())
}

/// Requests Track of processes that the caller does not own, and of ones that do not exist.
fn track_processes(endpoint: &Endpoint) -> HarnessResult<()> {
    let session = RawSession::greeted(endpoint)?;
    let uffd = Userfaultfd::create_user_mode_only()?;
    for pid in [1, std::os::unix::process::parent_id(), u32::MAX >> 1] {
        let mapping = v1::ClientMapping { address: 1 << 20, length_bytes: 4096, ..Default::default() };
        let file = Some(named(&own_name()).into());
        let track = v1::Track { file, mappings: vec![mapping], pagemap: false, maps: false, pid };
        session.send(&packet(Op::Track(track)), &[uffd.as_fd()])?;
        let error = session.error()?;
        let expected = format!("user {ATTACKER} has no process {pid} whose mappings may be tracked");
        if error.code != i32::from(Code::PermissionDenied) || error.message != expected {
            return Err(wrong("Track", error));
        }
    }
    Ok(())
}

fn violate_protocol(endpoint: &Endpoint) -> HarnessResult<()> {
    for bytes in [&[0xff; 100][..], &[0x0a; 70_000]] {
        let session = RawSession::greeted(endpoint)?;
        session.send(bytes, &[])?;
        let error = session.error()?;
        if error.code != i32::from(Code::InvalidArgument) || !error.fatal {
            return Err(wrong("a packet that is no request", error));
        }
    }
    Ok(())
}

#[test]
fn flood_of_invalid_requests_delays_no_other_user_and_misleads_no_reader_of_the_log() {
    require(root());
    let mut service = service(&[]);
    assert_withstands(&mut service, |service| {
        let mut attacker = Attacker::start(service, ATTACKER).unwrap();
        assert!(attacker.attack("invalid-requests", 0).unwrap() > 0);
        attacker
    });
    let log = service.log();
    let found = MISLEADING.iter().find(|character| **character != '\n' && log.contains(**character));
    assert_eq!(found, None, "{log}");
    assert!(!log.contains("\nlevel=ERROR"), "{log}");
    assert!(!log.contains("another one replaces it"), "refused requests end helpers: {log}");
}
