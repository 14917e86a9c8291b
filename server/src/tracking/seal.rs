//! Sealing the writers of a file: existing mappings stay writable, and no other writer can appear.

use std::os::fd::BorrowedFd;

use fdmap_proto::file::Seal;
use fdmap_sys::{SyscallError, memfd};

/// The seals that SealWriters adds. `F_SEAL_FUTURE_WRITE` refuses new writable mappings, writes through descriptors and punched
/// holes. It permits changes of the size, which change content too.
const WRITER_SEALS: u32 = Seal::FutureWrite.bit() | Seal::Shrink.bit() | Seal::Grow.bit();

/// True if `seals` refuse all writes except those through existing mappings.
#[must_use]
pub(crate) const fn writers_sealed(seals: u32) -> bool {
    let writes = Seal::FutureWrite.bit() | Seal::Write.bit();
    let size = Seal::Shrink.bit() | Seal::Grow.bit();
    seals & writes != 0 && seals & size == size
}

/// Seals the file of `fd`, which is open for writing, against new writers.
///
/// # Errors
/// `fcntl(F_ADD_SEALS)`: `EPERM` if the file has F_SEAL_SEAL.
pub fn seal_writers(fd: BorrowedFd<'_>) -> Result<(), SyscallError> {
    memfd::add_seals(fd, WRITER_SEALS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_sealed_only_with_the_size() {
        assert!(writers_sealed(WRITER_SEALS));
        assert!(writers_sealed(Seal::Write.bit() | Seal::Shrink.bit() | Seal::Grow.bit()));
        for missing in [Seal::FutureWrite, Seal::Shrink, Seal::Grow] {
            assert!(!writers_sealed(WRITER_SEALS & !missing.bit()), "{missing:?}");
        }
    }
}
