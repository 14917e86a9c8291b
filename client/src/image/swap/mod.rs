//! Reads swapped pages from their swap slots, so that a dump swaps nothing in. This folder owns the block devices of swap areas and the
//! proof that what was read is the content of a page. It refuses to swap pages in or out: the dump does, where there is no proof.
//!
//! # The proof
//!
//! What is at a page's slot on the device may be something else: the kernel puts the slot into the file's page cache before it writes the
//! page, it never writes zero pages (their slots are marked), zswap keeps pages in memory, and a slot gets a new user as soon as its page
//! is swapped in or punched away. So the slots of a *window* of pages are read like this:
//!
//! ```text
//!   C1   counters of swap-outs: pswpout, swpout_zero, zswpout; zswap is off and empty
//!   A1   the service: slot of each page; the slot is in use and not in the swap cache; its zero mark; slot of each page, the same
//!   R    the slots are read from the device
//!   A2   as A1
//!   C2   as C1
//!        swap areas are those that were opened: no event of poll(2) on /proc/swaps
//! ```
//!
//! The content of a page is proved if A1 and A2 give the same slot S and the same answer, "on the device" or "zero", and if C1 = C2:
//!
//! 1. A use of a slot begins in the swap cache, with a locked folio. The kernel counts pswpout before it submits the write, or marks the
//!    slot and counts swpout_zero; the folio stays in the swap cache until the write has succeeded. So a slot in use that is not in the swap
//!    cache was counted, and is written or marked. (With zswap, zswpout is counted, and the slot is not written.)
//! 2. A2 finds S in use, and not in the swap cache: its use was counted. Since C1 = C2, it was counted before C1. So S had one use from C1
//!    until A2.
//! 3. A1 finds S in the page, so this use is the page's: a slot of shmem has one user. A1 does not find S in the swap cache, so S was
//!    written or marked before R, and the mark that A1 reads is that of this use. Nothing else is written to S until A2.
//!
//! So no other page's bytes are read, whichever process swaps in, punches or writes meanwhile. pswpin is no part of the proof: a page that was punched
//! away leaves its slot without being counted, but then S is not in use, or its next use is counted. zswpout is part of it, since zswap may
//! be switched on and off within a window. Kernels of 6.12 that do not count swpout_zero mark a slot uncounted: A2 finds the mark, and
//! differs from A1 unless the page was zero there, too.
//!
//! R sees a write only after it was counted, and C2 is read after R. The counters do not lag: see `counters`. They are those of the whole
//! host. Where it swaps out all the time, windows are refuted, and get smaller; pages of the smallest are read through the file.
//!
//! Counters and events are those of files whose file system is the kernel's: see `kernel_file`. A container may have others there.
//!
//! An area that is switched off has no slots in use, and swapoff(2) raises its event before it returns. So a swap file has the extents
//! that were found when the area was opened.
//!
//! # Reads
//!
//! Slots of a window are sorted, and consecutive ones are read by one pread(2) with O_DIRECT. Chosen over io_uring: a dump has as many
//! windows in flight as jobs, zram answers each read in the calling thread, and the kernel swaps out to consecutive slots.

mod area;
mod counters;
mod kernel_file;
mod layout;
mod reader;
mod scratch;
mod watch;

pub(crate) use reader::SlotAccess;
pub(super) use reader::{SlotPage, SlotReader};
