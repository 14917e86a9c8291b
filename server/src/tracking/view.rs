//! What readers see without the lock of a tracker. Data only.

use fdmap_proto::units::Generation;

use super::gap_log::GapLog;
use super::stamps::StampMap;

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
