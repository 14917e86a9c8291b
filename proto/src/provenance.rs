//! Origin and accuracy of answers about page states.

use std::time::SystemTime;

use serde::{Serialize, Serializer};

/// Method used to read page states.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum ProbeKind {
    /// A BPF program walks the page cache XArray of the file.
    Xarray,
    /// mincore(2), and cachestat(2) or `lseek(SEEK_DATA)`.
    Syscalls,
}

/// The same moment on two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub monotonic_ns: u64,
    /// Wall clock.
    pub wall: SystemTime,
}

/// Origin and accuracy of an answer about page states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Provenance {
    /// Probe that read the states.
    pub probe: ProbeKind,
    /// Start of the reading.
    pub begin: Moment,
    /// End of the reading.
    pub end: Moment,
    /// States that could not be determined exactly.
    pub uncertainty: Uncertainty,
    /// `SwapCached` and `Swapped` are distinguished.
    pub swap_cached_distinguished: bool,
    /// Random id of the service process.
    pub instance: u64,
}

impl Provenance {
    /// Returns true if there is no uncertainty: the kernel held every reported state at some moment between begin and end.
    #[must_use]
    pub const fn exact(&self) -> bool {
        self.uncertainty.is_empty()
    }
}

impl Serialize for Provenance {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Fields {
            probe: ProbeKind,
            begin_monotonic_ns: u64,
            end_monotonic_ns: u64,
            #[serde(serialize_with = "crate::json::rfc3339")]
            begin_time: SystemTime,
            #[serde(serialize_with = "crate::json::rfc3339")]
            end_time: SystemTime,
            exact: bool,
            #[serde(flatten)]
            uncertainty: Uncertainty,
            swap_cached_distinguished: bool,
            #[serde(serialize_with = "crate::json::hex")]
            instance: u64,
        }
        let Self { probe, begin, end, uncertainty, swap_cached_distinguished, instance } = *self;
        Fields {
            probe,
            begin_monotonic_ns: begin.monotonic_ns,
            end_monotonic_ns: end.monotonic_ns,
            begin_time: begin.wall,
            end_time: end.wall,
            exact: self.exact(),
            uncertainty,
            swap_cached_distinguished,
            instance,
        }
        .serialize(serializer)
    }
}

/// Numbers of states that could not be determined exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Uncertainty {
    /// Leaves of 64 pages that changed during each attempt to read them. Each page is correct by itself, but the leaf does
    /// not show a single moment.
    pub unsettled_leaves: u64,
    /// Pages whose state the probe could not determine.
    pub unknown_pages: u64,
    /// Swapped pages that moved during the swap cache lookup; reported as `Swapped`.
    pub swap_cache_undetermined_pages: u64,
}

impl Uncertainty {
    /// Returns true if all numbers are 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.unsettled_leaves == 0 && self.unknown_pages == 0 && self.swap_cache_undetermined_pages == 0
    }
}

impl std::ops::AddAssign for Uncertainty {
    fn add_assign(&mut self, other: Self) {
        self.unsettled_leaves += other.unsettled_leaves;
        self.unknown_pages += other.unknown_pages;
        self.swap_cache_undetermined_pages += other.swap_cache_undetermined_pages;
    }
}
