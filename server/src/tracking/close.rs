//! Closing a file: nobody new can write to it.

use std::os::fd::BorrowedFd;

use fdmap_proto::file::Seal;
use fdmap_sys::{SyscallError, memfd};

/// What a closed file has. `F_SEAL_FUTURE_WRITE` refuses new writable mappings, writes through descriptors and punched holes,
/// but neither cutting nor growing, which change content as well.
const CLOSED: u32 = Seal::FutureWrite.bit() | Seal::Shrink.bit() | Seal::Grow.bit();

/// True if these seals keep everybody from writing, but through mappings that are there.
#[must_use]
pub const fn writers_sealed(seals: u32) -> bool {
    let writes = Seal::FutureWrite.bit() | Seal::Write.bit();
    let size = Seal::Shrink.bit() | Seal::Grow.bit();
    seals & writes != 0 && seals & size == size
}

/// Closes the file of `fd`, open for writing.
///
/// # Errors
/// `fcntl(F_ADD_SEALS)`: `EPERM` if the file is sealed against seals.
pub fn seal_writers(fd: BorrowedFd<'_>) -> Result<(), SyscallError> {
    memfd::add_seals(fd, CLOSED)
}
