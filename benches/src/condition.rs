//! The conditions that a file is measured in. Pure.

use fdmap_tests::pattern::Pattern;

/// What a file's pages are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Every page in memory.
    Resident,
    /// Written from front to back; half of it swapped out, as the kernel chose.
    HalfSwapped,
    /// The same, 15 of 16 pages swapped out.
    MostlySwapped,
    /// Written in leaps, so that swapped and resident pages lie between one another and no slot follows another; half of it
    /// swapped out.
    Scattered,
    /// Every other page never written, by chance; the rest in memory.
    HalfHoles,
}

/// Which pages are written, and in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// All, from front to back.
    InTurn,
    /// All, each far from the one before.
    InLeaps,
    /// Half of them, by chance.
    Half,
}

impl Condition {
    /// In the order in which they are cheapest to make.
    pub const ALL: [Self; 5] =
        [Self::Resident, Self::HalfSwapped, Self::MostlySwapped, Self::Scattered, Self::HalfHoles];

    /// For people.
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

    /// How the file is written.
    #[must_use]
    pub const fn fill(self) -> Fill {
        match self {
            Self::Resident | Self::HalfSwapped | Self::MostlySwapped => Fill::InTurn,
            Self::Scattered => Fill::InLeaps,
            Self::HalfHoles => Fill::Half,
        }
    }

    /// How much memory a file of so many bytes may take, if it is not as much as it needs.
    #[must_use]
    pub const fn limit(self, file_bytes: u64) -> Option<u64> {
        match self {
            Self::Resident | Self::HalfHoles => None,
            Self::HalfSwapped | Self::Scattered => Some(file_bytes / 2),
            Self::MostlySwapped => Some(file_bytes / 16),
        }
    }

    /// The least and the most swapped pages in 1000 pages. The page tables and the tree of a file count as memory too, 1/256
    /// of it at most, and the kernel frees somewhat more than it must.
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
    /// The pages of a file of `pages` pages that are written, in the order in which they are.
    pub fn pages(self, pages: u64) -> impl Iterator<Item = u64> {
        /// A prime that divides no file's pages.
        const LEAP: u64 = 2_654_435_761;
        let half = Pattern { seed: 1, percent: 50 };
        (0..pages)
            .filter(move |page| self != Self::Half || half.has(*page))
            .map(move |nth| if self == Self::InLeaps { nth * LEAP % pages } else { nth })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_written_once_in_any_order() {
        for fill in [Fill::InTurn, Fill::InLeaps] {
            let mut written: Vec<u64> = fill.pages(5 * 4096).collect();
            written.sort_unstable();
            assert!(written.into_iter().eq(0..5 * 4096), "{fill:?}");
        }
    }

    #[test]
    fn leaps_leave_nothing_together() {
        let written: Vec<u64> = Fill::InLeaps.pages(1 << 20).collect();
        assert!(written.windows(2).all(|pair| pair[0].abs_diff(pair[1]) > 512));
    }
}
