//! Answers of calls that are no streams: what a user leaves unread takes bounded memory, and what it reads is not refused.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use fdmap_client::Client;
use fdmap_client::grpc::CreateFile;
use fdmap_client::proto::AttributeSet;
use fdmap_proto::v1::files_client::FilesClient;
use fdmap_proto::v1::pages_client::PagesClient;
use fdmap_proto::{Access, v1};
use fdmap_sys::fd;
use fdmap_tests::attack::{self, USER as ATTACKER};
use fdmap_tests::harness::require;
use fdmap_tests::host::root;
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::unread::{self, LARGEST_WINDOW, NO_WINDOW};
use fdmap_tests::victim::{self, Victim};
use prost::Message;
use tokio::task::JoinSet;
use tonic::{Code, Status, Streaming};

use super::{CALLS, CONNECTIONS, PAGE, connect_as, settled_bytes};

/// Files of a List answer, and the bytes of their names: the answer is as large as it can be.
const LISTED: usize = 1000;
const NAME_BYTES: usize = 249;
/// Pages of a Lookup.
const LOOKED_UP: u64 = 1024;

fn list() -> v1::ListRequest {
    v1::ListRequest::default()
}

fn lookup() -> v1::LookupRequest {
    v1::LookupRequest {
        file: Some(named("65534/resident").into()),
        pages: (0..LOOKED_UP).collect(),
        attributes: AttributeSet::ALL.to_wire(),
        ..Default::default()
    }
}

/// A service with a file of the attacker whose pages are resident. The file lasts as long as its descriptor.
async fn service_with_resident_file(options: &[&str]) -> (Service, Client, OwnedFd) {
    require(root());
    let group = victim::GROUP.to_string();
    let all = ["--group", &group, "--unused-file-timeout", "600"];
    let service = Service::start(&[&all, options].concat()).unwrap();
    let client = service.client().await.unwrap();
    let size_bytes = LOOKED_UP * PAGE;
    create_for_attacker(&client, "resident", size_bytes).await;
    let (file, _) = service.fdpass().unwrap().open(&named("65534/resident"), true).unwrap();
    fd::write_at(file.as_fd(), 0, &vec![1; usize::try_from(size_bytes).unwrap()]).unwrap();
    (service, client, file)
}

async fn create_for_attacker(client: &Client, name: &str, size_bytes: u64) {
    let access = Some(Access::from_mode(ATTACKER, victim::GROUP, 0o600));
    let name = name.to_owned();
    client.create(CreateFile { name, size_bytes, access, ..CreateFile::default() }).await.unwrap();
}

/// Waits until the memory of the service is at most `max`: it returns what is free to the kernel every 10 s.
async fn await_bytes(service: &Service, max: u64) -> u64 {
    let began = Instant::now();
    loop {
        let now = settled_bytes(service).await;
        if now <= max || began.elapsed() > Duration::from_secs(15) {
            return now;
        }
    }
}

/// Makes as many calls as [`CONNECTIONS`] of the attacker permit, and reads no answer. Returns the answers that the service has, and the
/// statuses of calls that it refused.
async fn call_unread<Q, A>(
    service: &Service,
    path: &'static str,
    request: impl Fn() -> Q,
) -> (Vec<Streaming<A>>, Vec<Status>)
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let mut calls = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let socket = connect_as(ATTACKER, &service.endpoint());
        let channel = unread::channel(socket, [NO_WINDOW, LARGEST_WINDOW]).await;
        for _ in 0..CALLS {
            let (channel, request) = (channel.clone(), request());
            calls.spawn(async move { unread::call(&channel, path, request).await });
        }
    }
    let (mut held, mut refused) = (Vec::new(), Vec::new());
    for answer in calls.join_all().await {
        match answer {
            Ok(answer) => held.push(answer),
            Err(status) => refused.push(status),
        }
    }
    (held, refused)
}

/// True if the attacker can list its files.
fn lists(service: &Service) -> bool {
    fdmap_as(service, ATTACKER).unwrap().arg("ls").output().unwrap().status.success()
}

#[track_caller]
fn assert_refused(status: &Status) {
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(status.message().contains("bytes of unread answers and of requests in progress; "), "{status}");
}

/// Leaves answers unread. Asserts that the service has at most `max_bytes` of memory, and returns how many calls were refused.
async fn assert_bounded<Q, A>(
    service: &Service,
    victim: &mut Victim,
    max_bytes: u64,
    path: &'static str,
    request: impl Fn() -> Q,
) -> usize
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let reader = unread::channel(connect_as(ATTACKER, &service.endpoint()), [1 << 20; 2]).await;
    let (held, refused) = call_unread::<Q, A>(service, path, request).await;
    let bytes = await_bytes(service, max_bytes).await;
    let number = refused.len();
    println!("{path}: {} answers are unread, {number} calls refused: {} MiB", held.len(), bytes >> 20);
    assert!(bytes <= max_bytes, "{path}: {bytes} bytes");
    refused.iter().for_each(assert_refused);
    tokio::task::block_in_place(|| attack::assert_served(victim, path));
    // Other calls of the user, too.
    assert_eq!(lists(service), number == 0);
    let name = "refused".to_owned();
    let mut files = FilesClient::new(reader);
    if number > 0 {
        let create = v1::CreateRequest { name: name.clone(), size_bytes: PAGE, ..Default::default() };
        assert_refused(&files.create(create).await.unwrap_err());
    }
    drop(held);
    let began = Instant::now();
    while !lists(service) {
        assert!(began.elapsed() < Duration::from_secs(10), "{path}: answers of calls that ended count");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let created = files.get(v1::GetRequest { file: Some(named(&name).into()) }).await;
    assert_eq!(created.unwrap_err().code(), Code::NotFound, "the refused call took effect");
    number
}

/// Answers of calls that are no streams.
#[test(flavor = "multi_thread")]
async fn unread_answers_of_a_user_take_bounded_memory_and_delay_no_other_user() {
    const LIMIT: u64 = 16 << 20;
    // What the heap of the service keeps of 1024 calls and their connections.
    const OF_CALLS: u64 = 64 << 20;
    let limit = LIMIT.to_string();
    let (service, client, _file) =
        service_with_resident_file(&["--max-buffered-bytes-per-user", &limit]).await;
    for nth in 1..LISTED {
        create_for_attacker(&client, &format!("{nth:0NAME_BYTES$}"), PAGE).await;
    }
    let mut victim = tokio::task::block_in_place(|| Victim::start(&service).unwrap());
    let max = settled_bytes(&service).await + LIMIT + OF_CALLS;
    let (service, victim, info) = (&service, &mut victim, || v1::InfoRequest {});
    let refused = [
        assert_bounded::<_, v1::InfoResponse>(service, victim, max, "/fdmap.v1.Host/Info", info).await,
        assert_bounded::<_, v1::LookupResponse>(service, victim, max, "/fdmap.v1.Pages/Lookup", lookup).await,
        assert_bounded::<_, v1::ListResponse>(service, victim, max, "/fdmap.v1.Files/List", list).await,
    ];
    assert_eq!(refused.map(|number| number > 0), [false, true, true], "{refused:?}");
}

/// Concurrent calls on several connections, whose answers can fill the limit in each round.
#[test(flavor = "multi_thread")]
async fn answers_that_are_read_are_not_refused() {
    const ROUNDS: usize = 8;
    // Each answer takes 32 KiB, so all of a round take 14 MiB.
    const CONNECTIONS: usize = 7;
    // That of a host with 1 GiB of RAM.
    let limit = (16 << 20).to_string();
    let (service, _client, _file) =
        service_with_resident_file(&["--max-buffered-bytes-per-user", &limit]).await;
    let (began, mut calls) = (Instant::now(), JoinSet::new());
    for _ in 0..CONNECTIONS {
        let channel = unread::channel(connect_as(ATTACKER, &service.endpoint()), [1 << 20; 2]).await;
        for _ in 0..CALLS {
            let mut client = PagesClient::new(channel.clone());
            calls.spawn(async move {
                for _ in 0..ROUNDS {
                    let answer = client.lookup(lookup()).await.unwrap().into_inner();
                    assert_eq!(answer.pages.len() as u64, LOOKED_UP);
                }
            });
        }
    }
    let calls = calls.join_all().await.len() * ROUNDS;
    println!("{calls} calls in {:?}", began.elapsed());
}
