//! JSON forms of types that other crates define, for `#[serde(serialize_with = "...")]`.

use std::time::{Duration, SystemTime};

use serde::{Serialize as _, Serializer};

/// A wall clock time as RFC 3339 with nanoseconds, in UTC.
pub(crate) fn rfc3339<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_nanos(*time))
}

/// A duration in nanoseconds.
pub(crate) fn nanoseconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).serialize(serializer)
}

/// An optional duration in nanoseconds.
pub(crate) fn optional_nanoseconds<S: Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => nanoseconds(duration, serializer),
        None => serializer.serialize_none(),
    }
}

/// A 64-bit id as 16 hex digits: JSON readers lose the low bits of large numbers.
pub(crate) fn hex<S: Serializer>(id: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{id:016x}"))
}
