//! Facts about who refers to a file's pages: tried with a mapping that comes and goes, and with a page in a pipe.

use fdmap_proto::error_chain;
use std::os::fd::{AsFd as _, OwnedFd};

use fdmap_proto::units::{PageIndex, PageRange, PageSize, to_usize};
use fdmap_sys::error::CallContext as _;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::{SyscallError, memfd, splice};

use super::{Fact, fact_of};
use crate::probe::{PinKind, Pinned, Probe, Target};

/// Pages of the trial file.
const PAGES: u64 = 4;
/// The one that is put into a pipe.
const HELD: PageIndex = PageIndex(2);

/// All facts of this module.
pub(super) fn facts(probe: Option<&dyn Probe>, page_size: PageSize) -> [Fact; 2] {
    let file = trial_file(page_size).map_err(|error| error_chain(&error));
    let tried = |attempt: fn(&dyn Probe, &OwnedFd, PageSize) -> Result<(), String>| {
        let probe = probe.ok_or("needs xarray-walk")?;
        attempt(probe, file.as_ref().map_err(String::clone)?, page_size)
    };
    [
        fact_of(
            "writable-mappings",
            &tried(try_mappings),
            "proof that no mapping writes that the service does not know of",
        ),
        fact_of("page-pins", &tried(try_pins), "writes by direct I/O and devices that are under way"),
    ]
}

fn trial_file(page_size: PageSize) -> Result<OwnedFd, SyscallError> {
    let file = memfd::create("fdmap-trial", None)?;
    let bytes = PAGES * page_size.bytes();
    nix::sys::uio::pwrite(&file, &vec![1; to_usize(bytes)], 0)
        .call(|| format!("pwrite of {bytes} bytes at 0 of a trial file"))?;
    Ok(file)
}

fn try_mappings(probe: &dyn Probe, file: &OwnedFd, page_size: PageSize) -> Result<(), String> {
    let count = || {
        let found = probe.writable_mappings(file.as_fd()).map_err(|error| error_chain(&error))?;
        found.ok_or_else(|| "the program could not be loaded; the log says why".to_owned())
    };
    let map = |writable| {
        let len = to_usize(PAGES * page_size.bytes());
        SharedMapping::shared(file, 0, len, writable).map_err(|error| error_chain(&error))
    };
    let none = count()?;
    let mapping = map(true)?;
    let one = count()?;
    drop(mapping);
    let again = count()?;
    if (none, one, again) == (0, 1, 0) {
        Ok(())
    } else {
        Err(format!("counts {none}, {one} and {again} before, with and after a mapping that can write"))
    }
}

fn try_pins(probe: &dyn Probe, file: &OwnedFd, page_size: PageSize) -> Result<(), String> {
    let target = Target { fd: file.as_fd(), page_size, file_pages: PAGES, hugetlb_order: None };
    let pins = || {
        let mut found = Vec::new();
        match probe.pins(&target, &[PageRange::first(PAGES)], &mut found) {
            Ok(true) => Ok(found),
            Ok(false) => Err("the program could not be loaded; the log says why".to_owned()),
            Err(error) => Err(error_chain(&error)),
        }
    };
    let mapping = SharedMapping::shared(file, 0, to_usize(PAGES * page_size.bytes()), true)
        .map_err(|e| error_chain(&e))?;
    // A byte of each page is read, so that all of them are mapped: a reference that is explained.
    for page in 0..PAGES {
        mapping.read_at(to_usize(page * page_size.bytes()), &mut [0]);
    }
    let quiet = pins()?;
    let (read_end, write_end) = nix::unistd::pipe().map_err(|errno| format!("pipe: {errno}"))?;
    let offset = HELD.0 * page_size.bytes();
    splice::into_pipe(file.as_fd(), offset, write_end.as_fd(), 1).map_err(|error| error_chain(&error))?;
    let held = pins()?;
    drop((read_end, write_end));
    let after = pins()?;
    let expected = [Pinned { range: PageRange::at(HELD, 1), kind: PinKind::Held }];
    if quiet.is_empty() && held == expected && after.is_empty() {
        Ok(())
    } else {
        Err(format!(
            "finds {quiet:?}, {held:?} and {after:?} before, while and after page {HELD} is in a pipe"
        ))
    }
}
