//! What an answer about page states rests on.

use std::fmt;
use std::time::SystemTime;

/// How page states were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProbeKind {
    /// The file's page cache XArray, read by a BPF program.
    Xarray,
    /// SEEK_DATA/SEEK_HOLE and mincore.
    Syscalls,
}

impl ProbeKind {
    /// Lower case, one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Xarray => "xarray",
            Self::Syscalls => "syscalls",
        }
    }
}

impl fmt::Display for ProbeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One moment by two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub monotonic_ns: u64,
    /// The wall clock.
    pub wall: SystemTime,
}

/// What an answer about page states rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Provenance {
    /// How the states were read.
    pub probe: ProbeKind,
    /// No part of the answer was read before.
    pub begin: Moment,
    /// No part of the answer was read after.
    pub end: Moment,
    /// What keeps the answer from being exact.
    pub uncertainty: Uncertainty,
    /// `SwapCached` was told apart from `Swapped`.
    pub swap_cached_distinguished: bool,
    /// The service process that answered.
    pub instance: u64,
}

impl Provenance {
    /// Every state was seen as the kernel held it at some moment between begin and end.
    #[must_use]
    pub const fn exact(&self) -> bool {
        self.uncertainty.is_empty()
    }
}

/// Counts of what could not be determined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uncertainty {
    /// Leaves of 64 pages that changed each time they were read: each page is right by itself, the leaf is no
    /// one instant.
    pub unsettled_leaves: u64,
    /// Pages whose state the probe could not determine.
    pub unknown_pages: u64,
    /// Swapped pages that moved while it was being determined whether they were in the swap cache.
    pub swap_cache_undetermined: u64,
}

impl Uncertainty {
    /// True if there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.unsettled_leaves == 0 && self.unknown_pages == 0 && self.swap_cache_undetermined == 0
    }
}

impl std::ops::AddAssign for Uncertainty {
    fn add_assign(&mut self, other: Self) {
        self.unsettled_leaves += other.unsettled_leaves;
        self.unknown_pages += other.unknown_pages;
        self.swap_cache_undetermined += other.swap_cache_undetermined;
    }
}
