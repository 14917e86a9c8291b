//! The fixture of the demo: the service, swap, the cgroup, the client, the file.

use std::path::Path;
use std::process::Command;

use fdmap_client::compare::mappings_of;
use fdmap_client::proto::{PageSize, PagemapEntry};
use fdmap_sys::pagemap::Pagemap;
use fdmap_tests::cgroup::Cgroup;
use fdmap_tests::host::root;
use fdmap_tests::pattern::Pattern;
use fdmap_tests::service::{Service, program};
use fdmap_tests::swap::Swap;
use fdmap_tests::test_agent::TestAgent;
use fdmap_tests::{HarnessError, HarnessResult};

use crate::typed;

/// The name of the file.
pub(crate) const FILE: &str = "demo";
/// The file is written in stretches, so that the map has visible parts.
const STRETCHES: u64 = 16;
const PATTERN: Pattern = Pattern { seed: 1, percent: 100 };

/// Fields are dropped in this order.
pub(crate) struct Fixture {
    client: TestAgent,
    _cgroup: Cgroup,
    service: Service,
    swap: Swap,
    pages: u64,
    page_size: PageSize,
}

impl Fixture {
    /// Sets up the demo for a file of `mib` MiB.
    pub(crate) fn set(mib: u64) -> HarnessResult<Self> {
        root()?;
        let page_size = host_page_size()?;
        let bytes = mib << 20;
        let swap = Swap::at_least(2 * bytes)?;
        let made = if swap.is_ours() { " (the host has too little; removed at the end)" } else { "" };
        println!("swap      {}{made}", swap.name());
        let service = Service::start(&[])?;
        println!("service   fdmapd, process {}", service.pid());
        let cgroup = Cgroup::with_limit(bytes / 4)?;
        println!("cgroup    {}, {} MiB of memory", cgroup.path().display(), mib / 4);
        let client = TestAgent::start(Some(&cgroup))?;
        println!("client    process {} in that cgroup", client.pid());
        let pages = bytes / page_size.bytes();
        Ok(Self { client, _cgroup: cgroup, service, swap, pages, page_size })
    }

    /// The actions of the client: creates and maps the file, writes three quarters of it, and reads a few of the
    /// pages again.
    pub(crate) fn act(&mut self) -> HarnessResult<()> {
        println!();
        self.fdmap(&["create", FILE, "--size", &format!("{}M", self.bytes() >> 20)])?;
        self.client.open(&self.service, FILE)?;
        let stretch = self.pages / STRETCHES;
        for nth in (0..STRETCHES).filter(|nth| is_written(*nth)) {
            self.client.fill(PATTERN, nth * stretch, (nth + 1) * stretch)?;
        }
        self.client.read(stretch, stretch + stretch / 2)?;
        println!(
            "\nThe client mapped the file, wrote {} of its {} pages, and read some of them again.",
            self.written(),
            self.pages
        );
        Ok(())
    }

    /// True if the client wrote to a page.
    pub(crate) const fn has_data(&self, page: u64) -> bool {
        is_written(page / (self.pages / STRETCHES))
    }

    /// Number of pages that the client wrote.
    pub(crate) fn written(&self) -> u64 {
        (0..self.pages).map(|page| u64::from(self.has_data(page))).sum()
    }

    pub(crate) const fn pages(&self) -> u64 {
        self.pages
    }

    const fn bytes(&self) -> u64 {
        self.pages * self.page_size.bytes()
    }

    pub(crate) const fn service(&self) -> &Service {
        &self.service
    }

    pub(crate) const fn swap(&self) -> &Swap {
        &self.swap
    }

    pub(crate) fn folder(&self) -> &Path {
        self.service.folder()
    }

    /// The client's process.
    pub(crate) fn pid(&self) -> u32 {
        self.client.pid()
    }

    /// The client's pagemap entries of the file.
    pub(crate) fn pagemap(&self) -> HarnessResult<Vec<PagemapEntry>> {
        let mut words = vec![0; usize::try_from(self.pages).unwrap_or(usize::MAX)];
        let mapping =
            mappings_of(self.pid(), self.page_size)?.into_iter().find(|map| map.pages.len() == self.pages);
        let mut page = mapping
            .ok_or_else(|| HarnessError::Agent("the client maps no file of that size".to_owned()))?
            .first_virtual_page;
        let pagemap = Pagemap::open(Some(self.pid()))?;
        // 8 KiB at a time, like the fastest readers of pagemap.
        for chunk in words.chunks_mut(1024) {
            page += fdmap_client::proto::units::to_u64(pagemap.read(page, chunk)?);
        }
        Ok(words.into_iter().map(PagemapEntry).collect())
    }

    /// Runs `fdmap` against the service.
    pub(crate) fn fdmap(&self, arguments: &[&str]) -> HarnessResult<()> {
        typed(Command::new(program("fdmap")?).arg("--runtime-dir").arg(self.folder()), arguments)
    }
}

fn host_page_size() -> HarnessResult<PageSize> {
    let bytes = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    let size = bytes.and_then(|bytes| PageSize::new(bytes.cast_unsigned()));
    size.ok_or_else(|| HarnessError::Missing("a page size".to_owned()))
}

const fn is_written(stretch: u64) -> bool {
    stretch % 4 != 3
}
