//! Untrusted input: the right status, bounded memory, and no effect on other clients.

use std::io::{BufRead as _, BufReader};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Stdio;
use std::time::{Duration, Instant};

use fdmap_client::error::RefusalCode;
use fdmap_client::grpc::{CreateFile, ScanRequest};
use fdmap_client::proto::convert::{AttributeSet, FileName};
use fdmap_client::proto::shared_snapshot::BodyLayout;
use fdmap_client::proto::units::{FileId, SnapshotId};
use fdmap_client::proto::{Access, Backing, PageIndex, PageRange, Seal, Seals};
use fdmap_client::{Client, ClientError, FdpassClient, Timeouts};
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_proto::v1::files_client::FilesClient;
use fdmap_proto::v1::pages_client::PagesClient;
use fdmap_sys::memfd;
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, read, root};
use fdmap_tests::raw::{RawSession, channel, packet};
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use nix::sys::signal::Signal;
use tonic::Code;
use tonic::codegen::http::uri::PathAndQuery;

fn main() -> std::process::ExitCode {
    fdmap_tests::harness::main()
}

const PAGE: u64 = 4096;

/// A service with one file of ten pages.
async fn service() -> (Service, Client) {
    let service = Service::start(&["--max-file-bytes", "1073741824", "--max-lookup-pages", "100"]).unwrap();
    let client = service.client().await.unwrap();
    create(&client, "ram", 10 * PAGE).await.unwrap();
    (service, client)
}

async fn create(client: &Client, name: &str, size_bytes: u64) -> Result<(), ClientError> {
    let file = CreateFile { name: name.to_owned(), size_bytes, ..CreateFile::default() };
    client.create(file).await.map(|_| ())
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>, code: RefusalCode) {
    match result {
        Err(ClientError::Refused { code: got, message }) => {
            assert_eq!(got, code, "{message}");
            assert!(message.len() > 10, "the message gives no reason: {message:?}");
        }
        other => panic!("expected {code}: {other:?}"),
    }
}

/// Asserts that the service still works.
async fn assert_service_works(service: &Service) {
    let client = service.client().await.unwrap();
    let scan = client.scan(&named("ram"), &ScanRequest::default()).await.unwrap();
    assert_eq!(scan.header().file_pages, 10);
    service.fdpass().unwrap().open(&named("ram"), true).unwrap();
}

#[test]
async fn invalid_file_requests_are_refused() {
    let (service, client) = service().await;
    use RefusalCode::{AlreadyExists, FailedPrecondition, InvalidArgument, NotFound};
    refused(client.get(&named("absent")).await, NotFound);
    refused(client.get(&FileName::Id(FileId::new(77).unwrap())).await, NotFound);
    refused(client.delete(&named("absent")).await, NotFound);
    refused(create(&client, "ram", PAGE).await, AlreadyExists);
    refused(create(&client, "", PAGE).await, InvalidArgument);
    refused(create(&client, "a/b", PAGE).await, InvalidArgument);
    refused(create(&client, "guest\u{202e}mar", PAGE).await, InvalidArgument);
    refused(create(&client, &"x".repeat(300), PAGE).await, InvalidArgument);
    refused(create(&client, "none", 0).await, InvalidArgument);
    refused(create(&client, "large", (1 << 30) + 1).await, InvalidArgument);
    refused(client.resize(&named("ram"), 0).await, InvalidArgument);
    refused(client.resize(&named("ram"), u64::MAX).await, InvalidArgument);
    let hugetlb = |bytes| CreateFile {
        name: "huge".to_owned(),
        size_bytes: 1 << 24,
        backing: Backing::Hugetlb(bytes),
        ..CreateFile::default()
    };
    refused(client.create(hugetlb(3 << 20)).await, InvalidArgument);
    refused(client.create(hugetlb(1 << 24)).await, FailedPrecondition);
    let seal = |seal: Seal| [seal].into_iter().collect::<Seals>();
    client.seal(&named("ram"), seal(Seal::Grow)).await.unwrap();
    refused(client.resize(&named("ram"), 11 * PAGE).await, FailedPrecondition);
    client.seal(&named("ram"), seal(Seal::Seal)).await.unwrap();
    refused(client.seal(&named("ram"), seal(Seal::Shrink)).await, FailedPrecondition);
    refused(client.seal(&named("ram"), Seals::default()).await, InvalidArgument);
    assert_service_works(&service).await;
}

#[test]
async fn invalid_page_requests_are_refused() {
    let (service, client) = service().await;
    use RefusalCode::{InvalidArgument, NotFound, OutOfRange};
    let ram = named("ram");
    let scan = |start, end| ScanRequest {
        range: PageRange::new(PageIndex(start), PageIndex(end)),
        ..ScanRequest::default()
    };
    refused(client.scan(&ram, &scan(3, 3)).await, InvalidArgument);
    refused(client.scan(&ram, &scan(3, 11)).await, OutOfRange);
    refused(client.scan(&ram, &scan(u64::MAX - 1, u64::MAX)).await, OutOfRange);
    refused(client.scan(&named("absent"), &scan(0, 1)).await, NotFound);
    let lookup = |pages: Vec<u64>| {
        let pages: Vec<_> = pages.into_iter().map(PageIndex).collect();
        let client = client.clone();
        async move { client.lookup(&named("ram"), &pages, AttributeSet::NONE, Duration::ZERO, false).await }
    };
    refused(lookup(vec![]).await, InvalidArgument);
    refused(lookup(vec![0; 101]).await, InvalidArgument);
    refused(lookup(vec![10]).await, OutOfRange);
    refused(lookup(vec![u64::MAX]).await, OutOfRange);
    let nothing = SnapshotId::new(5).unwrap();
    refused(client.diff(&ram, nothing, None, None, Duration::ZERO).await, NotFound);
    refused(client.drop_snapshot(&ram, nothing).await, NotFound);
    let forever = ScanRequest { retain_for: Duration::from_secs(1 << 40), ..ScanRequest::default() };
    refused(client.scan(&ram, &forever).await, InvalidArgument);
    assert_service_works(&service).await;
}

#[test]
async fn malformed_grpc_requests_are_refused() {
    let (service, _) = service().await;
    let channel = channel(&service.endpoint(), 1 << 16).await.unwrap();
    let undecodable = channel.clone();
    let (mut pages, mut files) = (PagesClient::new(channel.clone()), FilesClient::new(channel));
    let file = || Some(named("ram").into());
    let ask = |request: v1::ScanRequest| {
        let mut pages = pages.clone();
        async move { pages.scan(request).await.map(|_| ()).unwrap_err().code() }
    };
    let scan = v1::ScanRequest { file: file(), ..Default::default() };
    let bad = [
        v1::ScanRequest { file: None, ..scan.clone() },
        v1::ScanRequest { file: Some(v1::FileRef { by: None }), ..scan.clone() },
        v1::ScanRequest { range: Some(v1::PageRange { start: 7, end: 2 }), ..scan.clone() },
        v1::ScanRequest { encoding: 99, ..scan.clone() },
        v1::ScanRequest { states: vec![99], ..scan.clone() },
        v1::ScanRequest { states: vec![0], ..scan.clone() },
        v1::ScanRequest { attributes: vec![-3], ..scan.clone() },
        v1::ScanRequest { max_age: Some(prost_types::Duration { seconds: -1, nanos: 0 }), ..scan.clone() },
        v1::ScanRequest {
            encoding: v1::Encoding::Entries.into(),
            attributes: vec![v1::Attribute::Order.into()],
            ..scan.clone()
        },
    ];
    for request in bad {
        assert_eq!(ask(request.clone()).await, Code::InvalidArgument, "{request:?}");
    }
    let create = |request: v1::CreateRequest| {
        let mut files = files.clone();
        async move { files.create(request).await.map(|_| ()).unwrap_err().code() }
    };
    let new = v1::CreateRequest { name: "new".to_owned(), size_bytes: PAGE, ..Default::default() };
    let bad = [
        v1::CreateRequest { backing: 99, ..new.clone() },
        v1::CreateRequest { seals: vec![99], ..new.clone() },
        v1::CreateRequest { hugetlb_page_size: 2 << 20, ..new.clone() },
        v1::CreateRequest {
            access: Some(v1::Access { owner: vec![99], ..Default::default() }),
            ..new.clone()
        },
    ];
    for request in bad {
        assert_eq!(create(request.clone()).await, Code::InvalidArgument, "{request:?}");
    }
    // Field 1 of the request is a message, and here it is a number.
    let mut raw = tonic::client::Grpc::new(undecodable);
    raw.ready().await.unwrap();
    let path = PathAndQuery::from_static("/fdmap.v1.Pages/Lookup");
    let codec = tonic_prost::ProstCodec::<u64, v1::LookupResponse>::default();
    let error = raw.unary(tonic::Request::new(7), path, codec).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    // A request above the size limit is refused before it is read whole.
    let huge = v1::LookupRequest { file: file(), pages: vec![u64::MAX; 1 << 20], ..Default::default() };
    assert_eq!(pages.lookup(huge).await.unwrap_err().code(), Code::OutOfRange);
    let long = v1::ListRequest { page_token: "x".repeat(1 << 20), ..Default::default() };
    assert_eq!(files.list(long).await.unwrap_err().code(), Code::OutOfRange);
    assert_service_works(&service).await;
}

fn adopt(name: &str) -> Vec<u8> {
    packet(Op::Adopt(v1::Adopt { name: name.to_owned(), access: None, lifetime: 0 }))
}

#[test]
async fn protocol_violation_ends_its_session_only() {
    let (service, _) = service().await;
    let place = service.endpoint();
    let memfd = memfd::create("passed", None).unwrap();
    let open = packet(Op::Open(v1::Open { file: Some(named("ram").into()), mode: 1 }));
    let bystander = RawSession::greeted(&place).unwrap();

    let fatal = |session: RawSession, bytes: &[u8], descriptors: usize| {
        session.send(bytes, &vec![memfd.as_fd(); descriptors]).unwrap();
        let error = session.error().unwrap();
        assert!(error.fatal, "{error:?}");
        assert!(session.reply().unwrap().is_none(), "the service closed the session");
        error
    };
    let invalid = i32::from(Code::InvalidArgument);
    let greeted = || RawSession::greeted(&place).unwrap();
    assert_eq!(fatal(greeted(), &[0xff; 100], 0).code, invalid);
    assert_eq!(fatal(greeted(), &open[..open.len() - 2], 0).code, invalid);
    assert_eq!(fatal(greeted(), &vec![0x0a; 70_000], 0).code, invalid);
    assert_eq!(fatal(greeted(), &adopt("none"), 0).code, invalid);
    assert_eq!(fatal(greeted(), &adopt("two"), 2).code, invalid);
    assert_eq!(fatal(greeted(), &adopt("many"), 253).code, invalid);
    assert_eq!(fatal(greeted(), &open, 1).code, invalid);
    assert_eq!(fatal(RawSession::connect(&place).unwrap(), &open, 0).code, invalid);
    // An operation of a later version: an empty field 15.
    let unknown = fatal(greeted(), &[0x7a, 0], 0);
    assert_eq!(unknown.code, i32::from(Code::Unimplemented));
    let old = packet(Op::Hello(v1::Hello { version: 0, client: String::new() }));
    assert_eq!(fatal(RawSession::connect(&place).unwrap(), &old, 0).code, invalid);

    bystander.send(&open, &[]).unwrap();
    let (_, answer) = bystander.reply().unwrap().unwrap();
    assert_eq!(answer.descriptors.len(), 1, "another session is still served");
    assert_service_works(&service).await;
}

/// Number of descriptors that the service has open.
fn open_descriptors(service: &Service) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", service.pid())).unwrap().count()
}

#[test]
async fn wrong_descriptor_is_refused_and_session_continues() {
    let (service, _) = service().await;
    let session = RawSession::greeted(&service.endpoint()).unwrap();
    let (pipe, _other_end) = nix::unistd::pipe().unwrap();
    let regular: OwnedFd = tempfile::tempfile().unwrap().into();
    let folder: OwnedFd = std::fs::File::open("/").unwrap().into();
    let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    let memfd = memfd::create("passed", None).unwrap();
    memfd::resize(memfd.as_fd(), PAGE).unwrap();
    let read_only = fdmap_sys::fd::reopen(memfd.as_fd(), false).unwrap();
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memfd));
    let path =
        nix::fcntl::open(link.as_str(), nix::fcntl::OFlag::O_PATH, nix::sys::stat::Mode::empty()).unwrap();
    for (what, descriptor) in [
        ("a pipe", pipe.as_fd()),
        ("a regular file", regular.as_fd()),
        ("a folder", folder.as_fd()),
        ("a socket", socket.as_fd()),
        ("a read-only memfd", read_only.as_fd()),
        ("an O_PATH descriptor", path.as_fd()),
    ] {
        let before = open_descriptors(&service);
        session.send(&adopt("wrong"), &[descriptor]).unwrap();
        let error = session.error().unwrap();
        assert_eq!(error.code, i32::from(Code::FailedPrecondition), "{what}: {error:?}");
        assert!(!error.fatal, "{what}");
        // The service may reply before it closes the descriptor.
        let sent = Instant::now();
        while open_descriptors(&service) != before {
            assert!(sent.elapsed() < Duration::from_secs(10), "{what} was not closed");
            std::thread::yield_now();
        }
    }
    session.send(&adopt("right"), &[memfd.as_fd()]).unwrap();
    assert!(matches!(session.reply().unwrap(), Some((v1::fdpass_reply::Result::Adopted(_), _))));
    assert_service_works(&service).await;
}

/// Another process may have the pid of the one that connected by now.
#[test]
async fn session_of_an_exited_process_concerns_no_mapping() {
    let (service, _) = service().await;
    let session = RawSession::greeted_by_exited_process(&service.endpoint()).unwrap();
    let file = || Some(v1::FileRef::from(named("ram")));
    let untrack = v1::Untrack { file: file(), mapping_ids: vec![1] };
    let detach = v1::Detach { file: file(), pid: 0, mapping_ids: vec![] };
    for operation in [Op::Untrack(untrack), Op::Detach(detach)] {
        session.send(&packet(operation), &[]).unwrap();
        let error = session.error().unwrap();
        assert_eq!(error.code, i32::from(Code::FailedPrecondition), "{error:?}");
        assert!(!error.fatal);
    }
    assert_service_works(&service).await;
}

#[test]
async fn silent_client_is_disconnected_and_others_are_served() {
    let (service, _) = service().await;
    let silent: Vec<_> = (0..20).map(|_| RawSession::connect(&service.endpoint()).unwrap()).collect();
    let grpc: Vec<_> = (0..20)
        .map(|_| std::os::unix::net::UnixStream::connect(service.endpoint().socket).unwrap())
        .collect();
    assert_service_works(&service).await;
    let started = Instant::now();
    for session in silent {
        assert!(session.reply().unwrap().is_none(), "a client that never sends Hello is disconnected");
    }
    assert!(started.elapsed() < Duration::from_secs(15));
    assert_service_works(&service).await;
    drop(grpc);
}

/// The service keeps 1024 events for all watchers, and 1 MiB of unsent answers for a connection.
#[test(flavor = "multi_thread")]
async fn watcher_that_does_not_read_gets_the_number_of_lost_events() {
    const CALLERS: u32 = 16;
    const CALLS: u32 = 400;
    let (service, client) = service().await;
    // An event has the name of its file.
    let name = "x".repeat(249);
    create(&client, &name, PAGE).await.unwrap();
    let mut files = FilesClient::new(channel(&service.endpoint(), 1 << 16).await.unwrap());
    let mut events = files.watch(v1::WatchRequest {}).await.unwrap().into_inner();
    let callers = (0..CALLERS).map(|caller| {
        let (client, name) = (client.clone(), named(&name));
        tokio::spawn(async move {
            for gid in 0..CALLS {
                client.set_access(&name, Access::from_mode(0, gid * CALLERS + caller, 0o600)).await.unwrap();
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
    let (mut changed, mut lost) = (0, 0);
    while changed + lost < u64::from(CALLERS * CALLS) {
        match events.message().await.unwrap().unwrap().event.unwrap() {
            v1::watch_response::Event::Changed(_) => changed += 1,
            v1::watch_response::Event::Lost(some) => lost += some.events,
            _ => {}
        }
    }
    assert_eq!(changed + lost, u64::from(CALLERS * CALLS), "{changed} changes");
    assert!(lost > 0 && changed > 1024, "{changed} changes and {lost} lost ones");
    assert_service_works(&service).await;
}

/// Resident memory of a process, bytes.
fn resident_bytes(pid: u32) -> u64 {
    let text = read(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().split(' ').next().unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
async fn stalled_and_dead_readers_cost_bounded_memory() {
    let _host = HostLock::acquire().unwrap();
    let (service, client) = service().await;
    // Every other page holds data, so that the file has 262,144 runs.
    create(&client, "striped", 1 << 30).await.unwrap();
    let (fd, _) = service.fdpass().unwrap().open(&named("striped"), true).unwrap();
    for page in (0..(1_i64 << 18)).step_by(2) {
        nix::sys::uio::pwrite(&fd, b"x", page * 4096).unwrap();
    }
    assert_service_works(&service).await;
    let before = resident_bytes(service.pid());
    let mut stalled = Vec::new();
    for _ in 0..50 {
        // With a window of 64 KiB the service cannot send ahead.
        let mut pages = PagesClient::new(channel(&service.endpoint(), 1 << 16).await.unwrap());
        let request = v1::ScanRequest {
            file: Some(named("striped").into()),
            max_age: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
            ..Default::default()
        };
        let mut stream = pages.scan(request).await.unwrap().into_inner();
        assert!(stream.message().await.unwrap().is_some());
        stalled.push((pages, stream));
    }
    assert_service_works(&service).await;
    let growth = resident_bytes(service.pid()) - before;
    assert!(growth < 200 << 20, "50 clients that do not read cost {growth} bytes");
    drop(stalled);
    assert_service_works(&service).await;
}

#[test]
async fn sessions_beyond_the_user_limit_are_refused() {
    require(root());
    let service = Service::start(&["--max-sessions-per-user", "3", "--group", "65534"]).unwrap();
    let command = |arguments: &[&str]| {
        let mut command = fdmap_as(&service, 65534).unwrap();
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    // A watching client prints `synced` first, and then keeps its session open.
    let mut watching = Vec::new();
    for _ in 0..3 {
        let mut child = command(&["--json", "watch"]).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "{\"event\":\"synced\"}\n");
        watching.push(child);
    }
    let refused = command(&["ls"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(5), "{}", String::from_utf8_lossy(&refused.stderr));
    // The limit is per user, and does not apply to root.
    assert!(service.client().await.unwrap().list().await.is_ok());
    let many: Vec<_> = (0..20).map(|_| service.fdpass().unwrap()).collect();
    assert_eq!(many.len(), 20);
    let mut first = watching.remove(0);
    first.kill().unwrap();
    first.wait().unwrap();
    let started = Instant::now();
    while command(&["ls"]).output().unwrap().status.code() != Some(0) {
        assert!(started.elapsed() < Duration::from_secs(10), "an ended session still counts");
    }
    for mut child in watching {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
async fn user_without_rights_is_refused() {
    require(root());
    let service = Service::start(&["--group", "65534"]).unwrap();
    let client = service.client().await.unwrap();
    create(&client, "private", 10 * PAGE).await.unwrap();
    let as_unprivileged = |arguments: &[&str]| {
        let out = fdmap_as(&service, 65534).unwrap().args(arguments).output().unwrap();
        (out.status.code().unwrap(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    // To a caller who guesses its name or id, the file looks as one that does not exist.
    let id = client.get(&named("private")).await.unwrap().id.to_string();
    let ids = (format!("id:{id}"), format!("id:{}", FileId::new(0x77).unwrap()));
    for (known, absent) in [("private", "absent"), ("0/private", "0/absent"), (&ids.0, &ids.1)] {
        for (command, more) in [
            ("stat", &[][..]),
            ("pages", &[]),
            ("lookup", &["0"]),
            ("resize", &["8K"]),
            ("seal", &["grow"]),
            ("delete", &[]),
            ("access", &["--mode", "777"]),
            ("snapshot", &[]),
            ("open", &["--", "true"]),
        ] {
            let run = |file: &str| as_unprivileged(&[&[command, file], more].concat());
            let (code, message) = run(known);
            assert_eq!(code, 3, "{command} {known}: {message}");
            let known = message.replace(&id, &FileId::new(0x77).unwrap().to_string());
            assert_eq!(known.replace("private", "absent"), run(absent).1);
        }
    }
    assert_eq!(as_unprivileged(&["create", "mine", "--size", "8K"]).0, 0);
    assert_eq!(as_unprivileged(&["open", "mine", "--write", "--", "true"]).0, 0);
    assert_eq!(
        as_unprivileged(&["create", "gift", "--size", "8K", "--uid", "0"]).0,
        4,
        "files cannot be given to another user"
    );
    // The inspect right alone permits reading the states, but not opening the file.
    let access = fdmap_client::proto::Access {
        other: [fdmap_client::proto::Right::Inspect].into_iter().collect(),
        ..fdmap_client::proto::Access::private(0, 0)
    };
    client.set_access(&named("private"), access).await.unwrap();
    assert_eq!(as_unprivileged(&["stat", "0/private"]).0, 0);
    assert_eq!(as_unprivileged(&["stat", "private"]).0, 3);
    assert_eq!(as_unprivileged(&["open", "0/private", "--", "true"]).0, 4);
}

#[test]
async fn stopped_service_times_out() {
    let (service, _) = service().await;
    let timeouts = Timeouts { connect: Duration::from_secs(1), answer: Duration::from_secs(1) };
    let mut session = FdpassClient::connect(&service.endpoint(), timeouts).unwrap();
    let client = Client::connect(&service.endpoint(), timeouts).await.unwrap();
    service.stop();
    let started = Instant::now();
    assert!(matches!(client.list().await, Err(ClientError::TimedOut { .. })));
    assert!(matches!(session.open(&named("ram"), false), Err(ClientError::TimedOut { .. })));
    assert!(matches!(
        FdpassClient::connect(&service.endpoint(), timeouts),
        Err(ClientError::TimedOut { .. })
    ));
    let snapshot = session.snapshot(&named("ram"), None, BodyLayout::States, Duration::ZERO);
    assert!(matches!(snapshot, Err(ClientError::TimedOut { .. })), "{snapshot:?}");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    service.signal(Signal::SIGCONT);
    assert_service_works(&service).await;
}
