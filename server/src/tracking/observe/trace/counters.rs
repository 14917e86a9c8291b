//! The counters that the programs of `bpf/file_writes.bpf.c` share with the service.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};

use fdmap_proto::units::to_u64;
use fdmap_sys::mapping::SharedMapping;
use libbpf_rs::Object;

use super::load::MAX_FILES;
use crate::bpf::records::{FollowedFile, WriteControl};
use crate::bpf::{TraceError, map_array};

/// Calls in progress, counted when they begin and when they end: members of [`WriteControl`].
const IN_PROGRESS: [(usize, usize); 6] = [
    (offset_of!(WriteControl, begun), offset_of!(WriteControl, ended)),
    MAPPINGS,
    SEGMENT_MAPPINGS,
    WRITES,
    OTHER_WRITES,
    REMAPS,
];

const MAPPINGS: (usize, usize) = (offset_of!(WriteControl, any_begun), offset_of!(WriteControl, any_ended));
const SEGMENT_MAPPINGS: (usize, usize) =
    (offset_of!(WriteControl, segments_begun), offset_of!(WriteControl, segments_ended));
const WRITES: (usize, usize) =
    (offset_of!(WriteControl, writes_begun), offset_of!(WriteControl, writes_ended));
const OTHER_WRITES: (usize, usize) =
    (offset_of!(WriteControl, others_begun), offset_of!(WriteControl, others_ended));

const REMAPS: (usize, usize) =
    (offset_of!(WriteControl, remaps_begun), offset_of!(WriteControl, remaps_ended));

#[derive(Debug)]
pub(super) struct Counters {
    /// One [`WriteControl`].
    control: SharedMapping,
    /// [`FollowedFile`]s by slot.
    files: SharedMapping,
}

impl Counters {
    pub(super) fn new(object: &Object) -> Result<Self, TraceError> {
        Ok(Self {
            control: map_array::<WriteControl>(object, "control", 1, true)?,
            files: map_array::<FollowedFile>(object, "files", MAX_FILES, true)?,
        })
    }

    pub(super) fn of_file(&self, slot: usize, which: Counter) -> &AtomicU64 {
        &self.files.atomic_u64s(slot * size_of::<FollowedFile>() + which.offset(), 1)[0]
    }

    /// Calls that may have mapped any followed file.
    pub(super) fn mappings_of_any_file(&self) -> u64 {
        self.of_host(offset_of!(WriteControl, mappings))
    }

    /// Calls that change a mapping of an unknown file: how many have begun, and how many have ended.
    pub(super) fn remaps(&self) -> (u64, u64) {
        // Read in this order, begun includes every call in flight and ended includes none of them.
        let ended = self.of_host(REMAPS.1);
        (self.of_host(REMAPS.0), ended)
    }

    /// A member of [`WriteControl`].
    pub(super) fn of_host(&self, offset: usize) -> u64 {
        self.control.atomic_u64s(offset, 1)[0].load(Ordering::SeqCst)
    }

    pub(super) fn set_followed(&self, files: usize) {
        let offset = offset_of!(WriteControl, followed);
        self.control.atomic_u64s(offset, 1)[0].store(to_u64(files), Ordering::SeqCst);
    }

    /// True if a call is in flight that is counted in these members of [`WriteControl`].
    fn is_in_flight(&self, (begun, ended): (usize, usize)) -> bool {
        // Read in this order, begun includes every call in flight and ended includes none of them.
        let ended = self.of_host(ended);
        self.of_host(begun) != ended
    }

    /// True if a call is in flight that may map any followed file, or any System V segment if the file is one.
    pub(super) fn any_file_is_being_mapped(&self, is_segment: bool) -> bool {
        self.is_in_flight(MAPPINGS) || is_segment && self.is_in_flight(SEGMENT_MAPPINGS)
    }

    /// Permanent attachments: of the file, and of files that could not be determined.
    pub(super) fn permanent_attachments(&self, slot: usize) -> (u64, u64) {
        let of_file = self.of_file(slot, Counter::PermanentAttachments).load(Ordering::SeqCst);
        (of_file, self.of_host(offset_of!(WriteControl, permanent_attachments)))
    }

    /// True if what was counted in `begun` has ended.
    pub(super) fn is_balanced(&self, slot: usize, begun: Counter, ended: Counter) -> bool {
        // Read in this order, begun includes everything in progress and ended includes nothing of it.
        let ended = self.of_file(slot, ended).load(Ordering::SeqCst);
        self.of_file(slot, begun).load(Ordering::SeqCst) == ended
    }

    /// Ends what is in progress in a free slot, while no program has its number.
    pub(super) fn balance(&self, slot: usize) {
        for (begun, ended) in [
            (Counter::Begun, Counter::Ended),
            (Counter::RequestsBegun, Counter::RequestsEnded),
            (Counter::MovesBegun, Counter::MovesEnded),
        ] {
            let begun = self.of_file(slot, begun).load(Ordering::SeqCst);
            self.of_file(slot, ended).store(begun, Ordering::SeqCst);
        }
    }

    /// True if a call is in flight that may write to any followed file.
    pub(super) fn any_file_is_being_written(&self) -> bool {
        self.is_in_flight(WRITES)
    }

    /// True if a call is in flight that may write to a followed file without naming it: by path, or through
    /// another file.
    pub(super) fn other_file_is_being_written(&self) -> bool {
        self.is_in_flight(OTHER_WRITES)
    }

    /// Notes that io_uring requests are observed from now on.
    pub(super) fn set_observed_since(&self, now_ns: u64) {
        let offset = offset_of!(WriteControl, observed_since);
        self.control.atomic_u64s(offset, 1)[0].store(now_ns, Ordering::SeqCst);
    }

    /// Tasks that searches found with an io_uring which may have requests from before they were observed.
    pub(super) fn earlier_rings(&self) -> u64 {
        self.of_host(offset_of!(WriteControl, earlier_rings))
    }

    /// io_uring requests without a completion event, since the service started.
    pub(super) fn skipped(&self) -> u64 {
        self.of_host(offset_of!(WriteControl, skipped))
    }

    /// Calls for which there was no room: on the file, and on any file.
    pub(super) fn uncounted(&self, slot: usize) -> (u64, u64) {
        let of_file = self.of_file(slot, Counter::Uncounted).load(Ordering::SeqCst);
        (of_file, self.of_host(offset_of!(WriteControl, uncounted)))
    }

    /// Tasks that searches found in a call: on the file, and on any file. `mounted`: the file is reachable by path, so that those
    /// on files of stacked file systems count.
    pub(super) fn calling(&self, slot: usize, mounted: bool) -> (u64, u64) {
        let of_file = self.of_file(slot, Counter::Calling).load(Ordering::SeqCst);
        let stacked = if mounted { self.of_host(offset_of!(WriteControl, calling_stacked)) } else { 0 };
        (of_file, self.of_host(offset_of!(WriteControl, calling)).wrapping_add(stacked))
    }

    /// True if no call is in progress that has an entry in a map.
    pub(super) fn no_call_is_in_progress(&self) -> bool {
        IN_PROGRESS.iter().all(|counted| !self.is_in_flight(*counted))
    }

    /// Ends all calls that are in progress, while no program is attached.
    pub(super) fn end_calls(&self) {
        for (begun, ended) in IN_PROGRESS {
            self.control.atomic_u64s(ended, 1)[0].store(self.of_host(begun), Ordering::SeqCst);
        }
    }
}

/// A member of [`FollowedFile`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Counter {
    Id,
    Begun,
    Ended,
    Records,
    Lost,
    MovesBegun,
    MovesEnded,
    Mapped,
    Remapped,
    RequestsBegun,
    RequestsEnded,
    Attached,
    PermanentAttachments,
    Uncounted,
    Calling,
}

impl Counter {
    const fn offset(self) -> usize {
        match self {
            Self::Id => offset_of!(FollowedFile, id),
            Self::Begun => offset_of!(FollowedFile, begun),
            Self::Ended => offset_of!(FollowedFile, ended),
            Self::Records => offset_of!(FollowedFile, records),
            Self::Lost => offset_of!(FollowedFile, lost),
            Self::Mapped => offset_of!(FollowedFile, mapped),
            Self::Remapped => offset_of!(FollowedFile, remapped),
            Self::MovesBegun => offset_of!(FollowedFile, moves_begun),
            Self::MovesEnded => offset_of!(FollowedFile, moves_ended),
            Self::RequestsBegun => offset_of!(FollowedFile, requests_begun),
            Self::RequestsEnded => offset_of!(FollowedFile, requests_ended),
            Self::Attached => offset_of!(FollowedFile, attached),
            Self::PermanentAttachments => offset_of!(FollowedFile, permanent_attachments),
            Self::Uncounted => offset_of!(FollowedFile, uncounted),
            Self::Calling => offset_of!(FollowedFile, calling),
        }
    }
}
