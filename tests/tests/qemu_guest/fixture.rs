//! What the tests of guests share.

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

/// Bytes that QEMU may have in memory: less than its guest has, and it needs some for itself.
const LIMIT: u64 = 160 << 20;

/// Pages of the disk.
pub const DISK: u64 = 4096;

/// The name that QEMU gives to the memory.
const MEMORY: &str = "memory-backend-memfd";

/// The descriptor of the memory where it is a file of the service's.
const GIVEN: i32 = 9;

/// How a program that knows nothing of the service gets to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// It is started under the shim.
    Exec,
    /// It is adopted while it runs.
    Adopt,
    /// It is started under the shim, with a file of the service's for its memory.
    Given,
}

impl Attachment {
    /// What it is started by.
    pub fn wrapper(self, service: &Service) -> Wrapper {
        let fdmap = program("fdmap").unwrap().display().to_string();
        let folder = service.folder().display().to_string();
        let fdmap = |words: &str| format!("{fdmap} --runtime-dir {folder} {words} --");
        let shim = fdmap("exec");
        let words = match self {
            Self::Adopt => String::new(),
            Self::Exec => shim,
            Self::Given => format!("{} {shim}", fdmap(&format!("open {MEMORY} --write --fd {GIVEN}"))),
        };
        Wrapper(words.split_whitespace().map(Into::into).collect())
    }

    /// The descriptor of the memory, if it is a file of the service's. Makes that file.
    pub async fn memory(self, fixture: &Fixture) -> Option<i32> {
        if self != Self::Given {
            return None;
        }
        let size_bytes = MEMORY_MIB << 20;
        let file = CreateFile { name: MEMORY.to_owned(), size_bytes, ..CreateFile::default() };
        fixture.client.create(file).await.unwrap();
        Some(GIVEN)
    }

    /// Has a process that runs taken over, if that is still to be done.
    pub fn take(self, fixture: &Fixture, pid: u32) {
        if self == Self::Adopt {
            let fdmap = program("fdmap").unwrap();
            let (fdmap, folder) = (fdmap.to_string_lossy(), fixture.service.folder().to_string_lossy());
            let pid = pid.to_string();
            let words = ["--runtime-dir", &folder, "adopt", "--pid", &pid, "--all", "--track"];
            println!("{}", output(&fdmap, &words).unwrap());
        }
    }
}

/// A service, and a host for a guest that is swapped. Undone in this order.
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

    /// Who asks what was written, beginning now.
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

    /// True if a process is named as one that writes unobserved.
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

/// The pages that two sets have in common.
pub fn both(one: &PageSet, other: &PageSet) -> PageSet {
    one.without(&one.without(other))
}
