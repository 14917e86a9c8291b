//! Shared parts of the guest tests.

use std::path::Path;

use fdmap_client::Client;
use fdmap_client::grpc::{CreateFile, SummaryOptions};
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::guest::disk::Disk;
use fdmap_tests::guest::{MEMORY_MIB, MEMORY_PAGES, Wrapper};
use fdmap_tests::harness::require;
use fdmap_tests::host::{HostLock, output};
use fdmap_tests::no_lost_writes::consumer::Consumer;
use fdmap_tests::no_lost_writes::pages::PageSet;
use fdmap_tests::service::{Service, named, program};
use fdmap_tests::swap::{Swap, SwapKind};

/// Memory limit of QEMU in bytes. It is less than the memory of the guest, and QEMU needs a part of it for itself.
const LIMIT: u64 = 160 << 20;

/// Pages of the disk.
pub const DISK: u64 = 4096;

/// The name that QEMU gives to the memfd of the guest's memory.
const MEMORY: &str = "memory-backend-memfd";

/// The number of the inherited memory descriptor, if the memory is a file of the service.
const INHERITED_FD: i32 = 9;

/// How an unmodified QEMU is connected to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// QEMU is started under the shim.
    Exec,
    /// QEMU is adopted while it runs.
    Adopt,
    /// QEMU is started under the shim, with a file of the service as the guest's memory.
    Given,
}

impl Attachment {
    /// The command in front of the program.
    pub fn wrapper(self, service: &Service) -> Wrapper {
        let fdmap = program("fdmap").unwrap().display().to_string();
        let folder = service.folder().display().to_string();
        let fdmap = |words: &str| format!("{fdmap} --runtime-dir {folder} {words} --");
        let shim = fdmap("exec");
        let words = match self {
            Self::Adopt => String::new(),
            Self::Exec => shim,
            Self::Given => format!("{} {shim}", fdmap(&format!("open {MEMORY} --write --fd {INHERITED_FD}"))),
        };
        Wrapper(words.split_whitespace().map(Into::into).collect())
    }

    /// Creates the memory file if the memory is a file of the service. Returns the number of its descriptor.
    pub async fn memory(self, fixture: &Fixture) -> Option<i32> {
        if self != Self::Given {
            return None;
        }
        let size_bytes = MEMORY_MIB << 20;
        let file = CreateFile { name: MEMORY.to_owned(), size_bytes, ..CreateFile::default() };
        fixture.client.create(file).await.unwrap();
        Some(INHERITED_FD)
    }

    /// Adopts a running process, if the attachment is [`Attachment::Adopt`].
    pub fn adopt(self, fixture: &Fixture, pid: u32) {
        if self == Self::Adopt {
            let fdmap = program("fdmap").unwrap();
            let (fdmap, folder) = (fdmap.to_string_lossy(), fixture.service.folder().to_string_lossy());
            let pid = pid.to_string();
            let words = ["--runtime-dir", &folder, "adopt", "--pid", &pid, "--all", "--track"];
            println!("{}", output(&fdmap, &words).unwrap());
        }
    }
}

/// A service, and a host that swaps the guest. The fields are dropped in this order.
pub struct Fixture {
    pub service: Service,
    client: Client,
    pub cgroup: Cgroup,
    pub disk: Disk,
    _swap: Swap,
    _host: HostLock,
}

impl Fixture {
    pub async fn make() -> Self {
        let host = HostLock::acquire().unwrap();
        let swap = require(Swap::make(1 << 29, SwapKind::Any));
        let cgroup = require(Cgroup::with_limit(LIMIT));
        let disk = Disk::make(Path::new(env!("CARGO_TARGET_TMPDIR")), 1, DISK).unwrap();
        let service = Service::start(&[]).unwrap();
        let client = service.client().await.unwrap();
        Self { service, client, cgroup, disk, _swap: swap, _host: host }
    }

    /// A new consumer of the memory that reports changes from now on.
    pub async fn consumer(&self) -> Consumer {
        let client = self.service.client().await.unwrap();
        let mut consumer = Consumer::new(client, named(MEMORY), MEMORY_PAGES, 1);
        consumer.step(true).await.unwrap();
        consumer
    }

    /// Seals the memory against new writers; existing mappings stay writable.
    pub async fn seal_writers(&self) {
        self.client.seal_writers(&named(MEMORY)).await.unwrap();
    }

    /// Pages of the memory that are swapped out.
    pub async fn swapped(&self) -> u64 {
        self.client.summary(&named(MEMORY), &SummaryOptions::default()).await.unwrap().swapped_pages
    }

    /// Returns true if coverage names the process as an unobserved writer.
    pub async fn names(&self, pid: u32) -> bool {
        let found = self.client.coverage(&named(MEMORY)).await.unwrap();
        found.coverage.gaps.iter().any(|gap| gap.pid == Some(pid))
    }
}

/// Pages of the memory as a set.
pub fn set_of(pages: &[u64]) -> PageSet {
    let mut set = PageSet::of(MEMORY_PAGES);
    set.extend(pages.iter().copied());
    set
}

/// The pages that both sets contain.
pub fn both(one: &PageSet, other: &PageSet) -> PageSet {
    one.without(&one.without(other))
}
