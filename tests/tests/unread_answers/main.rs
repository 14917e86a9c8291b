//! Answers that clients do not read, and requests that they do not complete: the service holds little memory for them, and they delay
//! no other call.

use std::io::{self, Read as _};
use std::pin::Pin;
use std::process::Stdio;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use fdmap_client::Endpoint;
use fdmap_client::grpc::{CreateFile, ScanRequest};
use fdmap_proto::v1::pages_client::PagesClient;
use fdmap_proto::{Access, v1};
use fdmap_sys::testing::credentials::become_user;
use fdmap_tests::attack::{self, USER as ATTACKER};
use fdmap_tests::harness::require;
use fdmap_tests::host::{read, root};
use fdmap_tests::reported::create_file;
use fdmap_tests::service::{Service, fdmap_as, named};
use fdmap_tests::test;
use fdmap_tests::unread::{self, LARGEST_WINDOW};
use fdmap_tests::victim;
use http_body::Frame;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{Body as HttpBody, Bytes, Service as _};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

mod single_answers;

fn main() -> std::process::ExitCode {
    victim::main().unwrap_or_else(fdmap_tests::harness::main)
}

const PAGE: u64 = 4096;
/// Pages of a file whose entries take 8 MiB.
const PAGES: u64 = 1 << 20;
const CONNECTIONS: u64 = 16;
/// The service permits no more on one connection.
const CALLS: usize = 64;

/// A connection from which nothing is read.
#[derive(Debug)]
struct Unread(UnixStream);

impl AsyncRead for Unread {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Poll::Pending
    }
}

impl AsyncWrite for Unread {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_shutdown(cx)
    }
}

/// A channel over a connection that `wrap` makes of a socket.
async fn channel<S>(endpoint: &Endpoint, windows: [u32; 2], wrap: fn(UnixStream) -> S) -> Channel
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let socket = UnixStream::connect(&endpoint.socket).await.unwrap();
    unread::channel(wrap(socket), windows).await
}

/// A connection of another user.
fn connect_as(uid: u32, endpoint: &Endpoint) -> UnixStream {
    let path = endpoint.socket.clone();
    // The kernel takes the identity of a peer from the thread that connects.
    let thread = std::thread::spawn(move || {
        become_user(uid, victim::GROUP).unwrap();
        std::os::unix::net::UnixStream::connect(path).unwrap()
    });
    let socket = thread.join().unwrap();
    socket.set_nonblocking(true).unwrap();
    UnixStream::from_std(socket).unwrap()
}

fn entries() -> v1::ScanRequest {
    let encoding = v1::Encoding::Entries.into();
    v1::ScanRequest { file: Some(named("large").into()), encoding, ..Default::default() }
}

async fn scan(channel: &Channel) -> Result<Streaming<v1::ScanResponse>, tonic::Status> {
    Ok(PagesClient::new(channel.clone()).scan(entries()).await?.into_inner())
}

/// The pages of the remaining messages.
async fn pages_in(mut answer: Streaming<v1::ScanResponse>) -> u64 {
    let mut pages = 0;
    while let Some(message) = answer.message().await.unwrap() {
        if let Some(v1::scan_response::Body::Entries(batch)) = message.body {
            pages += batch.entries.len() as u64 / 8;
        }
    }
    pages
}

fn resident_bytes(service: &Service) -> u64 {
    let status = read(format!("/proc/{}/status", service.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
}

/// Waits until the memory of the service grows no more.
async fn settled_bytes(service: &Service) -> u64 {
    let mut last = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = resident_bytes(service);
        if now <= last {
            return now;
        }
        last = now;
    }
}

/// The client permits the service to send everything, and reads nothing.
#[test(flavor = "multi_thread")]
async fn unread_connections_hold_little_memory() {
    // A message of each call, and what the connection buffers.
    const MAX_BYTES_PER_CONNECTION: u64 = 12 << 20;
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create_file(&client, "large", PAGES * PAGE).await.unwrap();
    client.scan(&named("large"), &ScanRequest::default()).await.unwrap();
    let before = settled_bytes(&service).await;
    let mut calls = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let channel = channel(&service.endpoint(), [LARGEST_WINDOW; 2], Unread).await;
        for _ in 0..CALLS {
            let channel = channel.clone();
            calls.spawn(async move { scan(&channel).await.map(drop) });
        }
    }
    let per_connection = settled_bytes(&service).await.saturating_sub(before) / CONNECTIONS;
    println!("{CALLS} unread calls of a connection hold {} KiB", per_connection >> 10);
    assert!(per_connection <= MAX_BYTES_PER_CONNECTION, "{per_connection} bytes");
    // Other clients are served meanwhile.
    let began = Instant::now();
    let other = channel(&service.endpoint(), [LARGEST_WINDOW; 2], |socket| socket).await;
    assert_eq!(pages_in(scan(&other).await.unwrap()).await, PAGES);
    assert!(began.elapsed() < Duration::from_secs(5), "a scan took {:?}", began.elapsed());
}

/// Begins as many streams as a user may have, on several connections. They last until the calls are dropped.
async fn begin_unread_streams(service: &Service) -> JoinSet<Result<(), Status>> {
    let client = service.client().await.unwrap();
    let access = Some(Access::from_mode(ATTACKER, victim::GROUP, 0o600));
    let name = "large".to_owned();
    let file = CreateFile { name, size_bytes: PAGES * PAGE, access, ..CreateFile::default() };
    // It is deleted some time after the end of the attack before.
    let created = client.create(file).await;
    assert!(created.is_ok() || client.get(&named("65534/large")).await.is_ok(), "{created:?}");
    let mut calls = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let socket = connect_as(ATTACKER, &service.endpoint());
        let channel = unread::channel(Unread(socket), [LARGEST_WINDOW; 2]).await;
        for _ in 0..CALLS {
            let channel = channel.clone();
            calls.spawn(async move { scan(&channel).await.map(drop) });
        }
    }
    let began = Instant::now();
    loop {
        let refused = fdmap_as(service, ATTACKER).unwrap().args(["pages", "large"]).output().unwrap();
        let message = String::from_utf8_lossy(&refused.stderr);
        if message.contains("user 65534 has 256 streams") {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{message}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // They stay.
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let refused = fdmap_as(service, ATTACKER).unwrap().args(["pages", "large"]).output().unwrap();
        let message = String::from_utf8_lossy(&refused.stderr);
        assert!(message.contains("user 65534 has 256 streams"), "{message}");
    }
    calls
}

#[test(flavor = "multi_thread")]
async fn unread_streams_of_a_user_delay_no_other_user() {
    require(root());
    let mut service = attack::service(&[]);
    tokio::task::block_in_place(|| {
        attack::assert_withstands(&mut service, |service| {
            Handle::current().block_on(begin_unread_streams(service))
        });
    });
}

/// Each call has a window of its own: one that the client does not read stops when its window is full.
#[test(flavor = "multi_thread")]
async fn unread_calls_do_not_stop_others_of_their_connection() {
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create_file(&client, "large", PAGES * PAGE).await.unwrap();
    let channel = channel(&service.endpoint(), [1 << 16, LARGEST_WINDOW], |socket| socket).await;
    let mut unread = Vec::new();
    for _ in 1..CALLS {
        unread.push(scan(&channel).await.unwrap());
    }
    let answer = tokio::time::timeout(Duration::from_secs(20), async {
        pages_in(scan(&channel).await.unwrap()).await
    });
    assert_eq!(answer.await.unwrap(), PAGES);
    for answer in unread.into_iter().step_by(8) {
        assert_eq!(pages_in(answer).await, PAGES);
    }
}

/// A request of which the last bytes never come.
struct Incomplete {
    sent: Option<Bytes>,
}

impl HttpBody for Incomplete {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match self.get_mut().sent.take() {
            Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            None => Poll::Pending,
        }
    }
}

/// Sends a Lookup but for its last byte. Returns the status that the service answers.
async fn look_up_incompletely(mut channel: Channel, message: Bytes) -> Code {
    let body = Body::new(Incomplete { sent: Some(message) });
    let request = Request::post("http://fdmapd.invalid/fdmap.v1.Pages/Lookup")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)
        .unwrap();
    std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    let answer: Response<Body> = channel.call(request).await.unwrap();
    Status::from_header_map(answer.headers()).unwrap().code()
}

/// A connection sends the headers and a part of as many requests as it may have.
#[test(flavor = "multi_thread")]
async fn incomplete_requests_hold_little_memory_and_are_refused() {
    /// The size limit of a request.
    const REQUEST_BYTES: usize = 256 << 10;
    // The HTTP/2 windows, and four requests, whose buffers can be twice as large.
    const MAX_BYTES_PER_CONNECTION: u64 = 4 << 20;
    // Two of the four requests, at least: they have arrived.
    const MIN_BYTES_PER_CONNECTION: u64 = 512 << 10;
    let service = Service::start(&[]).unwrap();
    let client = service.client().await.unwrap();
    create_file(&client, "small", PAGE).await.unwrap();
    let (file, request) = (named("small"), ScanRequest::default());
    let scan = || client.scan(&file, &request);
    scan().await.unwrap();
    let before = settled_bytes(&service).await;
    // Not compressed, and its length.
    let mut message = vec![0];
    message.extend(u32::try_from(REQUEST_BYTES).unwrap().to_be_bytes());
    message.resize(5 + REQUEST_BYTES - 1, 0);
    let message = Bytes::from(message);
    let (began, mut calls) = (Instant::now(), JoinSet::new());
    for _ in 0..CONNECTIONS {
        let channel = channel(&service.endpoint(), [LARGEST_WINDOW; 2], |socket| socket).await;
        for _ in 0..CALLS {
            calls.spawn(look_up_incompletely(channel.clone(), message.clone()));
        }
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let held = resident_bytes(&service).saturating_sub(before) / CONNECTIONS;
    assert!(began.elapsed() < Duration::from_secs(9), "the memory was read too late");
    println!("{CALLS} incomplete calls of a connection hold {} KiB", held >> 10);
    assert!((MIN_BYTES_PER_CONNECTION..=MAX_BYTES_PER_CONNECTION).contains(&held), "{held} bytes");
    // Other clients are served meanwhile.
    let served = Instant::now();
    scan().await.unwrap();
    assert!(served.elapsed() < Duration::from_secs(1), "a scan took {:?}", served.elapsed());
    for code in calls.join_all().await {
        assert_eq!(code, Code::DeadlineExceeded);
    }
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "the last call was refused after {:?}",
        began.elapsed()
    );
    scan().await.unwrap();
}

/// Streams that are open, of all connections.
#[test(flavor = "multi_thread")]
async fn user_has_a_bounded_number_of_streams() {
    require(root());
    let service = Service::start(&["--max-streams-per-user", "3", "--group", "65534"]).unwrap();
    let command = |arguments: &[&str]| {
        let mut command = fdmap_as(&service, 65534).unwrap();
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    assert!(command(&["create", "own", "--size", "64K"]).status().unwrap().success());
    let mut watching: Vec<_> = (0..3).map(|_| command(&["--json", "watch"]).spawn().unwrap()).collect();
    for child in &mut watching {
        // The first message: the stream is open.
        assert!(child.stdout.as_mut().unwrap().read(&mut [0]).unwrap() > 0);
    }
    let pages = || command(&["pages", "own"]).output().unwrap();
    let refused = pages();
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(6), "{message}");
    assert!(message.contains("user 65534 has 3 streams"), "{message}");
    // Root is not limited.
    service.client().await.unwrap().scan(&named("65534/own"), &ScanRequest::default()).await.unwrap();
    watching[0].kill().unwrap();
    let ended = Instant::now();
    while !pages().status.success() {
        assert!(ended.elapsed() < Duration::from_secs(10), "a stream that has ended counts");
    }
    for mut child in watching {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
