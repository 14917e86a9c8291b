//! The stamp of one page.

use fdmap_proto::units::{Generation, low_u32};

/// The generation in which a page was last written, and whether the write was observed.
///
/// Encoded in 32 bits: twice the generation, plus 1 if the stamp is conservative, which means that the page is reported as
/// written although no write was observed. 0 stands for a page that was never written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DirtyStamp(u32);

impl DirtyStamp {
    /// The stamp of a page that was never written.
    pub const NEVER: Self = Self(0);

    /// A page written in `generation`; [`Self::NEVER`] for [`Generation::NONE`].
    #[must_use]
    pub const fn new(generation: Generation, conservative: bool) -> Self {
        let bits = low_u32(generation.get()) << 1;
        if conservative && bits != 0 { Self(bits | 1) } else { Self(bits) }
    }

    /// Decodes a stamp; `None` if `bits` encode no stamp.
    #[must_use]
    pub fn from_bits(bits: u32) -> Option<Self> {
        let generation = Generation::new(u64::from(bits >> 1))?;
        (bits != 1).then(|| Self::new(generation, bits & 1 == 1))
    }

    /// Encodes the stamp.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The generation in which the page was last written; [`Generation::NONE`] if never.
    #[must_use]
    pub fn generation(self) -> Generation {
        Generation::new(u64::from(self.0 >> 1)).unwrap_or(Generation::MAX)
    }

    /// True if the page is reported as written although no write was observed.
    #[must_use]
    pub const fn is_conservative(self) -> bool {
        self.0 & 1 == 1
    }

    /// The stamp with the later generation; of the same generation, the observed stamp rather than the conservative one.
    #[must_use]
    pub const fn newer_of(self, other: Self) -> Self {
        // With the lowest bit inverted, the larger number is the newer stamp.
        let (a, b) = (self.0 ^ 1, other.0 ^ 1);
        Self((if a > b { a } else { b }) ^ 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(generation: u64, conservative: bool) -> DirtyStamp {
        DirtyStamp::new(Generation::new(generation).unwrap(), conservative)
    }

    #[test]
    fn later_generation_wins_and_then_the_observed_stamp() {
        let rising = [
            DirtyStamp::NEVER,
            stamp(1, true),
            stamp(1, false),
            stamp(2, true),
            stamp(u64::from(u32::MAX / 2) - 1, false),
        ];
        for (i, a) in rising.iter().enumerate() {
            for (j, b) in rising.iter().enumerate() {
                assert_eq!(a.newer_of(*b), rising[i.max(j)]);
            }
        }
    }

    #[test]
    fn bits_that_encode_no_stamp_are_refused() {
        assert_eq!(DirtyStamp::from_bits(0), Some(DirtyStamp::NEVER));
        assert_eq!(DirtyStamp::from_bits(1), None);
        assert_eq!(DirtyStamp::from_bits(u32::MAX), None);
        assert_eq!(DirtyStamp::from_bits(u32::MAX - 1), None);
        let last = DirtyStamp::new(Generation::MAX, true);
        assert_eq!(DirtyStamp::from_bits(last.bits()), Some(last));
        assert_eq!(last.generation(), Generation::MAX);
        assert_eq!(DirtyStamp::new(Generation::NONE, true), DirtyStamp::NEVER);
    }
}
