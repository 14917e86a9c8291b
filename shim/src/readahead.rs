//! Programs that read a pagemap entry by entry: what the file says of the next pages is fetched at once, and used for a moment.
//!
//! A page that holds data is never told as a hole by it: what was a hole is asked of the file again, by `SEEK_DATA`, which
//! takes less than a microsecond, and it is looked whether the file is still what is mapped there. That of a page with data it is told where it was a moment ago, is the price.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::time::Duration;

use fdmap_sys::address::AddressRange;
use fdmap_sys::fd;
use nix::libc;

use crate::file_states::{self, Piece};
use crate::mapping_table;
use crate::memory::page_bytes;
use crate::pagemap_overlay;
use crate::service_calls::{named, own_pid};
use crate::session::{LEAST_NUMBER, LOWEST_NUMBER, Shim, inode_of, now};

/// Entries that a read may have to be served so.
const FEW: u64 = 64;
/// Reads that follow one another before anything is fetched.
const STREAK: u32 = 8;
/// Pages that are fetched.
const MANY: u64 = 4096;
/// For how long they are used: four times as long as fetching them took, lest nothing else be done, within these.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(50);

/// What was fetched.
#[derive(Debug)]
pub struct Ahead {
    pid: i32,
    piece: Piece,
    /// The table of our own mappings, as it was.
    changes: u64,
    /// By the kernel's clock.
    until: Duration,
    /// The file, for looking again where it had a hole.
    file: OwnedFd,
}

/// What is remembered between reads.
#[derive(Debug, Default)]
pub struct Reader {
    /// Where the next read begins if it goes on where the last one ended.
    next: (i32, u64),
    /// Reads of which each went on where the one before ended.
    streak: u32,
    ahead: Option<Ahead>,
}

impl Reader {
    /// Forgets all, in a forked child: frees nothing. The descriptor is closed if that is `sound`: no other thread of the
    /// parent was at work on this.
    pub fn abandon(&mut self, sound: bool) {
        if let Some(ahead) = self.ahead.take() {
            if sound && ahead.is_open() {
                // SAFETY: it is ours, as its inode tells, and what held it is forgotten.
                unsafe { libc::close(ahead.file.as_raw_fd()) };
            }
            std::mem::forget(ahead);
        }
    }

    /// Lets go of what was fetched. The descriptor is closed only if the program has not done so.
    fn drop_ahead(&mut self) {
        if let Some(ahead) = self.ahead.take()
            && !ahead.is_open()
        {
            std::mem::forget(ahead.file);
        }
    }
}

impl Ahead {
    fn is_open(&self) -> bool {
        inode_of(self.file.as_raw_fd()) == Some(self.piece.inode)
    }

    /// The entry that is to be told in place of the kernel's; `None` if that has to be asked.
    fn entry(&self, address: u64, kernel: u64) -> Option<u64> {
        let file = self.piece.entry(address, page_bytes());
        let hole = !file.is_present() && !file.is_swap();
        let mapped = fdmap_proto::PagemapEntry(kernel).is_present();
        if hole && !mapped && !self.still_hole(self.piece.offset(address)?) {
            return None;
        }
        Some(pagemap_overlay::entry(kernel, file, self.piece.ours))
    }

    /// True if the pages in `range` are still of the same file, at the same place.
    fn still_mapped(&self, range: AddressRange) -> bool {
        let vmas = file_states::candidates(self.pid, range);
        let [vma] = vmas.as_slice() else { return false };
        vma.range.covers(range)
            && (vma.device, vma.inode) == (self.piece.device, self.piece.inode)
            && Some(vma.offset + (range.start - vma.range.start)) == self.piece.offset(range.start)
    }

    fn still_hole(&self, offset: u64) -> bool {
        let Ok(offset) = i64::try_from(offset) else { return false };
        // SAFETY: lseek takes integers and touches no memory; the position is nobody else's.
        let data = unsafe { libc::lseek(self.file.as_raw_fd(), offset, libc::SEEK_DATA) };
        // ENXIO: no data from there on.
        data > offset || (data < 0 && nix::errno::Errno::last() == nix::errno::Errno::ENXIO)
    }
}

/// Serves a short read that goes on where the last one ended, if it can; `false` if not, and then `entries` are as they were.
/// `entries` are what the kernel said of the pages in `range`.
pub fn serve(shim: &mut Shim, pid: i32, range: AddressRange, entries: &mut [u64]) -> bool {
    let follows = shim.reader.next == (pid, range.start);
    shim.reader.streak = if follows { shim.reader.streak.saturating_add(1) } else { 0 };
    shim.reader.next = (pid, range.end);
    if range.len() > FEW * page_bytes() {
        return false;
    }
    if pid == own_pid() && entries.iter().all(|entry| fdmap_proto::PagemapEntry(*entry).is_present()) {
        // The kernel is right about them, but for marks of the service.
        for (entry, address) in entries.iter_mut().zip((range.start..).step_by(step())) {
            let page = AddressRange { start: address, end: address + page_bytes() };
            if mapping_table::overlaps(page) {
                *entry = pagemap_overlay::entry(*entry, fdmap_proto::PagemapEntry::default(), true);
            }
        }
        return true;
    }
    if shim.reader.streak < STREAK {
        return false;
    }
    let fits = |ahead: &Ahead| {
        let moved = pid == own_pid() && ahead.changes != mapping_table::changes();
        ahead.pid == pid
            && ahead.piece.range.covers(range)
            && !moved
            && now() < ahead.until
            && ahead.is_open()
    };
    if !shim.reader.ahead.as_ref().is_some_and(fits) {
        shim.reader.drop_ahead();
        shim.reader.ahead = fetch(shim, pid, range);
    }
    let Some(ahead) = &shim.reader.ahead else { return false };
    let told: Option<Vec<_>> = entries
        .iter()
        .zip((range.start..).step_by(step()))
        .map(|(entry, address)| ahead.entry(address, *entry))
        .collect();
    let hole = |entry: &u64| {
        let entry = fdmap_proto::PagemapEntry(*entry);
        !entry.is_present() && !entry.is_swap()
    };
    // Last: what was mapped in its place before would be told by the wrong file.
    let told = told.filter(|told| !told.iter().any(hole) || ahead.still_mapped(range));
    let Some(told) = told else {
        // It changes as it is read: nothing is worth fetching for a while.
        shim.reader.drop_ahead();
        shim.reader.streak = 0;
        return false;
    };
    entries.copy_from_slice(&told);
    true
}

fn step() -> usize {
    usize::try_from(page_bytes()).unwrap_or(4096)
}

/// What a file says of the pages from `range` on; `None` if not all of that is of one file of the service.
fn fetch(shim: &mut Shim, pid: i32, range: AddressRange) -> Option<Ahead> {
    let (began, changes) = (now(), mapping_table::changes());
    let many = AddressRange::at(range.start, MANY * page_bytes())?;
    let piece = file_states::pieces(shim, pid, many, page_bytes()).into_iter().next()?;
    if !piece.range.covers(range) {
        return None;
    }
    let name = named(piece.device, piece.inode);
    let (file, _) = shim.ask(|service| service.open(&name, false)).ok()?;
    // As for the session.
    let above = |least| fd::duplicate_above(file.as_fd(), least);
    let file = above(LEAST_NUMBER).or_else(|_| above(LOWEST_NUMBER)).ok()?;
    let took = now().saturating_sub(began);
    let until = now() + (took * 4).clamp(SHORTEST, LONGEST);
    Some(Ahead { pid, piece, changes, until, file })
}
