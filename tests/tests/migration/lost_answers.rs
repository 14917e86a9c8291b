//! Answers that are lost or invalid when the destination completes the file, and when the source fences its own.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fdmap_proto::v1;
use fdmap_proto::v1::migration_server::{Migration, MigrationServer};
use fdmap_proto::v1::receive_request::Step;
use fdmap_proto::v1::receive_response::Result as Answer;
use fdmap_tests::test;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

use super::{Bed, PAGE, error_of, random, write_at};

/// How a destination answers a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Commit {
    /// It ends the connection. The next one is that of another process, which does not know the migration.
    ByAnother,
    /// With a file that is invalid.
    InvalidFile,
    /// With a message that has no result, each time.
    NoResult,
}

/// A destination that keeps nothing.
#[derive(Clone)]
struct Destination {
    commit: Commit,
    is_other: Arc<AtomicBool>,
}

#[tonic::async_trait]
impl Migration for Destination {
    type ReceiveStream = Pin<Box<dyn Stream<Item = Result<v1::ReceiveResponse, Status>> + Send>>;

    async fn receive(
        &self,
        request: Request<Streaming<v1::ReceiveRequest>>,
    ) -> Result<Response<Self::ReceiveStream>, Status> {
        if self.is_other.load(Ordering::Relaxed) {
            return Err(Status::not_found("the migration is not known here"));
        }
        let mut steps = request.into_inner();
        let (answers, stream) = mpsc::channel(64);
        let this = self.clone();
        tokio::spawn(async move {
            while let Ok(Some(v1::ReceiveRequest { number, step })) = steps.message().await {
                let result = match (step, this.commit) {
                    (Some(Step::Commit(_)), Commit::ByAnother) => {
                        this.is_other.store(true, Ordering::Relaxed);
                        return;
                    }
                    (Some(Step::Commit(_)), Commit::InvalidFile) => {
                        Some(Answer::Committed(v1::File::default()))
                    }
                    (Some(Step::Commit(_)), Commit::NoResult) => None,
                    _ => Some(Answer::Received(number)),
                };
                if answers.send(Ok(v1::ReceiveResponse { result })).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }
}

/// Serves a destination. Returns its port.
async fn serve(bed: &Bed, commit: Commit) -> u16 {
    let read = |file: &str| std::fs::read(bed.certificates.path(file)).unwrap();
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(read("service"), read("service.key")))
        .client_ca_root(Certificate::from_pem(read("ca")));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let service = MigrationServer::new(Destination { commit, is_other: Arc::default() });
    let mut server = Server::builder().tls_config(tls).unwrap();
    tokio::spawn(server.add_service(service).serve_with_incoming(TcpListenerStream::new(listener)));
    port
}

/// The destination may have the file: nothing here is undone.
#[test(flavor = "multi_thread")]
async fn source_stays_fenced_after_an_answer_that_does_not_say_whether_the_file_exists() {
    for (commit, reason) in [
        (Commit::ByAnother, "the migration is not known here"),
        (Commit::InvalidFile, "id"),
        (Commit::NoResult, "no answer"),
    ] {
        let bed = Bed::new();
        let fd = bed.create("ram", 16 * PAGE);
        write_at(&fd, 0, &random(1, 16 * 4096));
        let port = serve(&bed, commit).await;
        let options = ["--pause", "true", "--resume", "touch resumed", "--reconnect-within", "1s"];
        let mut migrate = bed.migrate(port, &options);
        migrate.args(["--timeout", "2s"]);
        let error = error_of(&migrate.output().unwrap(), 5);
        assert!(error.contains("It may have the file") && error.contains(reason), "{commit:?}: {error}");
        assert!(bed.json(&bed.source, &["ls"])[0]["fence"].is_string(), "{commit:?}");
        assert!(!bed.folder.join("resumed").exists(), "the writers stay paused");
        // The caller finds out that there is no file.
        bed.json(&bed.source, &["fence", "ram", "--remove"]);
        bed.json(&bed.source, &["checkpoint", "ram"]);
    }
}

/// How the answer of a fence is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    /// The connection breaks after the request. The next one works.
    Connection,
    /// Nothing passes any more, in either direction, on any connection.
    Everything,
}

/// Passes connections to the socket of a service. The request of the fence arrives there, and its answer is lost.
fn pass_until_the_fence(listener: UnixListener, to: &Path, loss: Loss) {
    let to = to.to_owned();
    let has_fenced = Arc::new(AtomicBool::new(false));
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, service) = (client.unwrap(), UnixStream::connect(&to).unwrap());
            for (from, to, is_request) in [(&client, &service, true), (&service, &client, false)] {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let has_fenced = Arc::clone(&has_fenced);
                std::thread::spawn(move || pass(from, to, is_request, loss, &has_fenced));
            }
        }
    });
}

fn pass(mut from: UnixStream, mut to: UnixStream, is_request: bool, loss: Loss, has_fenced: &AtomicBool) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        let bytes = &buffer[..len];
        let is_fence = is_request && bytes.windows(11).any(|window| window == b"migrated to");
        let was_fenced = has_fenced.load(Ordering::Relaxed);
        if was_fenced && loss == Loss::Everything {
            continue;
        }
        // Before the request: the answer comes soon.
        let loses = is_fence && !has_fenced.swap(true, Ordering::Relaxed);
        if loses && loss == Loss::Connection {
            let _ = from.shutdown(Shutdown::Both);
        }
        if to.write_all(bytes).is_err() {
            break;
        }
        if loses && loss == Loss::Connection {
            // It is read before the end of the connection.
            std::thread::sleep(Duration::from_millis(100));
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

#[test(flavor = "multi_thread")]
async fn fence_whose_answer_is_lost_is_ended_or_reported() {
    for loss in [Loss::Connection, Loss::Everything] {
        let bed = Bed::new();
        let fd = bed.create("ram", 16 * PAGE);
        write_at(&fd, 0, &random(1, 16 * 4096));
        let receiving = bed.receive(&["--keep"]);
        let folder = bed.folder.join("proxy");
        std::fs::create_dir(&folder).unwrap();
        let listener = UnixListener::bind(folder.join("fdmap.sock")).unwrap();
        pass_until_the_fence(listener, &bed.source.endpoint().socket, loss);
        let mut migrate = bed.migrate(receiving.port, &["--pause", "true", "--resume", "touch resumed"]);
        migrate.arg("--socket").arg(folder.join("fdmap.sock")).args(["--timeout", "2s"]);
        let error = error_of(&migrate.output().unwrap(), 5);
        let fence = bed.json(&bed.source, &["ls"])[0]["fence"].clone();
        let is_reported = error.contains("The file here stays fenced, perhaps");
        assert_eq!(is_reported, loss == Loss::Everything, "{error}");
        assert_eq!(fence.is_string(), is_reported, "{loss:?}: {fence} {error}");
        assert!(bed.folder.join("resumed").exists(), "{loss:?}");
        let (status, _, error) = receiving.ended();
        assert!(status == Some(7) && error.contains("the source aborted the migration"), "{error}");
        if is_reported {
            bed.json(&bed.source, &["fence", "ram", "--remove"]);
        }
        bed.assert_not_migrated();
    }
}
