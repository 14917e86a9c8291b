//! Reads of pagemaps and `PAGEMAP_SCAN`: what the kernel says, with the truth laid over it.

use fdmap_sys::Errno;
use fdmap_sys::address::AddressRange;
use nix::libc;

use crate::file_states::{self, Piece};
use crate::scan::{self, Argument, Found, Region, Stopped};
use crate::session::Shim;
use crate::{memory, pagemap_overlay, readahead};

/// Regions that the kernel is asked for at once.
const PIECEMEAL: usize = 1024;

/// Lays the truth over `len` bytes at `buffer` that were read of a pagemap from `offset` on.
///
/// # Safety
/// The caller has just had them written there, and nobody else uses them meanwhile.
pub unsafe fn read(shim: &mut Shim, pid: i32, buffer: *mut u8, len: usize, offset: u64) {
    let page_bytes = memory::page_bytes();
    let (first, count) = (offset / 8, u64::try_from(len / 8).unwrap_or(0));
    let Some(start) = first.checked_mul(page_bytes) else { return };
    let Some(range) = AddressRange::at(start, count.saturating_mul(page_bytes)) else { return };
    let bytes = (len / 8) * 8;
    if short(shim, pid, range, buffer, bytes) {
        return;
    }
    for piece in file_states::pieces(shim, pid, range, page_bytes) {
        let mut address = piece.range.start;
        while address < piece.range.end {
            let nth = usize::try_from((address - range.start) / page_bytes).unwrap_or(usize::MAX);
            let at: *mut u64 = buffer.wrapping_add(nth * 8).cast();
            // SAFETY: nth < count, so all 8 bytes are of the buffer; it need not be aligned.
            let kernel = unsafe { at.read_unaligned() };
            let told = pagemap_overlay::entry(kernel, piece.entry(address, page_bytes), piece.ours);
            if told != kernel {
                // SAFETY: as above.
                unsafe { at.write_unaligned(told) };
            }
            address += page_bytes;
        }
    }
}

/// A short read, by what was fetched for it before.
fn short(shim: &mut Shim, pid: i32, range: AddressRange, buffer: *mut u8, bytes: usize) -> bool {
    let mut entries = [0_u64; 64];
    let Some(entries) = entries.get_mut(..bytes / 8) else {
        return readahead::serve(shim, pid, range, &mut []);
    };
    let copy: *mut u8 = entries.as_mut_ptr().cast();
    // SAFETY: that many bytes were read into the buffer, and the copy has room for them; it is ours, so they do not overlap.
    unsafe { copy.copy_from_nonoverlapping(buffer, bytes) };
    let served = readahead::serve(shim, pid, range, entries);
    if served {
        // SAFETY: as above.
        unsafe { buffer.copy_from_nonoverlapping(copy, bytes) };
    }
    served
}

/// The kernel's `PAGEMAP_SCAN`.
pub type Kernel<'a> = &'a dyn Fn(&mut Argument) -> Result<i64, Errno>;

/// `PAGEMAP_SCAN` where service files are mapped in the range; `None`: the kernel is right about all of it.
pub fn scan(shim: &mut Shim, pid: i32, address: u64, kernel: Kernel<'_>) -> Option<Result<i64, Errno>> {
    let page_bytes = memory::page_bytes();
    let mut argument = Argument::default();
    memory::read(address, &mut argument)?;
    // With nothing to walk the kernel says what is wrong with the rest.
    kernel(&mut Argument { end: argument.start, ..argument }).ok()?;
    argument.end = argument.end.checked_next_multiple_of(page_bytes)?;
    let range = AddressRange { start: argument.start, end: argument.end };
    let pieces = file_states::pieces(shim, pid, range, page_bytes);
    if pieces.is_empty() {
        return None;
    }
    if argument.flags & scan::CHECK_WPASYNC != 0 && pieces.iter().any(|piece| piece.ours) {
        return Some(Err(Errno::EPERM));
    }
    Some(walk(&argument, &pieces, page_bytes, kernel).and_then(|(found, walk_end)| {
        let count = i64::try_from(found.regions().len()).map_err(|_| Errno::EINVAL)?;
        memory::write(argument.vec, found.regions())?;
        memory::write(address + scan::WALK_END_AT, &[walk_end])?;
        Ok(count)
    }))
}

/// The pieces and what lies between them, in turn.
fn walk(
    argument: &Argument,
    pieces: &[Piece],
    page_bytes: u64,
    kernel: Kernel<'_>,
) -> Result<(Found, u64), Errno> {
    let mut found = Found::new(argument, page_bytes);
    let mut at = argument.start;
    let protects = argument.flags & scan::WP_MATCHING != 0;
    for piece in pieces {
        if let Some(stopped) = others(argument, (at, piece.range.start), &mut found, kernel)? {
            return Ok((found, stopped));
        }
        at = piece.range.end;
        let stopped = match (protects, piece.ours) {
            (false, _) => of_file(argument, piece, page_bytes, &mut found, kernel)?,
            // As of memory that is not registered for it.
            (true, true) => None,
            // The program's own tracking: its marks are taken in the step that tells of them.
            (true, false) => others(argument, (piece.range.start, at), &mut found, kernel)?,
        };
        if let Some(stopped) = stopped {
            return Ok((found, stopped));
        }
    }
    let stopped = others(argument, (at, argument.end), &mut found, kernel)?;
    Ok((found, stopped.unwrap_or(argument.end)))
}

/// What the kernel is right about. Gives where it stopped early.
fn others(
    argument: &Argument,
    (start, end): (u64, u64),
    found: &mut Found,
    kernel: Kernel<'_>,
) -> Result<Option<u64>, Errno> {
    let mut at = start;
    while at < end {
        if found.is_full() {
            return Ok(Some(at));
        }
        let room = usize::try_from(found.room_left()).unwrap_or(usize::MAX).min(PIECEMEAL);
        let mut regions = vec![Region::default(); room];
        let max_pages = found.pages_left().unwrap_or(0);
        let mut now = Argument { start: at, end, max_pages, ..*argument };
        let count = ask(&mut now, &mut regions, kernel)?;
        for region in &regions[..count] {
            if let Err(Stopped(stopped)) = found.push(region.start, region.end, region.categories) {
                return Ok(Some(stopped));
            }
        }
        // The kernel walks on, unless what we gave it is full.
        at = now.walk_end.max(at);
        if count == 0 && at < end {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// What the file is right about.
fn of_file(
    argument: &Argument,
    piece: &Piece,
    page_bytes: u64,
    found: &mut Found,
    kernel: Kernel<'_>,
) -> Result<Option<u64>, Errno> {
    let mut push = |start, end, kernel_says| {
        let mut run = (start, start, 0);
        let mut address = start;
        while address < end {
            let told = scan::categories(kernel_says, piece.entry(address, page_bytes), piece.ours);
            if told != run.2 || run.0 == run.1 {
                settle(argument, found, run)?;
                run = (address, address, told);
            }
            address += page_bytes;
            run.1 = address;
        }
        settle(argument, found, run)
    };
    let mut at = piece.range.start;
    let mut regions = vec![Region::default(); PIECEMEAL];
    while at < piece.range.end {
        let mut now = everything(at, piece.range.end);
        let count = match ask(&mut now, &mut regions, kernel) {
            Err(Errno::EINVAL) => {
                (now.category_mask, now.return_mask) = (0, scan::FIRST_CATEGORIES);
                ask(&mut now, &mut regions, kernel)?
            }
            other => other?,
        };
        for region in &regions[..count] {
            // Where the kernel tells of nothing there is no mapping any more.
            if let Err(Stopped(stopped)) = push(region.start, region.end, region.categories) {
                return Ok(Some(stopped));
            }
        }
        if now.walk_end <= at {
            break;
        }
        at = now.walk_end;
    }
    Ok(None)
}

fn settle(
    argument: &Argument,
    found: &mut Found,
    (start, end, categories): (u64, u64, u64),
) -> Result<(), Stopped> {
    if start < end && argument.wants(categories) { found.push(start, end, categories) } else { Ok(()) }
}

/// All pages with all that is known of them.
fn everything(start: u64, end: u64) -> Argument {
    Argument { size: 96, start, end, return_mask: scan::CATEGORIES, ..Argument::default() }
}

fn ask(argument: &mut Argument, regions: &mut [Region], kernel: Kernel<'_>) -> Result<usize, Errno> {
    argument.vec = if regions.is_empty() { 0 } else { memory::address_of(regions.as_mut_ptr()) };
    argument.vec_len = u64::try_from(regions.len()).unwrap_or(0);
    let count = kernel(argument)?;
    Ok(usize::try_from(count).unwrap_or(0).min(regions.len()))
}

/// `ioctl`'s request as the kernel takes it: 32 bits.
pub const fn is_scan(request: libc::c_ulong) -> bool {
    request & 0xffff_ffff == scan::REQUEST
}

#[cfg(test)]
mod tests;
