//! Capabilities to find mappings of a file and references to its pages. They are tried with a mapping that is created and
//! removed, and with a page that is spliced into a pipe.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use fdmap_proto::units::{PageIndex, PageRange, PageSize, to_usize};
use fdmap_sys::error::CallContext as _;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{SyscallError, memfd, splice};

use super::capability::{Capability, capability_of};
use crate::probe::file_vma::MapperWalk;
use crate::probe::interface::{PinKind, PinnedRange, Probe, ScanTarget};
use fdmap_proto::error_chain;

/// Size of the trial file.
const PAGES: u64 = 4;
/// The page that is spliced into a pipe.
const SPLICED_PAGE: PageIndex = PageIndex(2);

/// References of the kernel itself are dropped within this time.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(200);

/// Why the probe finds no references.
fn refused(probe: &dyn Probe) -> String {
    probe.references_refused().unwrap_or_else(|| "the probe finds no references".to_owned())
}

pub(super) fn capabilities(probe: Option<&dyn Probe>, page_size: PageSize) -> [Capability; 4] {
    let file = trial_file(page_size).map_err(|error| error_chain(&error));
    let tried = |attempt: fn(&dyn Probe, &OwnedFd, PageSize) -> Result<(), String>| {
        let probe = probe.ok_or("needs xarray-walk")?;
        attempt(probe, file.as_ref().map_err(String::clone)?, page_size)
    };
    [
        capability_of(
            "writable-mappings",
            &tried(try_mappings),
            "proof that no mapping outside the service's knowledge writes to a file",
        ),
        capability_of(
            "mapper-walk",
            &tried(try_walk),
            "finding processes that map a file in all namespaces, without a wait for any of them; without it, fdmapd reads \
             /proc/PID/maps of all processes. Remedy: run fdmapd with CAP_BPF and CAP_PERFMON on Linux 6.4 or later",
        ),
        capability_of("page-pins", &tried(try_pins), "detection of direct I/O and device DMA in progress"),
        capability_of(
            "file-users",
            &tried(try_users),
            "finding every user of an ephemeral file; without it, fdmapd reads /proc of all processes, and keeps all ephemeral \
             files while it cannot read one. Remedy: run fdmapd with CAP_BPF and CAP_PERFMON",
        ),
    ]
}

fn trial_file(page_size: PageSize) -> Result<OwnedFd, SyscallError> {
    let file = memfd::create("fdmap-trial", None)?;
    let bytes = PAGES * page_size.bytes();
    nix::sys::uio::pwrite(&file, &vec![1; to_usize(bytes)], 0)
        .call(|| format!("pwrite of {bytes} bytes at 0 of a trial file"))?;
    Ok(file)
}

/// The count was tried thoroughly when its program was loaded.
fn try_users(probe: &dyn Probe, file: &OwnedFd, _page_size: PageSize) -> Result<(), String> {
    let found = probe.dentry_references([file.as_fd(); 2]).map_err(|error| error_chain(&error))?;
    let refused = || probe.users_refused().unwrap_or_else(|| "the probe counts no users".to_owned());
    if found.ok_or_else(refused)?.is_used() {
        return Err("reports a user of a trial file that has none".to_owned());
    }
    Ok(())
}

fn try_mappings(probe: &dyn Probe, file: &OwnedFd, page_size: PageSize) -> Result<(), String> {
    let count = || {
        let found = probe.writable_mappings(file.as_fd()).map_err(|error| error_chain(&error))?;
        found.ok_or_else(|| refused(probe))
    };
    let before = count()?;
    let len = to_usize(PAGES * page_size.bytes());
    let mapping = SharedMapping::shared(file, 0, len, true).map_err(|error| error_chain(&error))?;
    let during = count()?;
    drop(mapping);
    let after = count()?;
    if (before, during, after) == (0, 1, 0) {
        Ok(())
    } else {
        Err(format!("counts {before}, {during} and {after} before, during and after one writable mapping"))
    }
}

/// The walk was tried thoroughly when its program was loaded.
fn try_walk(probe: &dyn Probe, file: &OwnedFd, page_size: PageSize) -> Result<(), String> {
    let count = || match probe.mappers(file.as_fd()).map_err(|error| error_chain(&error))? {
        MapperWalk::Found(vmas) => Ok(vmas.len()),
        MapperWalk::Unknown => Err("every walk of the mappings of a trial file was rejected".to_owned()),
        MapperWalk::Unavailable(reason) => Err(reason),
    };
    let len = to_usize(PAGES * page_size.bytes());
    let mapping = SharedMapping::shared(file, 0, len, true).map_err(|error| error_chain(&error))?;
    let during = count()?;
    drop(mapping);
    let after = count()?;
    if (during, after) == (1, 0) {
        Ok(())
    } else {
        Err(format!("finds {during} and {after} mappings while and after a trial file is mapped"))
    }
}

fn try_pins(probe: &dyn Probe, file: &OwnedFd, page_size: PageSize) -> Result<(), String> {
    let target = ScanTarget { fd: file.as_fd(), page_size, file_pages: PAGES, hugetlb_order: None };
    let pins_once = || {
        let mut found = Vec::new();
        match probe.pins(&target, &[PageRange::first(PAGES)], &mut found) {
            Ok(true) => Ok(found),
            Ok(false) => Err(refused(probe)),
            Err(error) => Err(error_chain(&error)),
        }
    };
    // The kernel itself references a page for a moment, as while it drains a batch to an LRU list.
    let pins = |expected: &[PinnedRange]| {
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let found = pins_once()?;
            if found == expected || Instant::now() > deadline {
                return Ok::<_, String>(found);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let mapping = SharedMapping::shared(file, 0, to_usize(PAGES * page_size.bytes()), true)
        .map_err(|e| error_chain(&e))?;
    // Reading a byte of each page maps all pages. References by mappings are not extra references.
    for page in 0..PAGES {
        mapping.read_at(to_usize(page * page_size.bytes()), &mut [0]);
    }
    let before = pins(&[])?;
    let (read_end, write_end) = nix::unistd::pipe().map_err(|errno| format!("pipe: {errno}"))?;
    let offset = SPLICED_PAGE.0 * page_size.bytes();
    splice::into_pipe(file.as_fd(), offset, write_end.as_fd(), 1).map_err(|error| error_chain(&error))?;
    let expected = [PinnedRange { range: PageRange::at(SPLICED_PAGE, 1), kind: PinKind::ExtraReference }];
    let during = pins(&expected)?;
    drop((read_end, write_end, mapping));
    // Reading the page by splice and unmapping it mark it as accessed. Older kernels, such as 6.1, leave it in a batch to be
    // activated, which references it until the batch is full. To seal the file, the kernel drains the batches of all
    // processors if a page has extra references, and then finds none itself.
    memfd::add_seals(file.as_fd(), fdmap_proto::Seals::WRITE.bits()).map_err(|error| error_chain(&error))?;
    let after = pins(&[])?;
    if before.is_empty() && during == expected && after.is_empty() {
        Ok(())
    } else {
        Err(format!(
            "finds {before:?}, {during:?} and {after:?} before, while and after page {SPLICED_PAGE} is in a pipe"
        ))
    }
}
