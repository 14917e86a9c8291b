//! The trial of the walk at start: a file of the service, mapped three times, must be found as `/proc/self/maps` lists it.

use std::os::fd::AsFd as _;
use std::time::Duration;

use fdmap_proto::error_chain;
use fdmap_sys::address::AddressRange;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::{SyscallError, fd, memfd};
use nix::unistd::{SysconfVar, sysconf};

use super::accept::WritableCount;
use super::{MAX_VMAS, MAX_WALKS, Walked, Walker, find};
use crate::probe::file_vma::{FileVma, KernelAddress};

/// Pages of the trial file. Each mapping maps all pages from a different one on.
const PAGES: usize = 4;
const MAPPINGS: usize = 3;

/// Finds out which mappings the kernel counts, and lets the walker count them, too. Then checks that the walk finds the mappings of
/// a trial file, that they belong to the address space of this process, and that its page tables are counted.
pub(super) fn check(walker: &mut Walker) -> Result<WritableCount, String> {
    let counts = writable_count(walker)?;
    check_mappings(walker)?;
    check_page_tables(walker)?;
    Ok(counts)
}

/// Walks over the only mapping of a file that is shared and can never be written: with the other count, every walk is rejected.
fn writable_count(walker: &mut Walker) -> Result<WritableCount, String> {
    let failed = |error: SyscallError| error_chain(&error);
    let file = memfd::create("fdmap-trial", None).map_err(failed)?;
    memfd::resize(file.as_fd(), 1).map_err(failed)?;
    memfd::add_seals(file.as_fd(), memfd::SEAL_FUTURE_WRITE).map_err(failed)?;
    let _mapping = SharedMapping::shared(&file, 0, 1, false).map_err(failed)?;
    for counts in [WritableCount::MayWrite, WritableCount::Shared] {
        walker.counts = counts;
        let found = find(MAX_WALKS, || Some(walker.walk(file.as_fd(), MAX_VMAS)))
            .map_err(|error| error_chain(&error))?;
        if matches!(&found, Walked::Found(vmas) if vmas.len() == 1) {
            return Ok(counts);
        }
    }
    Err("walks of the mapping of a sealed trial file were rejected".to_owned())
}

fn check_mappings(walker: &mut Walker) -> Result<(), String> {
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|bytes| usize::try_from(bytes).ok());
    let page = page.filter(|bytes| bytes.is_power_of_two()).ok_or("the page size is unknown")?;
    let failed = |error: SyscallError| error_chain(&error);
    let file = memfd::create("fdmap-trial", None).map_err(failed)?;
    let pages = PAGES * page;
    memfd::resize(file.as_fd(), u64::try_from(pages).unwrap_or(0)).map_err(failed)?;
    let mut mappings = Vec::new();
    for nth in 0..MAPPINGS {
        let offset = u64::try_from(nth * page).unwrap_or(0);
        mappings.push(SharedMapping::shared(&file, offset, pages - nth * page, nth != 0).map_err(failed)?);
    }
    let expected = listed(&file, page).map_err(failed)?;
    let Walked::Found(mut found) =
        find(MAX_WALKS, || Some(walker.walk(file.as_fd(), MAX_VMAS))).map_err(|error| error_chain(&error))?
    else {
        return Err("walks of the mappings of a trial file were rejected".to_owned());
    };
    found.sort_unstable_by_key(|vma| vma.range.start);
    let as_listed = |vma: &FileVma| (vma.range, vma.first_page.0);
    let walked: Vec<_> = found.iter().map(as_listed).collect();
    if expected.len() != MAPPINGS || walked != expected {
        return Err(format!("finds the mappings {walked:x?} of a trial file instead of {expected:x?}"));
    }
    let pagemap = Pagemap::open(None).map_err(failed)?;
    let own = walker.private_data(pagemap.as_fd()).map_err(|error| error_chain(&error))?;
    check_owner(&found, own)
}

/// Checks that all VMAs are writable and belong to this process.
fn check_owner(found: &[FileVma], own: Option<KernelAddress>) -> Result<(), String> {
    if found.iter().any(|vma| Some(vma.mm) != own) {
        return Err("the mappings of a trial file do not belong to the address space of /proc/self/pagemap"
            .to_owned());
    }
    let pid = std::process::id();
    if found.iter().any(|vma| vma.pid.is_some_and(|found| found != pid)) {
        return Err(format!("the mappings of a trial file belong to {found:?} instead of process {pid}"));
    }
    if found.iter().any(|vma| !vma.writable) {
        return Err(format!("the mappings of a trial file are not writable: {found:?}"));
    }
    Ok(())
}

/// Checks that the page tables of this process are those of `/proc/self/status`.
fn check_page_tables(walker: &Walker) -> Result<(), String> {
    /// Other threads may change them meanwhile.
    const ATTEMPTS: usize = 100;
    let failed = |error: SyscallError| error_chain(&error);
    let pagemap = Pagemap::open(None).map_err(failed)?;
    let mut found = None;
    for _ in 0..ATTEMPTS {
        let before = listed_page_tables()?;
        let tables = walker.page_tables(pagemap.as_fd()).map_err(|error| error_chain(&error))?;
        let after = listed_page_tables()?;
        found = tables.map(|tables| tables.bytes);
        if found.is_some_and(|bytes| (before.min(after)..=before.max(after)).contains(&bytes)) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(format!("counts {found:?} bytes of page tables of this process, unlike VmPTE of /proc/self/status"))
}

/// `VmPTE` of `/proc/self/status`, in bytes.
fn listed_page_tables() -> Result<u64, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kibibytes.map(|kibibytes| kibibytes << 10).ok_or_else(|| "/proc/self/status has no VmPTE".to_owned())
}

/// The mappings of a file in this process: their addresses and first pages.
fn listed(file: &std::os::fd::OwnedFd, page: usize) -> Result<Vec<(AddressRange, u64)>, SyscallError> {
    let stat = fd::stat(file)?;
    let vmas = Maps::open(std::process::id())?.shared_of(stat.st_dev, stat.st_ino)?;
    Ok(vmas.iter().map(|vma| (vma.range, vma.offset / u64::try_from(page).unwrap_or(1))).collect())
}
