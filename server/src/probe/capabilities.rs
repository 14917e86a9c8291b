//! Facts about this kernel, found by trying, never by its version. A fact that cannot be tried is unknown, not false.

mod references;
mod writes;

use fdmap_proto::error_chain;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use fdmap_proto::provenance::ProbeKind;
use fdmap_proto::state::PageState;
use fdmap_proto::units::{PageIndex, PageRange, PageSize, to_u64};
use fdmap_sys::error::CallContext as _;
use fdmap_sys::{SyscallError, cachestat, fd, memfd, ownership};
use nix::unistd::{SysconfVar, sysconf};

use super::{Probe, ScanOptions, ScanOutput, SyscallsProbe, Target};
use crate::pages::{BLOCK_PAGES, BlockRange};

/// What was found out about one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It works, or it is so.
    Yes,
    /// It does not, or it is not.
    No,
    /// It could not be tried.
    Unknown,
}

/// One thing that this kernel can or cannot do for the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// A stable name.
    pub name: &'static str,
    /// The answer.
    pub answer: Answer,
    /// How it was found out, or why not.
    pub detail: String,
    /// What users lose where the answer is not yes; empty if that is nothing.
    pub impact: &'static str,
}

/// What was found out about this host, and the probes that came out of it.
pub struct Support {
    /// In the order in which they were tried.
    pub facts: Vec<Fact>,
    /// Bytes of a base page.
    pub page_size: PageSize,
    /// hugetlb page sizes, bytes, ascending.
    pub hugetlb_page_sizes: Vec<u64>,
    /// The xarray probe, or why not.
    pub xarray: Result<Arc<dyn Probe>, String>,
    /// The syscalls probe, or why not.
    pub syscalls: Result<Arc<dyn Probe>, String>,
}

/// Pages with data in the file that things are tried on: of two blocks, so that the tree has two levels.
const DATA: [u64; 3] = [1, 64, BLOCK_PAGES + 7];
const FILE_PAGES: u64 = 2 * BLOCK_PAGES;

impl Support {
    /// Tries everything. Takes some tens of milliseconds and leaves nothing behind.
    ///
    /// # Errors
    /// If not even a memfd can be made, or the page size is none that fdmap knows.
    pub fn try_out() -> Result<Self, SyscallError> {
        let page_size = page_size()?;
        let file = trial_file(page_size)?;
        let mut facts = Vec::new();
        let xarray = try_xarray(&file, page_size);
        let syscalls = try_probe(Arc::new(SyscallsProbe), &file, page_size);
        facts.push(fact_of(
            "xarray-walk",
            &xarray,
            "swap slots, exact states of hugetlb files, swap-cached pages told apart, page attributes, and most of the speed",
        ));
        facts.push(fact_of(
            "mincore-and-seek",
            &syscalls,
            "the syscalls probe, and swap-cached pages told apart",
        ));
        facts.push(try_attributes(xarray.as_deref().ok(), &file, page_size));
        facts.extend(references::facts(xarray.as_deref().ok(), page_size));
        facts.extend(writes::facts(page_size));
        facts.push(fact_of(
            "cachestat",
            &cachestat::count(file.as_fd(), 0, 0).map_err(|e| error_chain(&e)).and_then(|counts| {
                let right = counts.cached == to_u64(DATA.len());
                if right { Ok(()) } else { Err(format!("counts {counts:?} for {} pages", DATA.len())) }
            }),
            "",
        ));
        facts.push(fact_of(
            "seal-future-write",
            &try_future_write_seal().map_err(|e| error_chain(&e)),
            "files that are closed to new writers",
        ));
        facts.push(fact_of(
            "take-inodes",
            &try_take_ownership().map_err(|e| error_chain(&e)),
            "adopting memfds of other users",
        ));
        let hugetlb_page_sizes = hugetlb_page_sizes();
        facts.push(hugetlb_fact(&hugetlb_page_sizes));
        facts.push(thp_fact());
        facts.push(swap_fact());
        facts.push(zswap_fact());
        Ok(Self { facts, page_size, hugetlb_page_sizes, xarray, syscalls })
    }

    /// Why a probe cannot be used, if it cannot.
    ///
    /// # Errors
    /// The reason.
    pub fn works(&self, probe: ProbeKind) -> Result<(), String> {
        let found = match probe {
            ProbeKind::Xarray => &self.xarray,
            ProbeKind::Syscalls => &self.syscalls,
        };
        found.as_ref().map(|_| ()).map_err(String::clone)
    }
}

fn fact_of<T>(name: &'static str, tried: &Result<T, String>, impact: &'static str) -> Fact {
    let (answer, detail) = match tried {
        Ok(_) => (Answer::Yes, "tried on a file of our own".to_owned()),
        Err(reason) => (Answer::No, reason.clone()),
    };
    Fact { name, answer, detail, impact }
}

fn page_size() -> Result<PageSize, SyscallError> {
    let call = || "sysconf(_SC_PAGE_SIZE)".to_owned();
    let bytes = sysconf(SysconfVar::PAGE_SIZE).call(call)?.unwrap_or(0);
    u64::try_from(bytes).ok().and_then(PageSize::new).ok_or(nix::errno::Errno::EINVAL).call(call)
}

fn trial_file(page_size: PageSize) -> Result<OwnedFd, SyscallError> {
    let file = memfd::create("fdmap-trial", None)?;
    memfd::resize(file.as_fd(), FILE_PAGES * page_size.bytes())?;
    for page in DATA {
        let offset = i64::try_from(page * page_size.bytes()).unwrap_or(0);
        nix::sys::uio::pwrite(&file, b"fdmap", offset)
            .call(|| format!("pwrite at {offset} of a trial file"))?;
    }
    fd::reopen_for_probe(file.as_fd())
}

/// Tries whether a probe tells the trial file as it is.
fn try_probe(probe: Arc<dyn Probe>, file: &OwnedFd, page_size: PageSize) -> Result<Arc<dyn Probe>, String> {
    let out = scan(&*probe, file.as_fd(), page_size, ScanOptions::default())?;
    let mut data = Vec::new();
    for (index, block) in &out.blocks {
        for page in 0..BLOCK_PAGES {
            match block.state(page) {
                PageState::Hole => {}
                PageState::Resident => data.push(index.first_page().0 + page),
                other => {
                    return Err(format!("page {page} of block {} of a resident file is {other}", index.0));
                }
            }
        }
    }
    if data == DATA { Ok(probe) } else { Err(format!("found data in pages {data:?} instead of {DATA:?}")) }
}

fn scan(
    probe: &dyn Probe,
    file: BorrowedFd<'_>,
    page_size: PageSize,
    wants: ScanOptions,
) -> Result<ScanOutput, String> {
    let target = Target { fd: file, page_size, file_pages: FILE_PAGES, hugetlb_order: None };
    let mut out = ScanOutput::default();
    let range = BlockRange::around(PageRange::first(FILE_PAGES));
    probe.scan(&target, range, wants, &|| false, &mut out).map_err(|error| error_chain(&error))?;
    Ok(out)
}

#[cfg(feature = "xarray")]
fn try_xarray(file: &OwnedFd, page_size: PageSize) -> Result<Arc<dyn Probe>, String> {
    let (loaded, said) = super::bpf::listening(super::XarrayProbe::load);
    let probe = loaded.map_err(|error| match said.last() {
        Some(said) => format!("{}; libbpf: {said}", error_chain(&error)),
        None => error_chain(&error),
    })?;
    try_probe(Arc::new(probe), file, page_size)
}

#[cfg(not(feature = "xarray"))]
fn try_xarray(_file: &OwnedFd, _page_size: PageSize) -> Result<Arc<dyn Probe>, String> {
    Err("fdmapd was built without it".to_owned())
}

fn try_attributes(xarray: Option<&dyn Probe>, file: &OwnedFd, page_size: PageSize) -> Fact {
    let tried = match xarray {
        None => Err("needs xarray-walk".to_owned()),
        Some(probe) => {
            let wants = ScanOptions { attributes: true, ..ScanOptions::default() };
            scan(probe, file.as_fd(), page_size, wants).and_then(|out| {
                let page = out.attributes.get(PageIndex(DATA[0])).unpack(probe.attributes());
                let uptodate = page.flags.is_some_and(|flags| flags.names().any(|name| name == "uptodate"));
                let told = page.order == Some(0)
                    && uptodate
                    && page.map_count == Some(0)
                    && page.maybe_pinned == Some(false);
                if told { Ok(()) } else { Err(format!("an unmapped page of its own is {page:?}")) }
            })
        }
    };
    fact_of("page-attributes", &tried, "folio order, flags, map counts and pins")
}

fn try_future_write_seal() -> Result<(), SyscallError> {
    let file = memfd::create("fdmap-trial", None)?;
    memfd::add_seals(file.as_fd(), fdmap_proto::Seal::FutureWrite.bit())
}

/// Tries to own an inode that somebody else owns.
fn try_take_ownership() -> Result<(), SyscallError> {
    let file = memfd::create("fdmap-trial", None)?;
    // Owning what one owns already proves nothing.
    let other = if nix::unistd::geteuid().as_raw() == 65534 { 65533 } else { 65534 };
    nix::unistd::fchown(&file, Some(nix::unistd::Uid::from_raw(other)), None)
        .call(|| format!("fchown of a trial file to user {other}"))?;
    ownership::take(file.as_fd()).map(drop)
}

/// Sizes by /sys/kernel/mm/hugepages; what cannot be read there is not there.
fn hugetlb_page_sizes() -> Vec<u64> {
    let entries = fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten();
    let mut sizes: Vec<u64> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            kib.checked_mul(1024)
        })
        .collect();
    sizes.sort_unstable();
    sizes
}

fn hugetlb_fact(sizes: &[u64]) -> Fact {
    let free: Vec<String> = sizes
        .iter()
        .map(|bytes| {
            let kib = bytes / 1024;
            let free =
                fs::read_to_string(format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/free_hugepages"));
            format!("{} free of {kib} KiB", free.as_deref().unwrap_or("unknown").trim())
        })
        .collect();
    Fact {
        name: "hugetlb",
        answer: if sizes.is_empty() { Answer::No } else { Answer::Yes },
        detail: if sizes.is_empty() {
            "/sys/kernel/mm/hugepages is empty".to_owned()
        } else {
            free.join(", ")
        },
        impact: "hugetlb files",
    }
}

fn thp_fact() -> Fact {
    const PATH: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let (answer, detail) = match fs::read_to_string(PATH) {
        Err(error) => (Answer::Unknown, format!("{PATH}: {error}")),
        Ok(text) => {
            let chosen = text.split(['[', ']']).nth(1).unwrap_or("").to_owned();
            let on = matches!(chosen.as_str(), "always" | "within_size" | "advise" | "force");
            (if on { Answer::Yes } else { Answer::No }, format!("{PATH} is {chosen}"))
        }
    };
    Fact { name: "shmem-thp", answer, detail, impact: "transparent huge pages in files made for them" }
}

fn swap_fact() -> Fact {
    let (answer, detail) = match fs::read_to_string("/proc/swaps") {
        Err(error) => (Answer::Unknown, format!("/proc/swaps: {error}")),
        Ok(text) => {
            let areas: Vec<_> =
                text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
            if areas.is_empty() {
                (Answer::No, "/proc/swaps has no areas".to_owned())
            } else {
                (Answer::Yes, areas.join(", "))
            }
        }
    };
    Fact { name: "swap", answer, detail, impact: "" }
}

fn zswap_fact() -> Fact {
    const PATH: &str = "/sys/module/zswap/parameters/enabled";
    let (answer, detail) = match fs::read_to_string(PATH) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => (Answer::Yes, format!("no {PATH}")),
        Err(error) => (Answer::Unknown, format!("{PATH}: {error}")),
        Ok(text) if text.trim() == "N" => (Answer::Yes, format!("{PATH} is N")),
        Ok(text) => (Answer::No, format!("{PATH} is {}", text.trim())),
    };
    Fact {
        name: "zswap-off",
        answer,
        detail,
        impact: "the certainty that a swap slot's content is on the device; states and slots stay right",
    }
}
