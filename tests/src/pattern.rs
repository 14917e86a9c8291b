//! Pseudo-random choices of pages by seed, which a test and its agent compute alike. Pure.

use fdmap_proto::units::to_u64;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pattern {
    pub seed: u64,
    /// Percentage of written pages.
    pub percent: u64,
}

impl Pattern {
    /// True if `page` is written.
    #[must_use]
    pub const fn has(self, page: u64) -> bool {
        mix(self.seed ^ mix(page)) % 100 < self.percent
    }

    /// The first 16 bytes of `page`, which are never all zeroes.
    #[must_use]
    pub fn content(self, page: u64) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&(mix(self.seed) | 1).to_le_bytes());
        bytes[8..].copy_from_slice(&page.to_le_bytes());
        bytes
    }

    /// The written pages among the first `pages`.
    pub fn pages(self, pages: u64) -> impl Iterator<Item = u64> {
        (0..pages).filter(move |page| self.has(*page))
    }

    /// The number of written pages among the first `pages`.
    #[must_use]
    pub fn count(self, pages: u64) -> u64 {
        to_u64(self.pages(pages).count())
    }
}

/// splitmix64, as its author published it.
#[must_use]
pub const fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_has_about_the_requested_share() {
        for percent in [0, 37, 50, 100] {
            let count = Pattern { seed: 7, percent }.count(100_000);
            assert!(count.abs_diff(percent * 1000) < 1000, "{count} pages for {percent} %");
        }
    }
}
