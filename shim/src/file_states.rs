//! What files say of the pages that a process has mapped.

use std::time::Duration;

use fdmap_client::SharedSnapshot;
use fdmap_client::error::RefusalCode;
use fdmap_client::proto::shared_snapshot::BodyLayout;
use fdmap_client::proto::{PageIndex, PageRange, PagemapEntry};
use fdmap_sys::address::AddressRange;
use fdmap_sys::maps::{Maps, Vma};
use fdmap_sys::{Errno, SyscallError};

use crate::mapping_table;
use crate::service_calls::{named, own_pid};
use crate::session::{Failed, Shim};

/// A part of an address space in which a service file is mapped.
#[derive(Debug)]
pub struct Piece {
    /// Where.
    pub range: AddressRange,
    /// The file's `st_dev`.
    pub device: u64,
    /// The file's `st_ino`.
    pub inode: u64,
    /// The file's page that is mapped at its beginning.
    first: u64,
    /// Bytes in a page.
    page_bytes: u64,
    /// What the file says; `None`: all of it lies past the end of the file.
    states: Option<SharedSnapshot>,
    /// The service may have its writes observed, so marks there are the service's.
    pub ours: bool,
}

impl Piece {
    /// One of a file that says nothing of any page.
    #[cfg(test)]
    pub const fn silent(range: AddressRange) -> Self {
        Self { range, device: 0, inode: 0, first: 0, page_bytes: 4096, states: None, ours: false }
    }

    /// What the file says of the page that is mapped at an address of the piece.
    pub fn entry(&self, address: u64, page_bytes: u64) -> PagemapEntry {
        let page = PageIndex(self.first + (address - self.range.start) / page_bytes);
        self.states.as_ref().and_then(|states| states.entry(page)).unwrap_or_default()
    }

    /// Where in the file the page is that is mapped at an address of the piece.
    pub fn offset(&self, address: u64) -> Option<u64> {
        self.first.checked_mul(self.page_bytes)?.checked_add(address.checked_sub(self.range.start)?)
    }
}

/// The parts of `range` in which process `pid` has service files mapped, by ascending address. Empty if there is no service.
pub fn pieces(shim: &mut Shim, pid: i32, range: AddressRange, page_bytes: u64) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for vma in candidates(pid, range) {
        let part = vma.range.intersect(range);
        let first = (vma.offset + (part.start - vma.range.start)) / page_bytes;
        let pages = PageRange::at(PageIndex(first), part.len() / page_bytes);
        match states(shim, &vma, pages) {
            Ok(states) => {
                let (device, inode, ours) = (vma.device, vma.inode, is_ours(pid, part));
                pieces.push(Piece { range: part, device, inode, first, page_bytes, states, ours });
            }
            // No file of the service, or none that we may see.
            Err(Failed::Refused(_)) => {}
            Err(Failed::Gone) => return Vec::new(),
        }
    }
    pieces
}

/// Shared mappings of shmem and hugetlb files, and of others that look like it.
pub fn candidates(pid: i32, range: AddressRange) -> Vec<Vma> {
    let fits = |vma: &Vma| vma.shared && vma.inode != 0 && nix::sys::stat::major(vma.device) == 0;
    let Ok(pid) = u32::try_from(pid) else { return Vec::new() };
    let Ok(maps) = Maps::open(pid) else { return Vec::new() };
    let (mut found, mut address) = (Vec::new(), range.start);
    while address < range.end {
        match maps.vma_at_or_after(address, true) {
            Ok(Some(vma)) if vma.range.start < range.end => {
                address = vma.range.end;
                found.extend(Some(vma).filter(fits));
            }
            Err(SyscallError { errno: Errno::ENOTTY, .. }) => {
                let all = maps.all().unwrap_or_default();
                return all
                    .into_iter()
                    .filter(|vma| fits(vma) && !vma.range.intersect(range).is_empty())
                    .collect();
            }
            Ok(_) | Err(_) => break,
        }
    }
    found
}

/// What a file says of pages; of those past its end nothing.
fn states(shim: &mut Shim, vma: &Vma, pages: PageRange) -> Result<Option<SharedSnapshot>, Failed> {
    let file = named(vma.device, vma.inode);
    let mut fetch =
        |range, layout| shim.ask(|service| service.snapshot(&file, range, layout, Duration::ZERO));
    match fetch(Some(pages), BodyLayout::Entries) {
        Err(failed) if failed.code() == Some(RefusalCode::OutOfRange) => {
            // The header of any snapshot tells how many pages there are.
            let file_pages = match fetch(Some(PageRange::first(1)), BodyLayout::States) {
                Err(failed) if failed.code() == Some(RefusalCode::OutOfRange) => 0,
                other => other?.header().file_pages,
            };
            let there = pages.intersect(PageRange::first(file_pages));
            if there.is_empty() { Ok(None) } else { fetch(Some(there), BodyLayout::Entries).map(Some) }
        }
        other => other.map(Some),
    }
}

/// Of this process it is known what the service observes; of others it has to be assumed.
fn is_ours(pid: i32, range: AddressRange) -> bool {
    pid != own_pid() || mapping_table::overlaps(range)
}
