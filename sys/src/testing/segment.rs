//! System V shared memory.

use nix::errno::Errno;
use nix::libc;

use super::raw_mapping::RawMapping;
use crate::error::{CallContext as _, SyscallError};

/// A System V segment, removed on drop. Processes that have attached the segment keep its memory.
#[derive(Debug)]
pub struct Segment {
    id: i32,
    len: usize,
}

impl Segment {
    /// A new segment of `len` bytes, a multiple of the page size.
    ///
    /// # Errors
    /// `shmget`.
    pub fn new(len: usize) -> Result<Self, SyscallError> {
        // SAFETY: the call takes integers.
        let id = unsafe { libc::shmget(libc::IPC_PRIVATE, len, 0o600) };
        Errno::result(id).map(|id| Self { id, len }).call(|| format!("shmget of {len} bytes"))
    }

    /// Attaches the segment at a free range. Dropping the mapping detaches the segment: `shmdt` is `munmap` of its whole range.
    ///
    /// # Errors
    /// `shmat`.
    pub fn attach(&self) -> Result<RawMapping, SyscallError> {
        // SAFETY: the kernel chooses a free range.
        let at = unsafe { libc::shmat(self.id, std::ptr::null(), 0) };
        if at.addr() == usize::MAX {
            return Err(Errno::last()).call(|| format!("shmat of segment {}", self.id));
        }
        // SAFETY: shmat returned this range just now, so nothing else uses it.
        Ok(unsafe { RawMapping::from_raw(at, self.len) })
    }

    /// Attaches the segment and detaches it by `shmdt`.
    ///
    /// # Errors
    /// `shmat`, `shmdt`.
    pub fn attach_and_detach(&self) -> Result<(), SyscallError> {
        Self::detach(self.attach()?)
    }

    /// Detaches a segment by `shmdt`.
    ///
    /// # Errors
    /// `shmdt`: `EINVAL` if no segment is attached there; `EFAULT` if a part was unmapped. The range then stays mapped.
    pub fn detach(mapping: RawMapping) -> Result<(), SyscallError> {
        mapping.checked(0, mapping.len())?;
        let (start, len) = mapping.into_raw();
        // SAFETY: the range belonged to the mapping, into which no reference exists.
        Errno::result(unsafe { libc::shmdt(start) }).map(drop).call(|| format!("shmdt of {len} bytes"))
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: IPC_RMID reads and writes no memory of this process.
        unsafe { libc::shmctl(self.id, libc::IPC_RMID, std::ptr::null_mut()) };
    }
}
