//! `CLOCK_MONOTONIC`, the clock of all time stamps in answers: every process of the host reads the same time.

use nix::time::{ClockId, clock_gettime};

/// Current `CLOCK_MONOTONIC` time in nanoseconds.
#[must_use]
pub fn monotonic_ns() -> u64 {
    // clock_gettime fails only for an unknown clock or a bad pointer.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .unwrap_or_else(|errno| unreachable!("clock_gettime(CLOCK_MONOTONIC): {errno}"));
    let seconds = u64::try_from(now.tv_sec()).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec()).unwrap_or(0);
    seconds * 1_000_000_000 + nanos
}
