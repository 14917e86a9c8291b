//! Capabilities to track writes. They are tried by tracking writes to files of fdmapd.

use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use fdmap_proto::units::{PageSize, to_u64, to_usize};
use fdmap_sys::address::AddressRange;
use fdmap_sys::inotify::{Inotify, InotifyEvent};
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::{PageRegion, Pagemap, ScanFlags};
use fdmap_sys::uffd::{UffdFeatures, Userfaultfd, WRITE_TRACKING_NEEDS};
use fdmap_sys::{Errno, SyscallError, fd, memfd};

use super::capability::{Capability, capability_of};
use super::guard_trial;
use crate::tracking::{EventSources, REQUIRED_FEATURES, try_writer_threads};
use fdmap_proto::error_chain;

/// Size of the trial file.
const PAGES: u64 = 16;
const WRITTEN_PAGE: u64 = 5;

pub(super) fn capabilities(page_size: PageSize, event_sources: &EventSources) -> Vec<Capability> {
    let traced = event_sources.try_trace().map(drop).map_err(str::to_owned);
    vec![
        capability_of(
            "write-tracking",
            &try_tracking(page_size),
            "exact tracking of writes through mappings; without it, all pages of a mapping are conservative",
        ),
        capability_of(
            "fork-events",
            &try_fork_events().map_err(|error| with_remedy(&error)),
            "tracking of forked children; without it, their mappings are reported as untracked",
        ),
        capability_of(
            "mapping-queries",
            &Maps::open(std::process::id())
                .and_then(|maps| maps.vma_at_or_after(0, false))
                .map_err(|e| error_chain(&e)),
            "fast queries of mappings; without it, fdmapd parses /proc/PID/maps",
        ),
        capability_of(
            "modify-events",
            &try_modify_events(),
            "the end of each write through a descriptor; without it, such a write counts in several generations",
        ),
        capability_of(
            "writer-threads",
            &try_writer_threads(),
            "names of the threads that write through descriptors; without them, such writes are conservative if the file \
             is on a mounted file system, or if any process made a call that does not name its file",
        ),
        capability_of(
            "call-trace",
            &traced,
            "ranges of writes through descriptors, and short-lived mappings; without it, both make all data pages \
             conservative, coverage of tracked mappings is never exact, and on kernels with the bug that guard-regions reports, only programs \
             under `fdmap exec` can install guard regions in them",
        ),
        guard_trial::capability(traced.is_ok()),
    ]
}

fn try_tracking(page_size: PageSize) -> Result<(), String> {
    let found = track_one_write(page_size).map_err(|error| with_remedy(&error))?;
    if found == [WRITTEN_PAGE] {
        Ok(())
    } else {
        Err(format!("a write to page {WRITTEN_PAGE} of a tracked mapping is reported as writes to {found:?}"))
    }
}

/// The error with its causes. `EINVAL` of UFFDIO_API, and `ENOTTY` of PAGEMAP_SCAN, mean that the kernel lacks them.
fn with_remedy(error: &SyscallError) -> String {
    let text = error_chain(error);
    if matches!(error.errno, Errno::EINVAL | Errno::ENOTTY) {
        format!("{text}; {WRITE_TRACKING_NEEDS}")
    } else {
        text
    }
}

/// Writes one page of a tracked mapping, and returns the pages that the kernel reports as written.
fn track_one_write(page_size: PageSize) -> Result<Vec<u64>, SyscallError> {
    let file = memfd::create("fdmap-trial", None)?;
    let bytes = PAGES * page_size.bytes();
    memfd::resize(file.as_fd(), bytes)?;
    let mapping = SharedMapping::shared(&file, 0, to_usize(bytes), true)?;
    let start = to_u64(mapping.as_ptr().addr());
    let range = AddressRange { start, end: start + bytes };
    let userfaultfd = Userfaultfd::create()?;
    userfaultfd.api(REQUIRED_FEATURES)?;
    userfaultfd.register_wp(range)?;
    userfaultfd.write_protect(range, true)?;
    mapping.write_at(to_usize(WRITTEN_PAGE * page_size.bytes()), b"fdmap");
    let mut regions = [PageRegion::default(); 4];
    let flags = ScanFlags::WP_MATCHING.union(ScanFlags::CHECK_WPASYNC);
    let scanned = Pagemap::open(None)?.scan(range, flags, &mut regions)?;
    let page = |address: u64| (address - start) / page_size.bytes();
    Ok(regions[..scanned.count].iter().flat_map(|region| page(region.start)..page(region.end)).collect())
}

fn try_fork_events() -> Result<(), SyscallError> {
    Userfaultfd::create()?.api(REQUIRED_FEATURES | UffdFeatures::EVENT_FORK).map(drop)
}

fn try_modify_events() -> Result<(), String> {
    let seen = || -> Result<bool, SyscallError> {
        let made = memfd::create("fdmap-trial", None)?;
        let file = fd::reopen(made.as_fd(), true)?;
        let inotify = Inotify::new()?;
        let watch = inotify.watch_modify(file.as_fd())?;
        fd::write_at(file.as_fd(), 0, b"fdmap")?;
        let began = Instant::now();
        let mut seen = Vec::new();
        while seen.is_empty() && began.elapsed() < Duration::from_millis(100) {
            inotify.drain(&mut seen)?;
        }
        Ok(seen == [InotifyEvent::Modified(watch)])
    };
    match seen() {
        Ok(true) => Ok(()),
        Ok(false) => Err("inotify reports no write to a memfd that was reopened by path".to_owned()),
        Err(error) => Err(error_chain(&error)),
    }
}
