//! Page states of service files, fetched from the service for the files that a process maps.

use std::time::Duration;

use fdmap_client::SharedSnapshot;
use fdmap_client::error::RefusalCode;
use fdmap_client::proto::shared_snapshot::BodyLayout;
use fdmap_client::proto::{PageIndex, PageRange};
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::Vma;

use crate::descriptor::own_pid;
use crate::file_extent::FileExtent;
use crate::mapping_table;
use crate::session::{CallFailure, Shim, inode_name};
use crate::vmas::shared_vmas;

/// Returns the parts of `range` in which process `pid` maps service files, in ascending order; empty if the service is
/// unavailable.
pub fn fetch_extents(shim: &mut Shim, pid: i32, range: AddressRange, page_bytes: u64) -> Vec<FileExtent> {
    let mut extents = Vec::new();
    for vma in shared_vmas(pid, range) {
        let part = vma.range.intersect(range);
        let first_page = (vma.offset + (part.start - vma.range.start)) / page_bytes;
        let pages = PageRange::at(PageIndex(first_page), part.len() / page_bytes);
        match fetch_states(shim, &vma, pages) {
            Ok(states) => extents.push(FileExtent {
                range: part,
                device: vma.device,
                inode: vma.inode,
                first_page,
                page_bytes,
                states,
                tracked_by_service: may_be_tracked(pid, part),
            }),
            // The file does not belong to the service, or the program may not inspect it.
            Err(CallFailure::Refused(_)) => {}
            Err(CallFailure::Unavailable) => return Vec::new(),
        }
    }
    extents
}

/// Fetches the states of `pages`, without those beyond the end of the file; `None` if all of them lie beyond it.
fn fetch_states(shim: &mut Shim, vma: &Vma, pages: PageRange) -> Result<Option<SharedSnapshot>, CallFailure> {
    let file = inode_name(vma.device, vma.inode);
    let mut fetch =
        |range, layout| shim.call(|service| service.snapshot(&file, range, layout, Duration::ZERO));
    match fetch(Some(pages), BodyLayout::Entries) {
        Err(failure) if failure.code() == Some(RefusalCode::OutOfRange) => {
            // The header of every snapshot holds the size of the file.
            let file_pages = match fetch(Some(PageRange::first(1)), BodyLayout::States) {
                Err(failure) if failure.code() == Some(RefusalCode::OutOfRange) => 0,
                other => other?.header().file_pages,
            };
            let existing = pages.intersect(PageRange::first(file_pages));
            if existing.is_empty() { Ok(None) } else { fetch(Some(existing), BodyLayout::Entries).map(Some) }
        }
        other => other.map(Some),
    }
}

/// Whether the service may track writes to `range`. The mapping table knows for this process; for other processes assume it.
fn may_be_tracked(pid: i32, range: AddressRange) -> bool {
    pid != own_pid() || mapping_table::overlaps(range)
}
