//! `lseek` with `SEEK_DATA` and `SEEK_HOLE`: the parts of a file that hold data, resident or swapped.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

use crate::error::{CallContext, SyscallError};

/// Finds the first byte of data at or after `offset`; `None` if no data follows.
///
/// # Errors
/// `lseek`.
pub fn next_data(fd: BorrowedFd<'_>, offset: u64) -> Result<Option<u64>, SyscallError> {
    seek(fd, offset, Whence::SeekData, "SEEK_DATA")
}

/// Finds the first byte of a hole at or after `offset`; the end of the file counts as a hole. `None` if `offset` is at or past
/// the end.
///
/// # Errors
/// `lseek`.
pub fn next_hole(fd: BorrowedFd<'_>, offset: u64) -> Result<Option<u64>, SyscallError> {
    seek(fd, offset, Whence::SeekHole, "SEEK_HOLE")
}

fn seek(fd: BorrowedFd<'_>, offset: u64, whence: Whence, name: &str) -> Result<Option<u64>, SyscallError> {
    let call = || format!("lseek({name}) of descriptor {} from {offset}", fd.as_raw_fd());
    let start = i64::try_from(offset).map_err(|_| Errno::EOVERFLOW).call(call)?;
    match lseek(fd, start, whence) {
        Ok(found) => Ok(u64::try_from(found).ok()),
        Err(Errno::ENXIO) => Ok(None),
        Err(errno) => Err(errno).call(call),
    }
}
