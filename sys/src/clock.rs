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

/// True if `CLOCK_MONOTONIC` of this process is that of the initial time namespace, which BPF programs read: time_namespaces(7).
#[must_use]
pub fn is_that_of_the_host() -> bool {
    // A kernel without time namespaces has no such file.
    std::fs::read_to_string("/proc/self/timens_offsets").map_or(true, |offsets| has_no_offset(&offsets))
}

/// Parses `CLOCK SECONDS NANOSECONDS` in each line. Pure.
fn has_no_offset(offsets: &str) -> bool {
    let fields = |line: &str| line.split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let monotonic =
        offsets.lines().map(fields).find(|fields| fields.first().is_some_and(|name| name == "monotonic"));
    monotonic.is_none_or(|fields| fields[1..].iter().all(|offset| offset == "0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offset_of_the_monotonic_clock_is_found() {
        assert!(has_no_offset("monotonic           0         0\nboottime           10         0\n"));
        assert!(has_no_offset(""));
        assert!(!has_no_offset("monotonic          -5         0\nboottime            0         0\n"));
        assert!(!has_no_offset("boottime            0         0\nmonotonic           0         1\n"));
        assert!(is_that_of_the_host() || std::fs::read_to_string("/proc/self/timens_offsets").is_ok());
    }
}
