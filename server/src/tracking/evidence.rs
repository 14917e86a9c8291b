//! What is known at a checkpoint of writers that no page table shows, and what follows from it. Pure.
//!
//! The signals, and what each is worth (`docs/dirty-tracking.md` has the measurements):
//!
//! - *ctime* of the inode changes before a write through a descriptor copies its bytes, in every case; and when a page
//!   that is protected is written through a mapping. Unchanged, it proves that neither happened.
//! - *IN_MODIFY* comes at the end of a write through a descriptor that was opened by path (those that the service hands
//!   out are), but not of native AIO or a loop device, and not of descriptors made by `memfd_create`.
//! - *Traced* system calls give the exact range and whether they are under way, whatever the descriptor. Native AIO, loop
//!   devices and io_uring are not among them: whether these were at work at all is known by counts.

use std::time::Duration;

use fdmap_proto::tracking::GapKind;

/// How long a write whose end gives no signal is reckoned with after it was seen to begin: one call moves at most 2 GiB,
/// and may have to wait for swap.
pub const SILENT_WRITE: Duration = Duration::from_secs(10);

/// What system call tracing has to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedCalls {
    /// Some were lost.
    pub lost: bool,
    /// Requests that write were submitted to some io_uring of this host lately.
    pub io_uring: bool,
    /// Native AIO was submitted lately that may write to a followed file, or on this host a hole punched by `madvise`, or a file cut by its path.
    pub unranged: bool,
}

/// What is known of writes through descriptors since the last checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorEvidence {
    /// Writes through descriptors are impossible, and were when the last generation was closed.
    pub closed: bool,
    /// There may be descriptors whose writes raise no IN_MODIFY.
    pub silent: bool,
    /// The inode's ctime differs from what it was before the last checkpoint's harvest.
    pub ctime_changed: bool,
    /// IN_MODIFY was seen.
    pub modified: bool,
    /// Signals were lost, or the service was away.
    pub lost: bool,
    /// Written pages were found in page tables: they explain a change of ctime.
    pub mapped_writes: bool,
    /// Traced calls wrote, or may have.
    pub traced_writes: bool,
    /// `None`: calls are not traced.
    pub traced: Option<TracedCalls>,
    /// A loop device has the file open.
    pub loop_device: bool,
    /// A write whose end gives no signal began less than [`SILENT_WRITE`] or one generation ago.
    pub silent_write_pending: bool,
}

/// What follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DescriptorVerdict {
    /// All data pages count as written, for this reason.
    pub conservative: Option<GapKind>,
    /// That rests on a mere possibility: a policy may ignore it.
    pub only_possible: bool,
    /// A write may be under way whose end will give no signal.
    pub silent_write: bool,
}

/// Judges writes through descriptors: what traced calls do not explain counts for all data pages.
#[must_use]
pub fn judge_descriptors(evidence: &DescriptorEvidence) -> DescriptorVerdict {
    let DescriptorEvidence { closed, silent, ctime_changed, modified, lost, mapped_writes, .. } = *evidence;
    if closed {
        return DescriptorVerdict::default();
    }
    let certain = |kind, silent_write| DescriptorVerdict {
        conservative: Some(kind),
        only_possible: false,
        silent_write,
    };
    // Not even an unchanged ctime says that no write has ended: it changes before.
    if lost {
        return certain(GapKind::LostEvents, true);
    }
    let explained_modify = evidence.traced_writes
        && evidence.traced.is_some_and(|traced| !traced.lost && !traced.io_uring && !traced.unranged);
    if modified && !explained_modify {
        // It may stand for several writes, of which some were silent and are under way.
        return certain(GapKind::DescriptorWrite, silent && ctime_changed);
    }
    if ctime_changed {
        let verdict = |only_possible| DescriptorVerdict {
            conservative: Some(GapKind::UnnotifiedDescriptor),
            only_possible,
            silent_write: true,
        };
        match evidence.traced {
            Some(traced) => {
                let uring = traced.io_uring && silent;
                let nobody = !mapped_writes && !evidence.traced_writes;
                if traced.lost || traced.unranged || uring || evidence.loop_device || nobody {
                    return verdict(mapped_writes && !evidence.loop_device);
                }
            }
            // Nothing explains it, or page tables may explain it and something else may have happened as well.
            None => return verdict(mapped_writes && !silent && !evidence.loop_device),
        }
    }
    if evidence.silent_write_pending {
        return DescriptorVerdict {
            conservative: Some(GapKind::UnnotifiedDescriptor),
            only_possible: false,
            silent_write: false,
        };
    }
    DescriptorVerdict::default()
}

/// What must hold for a checkpoint to find nothing without a look at page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleEvidence {
    /// Write faults leave the ctime alone.
    pub hugetlb: bool,
    /// As in [`DescriptorEvidence`].
    pub silent: bool,
    /// As in [`DescriptorEvidence`].
    pub ctime_changed: bool,
    /// As in [`DescriptorEvidence`], or lost signals.
    pub modified: bool,
    /// As in [`DescriptorEvidence`].
    pub silent_write_pending: bool,
    /// A traced write ended or is under way.
    pub traced_writes: bool,
    /// Pages that were pinned at the last checkpoint.
    pub pinned_pages: bool,
    /// Untracked writable mappings exist, existed at the last checkpoint, or may have come and gone.
    pub untracked_mappings: bool,
    /// Every tracked mapping is where it was.
    pub mappings_stand: bool,
    /// The file's size is what it was.
    pub same_size: bool,
    /// Pages were stamped since the last generation was closed.
    pub stamped_since: bool,
}

/// True if nothing was written since the last generation was closed, or what was will be found by a later checkpoint: an idle
/// one closes no generation, so that the moment between a page's becoming writable and the change of ctime does no harm.
#[must_use]
pub const fn idle(evidence: &IdleEvidence) -> bool {
    !evidence.hugetlb
        && !evidence.silent
        && !evidence.ctime_changed
        && !evidence.modified
        && !evidence.silent_write_pending
        && !evidence.traced_writes
        && !evidence.pinned_pages
        && !evidence.untracked_mappings
        && evidence.mappings_stand
        && evidence.same_size
        && !evidence.stamped_since
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: DescriptorEvidence = DescriptorEvidence {
        closed: false,
        silent: false,
        ctime_changed: false,
        modified: false,
        lost: false,
        mapped_writes: false,
        traced_writes: false,
        traced: None,
        loop_device: false,
        silent_write_pending: false,
    };
    const ALL_SEEN: TracedCalls = TracedCalls { lost: false, io_uring: false, unranged: false };

    fn kind(evidence: DescriptorEvidence) -> Option<GapKind> {
        judge_descriptors(&evidence).conservative
    }

    #[test]
    fn unchanged_inode_was_not_written_by_descriptor() {
        assert_eq!(judge_descriptors(&QUIET), DescriptorVerdict::default());
    }

    #[test]
    fn closed_file_needs_no_signals() {
        let loud =
            DescriptorEvidence { closed: true, ctime_changed: true, modified: true, lost: true, ..QUIET };
        assert_eq!(judge_descriptors(&loud), DescriptorVerdict::default());
    }

    #[test]
    fn modification_is_conservative_unless_its_range_was_traced() {
        let modified = DescriptorEvidence { ctime_changed: true, modified: true, ..QUIET };
        assert_eq!(kind(modified), Some(GapKind::DescriptorWrite));
        let unseen = DescriptorEvidence { traced: Some(ALL_SEEN), ..modified };
        assert_eq!(kind(unseen), Some(GapKind::DescriptorWrite), "no traced call explains it");
        let modified = DescriptorEvidence { traced_writes: true, ..modified };
        assert_eq!(kind(DescriptorEvidence { traced: Some(ALL_SEEN), ..modified }), None);
        for unexplained in [
            TracedCalls { lost: true, ..ALL_SEEN },
            TracedCalls { io_uring: true, ..ALL_SEEN },
            TracedCalls { unranged: true, ..ALL_SEEN },
        ] {
            assert!(kind(DescriptorEvidence { traced: Some(unexplained), ..modified }).is_some());
        }
    }

    #[test]
    fn changed_ctime_without_another_reason_is_a_silent_write() {
        let changed = DescriptorEvidence { ctime_changed: true, ..QUIET };
        let verdict = judge_descriptors(&changed);
        assert_eq!(verdict.conservative, Some(GapKind::UnnotifiedDescriptor));
        assert!(verdict.silent_write && !verdict.only_possible);
        // Page tables explain it, but need not be all.
        let verdict = judge_descriptors(&DescriptorEvidence { mapped_writes: true, ..changed });
        assert!(verdict.conservative.is_some() && verdict.only_possible);
        // Traced, there is nothing else that could have done it.
        let traced = DescriptorEvidence { mapped_writes: true, traced: Some(ALL_SEEN), ..changed };
        assert_eq!(kind(traced), None);
        assert!(kind(DescriptorEvidence { mapped_writes: false, ..traced }).is_some(), "nobody explains it");
        assert!(kind(DescriptorEvidence { loop_device: true, ..traced }).is_some());
        let uring = TracedCalls { io_uring: true, ..ALL_SEEN };
        assert_eq!(
            kind(DescriptorEvidence { traced: Some(uring), ..traced }),
            None,
            "it would raise IN_MODIFY"
        );
        assert!(kind(DescriptorEvidence { traced: Some(uring), silent: true, ..traced }).is_some());
    }

    #[test]
    fn write_without_a_signal_at_its_end_counts_for_the_next_generation_too() {
        let pending = DescriptorEvidence { silent_write_pending: true, ..QUIET };
        assert_eq!(kind(pending), Some(GapKind::UnnotifiedDescriptor));
    }

    #[test]
    fn lost_signals_count_whatever_the_ctime_says() {
        let lost = DescriptorEvidence { lost: true, traced: Some(ALL_SEEN), ..QUIET };
        assert_eq!(kind(lost), Some(GapKind::LostEvents));
    }

    #[test]
    fn any_doubt_keeps_a_checkpoint_from_being_idle() {
        let quiet = IdleEvidence {
            hugetlb: false,
            silent: false,
            ctime_changed: false,
            modified: false,
            silent_write_pending: false,
            traced_writes: false,
            pinned_pages: false,
            untracked_mappings: false,
            mappings_stand: true,
            same_size: true,
            stamped_since: false,
        };
        assert!(idle(&quiet));
        for busy in [
            IdleEvidence { hugetlb: true, ..quiet },
            IdleEvidence { silent: true, ..quiet },
            IdleEvidence { ctime_changed: true, ..quiet },
            IdleEvidence { modified: true, ..quiet },
            IdleEvidence { silent_write_pending: true, ..quiet },
            IdleEvidence { traced_writes: true, ..quiet },
            IdleEvidence { pinned_pages: true, ..quiet },
            IdleEvidence { untracked_mappings: true, ..quiet },
            IdleEvidence { mappings_stand: false, ..quiet },
            IdleEvidence { same_size: false, ..quiet },
            IdleEvidence { stamped_since: true, ..quiet },
        ] {
            assert!(!idle(&busy), "{busy:?}");
        }
    }
}
