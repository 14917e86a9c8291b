//! Results of checkpoints and of dirty rate measurements.

use std::time::{Duration, SystemTime};

use serde::Serialize;

use crate::tracking::{Coverage, Cursor};
use crate::units::Generation;

/// Result of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checkpoint {
    /// Generation that was closed; if `unchanged`, the last closed generation.
    pub generation: Generation,
    /// No page was written since `generation` was closed, so no generation was closed now.
    pub unchanged: bool,
    /// Pages of the generation whose write was observed.
    pub observed_pages: u64,
    /// Pages of the generation that are reported conservatively: no write was observed.
    pub conservative_pages: u64,
    /// How completely the writers were observed.
    pub coverage: Coverage,
    /// Time the checkpoint took in the service.
    #[serde(rename = "duration_ns", serialize_with = "crate::json::nanoseconds")]
    pub duration: Duration,
    /// Time of the checkpoint.
    #[serde(serialize_with = "crate::json::rfc3339")]
    pub time: SystemTime,
}

/// A checkpoint that closed a generation, as reported to watchers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckpointEvent {
    /// Generation that was closed.
    pub generation: Generation,
    /// Pages of the generation whose write was observed.
    pub observed_pages: u64,
    /// Pages of the generation that are reported conservatively.
    pub conservative_pages: u64,
    /// Time of the checkpoint.
    #[serde(serialize_with = "crate::json::rfc3339")]
    pub time: SystemTime,
    /// Time since the previous checkpoint; `None` for the first.
    #[serde(
        rename = "since_last_ns",
        serialize_with = "crate::json::optional_nanoseconds",
        skip_serializing_if = "Option::is_none"
    )]
    pub since_last: Option<Duration>,
    /// Observed and conservative pages per second since the previous checkpoint; 0 for the first.
    pub pages_per_second: f64,
}

/// Dirty page rate of a file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DirtyRate {
    /// Measured time between the two checkpoints.
    #[serde(rename = "window_ns", serialize_with = "crate::json::nanoseconds")]
    pub window: Duration,
    /// Distinct pages whose write was observed in the window.
    pub observed_pages: u64,
    /// Distinct pages reported conservatively in the window.
    pub conservative_pages: u64,
    /// Observed and conservative pages per second.
    pub pages_per_second: f64,
    /// The same in bytes.
    pub bytes_per_second: f64,
    /// How completely the writers were observed.
    pub coverage: Coverage,
    /// Generation closed at the end of the window.
    pub generation: Generation,
}

/// A cursor with a frozen set of changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BegunCursor {
    /// The cursor. Its `until_generation` is the generation to commit.
    pub cursor: Cursor,
    /// Pages of the frozen set whose write was observed.
    pub observed_pages: u64,
    /// Pages of the frozen set that are reported conservatively.
    pub conservative_pages: u64,
    /// How completely the writers were observed.
    pub coverage: Coverage,
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn durations_and_times_serialize_with_their_units() {
        let event = CheckpointEvent {
            generation: Generation::FIRST,
            observed_pages: 2,
            conservative_pages: 0,
            time: UNIX_EPOCH,
            since_last: None,
            pages_per_second: 0.0,
        };
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["time"], "1970-01-01T00:00:00.000000000Z");
        assert!(json.get("since_last_ns").is_none());
        let later = CheckpointEvent { since_last: Some(Duration::from_millis(2)), ..event };
        assert_eq!(serde_json::to_value(later).unwrap()["since_last_ns"], 2_000_000);
    }
}
