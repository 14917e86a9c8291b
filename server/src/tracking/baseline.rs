//! The inode at the last checkpoint, with which the next observation is compared.

use std::os::fd::AsFd as _;
use std::time::{Duration, Instant, SystemTime};

use fdmap_proto::units::PageSize;
use fdmap_sys::{SyscallError, fd, memfd};
use nix::sys::stat::FileStat;

/// The longest time that an unnotified write may take. Such a write changes ctime when it begins and gives no signal when it
/// ends. One call moves at most 2 GiB and may have to wait for swap.
pub(crate) const UNNOTIFIED_WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// More than the longest tick of the clock of the file system, which is 10 ms with CONFIG_HZ=100.
const TICK: Duration = Duration::from_millis(20);

/// Changes that [`ctime_is_fine`] compares: in far less than a tick.
const CTIME_TRIALS: u64 = 32;

/// What checkpoints compare of the inode. Times are seconds and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InodeBaseline {
    pub(crate) ctime: (i64, i64),
    pub(crate) atime: (i64, i64),
    /// A later change could have the same ctime: the clock of the file system has not ticked since this one.
    pub(crate) ctime_recent: bool,
    /// As `ctime_recent`.
    pub(crate) atime_recent: bool,
    /// Size of the file in pages.
    pub(crate) pages: u64,
    /// The file may end in the middle of its last page.
    pub(crate) partial_page: bool,
    /// The seals admit no new writer.
    pub(crate) writers_sealed: bool,
}

impl InodeBaseline {
    /// `fine_ctime`: as [`ctime_is_fine`]. atime never is.
    #[must_use]
    pub(crate) fn new(stat: &FileStat, page_size: PageSize, writers_sealed: bool, fine_ctime: bool) -> Self {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let (pages, partial_page) = (page_size.pages_in(size), !size.is_multiple_of(page_size.bytes()));
        let (ctime, atime) = ((stat.st_ctime, stat.st_ctime_nsec), (stat.st_atime, stat.st_atime_nsec));
        let recent = |time| age_of(time).is_none_or(|age| age < TICK);
        let (ctime_recent, atime_recent) = (!fine_ctime && recent(ctime), recent(atime));
        Self { ctime, atime, ctime_recent, atime_recent, pages, partial_page, writers_sealed }
    }

    /// True if an unnotified write that changed the ctime may still be in progress.
    #[must_use]
    pub(crate) fn changed_recently(&self) -> bool {
        age_of(self.ctime).is_none_or(|age| age < UNNOTIFIED_WRITE_TIMEOUT)
    }
}

/// The age of a time of the inode; `None`: it is in the future, or cannot be compared.
fn age_of((seconds, nanos): (i64, i64)) -> Option<Duration> {
    let (seconds, nanos) = (u64::try_from(seconds).ok()?, u32::try_from(nanos).ok()?);
    SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos))?.elapsed().ok()
}

/// Finds out by trying whether two changes of an inode that are seen one by one always have different ctimes, as on tmpfs since
/// Linux 6.13. If this cannot be tried, they do not.
pub(crate) fn ctime_is_fine() -> bool {
    let try_once = || {
        let file = memfd::create("fdmap-times", None)?;
        let mut last = None;
        for at in 0..CTIME_TRIALS {
            fd::write_at(file.as_fd(), at, b"x")?;
            let stat = fd::stat(&file)?;
            let now = (stat.st_ctime, stat.st_ctime_nsec);
            if last.replace(now) == Some(now) {
                return Ok(false);
            }
        }
        Ok::<bool, SyscallError>(true)
    };
    try_once().unwrap_or(false)
}

/// An unnotified write that may be in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingWrite {
    /// The write is only possible: the policy may ignore it.
    pub(crate) only_possible: bool,
}

/// Whether an unnotified write may be in progress.
///
/// A write that may have begun before one checkpoint counts in the generation that this checkpoint closes and in the next one,
/// however late the next checkpoint comes. Where calls are not traced its end is never observed, and it counts for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnnotifiedWrites(Option<Begun>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Begun {
    at: Instant,
    /// No generation has been closed since.
    next_generation_due: bool,
    only_possible: bool,
}

impl UnnotifiedWrites {
    /// An unnotified write may have begun by `at`. `only_possible`: something else explains its signals as well.
    #[must_use]
    pub(crate) const fn begun(at: Instant, only_possible: bool) -> Self {
        Self(Some(Begun { at, next_generation_due: true, only_possible }))
    }

    /// The write that may be in progress, or may have ended since the last checkpoint. `calls_traced`: all writers whose calls take
    /// longer than [`UNNOTIFIED_WRITE_TIMEOUT`] are observed.
    #[must_use]
    pub(crate) fn pending(&self, now: Instant, calls_traced: bool) -> Option<PendingWrite> {
        let recent = |begun: &Begun| {
            begun.next_generation_due || now.duration_since(begun.at) < UNNOTIFIED_WRITE_TIMEOUT
        };
        let begun = self.0.filter(|begun| !calls_traced || recent(begun))?;
        Some(PendingWrite { only_possible: begun.only_possible })
    }

    /// The state after a checkpoint at `now`; `begun`: the checkpoint found that another unnotified write may have begun.
    #[must_use]
    pub(crate) fn after_checkpoint(
        self,
        begun: Option<PendingWrite>,
        now: Instant,
        calls_traced: bool,
    ) -> Self {
        let before = self.pending(now, calls_traced);
        if let Some(begun) = begun {
            let only_possible = begun.only_possible && before.is_none_or(|before| before.only_possible);
            return Self::begun(now, only_possible);
        }
        Self(self.0.filter(|_| before.is_some()).map(|begun| Begun { next_generation_due: false, ..begun }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CERTAIN: Option<PendingWrite> = Some(PendingWrite { only_possible: false });
    const POSSIBLE: Option<PendingWrite> = Some(PendingWrite { only_possible: true });

    #[test]
    fn unnotified_write_is_pending_for_one_more_generation_and_for_its_longest_time() {
        let begun = Instant::now();
        let (soon, late) = (begun + Duration::from_secs(1), begun + UNNOTIFIED_WRITE_TIMEOUT);
        let write = UnnotifiedWrites::begun(begun, false);
        assert_eq!((write.pending(soon, true), write.pending(late, true)), (CERTAIN, CERTAIN), "one is due");
        let next = write.after_checkpoint(None, soon, true);
        assert_eq!((next.pending(soon, true), next.pending(late, true)), (CERTAIN, None));
        assert_eq!(next.after_checkpoint(None, late, true), UnnotifiedWrites::default());
        assert_eq!(next.after_checkpoint(CERTAIN, late, true), UnnotifiedWrites::begun(late, false));
        assert_eq!(UnnotifiedWrites::default().pending(late, false), None);
    }

    #[test]
    fn unnotified_write_never_ends_where_calls_are_not_traced() {
        let begun = Instant::now();
        let late = begun + 100 * UNNOTIFIED_WRITE_TIMEOUT;
        let write = UnnotifiedWrites::begun(begun, true).after_checkpoint(None, begun, false);
        assert_eq!(write.pending(late, false), POSSIBLE);
        let certain = write.after_checkpoint(CERTAIN, late, false).after_checkpoint(POSSIBLE, late, false);
        assert_eq!(certain.pending(late, false), CERTAIN, "a certain write stays certain");
    }

    #[test]
    fn time_of_the_current_tick_is_recent_unless_it_is_fine() {
        let file = memfd::create("recent", None).unwrap();
        let stat = fd::stat(&file).unwrap();
        let coarse = InodeBaseline::new(&stat, PageSize::new(4096).unwrap(), false, false);
        assert!(coarse.ctime_recent && coarse.atime_recent);
        let fine = InodeBaseline::new(&stat, PageSize::new(4096).unwrap(), false, true);
        assert!(!fine.ctime_recent && fine.atime_recent);
        std::thread::sleep(2 * TICK);
        let later = InodeBaseline::new(&fd::stat(&file).unwrap(), PageSize::new(4096).unwrap(), false, false);
        assert!(!later.ctime_recent && !later.atime_recent);
    }

    #[test]
    fn ctime_of_another_age_is_not_recent() {
        let long_ago = InodeBaseline { ctime: (1, 0), ..InodeBaseline::default() };
        assert!(!long_ago.changed_recently());
        let negative = InodeBaseline { ctime: (-1, 0), ..long_ago };
        assert!(negative.changed_recently(), "a time that cannot be compared may be recent");
    }
}
