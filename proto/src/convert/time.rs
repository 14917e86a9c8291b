//! Durations and timestamps.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::ConvertError;

/// Decodes a duration of 0 or more. An absent duration is 0.
///
/// # Errors
/// [`ConvertError::Duration`] if it is negative or not normalized.
pub fn duration_from_wire(
    field: &'static str,
    duration: Option<prost_types::Duration>,
) -> Result<Duration, ConvertError> {
    let duration = duration.unwrap_or_default();
    let (seconds, nanos) = (duration.seconds, duration.nanos);
    match (u64::try_from(seconds), u32::try_from(nanos)) {
        (Ok(whole), Ok(part)) if part < 1_000_000_000 => Ok(Duration::new(whole, part)),
        _ => Err(ConvertError::Duration { field, seconds, nanos }),
    }
}

/// Encodes a duration. Saturates at 2^63 - 1 seconds.
#[must_use]
pub fn duration_to_wire(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
    }
}

/// Encodes a wall clock time.
#[must_use]
pub fn timestamp_to_wire(time: SystemTime) -> prost_types::Timestamp {
    time.into()
}

/// Decodes a wall clock time.
///
/// # Errors
/// [`ConvertError::Missing`] if it is absent, [`ConvertError::Duration`] if it is before 1970 or out of range.
pub fn timestamp_from_wire(
    field: &'static str,
    time: Option<prost_types::Timestamp>,
) -> Result<SystemTime, ConvertError> {
    let prost_types::Timestamp { seconds, nanos } = time.ok_or(ConvertError::Missing(field))?;
    let since_epoch = duration_from_wire(field, Some(prost_types::Duration { seconds, nanos }))?;
    UNIX_EPOCH.checked_add(since_epoch).ok_or(ConvertError::Duration { field, seconds, nanos })
}
