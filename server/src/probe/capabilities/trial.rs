//! The file that probes are tried on.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fdmap_proto::state::PageState;
use fdmap_proto::units::{PageIndex, PageRange, PageSize};
use fdmap_sys::error::CallContext as _;
use fdmap_sys::{SyscallError, fd, memfd};

use crate::pages::{BLOCK_PAGES, BlockRange, ScanOptions};
use crate::probe::interface::{Probe, ScanOutput, ScanTarget};
use fdmap_proto::error_chain;

/// A page that holds data.
pub(super) const DATA_PAGE: u64 = 1;

/// The pages that hold data: single ones, a leaf without holes, and one with all pages but one. They are in two blocks, so that the XArray
/// has two levels.
pub(super) fn data_pages() -> impl Iterator<Item = u64> {
    [DATA_PAGE, 64].into_iter().chain(128..192).chain(192..255).chain([BLOCK_PAGES + 7])
}
const FILE_PAGES: u64 = 2 * BLOCK_PAGES;

/// A memfd whose pages [`data_pages`] hold data; all others are holes.
#[derive(Debug)]
pub(super) struct TrialFile {
    fd: OwnedFd,
    page_size: PageSize,
}

impl TrialFile {
    pub(super) fn create(page_size: PageSize) -> Result<Self, SyscallError> {
        let file = memfd::create("fdmap-trial", None)?;
        memfd::resize(file.as_fd(), FILE_PAGES * page_size.bytes())?;
        for page in data_pages() {
            let offset = i64::try_from(page * page_size.bytes()).unwrap_or(0);
            nix::sys::uio::pwrite(&file, b"fdmap", offset)
                .call(|| format!("pwrite at {offset} of a trial file"))?;
        }
        Ok(Self { fd: fd::reopen_for_probe(file.as_fd())?, page_size })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Checks that `probe` reports the states of this file.
    pub(super) fn check_probe(&self, probe: &dyn Probe) -> Result<(), String> {
        let out = self.scan(probe, ScanOptions::default())?;
        let mut data = Vec::new();
        for (index, block) in &out.blocks {
            for page in 0..BLOCK_PAGES {
                match block.state(page) {
                    PageState::Hole => {}
                    // The host may swap the file out at any time.
                    PageState::Resident | PageState::Swapped => data.push(index.first_page().0 + page),
                    other => {
                        let block = index.0;
                        return Err(format!(
                            "reports page {page} of block {block} of a file with data as {other}"
                        ));
                    }
                }
            }
        }
        let expected: Vec<_> = data_pages().collect();
        if data == expected {
            Ok(())
        } else {
            Err(format!("finds data in pages {data:?} instead of {expected:?}"))
        }
    }

    /// Checks the attributes of an unmapped page of this file.
    pub(super) fn check_attributes(&self, probe: &dyn Probe) -> Result<(), String> {
        let out = self.scan(probe, ScanOptions { attributes: true, ..ScanOptions::default() })?;
        let page = out.attributes.get(PageIndex(DATA_PAGE)).unpack(probe.attributes());
        let uptodate =
            page.flags.is_some_and(|flags| flags.valid().contains(fdmap_proto::PageFlags::UPTODATE));
        let is_right = page.order == Some(0)
            && uptodate
            && page.map_count == Some(0)
            && page.maybe_pinned == Some(false);
        if is_right { Ok(()) } else { Err(format!("reports an unmapped page of a trial file as {page:?}")) }
    }

    fn scan(&self, probe: &dyn Probe, options: ScanOptions) -> Result<ScanOutput, String> {
        let target = ScanTarget {
            fd: self.fd.as_fd(),
            page_size: self.page_size,
            file_pages: FILE_PAGES,
            hugetlb_order: None,
        };
        let mut out = ScanOutput::default();
        let range = BlockRange::around(PageRange::first(FILE_PAGES));
        probe.scan(&target, range, options, &|| false, &mut out).map_err(|error| error_chain(&error))?;
        Ok(out)
    }
}
