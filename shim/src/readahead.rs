//! Readahead for programs that read a pagemap a few entries at a time: the states of the following pages are fetched at once and
//! used for some milliseconds.
//!
//! A page that holds data is never reported as a hole: a cached hole is verified with `SEEK_DATA` on the file, which takes less than
//! a microsecond, and the mapping is verified too. Cost: for pages with data, the reported location may be as old as the readahead.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::Duration;

use fdmap_proto::PagemapEntry;
use fdmap_sys::address::AddressRange;
use fdmap_sys::fd;
use nix::errno::Errno;
use nix::libc;

use crate::descriptor::own_pid;
use crate::memory::page_bytes;
use crate::readahead_cache::Readahead;
use crate::session::{MIN_SESSION_FD, MIN_SHIM_FD, Shim, inode_name, now};
use crate::vmas::shared_vmas;
use crate::{file_states, mapping_table, pagemap_overlay};

/// Maximum number of entries of a read that is served from the readahead.
const MAX_READ_ENTRIES: u64 = 64;
/// Number of sequential reads that start the readahead.
const MIN_SEQUENTIAL_READS: u32 = 8;
/// Pages fetched at once.
const READAHEAD_PAGES: u64 = 4096;
/// The states live four times as long as it took to fetch them, within these bounds, so that fetching takes a limited share of
/// the time.
const MIN_LIFETIME: Duration = Duration::from_millis(1);
const MAX_LIFETIME: Duration = Duration::from_millis(50);

/// Corrects a short read that continues where the last one ended. `entries` are the kernel's entries of the pages in `range`.
/// Returns `false`, with `entries` unchanged, if the caller has to fetch the states.
pub fn serve(shim: &mut Shim, pid: i32, range: AddressRange, entries: &mut [u64]) -> bool {
    record_read(shim, pid, range);
    if range.len() > MAX_READ_ENTRIES * page_bytes() {
        return false;
    }
    if pid == own_pid() && entries.iter().all(|entry| PagemapEntry(*entry).is_present()) {
        hide_write_protection(range, entries);
        return true;
    }
    if shim.readahead.sequential_reads < MIN_SEQUENTIAL_READS {
        return false;
    }
    if !shim.readahead.readahead.as_ref().is_some_and(|readahead| is_usable(readahead, pid, range)) {
        shim.readahead.clear();
        shim.readahead.readahead = fetch(shim, pid, range);
    }
    let Some(readahead) = &shim.readahead.readahead else { return false };
    let Some(corrected) = corrected_entries(readahead, range, entries) else {
        // The file or the mapping changes while it is read: do not fetch again for the next reads.
        shim.readahead.clear();
        shim.readahead.sequential_reads = 0;
        return false;
    };
    entries.copy_from_slice(&corrected);
    true
}

fn record_read(shim: &mut Shim, pid: i32, range: AddressRange) {
    let cache = &mut shim.readahead;
    let is_sequential = cache.next == (pid, range.start);
    cache.sequential_reads = if is_sequential { cache.sequential_reads.saturating_add(1) } else { 0 };
    cache.next = (pid, range.end);
}

/// Entries of pages that the page table maps need no states; only the service's write protection is hidden.
fn hide_write_protection(range: AddressRange, entries: &mut [u64]) {
    for (entry, address) in entries.iter_mut().zip((range.start..).step_by(address_step())) {
        let page = AddressRange { start: address, end: address + page_bytes() };
        if mapping_table::overlaps(page) {
            *entry = pagemap_overlay::corrected_entry(*entry, PagemapEntry::default(), true);
        }
    }
}

fn is_usable(readahead: &Readahead, pid: i32, range: AddressRange) -> bool {
    let mappings_changed = pid == own_pid() && readahead.mapping_changes != mapping_table::change_count();
    readahead.pid == pid
        && readahead.extent.range.covers(range)
        && !mappings_changed
        && now() < readahead.expires
        && readahead.is_open()
}

/// Returns the corrected entries; `None` if a cached hole now holds data or the mapping has changed.
fn corrected_entries(readahead: &Readahead, range: AddressRange, entries: &[u64]) -> Option<Vec<u64>> {
    let corrected: Option<Vec<_>> = entries
        .iter()
        .zip((range.start..).step_by(address_step()))
        .map(|(entry, address)| corrected_entry(readahead, address, *entry))
        .collect();
    let is_hole = |entry: &u64| {
        let entry = PagemapEntry(*entry);
        !entry.is_present() && !entry.is_swap()
    };
    // The mapping is checked last: holes of a mapping that was replaced meanwhile would come from the wrong file.
    corrected.filter(|entries| !entries.iter().any(is_hole) || is_still_mapped(readahead, range))
}

/// Returns the corrected entry of one page; `None` if it was a hole and may hold data now.
fn corrected_entry(readahead: &Readahead, address: u64, kernel: u64) -> Option<u64> {
    let extent = &readahead.extent;
    let file = extent.entry(address, page_bytes());
    let is_hole = !file.is_present() && !file.is_swap();
    if is_hole && !PagemapEntry(kernel).is_present() && !is_still_hole(readahead, extent.offset(address)?) {
        return None;
    }
    Some(pagemap_overlay::corrected_entry(kernel, file, extent.tracked_by_service))
}

/// Checks whether the pages in `range` still map the same part of the same file.
fn is_still_mapped(readahead: &Readahead, range: AddressRange) -> bool {
    let extent = &readahead.extent;
    let vmas = shared_vmas(readahead.pid, range);
    let [vma] = vmas.as_slice() else { return false };
    vma.range.covers(range)
        && (vma.device, vma.inode) == (extent.device, extent.inode)
        && Some(vma.offset + (range.start - vma.range.start)) == extent.offset(range.start)
}

fn is_still_hole(readahead: &Readahead, offset: u64) -> bool {
    let Ok(offset) = i64::try_from(offset) else { return false };
    // SAFETY: lseek takes integers and accesses no memory; nothing else uses this descriptor's file offset.
    let data = unsafe { libc::lseek(readahead.file.as_raw_fd(), offset, libc::SEEK_DATA) };
    // ENXIO: no data at or after the offset.
    data > offset || (data < 0 && Errno::last() == Errno::ENXIO)
}

fn address_step() -> usize {
    usize::try_from(page_bytes()).unwrap_or(4096)
}

/// Fetches the states of the pages from `range` on; `None` if `range` does not lie in one file of the service.
fn fetch(shim: &mut Shim, pid: i32, range: AddressRange) -> Option<Readahead> {
    let (start, mapping_changes) = (now(), mapping_table::change_count());
    let ahead = AddressRange::at(range.start, READAHEAD_PAGES * page_bytes())?;
    let extent = file_states::fetch_extents(shim, pid, ahead, page_bytes()).into_iter().next()?;
    if !extent.range.covers(range) {
        return None;
    }
    let name = inode_name(extent.device, extent.inode);
    let (file, _) = shim.call(|service| service.open(&name, false)).ok()?;
    // Out of the way of the program's descriptors, as the session's.
    let renumber = |min_number| fd::duplicate_above(file.as_fd(), min_number);
    let file = renumber(MIN_SESSION_FD).or_else(|_| renumber(MIN_SHIM_FD)).ok()?;
    let elapsed = now().saturating_sub(start);
    let expires = now() + (elapsed * 4).clamp(MIN_LIFETIME, MAX_LIFETIME);
    Some(Readahead { pid, extent, mapping_changes, expires, file })
}
