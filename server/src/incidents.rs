//! Counts incidents of helper processes that clients can cause. The log may omit lines of them; the counts omit none.

use std::sync::atomic::{AtomicU64, Ordering};

use fdmap_proto::HelperIncident;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Incident {
    /// A receiver did not answer in time, or closes no more descriptors: another one replaces it.
    ReceiverReplaced,
    /// A receiver ended without being asked to.
    ReceiverEnded,
    /// A receiver was killed, with its sessions, since it did not answer for long.
    ReceiverKilled,
    /// A refuser ended, or was killed: another one replaces it.
    RefuserEnded,
    /// A refuser has as many connections to close as it may have.
    RefuserFull,
    /// A call on an inode took longer than its deadline.
    InodeHelperLate,
    /// An inode helper ended, or was killed.
    InodeHelperEnded,
    /// A call on a tracked address space took longer than its deadline.
    HolderLate,
    /// A holder ended, or was killed: another one replaces it.
    HolderReplaced,
    /// The process that reads the fork events of a user ended.
    CompanionEnded,
    /// A search process did not end in time, or, if it searches for users of ephemeral files, was killed.
    SearchLate,
}

/// The name of each, in the order of [`Incident`].
const NAMES: [&str; 11] = [
    "receiver-replaced",
    "receiver-ended",
    "receiver-killed",
    "refuser-ended",
    "refuser-full",
    "inode-helper-late",
    "inode-helper-ended",
    "holder-late",
    "holder-replaced",
    "companion-ended",
    "search-late",
];

static COUNTS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];

pub(crate) fn count(incident: Incident) {
    COUNTS[incident as usize].fetch_add(1, Ordering::Relaxed);
}

/// How often each happened since the service started.
pub(crate) fn counts() -> Vec<HelperIncident> {
    let counts = COUNTS.iter().map(|count| count.load(Ordering::Relaxed));
    NAMES.iter().zip(counts).map(|(name, count)| HelperIncident { name: (*name).into(), count }).collect()
}
