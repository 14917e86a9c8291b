//! What readers see without the lock of a tracker. Data only.

use std::time::{Duration, SystemTime};

use fdmap_proto::tracking::{Coverage, CoveragePolicy, TrackedMapping};
use fdmap_proto::units::Generation;

use super::gap_log::GapLog;
use super::stamps::{Counts, StampMap};

/// All closed generations.
#[derive(Clone, Debug)]
pub struct View {
    pub stamps: StampMap,
    /// The last closed generation, or [`Generation::NONE`].
    pub closed: Generation,
    pub(crate) gaps: GapLog,
    /// Size of the file in pages when the generation was closed.
    pub pages: u64,
    /// Number of tracked mappings when the generation was closed.
    pub tracked_mappings: u64,
}

/// A checkpoint that closed a generation.
#[derive(Clone, Debug)]
pub struct CheckpointEvent {
    /// The generation that it closed.
    pub generation: Generation,
    /// Pages written in it.
    pub counts: Counts,
    pub time: SystemTime,
    /// Time since the generation before was closed; `None` for the first one since the service started.
    pub since_last: Option<Duration>,
}

/// Result of a checkpoint.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The last closed generation.
    pub generation: Generation,
    /// Nothing was written: the checkpoint closed no generation.
    pub unchanged: bool,
    /// Pages written in the generation; 0 if `unchanged`.
    pub counts: Counts,
    pub coverage: Coverage,
    pub duration: Duration,
    pub time: SystemTime,
}

/// Which writers are observed now.
#[derive(Clone, Debug)]
pub struct CoverageReport {
    /// Coverage of the open generation so far.
    pub coverage: Coverage,
    pub mappings: Vec<TrackedMapping>,
    pub policy: CoveragePolicy,
    pub closed_generation: Generation,
    pub writers_sealed: bool,
}
