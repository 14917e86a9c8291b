//! The inode at the last checkpoint, with which the next observation is compared.

use std::time::{Duration, Instant, SystemTime};

use nix::sys::stat::FileStat;

/// The longest time that an unnotified write may take. Such a write changes ctime when it begins and gives no signal when it
/// ends. One call moves at most 2 GiB and may have to wait for swap.
pub(crate) const UNNOTIFIED_WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// What checkpoints compare of the inode. Times are seconds and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InodeBaseline {
    pub(crate) ctime: (i64, i64),
    pub(crate) atime: (i64, i64),
    /// Size of the file in pages.
    pub(crate) pages: u64,
    /// The seals admit no new writer.
    pub(crate) writers_sealed: bool,
}

impl InodeBaseline {
    #[must_use]
    pub(crate) const fn new(stat: &FileStat, pages: u64, writers_sealed: bool) -> Self {
        Self {
            ctime: (stat.st_ctime, stat.st_ctime_nsec),
            atime: (stat.st_atime, stat.st_atime_nsec),
            pages,
            writers_sealed,
        }
    }

    /// True if an unnotified write that changed the ctime may still be in progress.
    #[must_use]
    pub(crate) fn changed_recently(&self) -> bool {
        let (Ok(seconds), Ok(nanos)) = (u64::try_from(self.ctime.0), u32::try_from(self.ctime.1)) else {
            return true;
        };
        let changed = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos);
        changed.elapsed().map_or(true, |elapsed| elapsed < UNNOTIFIED_WRITE_TIMEOUT)
    }
}

/// Whether an unnotified write may be in progress.
///
/// A write that may have begun before one checkpoint counts in the generation that this checkpoint closes and in the next one,
/// however late the next checkpoint comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnnotifiedWrites(Option<Begun>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Begun {
    at: Instant,
    /// No generation has been closed since.
    next_generation_due: bool,
}

impl UnnotifiedWrites {
    /// An unnotified write may have begun by `at`.
    #[must_use]
    pub(crate) const fn begun(at: Instant) -> Self {
        Self(Some(Begun { at, next_generation_due: true }))
    }

    /// True if an unnotified write may be in progress, or may have ended since the last checkpoint.
    #[must_use]
    pub(crate) fn may_be_pending(&self, now: Instant) -> bool {
        self.0.is_some_and(|begun| {
            begun.next_generation_due || now.duration_since(begun.at) < UNNOTIFIED_WRITE_TIMEOUT
        })
    }

    /// The state after a checkpoint at `now`; `begun`: the checkpoint found that another unnotified write may have begun.
    #[must_use]
    pub(crate) fn after_checkpoint(self, begun: bool, now: Instant) -> Self {
        if begun {
            return Self::begun(now);
        }
        Self(
            self.0
                .filter(|_| self.may_be_pending(now))
                .map(|begun| Begun { next_generation_due: false, ..begun }),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unnotified_write_is_pending_for_one_more_generation_and_for_its_longest_time() {
        let begun = Instant::now();
        let (soon, late) = (begun + Duration::from_secs(1), begun + UNNOTIFIED_WRITE_TIMEOUT);
        let write = UnnotifiedWrites::begun(begun);
        assert!(write.may_be_pending(soon) && write.may_be_pending(late), "the next generation is due");
        let next = write.after_checkpoint(false, soon);
        assert!(next.may_be_pending(soon) && !next.may_be_pending(late));
        assert_eq!(next.after_checkpoint(false, late), UnnotifiedWrites::default());
        assert_eq!(next.after_checkpoint(true, late), UnnotifiedWrites::begun(late));
        assert!(!UnnotifiedWrites::default().may_be_pending(late));
    }

    #[test]
    fn ctime_of_another_age_is_not_recent() {
        let long_ago = InodeBaseline { ctime: (1, 0), ..InodeBaseline::default() };
        assert!(!long_ago.changed_recently());
        let negative = InodeBaseline { ctime: (-1, 0), ..long_ago };
        assert!(negative.changed_recently(), "a time that cannot be compared may be recent");
    }
}
