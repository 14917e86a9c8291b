//! Clients that use all that their user may have, break the protocol, or do not read, until they are ended.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fdmap_client::grpc::{CreateFile, ScanRequest};
use fdmap_client::proto::convert::FileName;
use fdmap_client::{Client, FdpassClient, Timeouts};
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_proto::v1::files_client::FilesClient;
use fdmap_proto::v1::pages_client::PagesClient;
use fdmap_sys::memfd;
use fdmap_sys::scm::MAX_DESCRIPTORS;
use fdmap_tests::HarnessResult;
use fdmap_tests::raw::{RawSession, channel, packet};
use fdmap_tests::reported::create_file;
use fdmap_tests::service::named;
use fdmap_tests::test_agent::TestAgent;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::task::JoinSet;

use crate::user::User;

const PAGE: u64 = 4096;

/// Pages of a file whose scan does not fit into the window of a connection.
const LARGE_PAGES: u64 = 1 << 15;

/// The smallest window of a connection, in bytes.
const WINDOW: u32 = 1 << 16;

/// Connections that a client keeps open without using them.
const MAX_IDLE: usize = 16;

/// Calls of one client at a time.
const MAX_CALLS: usize = 64;

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// Streams that are not read.
    UnreadStreams,
    /// Sessions that are not read, and whose replies carry descriptors.
    UnreadReplies,
    /// Connections that send nothing, or only Hello.
    Silence,
    /// Connections that are closed at once.
    Connections,
    /// Create and Delete at once.
    Files,
    /// Checkpoint and Scan of one file at once.
    Checkpoints,
    /// Track requests with descriptors of other kinds.
    Tracks,
    /// Packets with as many descriptors as one can carry.
    Descriptors,
    /// Clients that disconnect during a request.
    Deaths,
    /// A process that is stopped while its mapping is tracked, and Checkpoint of its file at once.
    StoppedProcess,
}

impl Attack {
    /// Attacks that begin with one connection, and then [`Attack::Connections`], which leaves no other to its user.
    pub const OF_FIRST_USER: [Self; 4] =
        [Self::Files, Self::Checkpoints, Self::StoppedProcess, Self::Connections];
    pub const OF_SECOND_USER: [Self; 6] = [
        Self::UnreadStreams,
        Self::UnreadReplies,
        Self::Silence,
        Self::Tracks,
        Self::Descriptors,
        Self::Deaths,
    ];
}

/// A client that attacks the service until the end.
#[derive(Debug)]
pub struct HostileClient {
    pub user: User,
    pub attack: Attack,
    /// Distinguishes clients of one user.
    pub number: u64,
    /// For [`Attack::StoppedProcess`].
    pub agent: Option<TestAgent>,
    pub is_over: Arc<AtomicBool>,
    /// Requests and connections so far.
    pub attempts: Arc<AtomicU64>,
}

impl HostileClient {
    /// Attacks until the end. Must run on a thread that ends afterwards.
    ///
    /// # Errors
    /// The attack could not begin. Later errors are ignored: the service may refuse all.
    pub fn run(self) -> HarnessResult<()> {
        let user = self.user.clone();
        user.run(self.attack())
    }

    async fn attack(mut self) -> HarnessResult<()> {
        match self.attack {
            Attack::UnreadStreams => self.open_unread_streams().await,
            Attack::UnreadReplies => self.leave_replies_unread().await,
            Attack::Silence => self.stay_silent().await,
            Attack::Connections => self.connect_often(),
            Attack::Files => self.create_files().await,
            Attack::Checkpoints => self.make_checkpoints().await,
            Attack::Tracks => self.track_other_descriptors(),
            Attack::Descriptors => self.send_descriptors(),
            Attack::Deaths => self.disconnect_during_calls().await,
            Attack::StoppedProcess => {
                let agent = self.agent.take().expect("a process to stop");
                self.stop_process(agent).await
            }
        }
    }

    /// Counts an attempt; false at the end.
    fn goes_on(&self) -> bool {
        self.attempts.fetch_add(1, Ordering::Relaxed);
        !self.is_over.load(Ordering::Relaxed)
    }

    async fn client(&self) -> HarnessResult<Client> {
        Ok(Client::connect(&self.user.endpoint(), Timeouts::default()).await?)
    }

    /// A name that only this client uses.
    fn name(&self) -> String {
        format!("hostile-{}", self.number)
    }

    /// Creates a file of this client.
    async fn file(&self, pages: u64) -> HarnessResult<(Client, FileName)> {
        let client = self.client().await?;
        create_file(&client, &self.name(), pages * PAGE).await?;
        Ok((client, named(&self.name())))
    }

    /// Keeps [`MAX_CALLS`] calls in progress.
    async fn flood<F: Future<Output = ()> + Send + 'static>(&self, mut call: impl FnMut(u64) -> F) {
        let mut calls = JoinSet::new();
        for number in 0.. {
            if calls.len() >= MAX_CALLS {
                calls.join_next().await;
            }
            if !self.goes_on() {
                break;
            }
            calls.spawn(call(number));
        }
    }

    async fn open_unread_streams(&self) -> HarnessResult<()> {
        let (_client, file) = self.file(LARGE_PAGES).await?;
        let mut idle = VecDeque::new();
        while self.goes_on() {
            if let Ok(channel) = channel(&self.user.endpoint(), WINDOW).await {
                let request = v1::ScanRequest {
                    file: Some(file.clone().into()),
                    encoding: v1::Encoding::Entries.into(),
                    ..Default::default()
                };
                let scan = PagesClient::new(channel.clone()).scan(request).await.ok();
                let watch = FilesClient::new(channel).watch(v1::WatchRequest {}).await.ok();
                keep_open(&mut idle, (scan, watch));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    async fn leave_replies_unread(&self) -> HarnessResult<()> {
        /// More replies than the socket takes, and fewer requests than block this client.
        const REQUESTS: usize = 400;
        let (_client, file) = self.file(16).await?;
        let mode = v1::open::Mode::ReadOnly.into();
        let open = packet(Op::Open(v1::Open { file: Some(file.into()), mode }));
        let mut idle = VecDeque::new();
        while self.goes_on() {
            if let Ok(session) = RawSession::greeted(&self.user.endpoint()) {
                let _ = (0..REQUESTS).try_for_each(|_| session.send(&open, &[]));
                keep_open(&mut idle, session);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    async fn stay_silent(&self) -> HarnessResult<()> {
        let endpoint = self.user.endpoint();
        let mut idle = VecDeque::new();
        while self.goes_on() {
            let grpc = std::os::unix::net::UnixStream::connect(&endpoint.socket);
            keep_open(&mut idle, (grpc, RawSession::connect(&endpoint), RawSession::greeted(&endpoint)));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    fn connect_often(&self) -> HarnessResult<()> {
        let endpoint = self.user.endpoint();
        while self.goes_on() {
            let _ = std::os::unix::net::UnixStream::connect(&endpoint.socket);
            let _ = RawSession::connect(&endpoint);
        }
        Ok(())
    }

    async fn create_files(&self) -> HarnessResult<()> {
        let (client, prefix) = (self.client().await?, self.name());
        self.flood(|number| {
            let (client, name) = (client.clone(), format!("{prefix}-{number}"));
            async move {
                let file = CreateFile { name: name.clone(), size_bytes: PAGE, ..CreateFile::default() };
                let _ = client.create(file).await;
                let _ = client.delete(&named(&name)).await;
            }
        })
        .await;
        Ok(())
    }

    async fn make_checkpoints(&self) -> HarnessResult<()> {
        let (client, file) = self.file(LARGE_PAGES).await?;
        self.flood(|number| {
            let (client, file) = (client.clone(), file.clone());
            async move {
                let _ = client.checkpoint(&file, true, None).await;
                if number % 2 == 0 {
                    let _ = client.scan(&file, &ScanRequest::default()).await;
                }
            }
        })
        .await;
        Ok(())
    }

    fn track_other_descriptors(&self) -> HarnessResult<()> {
        let memfd = memfd::create(&self.name(), None)?;
        memfd::resize(memfd.as_fd(), PAGE)?;
        FdpassClient::connect(&self.user.endpoint(), Timeouts::default())?.adopt(
            memfd.as_fd(),
            &self.name(),
            None,
        )?;
        let (socket, _peer) = fdmap_sys::scm::socket_pair()?;
        let null: OwnedFd = std::fs::File::open("/dev/null").expect("/dev/null").into();
        let file = Some(v1::FileRef::from(named(&self.name())));
        let mapping = v1::ClientMapping { address: PAGE, length_bytes: PAGE, first_page: 0 };
        let (mappings, pid) = (vec![mapping; 64], 0);
        let track = packet(Op::Track(v1::Track { file, mappings, pagemap: true, maps: true, pid }));
        let kinds = [memfd.as_fd(), socket.as_fd(), null.as_fd()];
        let mut session = None;
        for number in 0.. {
            if !self.goes_on() {
                break;
            }
            let passed = [0, 1, 2].map(|at| kinds[(number + at * number / 3) % kinds.len()]);
            session = session.or_else(|| RawSession::greeted(&self.user.endpoint()).ok());
            // A session that has ended is replaced.
            session = session
                .filter(|open| open.send(&track, &passed).is_ok() && matches!(open.reply(), Ok(Some(_))));
        }
        Ok(())
    }

    fn send_descriptors(&self) -> HarnessResult<()> {
        let memfd = memfd::create(&self.name(), None)?;
        let adopt = packet(Op::Adopt(v1::Adopt { name: self.name(), access: None, lifetime: 0 }));
        while self.goes_on() {
            if let Ok(session) = RawSession::greeted(&self.user.endpoint()) {
                let _ = (0..3).try_for_each(|_| session.send(&adopt, &[memfd.as_fd(); MAX_DESCRIPTORS]));
            }
        }
        Ok(())
    }

    async fn disconnect_during_calls(&self) -> HarnessResult<()> {
        let (_client, file) = self.file(LARGE_PAGES).await?;
        let fetch = v1::FetchSnapshot {
            file: Some(file.clone().into()),
            layout: v1::fetch_snapshot::Layout::States.into(),
            ..Default::default()
        };
        let fetch = packet(Op::FetchSnapshot(fetch));
        while self.goes_on() {
            if let Ok(session) = RawSession::greeted(&self.user.endpoint()) {
                let _ = session.send(&fetch, &[]);
            }
            if let Ok(client) = self.client().await {
                let calls = async {
                    let retained =
                        ScanRequest { retain_for: Duration::from_secs(1), ..ScanRequest::default() };
                    let checkpoint = client.checkpoint(&file, true, None);
                    let _ = tokio::join!(checkpoint, client.scan(&file, &retained), client.list());
                };
                let _ = tokio::time::timeout(Duration::from_millis(1), calls).await;
            }
        }
        Ok(())
    }

    async fn stop_process(&self, mut agent: TestAgent) -> HarnessResult<()> {
        let (client, file) = self.file(LARGE_PAGES).await?;
        agent.map_in(&self.user.runtime_dir, &self.name(), true)?;
        agent.poke(0, 0, LARGE_PAGES / 16)?;
        // The process has the same user.
        kill(Pid::from_raw(agent.pid().cast_signed()), Signal::SIGSTOP).expect("SIGSTOP");
        self.flood(|_| {
            let (client, file) = (client.clone(), file.clone());
            async move {
                let _ = client.checkpoint(&file, true, None).await;
            }
        })
        .await;
        // A stopped process ends by SIGKILL.
        agent.kill()
    }
}

/// Adds a connection, and closes the oldest beyond [`MAX_IDLE`].
fn keep_open<T>(idle: &mut VecDeque<T>, connection: T) {
    idle.push_back(connection);
    if idle.len() > MAX_IDLE {
        drop(idle.pop_front());
    }
}
