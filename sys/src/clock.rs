//! `CLOCK_MONOTONIC`, by which answers are dated: every process of the host reads the same.

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`.
#[must_use]
pub fn monotonic_ns() -> u64 {
    // clock_gettime fails for an unknown clock or a bad pointer only.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .unwrap_or_else(|errno| unreachable!("clock_gettime(CLOCK_MONOTONIC): {errno}"));
    let seconds = u64::try_from(now.tv_sec()).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec()).unwrap_or(0);
    seconds * 1_000_000_000 + nanos
}
