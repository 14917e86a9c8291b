//! Messages that `fdmap migrate` never sends: each ends the migration with a clear error, and the destination keeps nothing.

use fdmap_proto::v1;
use fdmap_proto::v1::migration_client::MigrationClient;
use fdmap_proto::v1::receive_request::Step;
use fdmap_tests::test;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status, Streaming};

use super::Bed;

const PAGES: u64 = 100;

/// A connection to `fdmap receive`.
struct Raw {
    requests: mpsc::Sender<v1::ReceiveRequest>,
    answers: Streaming<v1::ReceiveResponse>,
}

fn request(number: u64, step: Step) -> v1::ReceiveRequest {
    v1::ReceiveRequest { number, step: Some(step) }
}

fn begin(migration_id: u64, resumed: bool) -> v1::ReceiveRequest {
    let begin = v1::BeginMigration {
        migration_id,
        resumed,
        name: "ram".to_owned(),
        size_bytes: PAGES * 4096,
        ..v1::BeginMigration::default()
    };
    request(0, Step::Begin(begin))
}

/// Pages with this content.
fn pages(start: u64, end: u64, frame: Vec<u8>) -> v1::MigratedPages {
    v1::MigratedPages {
        content: vec![v1::PageRange { start, end }],
        frame: frame.into(),
        compression: v1::FrameCompression::None.into(),
        zero: Vec::new(),
    }
}

async fn channel(bed: &Bed, port: u16, certificate: &str) -> Channel {
    let read = |file: &str| std::fs::read(bed.certificates.path(file)).unwrap();
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(read("ca")))
        .identity(Identity::from_pem(read(certificate), read(&format!("{certificate}.key"))))
        .domain_name("fdmapd.test");
    let endpoint = Endpoint::from_shared(format!("https://localhost:{port}")).unwrap();
    endpoint.tls_config(tls).unwrap().connect().await.unwrap()
}

impl Raw {
    async fn connect(bed: &Bed, port: u16, first: v1::ReceiveRequest) -> Result<Self, Status> {
        Self::connect_by(bed, port, "source", first).await
    }

    async fn connect_by(
        bed: &Bed,
        port: u16,
        certificate: &str,
        first: v1::ReceiveRequest,
    ) -> Result<Self, Status> {
        let (requests, queue) = mpsc::channel(16);
        requests.send(first).await.unwrap();
        let mut client = MigrationClient::new(channel(bed, port, certificate).await);
        let answers = client.receive(ReceiverStream::new(queue)).await?.into_inner();
        Ok(Self { requests, answers })
    }

    /// Sends a step, and returns the number that the destination acknowledges.
    async fn send(&mut self, step: v1::ReceiveRequest) -> Result<u64, Status> {
        // Fails after the end of the connection, whose status follows.
        let _ = self.requests.send(step).await;
        self.acknowledged().await
    }

    async fn acknowledged(&mut self) -> Result<u64, Status> {
        match self.answers.message().await? {
            Some(v1::ReceiveResponse { result: Some(v1::receive_response::Result::Received(number)) }) => {
                Ok(number)
            }
            other => Err(Status::unknown(format!("{other:?}"))),
        }
    }
}

#[test(flavor = "multi_thread")]
async fn invalid_steps_end_the_migration() {
    let bed = Bed::new();
    let valid = pages(0, 1, vec![7; 4096]);
    let with = |change: &dyn Fn(&mut v1::MigratedPages)| {
        let mut pages = valid.clone();
        change(&mut pages);
        Step::Pages(pages)
    };
    let many: Vec<_> = (0..PAGES).map(|start| v1::PageRange { start, end: start + 1 }).rev().collect();
    let cases = [
        (2, Step::Pages(valid.clone()), Code::InvalidArgument, "step 2 follows step 0"),
        (1, with(&|pages| pages.frame = vec![7; 4000].into()), Code::InvalidArgument, "content of 1 pages"),
        (
            1,
            with(&|pages| pages.frame = vec![7; 1 << 21].into()),
            Code::InvalidArgument,
            "content of 1 pages",
        ),
        (1, with(&|pages| pages.content[0].end = 1 << 40), Code::InvalidArgument, "of a file of 100 pages"),
        (1, with(&|pages| pages.content = many.clone()), Code::InvalidArgument, "not valid here"),
        (1, with(&|pages| pages.compression = 77), Code::InvalidArgument, "unknown compression 77"),
        (1, with(&|pages| pages.compression = 2), Code::InvalidArgument, "content of 1 pages"),
        (
            1,
            with(&|pages| pages.frame = vec![7; 5 << 20].into()),
            Code::OutOfRange,
            "message length too large",
        ),
        (1, Step::ResizeBytes(u64::MAX), Code::InvalidArgument, "limit"),
        (1, Step::Commit(v1::CommitMigration {}), Code::InvalidArgument, "commit without verify"),
        (1, Step::Verify(vec![1; 5]), Code::InvalidArgument, "a digest of 5 bytes"),
        (1, Step::Verify(vec![1; 32]), Code::DataLoss, "digest of the file differs"),
        (1, begin(1, false).step.unwrap(), Code::InvalidArgument, "no content that may follow begin"),
        (1, Step::Abort(v1::AbortMigration {}), Code::Cancelled, "the source aborted"),
    ];
    for (number, step, code, reason) in cases {
        let receiving = bed.receive(&["--keep", "--reconnect-within", "1s"]);
        let mut raw = Raw::connect(&bed, receiving.port, begin(1, false)).await.unwrap();
        assert_eq!(raw.acknowledged().await.unwrap(), 0);
        let status = raw.send(request(number, step)).await.unwrap_err();
        assert!(status.code() == code && status.message().contains(reason), "{reason}: {status}");
        let (exit, _, error) = receiving.ended();
        assert_eq!(exit, Some(7), "{error}");
        assert_eq!(bed.json(&bed.destination, &["ls"]), json!([]), "{reason}");
    }
}

#[test(flavor = "multi_thread")]
async fn first_message_must_begin() {
    let bed = Bed::new();
    let receiving = bed.receive(&["--keep"]);
    let first = request(1, Step::Pages(pages(0, 1, vec![7; 4096])));
    for (first, code) in [
        (first, Code::InvalidArgument),
        (v1::ReceiveRequest::default(), Code::InvalidArgument),
        (begin(1, true), Code::NotFound),
    ] {
        assert_eq!(Raw::connect(&bed, receiving.port, first).await.err().unwrap().code(), code);
    }
    // None of them has begun a migration.
    let mut raw = Raw::connect(&bed, receiving.port, begin(1, false)).await.unwrap();
    assert_eq!(raw.acknowledged().await.unwrap(), 0);
}

/// Steps that were received are not applied again, and only the client that began can go on.
#[test(flavor = "multi_thread")]
async fn second_connection_of_the_source_takes_over() {
    let bed = Bed::new();
    bed.certificates.sign("other", fdmap_tests::certificates::dns("other.test"), 3);
    let receiving = bed.receive(&["--keep"]);
    let mut first = Raw::connect(&bed, receiving.port, begin(1, false)).await.unwrap();
    assert_eq!(first.acknowledged().await.unwrap(), 0);
    let step = |number, byte| request(number, Step::Pages(pages(number, number + 1, vec![byte; 4096])));
    assert_eq!(first.send(step(1, 1)).await.unwrap(), 1);
    assert_eq!(first.send(step(2, 2)).await.unwrap(), 2);

    for (certificate, id) in [("other", 1), ("source", 2)] {
        let stranger = Raw::connect_by(&bed, receiving.port, certificate, begin(id, true)).await;
        assert_eq!(stranger.err().unwrap().code(), Code::ResourceExhausted, "{certificate} {id}");
    }
    let mut second = Raw::connect(&bed, receiving.port, begin(1, true)).await.unwrap();
    assert_eq!(second.acknowledged().await.unwrap(), 2);
    assert_eq!(first.acknowledged().await.unwrap_err().code(), Code::Unavailable);
    // Other content under a number that was received.
    assert_eq!(second.send(step(2, 9)).await.unwrap(), 2);
    assert_eq!(second.send(step(3, 3)).await.unwrap(), 3);
    let content = bed.content(&bed.destination, "ram");
    let bytes: Vec<_> = (0..5).map(|page| content[page * 4096]).collect();
    assert_eq!(bytes, [0, 1, 2, 3, 0]);
}
