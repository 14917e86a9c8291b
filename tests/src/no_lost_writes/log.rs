//! The log of writes: shared memory to which writers append, each thread in its own lane. The test allocates it in
//! advance, so that its memory is charged to the test and not to a cgroup with a small limit.
//!
//! ```text
//! page 0: lanes u64, records of a lane u64, "stop" u64
//! each lane: a page with the number of records u64 and "claimed" u64, then the records
//! ```

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::{Pod, Zeroable};
use fdmap_sys::clock::monotonic_ns;
use fdmap_sys::mapping::SharedMapping;
use fdmap_sys::memfd;
use nix::fcntl::{FallocateFlags, OFlag, fallocate, open};
use nix::sys::stat::Mode;

use super::method::Method;
use crate::{HarnessError, HarnessResult};

const PAGE: usize = 4096;

/// A write of one page.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Write {
    /// The page of the file.
    pub page: u32,
    /// `Method::number`.
    pub method: u32,
    /// Nanoseconds of CLOCK_MONOTONIC before the write: its last byte had not reached the page yet.
    pub begin: u64,
    /// The time after the write: its last byte had reached the page.
    pub end: u64,
}

/// A log in shared memory.
#[derive(Debug)]
pub struct Log {
    fd: OwnedFd,
    mapping: SharedMapping,
    lanes: usize,
    capacity: usize,
}

impl Log {
    /// Creates a log of `lanes` lanes with room for `capacity` records each.
    ///
    /// # Errors
    /// [`HarnessError::Syscall`] if memory is exhausted.
    pub fn create(lanes: usize, capacity: usize) -> HarnessResult<Self> {
        let fd = memfd::create("fdmap-log", None)?;
        let bytes = PAGE + lanes * stride(capacity);
        memfd::resize(fd.as_fd(), bytes as u64)?;
        fallocate(&fd, FallocateFlags::empty(), 0, bytes as i64)
            .map_err(|errno| failed(format!("fallocate of {bytes} bytes for a log"), errno))?;
        let mapping = SharedMapping::shared(&fd, 0, bytes, true)?;
        let log = Self { fd, mapping, lanes, capacity };
        log.word(0).store(lanes as u64, Ordering::Relaxed);
        log.word(8).store(capacity as u64, Ordering::Release);
        Ok(log)
    }

    /// Opens a log of another process by its [`path`](Self::path).
    ///
    /// # Errors
    /// [`HarnessError::Syscall`]; [`HarnessError::Agent`] if the file is not a log.
    pub fn open(path: &Path) -> HarnessResult<Self> {
        let fd = open(path, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(|errno| failed(format!("open of {}", path.display()), errno))?;
        let bytes = fdmap_sys::fd::stat(&fd)?.st_size as usize;
        let mapping = SharedMapping::shared(&fd, 0, bytes, true)?;
        let mut log = Self { fd, mapping, lanes: 0, capacity: 0 };
        let (lanes, capacity) = (log.word(0).load(Ordering::Relaxed), log.word(8).load(Ordering::Acquire));
        (log.lanes, log.capacity) = (lanes as usize, capacity as usize);
        if bytes != PAGE + log.lanes * stride(log.capacity) {
            return Err(HarnessError::Agent(format!("{} is not a log of writes", path.display())));
        }
        Ok(log)
    }

    /// The path by which other processes can open the log while this process exists.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.fd.as_raw_fd())
    }

    /// Asks all writers to stop.
    pub fn stop(&self) {
        self.word(16).store(1, Ordering::Relaxed);
    }

    /// True after [`Log::stop`].
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.word(16).load(Ordering::Relaxed) != 0
    }

    /// A lane to append to; `None` if it does not exist or is claimed.
    #[must_use]
    pub fn claim(&self, lane: usize) -> Option<Lane<'_>> {
        let at = self.lane_at(lane)?;
        if self.word(at + 8).swap(1, Ordering::AcqRel) != 0 {
            return None;
        }
        let (count, claimed) = (self.word(at), self.word(at + 8));
        Some(Lane { log: self, count, claimed, records: at + PAGE, capacity: self.capacity })
    }

    /// The writes that a lane contains so far.
    ///
    /// # Panics
    /// If the lane does not exist.
    #[must_use]
    pub fn writes(&self, lane: usize) -> &[Write] {
        let at = self.lane_at(lane).expect("a lane of the log");
        let count = self.word(at).load(Ordering::Acquire) as usize;
        assert!(count <= self.capacity, "the count of lane {lane} exceeds its capacity");
        // SAFETY: Lane::push writes each record once, before it increases the count.
        unsafe { self.mapping.slice_of(at + PAGE, count) }
    }

    /// Number of lanes.
    #[must_use]
    pub const fn lanes(&self) -> usize {
        self.lanes
    }

    /// Number of writes in all lanes.
    #[must_use]
    pub fn count(&self) -> usize {
        (0..self.lanes).map(|lane| self.writes(lane).len()).sum()
    }

    fn lane_at(&self, lane: usize) -> Option<usize> {
        (lane < self.lanes).then(|| PAGE + lane * stride(self.capacity))
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.mapping.atomic_u64s(at, 1)[0]
    }
}

/// Size of a lane in bytes.
const fn stride(capacity: usize) -> usize {
    PAGE + (capacity * size_of::<Write>()).next_multiple_of(PAGE)
}

fn failed(call: String, errno: fdmap_sys::Errno) -> HarnessError {
    fdmap_sys::SyscallError { call, errno }.into()
}

/// A part of the log to which one thread appends. A forked child may continue it while its parent does not use it.
#[derive(Debug)]
pub struct Lane<'a> {
    log: &'a Log,
    count: &'a AtomicU64,
    claimed: &'a AtomicU64,
    /// The offset of the first record in the log.
    records: usize,
    capacity: usize,
}

impl Lane<'_> {
    /// Calls `write`, which writes `pages` pages from `page` on, and appends the write with its times if it succeeds.
    ///
    /// # Errors
    /// The error of `write`.
    pub fn during<E>(
        &mut self,
        method: Method,
        page: u64,
        pages: u64,
        write: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let begin = monotonic_ns();
        write()?;
        let end = after();
        self.append(method, page, pages, begin, end);
        Ok(())
    }

    /// Appends a write of pages from `page` on. It allocates no memory and takes no lock, so that a forked child may
    /// call it.
    pub fn append(&mut self, method: Method, page: u64, pages: u64, begin: u64, end: u64) {
        for page in page..page + pages {
            self.push(Write { page: page as u32, method: method.number(), begin, end });
        }
    }

    /// True if the lane has room for this number of records.
    #[must_use]
    pub fn has_room(&self, writes: usize) -> bool {
        self.count.load(Ordering::Relaxed) as usize + writes <= self.capacity
    }

    /// The log of this lane.
    #[must_use]
    pub const fn log(&self) -> &Log {
        self.log
    }

    fn push(&mut self, write: Write) {
        let count = self.count.load(Ordering::Relaxed);
        assert!((count as usize) < self.capacity, "the log is full");
        // No reader reads the record before the count includes it.
        let at = self.records + count as usize * size_of::<Write>();
        assert!(self.log.mapping.write_at(at, bytemuck::bytes_of(&write)), "the log is too short");
        self.count.store(count + 1, Ordering::Release);
    }
}

impl Drop for Lane<'_> {
    fn drop(&mut self) {
        self.claimed.store(0, Ordering::Release);
    }
}

/// The time at which all earlier stores of this thread have reached memory.
#[must_use]
pub fn after() -> u64 {
    // Without the fence, the clock may be read while a store is still in the store buffer of the CPU.
    std::sync::atomic::fence(Ordering::SeqCst);
    monotonic_ns()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_another_process_are_read() {
        let log = Log::create(2, 100).unwrap();
        let other = Log::open(Path::new(&log.path())).unwrap();
        let mut lane = other.claim(1).unwrap();
        assert!(log.claim(1).is_none(), "the lane is claimed");
        assert!(log.claim(2).is_none(), "the lane does not exist");
        lane.during(Method::Pwrite, 7, 2, || Ok::<_, ()>(())).unwrap();
        assert_eq!(lane.during(Method::Pwrite, 9, 1, || Err(5)), Err(5));
        assert!(lane.has_room(98) && !lane.has_room(99));
        let writes = log.writes(1);
        assert_eq!(writes.iter().map(|write| write.page).collect::<Vec<_>>(), [7, 8]);
        assert!(writes[0].begin <= writes[0].end);
        assert_eq!(Method::of_number(writes[0].method), Some(Method::Pwrite));
        assert_eq!((log.writes(0).len(), log.count()), (0, 2));
        assert!(!other.is_stopped());
        log.stop();
        assert!(other.is_stopped());
        drop(lane);
        assert!(log.claim(1).is_some(), "the lane was released");
    }
}
