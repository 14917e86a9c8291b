//! Sealing the writers of a file: existing mappings stay writable, and no other writer can appear.

use fdmap_proto::file::Seals;

/// The seals that SealWriters adds. `F_SEAL_FUTURE_WRITE` refuses new writable mappings, writes through descriptors and punched
/// holes. It permits changes of the size, which change content too.
pub const WRITER_SEALS: Seals = Seals::FUTURE_WRITE.union(Seals::SHRINK).union(Seals::GROW);

/// True if `seals` refuse all writes except those through existing mappings.
#[must_use]
pub(crate) const fn writers_sealed(seals: u32) -> bool {
    let writes = Seals::FUTURE_WRITE.bits() | Seals::WRITE.bits();
    let size = Seals::SHRINK.bits() | Seals::GROW.bits();
    seals & writes != 0 && seals & size == size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_sealed_only_with_the_size() {
        assert!(writers_sealed(WRITER_SEALS.bits()));
        assert!(writers_sealed(Seals::WRITE.bits() | Seals::SHRINK.bits() | Seals::GROW.bits()));
        for missing in [Seals::FUTURE_WRITE, Seals::SHRINK, Seals::GROW] {
            assert!(!writers_sealed(WRITER_SEALS.bits() & !missing.bits()), "{missing:?}");
        }
    }
}
