//! Sealing the writers of a file: existing mappings stay writable, and no other writer can appear.

use std::os::fd::BorrowedFd;

use fdmap_proto::file::Seals;
use fdmap_sys::{SyscallError, memfd};

/// The seals that SealWriters adds. `F_SEAL_FUTURE_WRITE` refuses new writable mappings, writes through descriptors and punched
/// holes. It permits changes of the size, which change content too.
const WRITER_SEALS: u32 = Seals::FUTURE_WRITE.bits() | Seals::SHRINK.bits() | Seals::GROW.bits();

/// True if `seals` refuse all writes except those through existing mappings.
#[must_use]
pub(crate) const fn writers_sealed(seals: u32) -> bool {
    let writes = Seals::FUTURE_WRITE.bits() | Seals::WRITE.bits();
    let size = Seals::SHRINK.bits() | Seals::GROW.bits();
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
        assert!(writers_sealed(Seals::WRITE.bits() | Seals::SHRINK.bits() | Seals::GROW.bits()));
        for missing in [Seals::FUTURE_WRITE, Seals::SHRINK, Seals::GROW] {
            assert!(!writers_sealed(WRITER_SEALS & !missing.bits()), "{missing:?}");
        }
    }
}
