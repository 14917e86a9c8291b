//! The table of descriptors that refer to pagemaps. Lookups take no lock and do not allocate. Because close is not interposed, each
//! lookup verifies that the descriptor still refers to the inode that was marked.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::descriptor::device_and_inode;
use crate::guard;

/// Descriptors with this number or a higher one are not marked.
const MAX_FDS: usize = 1 << 16;
/// Maximum number of marks.
const MAX_MARKS: usize = 256;

/// One bit for each descriptor number, so that lookups of unmarked descriptors are fast.
static BITS: [AtomicU64; MAX_FDS / 64] = [const { AtomicU64::new(0) }; MAX_FDS / 64];
static MARKS: [Slot; MAX_MARKS] = [const { Slot::empty() }; MAX_MARKS];
/// Number of marks ever set. Lookups return at once while it is 0.
static MARKS_SET: AtomicU32 = AtomicU32::new(0);

struct Slot {
    /// [`FREE`], [`BUSY`] or a descriptor number.
    fd: AtomicI32,
    pid: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

const FREE: i32 = -1;
const BUSY: i32 = -2;

impl Slot {
    const fn empty() -> Self {
        Self {
            fd: AtomicI32::new(FREE),
            pid: AtomicI32::new(0),
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
        }
    }

    /// Checks whether the descriptor still refers to the marked file.
    fn is_current(&self, fd: i32) -> bool {
        device_and_inode(fd)
            == Some((self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed)))
    }
}

/// Marks a descriptor as the pagemap of process `pid`. Does nothing if the table is full, or in a vfork or clone child, whose
/// descriptors may differ from those of the process that owns the table.
pub fn mark(fd: i32, pid: i32) {
    if !guard::is_enabled() {
        return;
    }
    let Some((word, bit)) = bit_of(fd) else { return };
    let Some((device, inode)) = device_and_inode(fd) else { return };
    unmark(fd);
    let Some(slot) = claim_slot() else { return };
    slot.pid.store(pid, Ordering::Relaxed);
    slot.device.store(device, Ordering::Relaxed);
    slot.inode.store(inode, Ordering::Relaxed);
    slot.fd.store(fd, Ordering::Release);
    word.fetch_or(bit, Ordering::Release);
    MARKS_SET.fetch_add(1, Ordering::Release);
}

/// Returns the process whose pagemap the descriptor refers to; `None` if it is not marked.
#[inline]
pub fn pid_of(fd: i32) -> Option<i32> {
    if MARKS_SET.load(Ordering::Acquire) == 0 {
        return None;
    }
    let (word, bit) = bit_of(fd)?;
    if word.load(Ordering::Acquire) & bit == 0 {
        return None;
    }
    let slot = MARKS.iter().find(|slot| slot.fd.load(Ordering::Acquire) == fd)?;
    let pid = slot.pid.load(Ordering::Relaxed);
    if slot.is_current(fd) {
        return Some(pid);
    }
    // The number now refers to another file. A vfork child's descriptors do not affect the parent's marks.
    if guard::is_enabled() {
        unmark(fd);
    }
    None
}

/// Marks descriptor `to`, a duplicate of `from`, if `from` is marked.
#[inline]
pub fn copy(from: i32, to: i32) {
    if let Some(pid) = pid_of(from)
        && to >= 0
        && to != from
    {
        mark(to, pid);
    }
}

fn unmark(fd: i32) {
    if let Some((word, bit)) = bit_of(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
    for slot in &MARKS {
        // A thread that marks the same number concurrently uses another slot.
        let _ = slot.fd.compare_exchange(fd, FREE, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Claims a free slot, or the slot of a descriptor that was closed.
fn claim_slot() -> Option<&'static Slot> {
    let claim = |slot: &&Slot, from| {
        slot.fd.compare_exchange(from, BUSY, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    MARKS.iter().find(|slot| claim(slot, FREE)).or_else(|| {
        MARKS.iter().find(|slot| {
            let fd = slot.fd.load(Ordering::Acquire);
            fd >= 0 && !slot.is_current(fd) && claim(slot, fd)
        })
    })
}

fn bit_of(fd: i32) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((BITS.get(fd / 64)?, 1 << (fd % 64)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd as _;

    use nix::libc;

    use super::*;

    /// One test, because the table is global.
    #[test]
    fn mark_is_bound_to_the_file_not_to_the_number() {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let fd = pagemap.as_raw_fd();
        mark(fd, 7);
        assert_eq!(pid_of(fd), None, "the shim is not enabled");
        guard::initialize();
        assert_eq!(pid_of(fd), None);
        mark(fd, 7);
        assert_eq!(pid_of(fd), Some(7));
        let second = pagemap.try_clone().unwrap();
        copy(fd, second.as_raw_fd());
        assert_eq!(pid_of(second.as_raw_fd()), Some(7));

        let other = File::open("/proc/self/maps").unwrap();
        // SAFETY: both descriptors belong to this test, and the second one's file is no longer used.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), fd) }, fd);
        assert_eq!(pid_of(fd), None, "the number refers to another file");
        copy(fd, second.as_raw_fd());
        assert_eq!(pid_of(second.as_raw_fd()), Some(7));
        assert_eq!((pid_of(-1), pid_of(1 << 20)), (None, None));
        mark(-1, 7);
        mark(1 << 20, 7);

        // More marks than slots: the slots of closed descriptors are reused.
        for pid in 1..1000 {
            let pagemap = File::open("/proc/self/pagemap").unwrap();
            mark(pagemap.as_raw_fd(), pid);
            assert_eq!(pid_of(pagemap.as_raw_fd()), Some(pid));
        }
    }
}
