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
const IN_PROGRESS: [(usize, usize); 4] = [
    (offset_of!(WriteControl, begun), offset_of!(WriteControl, ended)),
    (offset_of!(WriteControl, any_begun), offset_of!(WriteControl, any_ended)),
    (offset_of!(WriteControl, segments_begun), offset_of!(WriteControl, segments_ended)),
    (offset_of!(WriteControl, writes_begun), offset_of!(WriteControl, writes_ended)),
];

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

    /// A member of [`WriteControl`].
    pub(super) fn of_host(&self, offset: usize) -> u64 {
        self.control.atomic_u64s(offset, 1)[0].load(Ordering::SeqCst)
    }

    pub(super) fn set_followed(&self, files: usize) {
        let offset = offset_of!(WriteControl, followed);
        self.control.atomic_u64s(offset, 1)[0].store(to_u64(files), Ordering::SeqCst);
    }

    /// True if a call is in flight that may map any followed file, or any System V segment if the file is one.
    pub(super) fn any_file_is_being_mapped(&self, is_segment: bool) -> bool {
        // Read in this order, begun includes every call in flight and ended includes none of them.
        let in_flight = |ended: usize, begun: usize| {
            let ended = self.of_host(ended);
            self.of_host(begun) != ended
        };
        in_flight(offset_of!(WriteControl, any_ended), offset_of!(WriteControl, any_begun))
            || is_segment
                && in_flight(
                    offset_of!(WriteControl, segments_ended),
                    offset_of!(WriteControl, segments_begun),
                )
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
        // Read in this order, begun includes every call in flight and ended includes none of them.
        let ended = self.of_host(offset_of!(WriteControl, writes_ended));
        self.of_host(offset_of!(WriteControl, writes_begun)) != ended
    }

    /// io_uring requests without a completion event.
    pub(super) fn skipped(&self) -> u64 {
        self.of_host(offset_of!(WriteControl, skipped))
    }

    /// Calls for which there was no room: on the file, and on any file.
    pub(super) fn uncounted(&self, slot: usize) -> (u64, u64) {
        let of_file = self.of_file(slot, Counter::Uncounted).load(Ordering::SeqCst);
        (of_file, self.of_host(offset_of!(WriteControl, uncounted)))
    }

    /// Tasks that searches found in a call: on the file, and on any file.
    pub(super) fn calling(&self, slot: usize) -> (u64, u64) {
        let of_file = self.of_file(slot, Counter::Calling).load(Ordering::SeqCst);
        (of_file, self.of_host(offset_of!(WriteControl, calling)))
    }

    /// True if no call is in progress that has an entry in a map.
    pub(super) fn no_call_is_in_progress(&self) -> bool {
        IN_PROGRESS.iter().all(|(begun, ended)| {
            let ended = self.of_host(*ended);
            self.of_host(*begun) == ended
        })
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
