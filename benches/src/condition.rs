//! Conditions of the measured file. Pure.

use fdmap_tests::pattern::Pattern;

/// State of the file's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Every page is resident.
    Resident,
    /// Written in ascending order; half of the pages swapped out, as chosen by the kernel.
    HalfSwapped,
    /// The same with 15 of 16 pages swapped out.
    MostlySwapped,
    /// Written in large strides, so that swapped and resident pages are interleaved and no two slots are consecutive; half of the
    /// pages swapped out.
    Scattered,
    /// A random half of the pages never written; the rest resident.
    HalfHoles,
}

/// Which pages are written, in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// All, in ascending order.
    Ascending,
    /// All, in large strides.
    Strided,
    /// A random half.
    Half,
}

impl Condition {
    /// Ordered so that each condition needs the least work after the one before.
    pub const ALL: [Self; 5] =
        [Self::Resident, Self::HalfSwapped, Self::MostlySwapped, Self::Scattered, Self::HalfHoles];

    /// Label in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Resident => "all resident",
            Self::HalfSwapped => "half swapped",
            Self::MostlySwapped => "mostly swapped",
            Self::Scattered => "half swapped, scattered",
            Self::HalfHoles => "half holes",
        }
    }

    #[must_use]
    pub const fn fill(self) -> Fill {
        match self {
            Self::Resident | Self::HalfSwapped | Self::MostlySwapped => Fill::Ascending,
            Self::Scattered => Fill::Strided,
            Self::HalfHoles => Fill::Half,
        }
    }

    /// Memory limit in bytes for a file of `file_bytes`; `None` for no limit.
    #[must_use]
    pub const fn limit(self, file_bytes: u64) -> Option<u64> {
        match self {
            Self::Resident | Self::HalfHoles => None,
            Self::HalfSwapped | Self::Scattered => Some(file_bytes / 2),
            Self::MostlySwapped => Some(file_bytes / 16),
        }
    }

    /// Minimum and maximum number of swapped pages per 1000. Page tables and the file's XArray are charged too, at most 1/256 of the
    /// file, and the kernel reclaims slightly more than necessary.
    #[must_use]
    pub const fn swapped(self) -> (u64, u64) {
        match self {
            Self::Resident | Self::HalfHoles => (0, 0),
            Self::HalfSwapped | Self::Scattered => (490, 570),
            Self::MostlySwapped => (930, 985),
        }
    }
}

impl Fill {
    /// The pages to write in a file of `pages` pages, in order.
    pub fn pages(self, pages: u64) -> impl Iterator<Item = u64> {
        /// A prime that does not divide the number of pages of any file.
        const STRIDE: u64 = 2_654_435_761;
        let half = Pattern { seed: 1, percent: 50 };
        (0..pages)
            .filter(move |page| self != Self::Half || half.has(*page))
            .map(move |nth| if self == Self::Strided { nth * STRIDE % pages } else { nth })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_writes_each_page_once() {
        for fill in [Fill::Ascending, Fill::Strided] {
            let mut written: Vec<u64> = fill.pages(5 * 4096).collect();
            written.sort_unstable();
            assert!(written.into_iter().eq(0..5 * 4096), "{fill:?}");
        }
    }

    #[test]
    fn strided_writes_are_never_adjacent() {
        let written: Vec<u64> = Fill::Strided.pages(1 << 20).collect();
        assert!(written.windows(2).all(|pair| pair[0].abs_diff(pair[1]) > 512));
    }
}
