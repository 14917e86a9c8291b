//! A client that keeps to its limits.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use fdmap_client::grpc::ScanRequest;
use fdmap_client::proto::units::Generation;
use fdmap_client::{Client, FdpassClient, MappedFile, Timeouts};
use fdmap_sys::memfd;
use fdmap_tests::pattern::mix;
use fdmap_tests::reported::{Reported, create_file};
use fdmap_tests::service::named;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::{HarnessError, HarnessResult};

use crate::latencies::Latencies;
use crate::user::User;

const PAGE: u64 = 4096;
const PAGES: u64 = 64;

/// The longest pause between two rounds of calls.
const MAX_PAUSE_MILLIS: u64 = 2000;

/// A client with one file, which no other client uses.
#[derive(Debug)]
pub struct HonestClient {
    pub user: User,
    pub number: u64,
    /// Writes through a tracked mapping of the file.
    pub agent: Option<TestAgent>,
    pub until: Instant,
}

/// How a client writes.
enum Writer {
    Tracked(TestAgent),
    Mapping(Box<MappedFile>),
    Descriptor(File),
}

impl HonestClient {
    /// Calls the service until the end, and deletes the file. Must run on a thread that ends afterwards.
    ///
    /// # Errors
    /// The first call that fails.
    pub fn run(self) -> HarnessResult<Latencies> {
        let user = self.user.clone();
        user.run(self.calls())
    }

    async fn calls(mut self) -> HarnessResult<Latencies> {
        let mut latencies = Latencies::default();
        let endpoint = self.user.endpoint();
        let connected = latencies.of("Connect", Client::connect(&endpoint, Timeouts::default()));
        let client = connected.await?;
        let mut session =
            latencies.of_blocking("Hello", || FdpassClient::connect(&endpoint, Timeouts::default()))?;
        let file = named(&format!("honest-{}", self.number));
        let mut writer = self.create(&client, &mut session, &mut latencies).await?;
        let mut since = latencies.of("Checkpoint", client.checkpoint(&file, false, None)).await?.generation;
        let mut word = self.number;
        while Instant::now() < self.until {
            word = mix(word);
            let page = word % PAGES;
            writer.write(page)?;
            let made = latencies.of("Checkpoint", client.checkpoint(&file, false, None)).await?;
            assert_reports(&client, &mut latencies, self.number, since, page).await?;
            since = made.generation;
            let scan = async { client.scan(&file, &ScanRequest::default()).await?.runs().await };
            latencies.of("Scan", scan).await?;
            latencies.of("Get", client.get(&file)).await?;
            latencies.of("List", client.list()).await?;
            latencies.of_blocking("Open", || session.open(&file, word & 1 << 20 == 0))?;
            let pause = Duration::from_millis((word >> 32) % MAX_PAUSE_MILLIS);
            tokio::time::sleep(pause.min(self.until.saturating_duration_since(Instant::now()))).await;
        }
        latencies.of("Delete", client.delete(&file)).await?;
        Ok(latencies)
    }

    /// Creates the file, or transfers a memfd, and opens it for writing.
    async fn create(
        &mut self,
        client: &Client,
        session: &mut FdpassClient,
        latencies: &mut Latencies,
    ) -> HarnessResult<Writer> {
        let name = format!("honest-{}", self.number);
        if self.number.is_multiple_of(3) {
            let fd = memfd::create(&name, None)?;
            memfd::resize(fd.as_fd(), PAGES * PAGE)?;
            latencies.of_blocking("Adopt", || session.adopt(fd.as_fd(), &name, None))?;
        } else {
            latencies.of("Create", create_file(client, &name, PAGES * PAGE)).await?;
        }
        if let Some(mut agent) = self.agent.take() {
            agent.map_in(&self.user.runtime_dir, &name, true)?;
            return Ok(Writer::Tracked(agent));
        }
        let (fd, _) = latencies.of_blocking("Open", || session.open(&named(&name), true))?;
        if self.number.is_multiple_of(2) {
            return Ok(Writer::Descriptor(fd.into()));
        }
        drop(fd);
        let mapped = latencies.of_blocking("Open", || session.map(&named(&name), true))?;
        Ok(Writer::Mapping(Box::new(mapped)))
    }
}

impl Writer {
    fn write(&mut self, page: u64) -> HarnessResult<()> {
        let written = match self {
            Self::Tracked(agent) => return agent.poke(0, page, page + 1),
            Self::Mapping(mapped) => mapped.write_at(page * PAGE, b"written"),
            Self::Descriptor(file) => file.write_all_at(b"written", page * PAGE).is_ok(),
        };
        if written { Ok(()) } else { Err(HarnessError::Agent(format!("page {page} cannot be written"))) }
    }
}

/// Fails if the service does not report the write to a page: another client deceived it.
async fn assert_reports(
    client: &Client,
    latencies: &mut Latencies,
    number: u64,
    since: Generation,
    page: u64,
) -> HarnessResult<()> {
    let file = named(&format!("honest-{number}"));
    let reported = latencies.of("Changes", Reported::since(client, &file, since)).await?;
    if reported.pages.contains(&page) {
        return Ok(());
    }
    Err(HarnessError::Agent(format!("the write to page {page} is missing in {reported:?}")))
}
