//! A request to read page states, and its result.

use std::sync::Arc;

use super::attributes::AttributeMap;
use super::map::Snapshot;

/// What a scan determines beyond hole, resident, swapped and swap slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanOptions {
    /// Distinguish swap-cached from swapped pages.
    pub distinguish_swap_cached: bool,
    /// Read page attributes.
    pub attributes: bool,
}

/// The states that one requester receives.
#[derive(Clone, Debug)]
pub struct ScanResult {
    /// All known states of the file, also outside the requested ranges.
    pub snapshot: Snapshot,
    /// Attributes of the requested pages; `None` if [`ScanOptions::attributes`] was not set.
    pub attributes: Option<Arc<AttributeMap>>,
}
