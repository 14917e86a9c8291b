//! Corrects the results of pagemap reads and `PAGEMAP_SCAN` with the page states of service files.

use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use fdmap_sys::pagemap::{PAGEMAP_SCAN, PageRegion, PmScanArg, ScanFlags};
use nix::libc;

use crate::file_extent::FileExtent;
use crate::scan::{self, LimitReached, ScanOutput};
use crate::session::Shim;
use crate::{file_states, memory, pagemap_overlay, readahead};

/// Maximum number of regions of one call to the kernel.
const MAX_REGIONS_PER_CALL: usize = 1024;

/// Corrects `len` bytes at `buffer` that a read of the pagemap of `pid` at `offset` returned.
///
/// # Safety
/// The kernel has written `len` bytes to `buffer`, and no other thread accesses them during the call.
pub unsafe fn correct(shim: &mut Shim, pid: i32, buffer: *mut u8, len: usize, offset: u64) {
    let page_bytes = memory::page_bytes();
    let (first, count) = (offset / 8, u64::try_from(len / 8).unwrap_or(0));
    let Some(start) = first.checked_mul(page_bytes) else { return };
    let Some(range) = AddressRange::at(start, count.saturating_mul(page_bytes)) else { return };
    let bytes = (len / 8) * 8;
    if serve_short_read(shim, pid, range, buffer, bytes) {
        return;
    }
    for extent in file_states::fetch_extents(shim, pid, range, page_bytes) {
        let mut address = extent.range.start;
        while address < extent.range.end {
            let index = usize::try_from((address - range.start) / page_bytes).unwrap_or(usize::MAX);
            let at: *mut u64 = buffer.wrapping_add(index * 8).cast();
            // SAFETY: index < count, so all 8 bytes lie in the buffer; the read does not need alignment.
            let kernel = unsafe { at.read_unaligned() };
            let corrected = pagemap_overlay::corrected_entry(
                kernel,
                extent.entry(address, page_bytes),
                extent.tracked_by_service,
            );
            if corrected != kernel {
                // SAFETY: as above.
                unsafe { at.write_unaligned(corrected) };
            }
            address += page_bytes;
        }
    }
}

/// Corrects a short read from the readahead cache. Returns `false` if the caller has to fetch the states.
fn serve_short_read(shim: &mut Shim, pid: i32, range: AddressRange, buffer: *mut u8, bytes: usize) -> bool {
    let mut entries = [0_u64; 64];
    let Some(entries) = entries.get_mut(..bytes / 8) else {
        return readahead::serve(shim, pid, range, &mut []);
    };
    let copy: *mut u8 = entries.as_mut_ptr().cast();
    // SAFETY: the buffer holds that many bytes and the local array has space for them, so the ranges do not overlap.
    unsafe { copy.copy_from_nonoverlapping(buffer, bytes) };
    let served = readahead::serve(shim, pid, range, entries);
    if served {
        // SAFETY: as above.
        unsafe { buffer.copy_from_nonoverlapping(copy, bytes) };
    }
    served
}

/// Calls the kernel's `PAGEMAP_SCAN` and returns the number of regions.
pub type KernelScan<'a> = &'a dyn Fn(&mut PmScanArg) -> Result<i64, Errno>;

/// Emulates `PAGEMAP_SCAN` with the argument at `address`. Returns `None` if no service file is mapped in its range, so that the
/// kernel's result needs no correction.
pub fn scan(shim: &mut Shim, pid: i32, address: u64, kernel: KernelScan<'_>) -> Option<Result<i64, Errno>> {
    let page_bytes = memory::page_bytes();
    let mut argument = PmScanArg::default();
    memory::read(address, &mut argument)?;
    // A scan of an empty range lets the kernel validate the other fields.
    kernel(&mut PmScanArg { end: argument.start, ..argument }).ok()?;
    argument.end = argument.end.checked_next_multiple_of(page_bytes)?;
    let range = AddressRange { start: argument.start, end: argument.end };
    let extents = file_states::fetch_extents(shim, pid, range, page_bytes);
    if extents.is_empty() {
        return None;
    }
    if argument.flags & ScanFlags::CHECK_WPASYNC.bits() != 0
        && extents.iter().any(|extent| extent.tracked_by_service)
    {
        return Some(Err(Errno::EPERM));
    }
    Some(walk(&argument, &extents, page_bytes, kernel).and_then(|(output, walk_end)| {
        let count = i64::try_from(output.regions().len()).map_err(|_| Errno::EINVAL)?;
        memory::write(argument.vec, output.regions())?;
        memory::write(address + scan::WALK_END_OFFSET, &[walk_end])?;
        Ok(count)
    }))
}

/// Walks the extents and the gaps between them in ascending order. Returns the output and the end address.
fn walk(
    argument: &PmScanArg,
    extents: &[FileExtent],
    page_bytes: u64,
    kernel: KernelScan<'_>,
) -> Result<(ScanOutput, u64), Errno> {
    let mut output = ScanOutput::new(argument, page_bytes);
    let mut at = argument.start;
    let protects = argument.flags & ScanFlags::WP_MATCHING.bits() != 0;
    for extent in extents {
        if let Some(stopped) = walk_kernel(argument, (at, extent.range.start), &mut output, kernel)? {
            return Ok((output, stopped));
        }
        at = extent.range.end;
        let stopped = match (protects, extent.tracked_by_service) {
            (false, _) => walk_file(argument, extent, page_bytes, &mut output, kernel)?,
            // Treated like memory that is not registered for write protection.
            (true, true) => None,
            // The program tracks this memory itself: the kernel reports and protects in one step.
            (true, false) => walk_kernel(argument, (extent.range.start, at), &mut output, kernel)?,
        };
        if let Some(stopped) = stopped {
            return Ok((output, stopped));
        }
    }
    let stopped = walk_kernel(argument, (at, argument.end), &mut output, kernel)?;
    Ok((output, stopped.unwrap_or(argument.end)))
}

/// Scans memory without service files. Returns the address at which it stopped early.
fn walk_kernel(
    argument: &PmScanArg,
    (start, end): (u64, u64),
    output: &mut ScanOutput,
    kernel: KernelScan<'_>,
) -> Result<Option<u64>, Errno> {
    let mut at = start;
    while at < end {
        if output.is_full() {
            return Ok(Some(at));
        }
        let max_regions =
            usize::try_from(output.regions_left()).unwrap_or(usize::MAX).min(MAX_REGIONS_PER_CALL);
        let mut regions = vec![PageRegion::default(); max_regions];
        let max_pages = output.pages_left().unwrap_or(0);
        let mut part = PmScanArg { start: at, end, max_pages, ..*argument };
        let count = call_kernel(&mut part, &mut regions, kernel)?;
        for region in &regions[..count] {
            if let Err(LimitReached(stopped)) = output.push(region.start, region.end, region.categories) {
                return Ok(Some(stopped));
            }
        }
        // The kernel stops early only if the regions or the pages of this call are used up.
        at = part.walk_end.max(at);
        if count == 0 && at < end {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Scans an extent of a service file. Returns the address at which it stopped early.
fn walk_file(
    argument: &PmScanArg,
    extent: &FileExtent,
    page_bytes: u64,
    output: &mut ScanOutput,
    kernel: KernelScan<'_>,
) -> Result<Option<u64>, Errno> {
    let mut push = |start, end, kernel_categories| {
        let mut run = (start, start, 0);
        let mut address = start;
        while address < end {
            let categories = scan::corrected_categories(
                kernel_categories,
                extent.entry(address, page_bytes),
                extent.tracked_by_service,
            );
            if categories != run.2 || run.0 == run.1 {
                push_run(argument, output, run)?;
                run = (address, address, categories);
            }
            address += page_bytes;
            run.1 = address;
        }
        push_run(argument, output, run)
    };
    let mut at = extent.range.start;
    let mut regions = vec![PageRegion::default(); MAX_REGIONS_PER_CALL];
    while at < extent.range.end {
        let mut part = all_categories(at, extent.range.end);
        let count = match call_kernel(&mut part, &mut regions, kernel) {
            Err(Errno::EINVAL) => {
                (part.category_mask, part.return_mask) = (0, scan::BASE_CATEGORIES);
                call_kernel(&mut part, &mut regions, kernel)?
            }
            other => other?,
        };
        for region in &regions[..count] {
            // The kernel reports no region where nothing is mapped any more.
            if let Err(LimitReached(stopped)) = push(region.start, region.end, region.categories) {
                return Ok(Some(stopped));
            }
        }
        if part.walk_end <= at {
            break;
        }
        at = part.walk_end;
    }
    Ok(None)
}

fn push_run(
    argument: &PmScanArg,
    output: &mut ScanOutput,
    (start, end, categories): (u64, u64, u64),
) -> Result<(), LimitReached> {
    if start < end && scan::selects(argument, categories) {
        output.push(start, end, categories)
    } else {
        Ok(())
    }
}

/// A scan that reports every page with all its categories.
fn all_categories(start: u64, end: u64) -> PmScanArg {
    PmScanArg { size: 96, start, end, return_mask: scan::ALL_CATEGORIES, ..PmScanArg::default() }
}

fn call_kernel(
    argument: &mut PmScanArg,
    regions: &mut [PageRegion],
    kernel: KernelScan<'_>,
) -> Result<usize, Errno> {
    argument.vec = if regions.is_empty() { 0 } else { memory::address_of(regions.as_mut_ptr()) };
    argument.vec_len = u64::try_from(regions.len()).unwrap_or(0);
    let count = kernel(argument)?;
    Ok(usize::try_from(count).unwrap_or(0).min(regions.len()))
}

/// Checks an ioctl request number. The kernel ignores all but the low 32 bits.
pub const fn is_scan(request: libc::c_ulong) -> bool {
    request & 0xffff_ffff == PAGEMAP_SCAN
}

#[cfg(test)]
mod tests;
