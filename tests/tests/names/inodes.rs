//! A caller who guesses the inode of a file without rights to it learns nothing: each answer is that for an inode that does not exist.

use std::os::fd::AsFd as _;
use std::time::Duration;

use fdmap_client::grpc::{ChangesOptions, ScanRequest, SummaryOptions};
use fdmap_client::proto::file::{Seal, Seals};
use fdmap_client::proto::shared_snapshot::BodyLayout;
use fdmap_client::proto::{
    Access, AttributeSet, ClientMapping, CoveragePolicy, FileName, Generation, MappingId, PageIndex,
    SnapshotId,
};
use fdmap_client::{Client, ClientError, Endpoint, FdpassClient, Timeouts};
use fdmap_sys::testing::credentials::become_user;
use fdmap_sys::uffd::Userfaultfd;
use fdmap_sys::{fd, memfd};
use fdmap_tests::service::{Service, named};
use fdmap_tests::test;

use super::{PAGE, SQUATTER, VICTIM, create_for, service};

/// The group of the sockets.
pub(super) const GROUP: u32 = 65534;

/// The answers to requests about one file.
struct Answers {
    /// As the service displays it.
    file: String,
    answers: Vec<(&'static str, String)>,
}

impl Answers {
    /// Adds an answer: code and text of an error, in which the name of the file is replaced.
    fn add<T>(&mut self, request: &'static str, result: Result<T, ClientError>) {
        let answer = match result {
            Ok(_) => "ok".to_owned(),
            Err(ClientError::Refused { code, message }) => {
                format!("{code:?}: {}", message.replace(&self.file, "FILE"))
            }
            Err(other) => panic!("{request}: {other:?}"),
        };
        self.answers.push((request, answer));
    }

    fn request_by_fdpass(&mut self, endpoint: &Endpoint, file: &FileName) {
        let mut session = FdpassClient::connect(endpoint, Timeouts::default()).unwrap();
        self.add("Open for reading", session.open(file, false));
        self.add("Open for writing", session.open(file, true));
        self.add("FetchSnapshot", session.snapshot(file, None, BodyLayout::States, Duration::ZERO));
        let uffd = Userfaultfd::create_user_mode_only().unwrap();
        // Nothing is mapped there.
        let mapping = ClientMapping { address: PAGE, length_bytes: PAGE, first_page: PageIndex(0) };
        self.add("Track", session.track(file, uffd.as_fd(), None, None, &[mapping]));
        self.add("Untrack", session.untrack(file, &[MappingId::new(1).unwrap()]));
        self.add("Detach", session.detach(None, file, &[]));
        self.add("SetCoveragePolicy by fdpass", session.set_coverage_policy(file, CoveragePolicy::Ignore));
    }

    async fn request_pages(&mut self, client: &Client, file: &FileName) {
        let none = Duration::ZERO;
        let snapshot = SnapshotId::new(1).unwrap();
        self.add("Get", client.get(file).await);
        self.add("Scan", client.scan(file, &ScanRequest::default()).await);
        self.add("Lookup", client.lookup(file, &[PageIndex(0)], AttributeSet::NONE, none, false).await);
        self.add("Summary", client.summary(file, &SummaryOptions::default()).await);
        self.add("SlotContent", client.slot_content(file, &[PageIndex(0)]).await);
        self.add("Diff", client.diff(file, snapshot, None, None, none).await);
        self.add("DropSnapshot", client.drop_snapshot(file, snapshot).await);
    }

    async fn request_changes(&mut self, client: &Client, file: &FileName) {
        self.add("Checkpoint", client.checkpoint(file, true, None).await);
        self.add("Changes", client.changes(file, ChangesOptions::default()).await);
        self.add("GetCoverage", client.coverage(file).await);
        self.add("WatchCheckpoints", client.watch_checkpoints(file).await);
        self.add("DirtyRate", client.dirty_rate(file, Duration::from_millis(1)).await);
        self.add("SetCoveragePolicy", client.set_coverage_policy(file, CoveragePolicy::Ignore).await);
        self.add("CreateCursor", client.create_cursor(file, "cursor", Generation::NONE).await);
        self.add("ListCursors", client.cursors(file).await);
        self.add("BeginCursor", client.begin_cursor(file, "cursor", false).await);
        self.add("AbortCursor", client.abort_cursor(file, "cursor").await);
        self.add("CommitCursor", client.commit_cursor(file, "cursor", Generation::NONE).await);
        self.add("DeleteCursor", client.delete_cursor(file, "cursor").await);
    }

    /// Delete comes last: the owner may do that.
    async fn request_files(&mut self, client: &Client, file: &FileName) {
        self.add("Resize", client.resize(file, 8 * PAGE).await);
        self.add("Seal", client.seal(file, [Seal::Grow].into_iter().collect::<Seals>()).await);
        self.add("SealWriters", client.seal_writers(file).await);
        self.add("Fence", client.fence(file, "moved").await);
        self.add("end of Fence", client.end_fence(file, "moved").await);
        self.add("SetAccess", client.set_access(file, Access::private(SQUATTER, GROUP)).await);
        self.add("Delete", client.delete(file).await);
    }
}

/// The answers to a user, who sends every kind of request about a file.
pub(super) fn answers_to(service: &Service, user: u32, file: &FileName) -> Vec<(&'static str, String)> {
    let endpoint = service.endpoint();
    let request = || {
        become_user(user, GROUP).unwrap();
        let mut answers = Answers { file: file.to_string(), answers: Vec::new() };
        answers.request_by_fdpass(&endpoint, file);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = Client::connect(&endpoint, Timeouts::default()).await.unwrap();
            answers.request_pages(&client, file).await;
            answers.request_changes(&client, file).await;
            answers.request_files(&client, file).await;
        });
        answers.answers
    };
    std::thread::scope(|scope| scope.spawn(request).join().unwrap())
}

#[test(flavor = "multi_thread")]
async fn inode_of_a_file_without_rights_is_as_if_it_did_not_exist() {
    let service = service();
    let client = service.client().await.unwrap();
    create_for(&client, VICTIM, "private", 0o600).await;
    let (file, _) = service.fdpass().unwrap().open(&named("1234/private"), true).unwrap();
    let inode = |stat: nix::sys::stat::FileStat| FileName::Inode { device: stat.st_dev, number: stat.st_ino };
    let private = inode(fd::stat(&file).unwrap());
    let FileName::Inode { device, number } = private else { unreachable!() };
    assert_eq!(client.get(&private).await.unwrap().name, "private", "the inode is that of the file");

    let learned = answers_to(&service, SQUATTER, &private);
    for (request, answer) in &learned {
        assert_eq!(answer, "NotFound: FILE not found", "{request}");
    }
    // A memfd that exists and is not of the service, and inodes that do not exist.
    let other = memfd::create("other", None).unwrap();
    for absent in [
        inode(fd::stat(&other).unwrap()),
        FileName::Inode { device, number: u64::MAX },
        FileName::Inode { device: device + 1, number },
    ] {
        assert_eq!(answers_to(&service, SQUATTER, &absent), learned, "{absent}");
    }
    // The owner's answers differ, each.
    for ((request, owners), (_, strangers)) in answers_to(&service, VICTIM, &private).iter().zip(&learned) {
        assert_ne!(owners, strangers, "{request}");
    }
}
