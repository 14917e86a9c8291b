//! Which descriptors are pagemaps, by number. Reading it takes no lock and allocates nothing; what it says of a number is
//! proved by the inode before anything is done with it, since closing is not followed.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use nix::libc;

use crate::guard;

/// Descriptors with higher numbers are not marked.
const MOST: usize = 1 << 16;
/// Marks at a time.
const SLOTS: usize = 256;

/// A bit for each number, to be quick about all others.
static BITS: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];
static MARKS: [Slot; SLOTS] = [const { Slot::empty() }; SLOTS];
/// How many numbers were ever marked: nothing is looked at before the first.
static EVER: AtomicU32 = AtomicU32::new(0);

struct Slot {
    /// [`FREE`], [`BUSY`] or the descriptor's number.
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

    /// True if the descriptor is still the file that was marked.
    fn holds(&self, fd: i32) -> bool {
        identity(fd) == Some((self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed)))
    }
}

/// Marks a descriptor as the pagemap of a process. Where there is no room it is not marked, nor where the descriptors may be
/// another process's than the marks.
pub fn mark(fd: i32, pid: i32) {
    if !guard::is_here() {
        return;
    }
    let Some((word, bit)) = place(fd) else { return };
    let Some((device, inode)) = identity(fd) else { return };
    unmark(fd);
    let Some(slot) = claim() else { return };
    slot.pid.store(pid, Ordering::Relaxed);
    slot.device.store(device, Ordering::Relaxed);
    slot.inode.store(inode, Ordering::Relaxed);
    slot.fd.store(fd, Ordering::Release);
    word.fetch_or(bit, Ordering::Release);
    EVER.fetch_add(1, Ordering::Release);
}

/// The process whose pagemap a descriptor is; `None` for all others.
#[inline]
pub fn find(fd: i32) -> Option<i32> {
    if EVER.load(Ordering::Acquire) == 0 {
        return None;
    }
    let (word, bit) = place(fd)?;
    if word.load(Ordering::Acquire) & bit == 0 {
        return None;
    }
    let slot = MARKS.iter().find(|slot| slot.fd.load(Ordering::Acquire) == fd)?;
    let pid = slot.pid.load(Ordering::Relaxed);
    if slot.holds(fd) {
        return Some(pid);
    }
    // The number is somebody else's by now; of a process that was made by vfork it tells nothing.
    if guard::is_here() {
        unmark(fd);
    }
    None
}

/// A second number for a file: it is what the first is.
#[inline]
pub fn copy(from: i32, to: i32) {
    if let Some(pid) = find(from)
        && to >= 0
        && to != from
    {
        mark(to, pid);
    }
}

fn unmark(fd: i32) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
    for slot in &MARKS {
        // Whoever marks it meanwhile has another slot.
        let _ = slot.fd.compare_exchange(fd, FREE, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// A slot for oneself; those of descriptors that were closed are taken again.
fn claim() -> Option<&'static Slot> {
    let take = |slot: &&Slot, from| {
        slot.fd.compare_exchange(from, BUSY, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    MARKS.iter().find(|slot| take(slot, FREE)).or_else(|| {
        MARKS.iter().find(|slot| {
            let fd = slot.fd.load(Ordering::Acquire);
            fd >= 0 && !slot.holds(fd) && take(slot, fd)
        })
    })
}

fn place(fd: i32) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((BITS.get(fd / 64)?, 1 << (fd % 64)))
}

/// Device and inode of a descriptor's file. Allocates nothing.
pub fn identity(fd: i32) -> Option<(u64, u64)> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat fills the struct, for which there is room.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: fstat succeeded, so it is filled.
    let stat = unsafe { stat.assume_init() };
    Some((stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd as _;

    use super::*;

    /// One test, since marks are the process's.
    #[test]
    fn marks_are_of_files_not_of_numbers() {
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let fd = pagemap.as_raw_fd();
        mark(fd, 7);
        assert_eq!(find(fd), None, "the shim does not work here");
        guard::begin();
        assert_eq!(find(fd), None);
        mark(fd, 7);
        assert_eq!(find(fd), Some(7));
        let second = pagemap.try_clone().unwrap();
        copy(fd, second.as_raw_fd());
        assert_eq!(find(second.as_raw_fd()), Some(7));

        let other = File::open("/proc/self/maps").unwrap();
        // SAFETY: both numbers are descriptors of ours, and the second one's file is not used any more.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), fd) }, fd);
        assert_eq!(find(fd), None, "another file has the number");
        copy(fd, second.as_raw_fd());
        assert_eq!(find(second.as_raw_fd()), Some(7));
        assert_eq!((find(-1), find(1 << 20)), (None, None));
        mark(-1, 7);
        mark(1 << 20, 7);

        // More than there is room for, all closed again: marks go on to work.
        for pid in 1..1000 {
            let pagemap = File::open("/proc/self/pagemap").unwrap();
            mark(pagemap.as_raw_fd(), pid);
            assert_eq!(find(pagemap.as_raw_fd()), Some(pid));
        }
    }
}
