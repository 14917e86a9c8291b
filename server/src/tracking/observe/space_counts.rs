//! What happened in a tracked address space. Data only.

/// Counters of one address space. They never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceCounts {
    /// Calls by other processes that may take written bits, counted when they begin.
    pub begun: u64,
    /// The same calls, counted when they end.
    pub ended: u64,
    /// Children that got a copy of the address space, counted before they run.
    pub copies: u64,
    /// Calls that may make a shared mapping writable, counted when they begin.
    pub protect_begun: u64,
    /// The same calls, counted when they end.
    pub protect_ended: u64,
}
