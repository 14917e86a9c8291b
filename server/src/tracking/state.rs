//! What a tracker keeps of one file.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

use fdmap_proto::file::FileInfo;
use fdmap_proto::tracking::CoveragePolicy;
use fdmap_proto::units::{Generation, PageRange};
use fdmap_sys::ownership::Ownership;
use nix::sys::stat::FileStat;

use super::calls::Others;
use super::children::Child;
use super::coverage::{GapLog, Missed};
use super::cursors::Cursors;
use super::evidence::SILENT_WRITE;
use super::forked::Held;
use super::forks::ForkSubscription;
use super::journal::{Journal, JournalError, JournalHeader};
use super::observed::{Observed, Regions};
use super::ranges;
use super::stamp::PageStamp;
use super::stamps::StampMap;

/// How many checkpoints a page is told again that somebody held when it was harvested, and still holds. A short hold, as by
/// a write through /proc/PID/mem, is over long before; a page that waits to be put on an LRU list can look so for long.
const HELD_CHECKPOINTS: u8 = 4;
/// Pages that are remembered one by one.
const MOST_HELD: usize = 1 << 16;
/// And for how long at least.
const HELD_FOR: Duration = Duration::from_secs(1);

/// In the journal: no new writers could come.
pub const WAS_CLOSED: u64 = 1;
/// In the journal: there were untracked mappings.
pub const WAS_UNTRACKED: u64 = 2;
/// In the journal: not all closed generations were observed exactly.
pub const HAD_GAPS: u64 = 4;
/// In the journal: in some, writes were left out.
pub const HAD_IGNORED: u64 = 8;

/// Everything that changes.
#[derive(Debug)]
pub struct State {
    /// The file, as it was told last.
    pub file: FileInfo,
    /// Whose the inode was before it was adopted.
    pub before: Option<Ownership>,
    /// The open generation.
    pub open: Generation,
    /// When each page was written.
    pub stamps: StampMap,
    /// The same, and what else must outlive the process.
    pub journal: Journal,
    /// The tracked mappings.
    pub observed: Vec<Observed>,
    /// Children that were forked and are not found yet: as long as their userfaultfds are open their writes are kept.
    pub children: Vec<Child>,
    /// Userfaultfds of children of which it is not known whose they are: one may be that of a child that was found.
    pub spare: Vec<(Held, ForkSubscription)>,
    /// Pages that may be written by a device, or through a reference of the kernel's, without anybody's seeing it.
    pub sticky: Sticky,
    /// The inode as it was before the last harvest.
    pub marks: Marks,
    /// Untracked mappings at the last checkpoint, or since.
    pub untracked: Untracked,
    /// What to do about those.
    pub policy: CoveragePolicy,
    /// The gaps of closed generations.
    pub gaps: GapLog,
    /// Those of the open one so far.
    pub open_gaps: Vec<Missed>,
    /// Pages were stamped since the last generation was closed.
    pub stamped: bool,
    /// What of this the journal has with each checkpoint, the last answers among it.
    pub hot: JournalHeader,
    /// Cursors.
    pub cursors: Cursors,
    /// When the last generation was closed.
    pub last_made: Option<(Instant, SystemTime)>,
    /// Keys of tracked mappings whose descriptors are kept.
    pub kept: BTreeSet<u64>,
    /// The last process that was started before the last look.
    pub last_pid: Option<u32>,
    /// Writers that traced calls do not tell the ranges of.
    pub others: Others,
    /// Marks were taken and not stamped.
    pub doubt: bool,
    /// Room for scans.
    pub regions: Regions,
}

/// What of the inode is compared from one checkpoint to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Seconds and nanoseconds.
    pub ctime: (i64, i64),
    /// Seconds and nanoseconds.
    pub atime: (i64, i64),
    /// The file's size.
    pub pages: u64,
    /// No new writers could come.
    pub closed: bool,
    /// A write whose end gives no signal may have begun then; and the generation after is still to come.
    pub silent_since: Option<(Instant, bool)>,
}

impl Marks {
    /// As the inode is now.
    #[must_use]
    pub fn new(stat: &FileStat, pages: u64, closed: bool) -> Self {
        Self {
            ctime: (stat.st_ctime, stat.st_ctime_nsec),
            atime: (stat.st_atime, stat.st_atime_nsec),
            pages,
            closed,
            silent_since: None,
        }
    }

    /// A write whose end gives no signal may be under way, or may have ended since the last checkpoint.
    #[must_use]
    pub fn silent_write_pending(&self, now: Instant) -> bool {
        self.silent_since.is_some_and(|(since, owed)| owed || now.duration_since(since) < SILENT_WRITE)
    }
}

/// Untracked writable mappings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Untracked {
    /// The pages that they map.
    pub pages: Vec<PageRange>,
    /// There are some whose pages are not known.
    pub unknown: bool,
}

impl Untracked {
    /// True if there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.pages.is_empty() && !self.unknown
    }

    /// How the journal has it.
    #[must_use]
    pub const fn flag(&self) -> u64 {
        if self.is_empty() { 0 } else { WAS_UNTRACKED }
    }
}

/// How long a page has been held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    checkpoints: u8,
    since: Instant,
}

/// Pages to be told as written in the next generation as well.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sticky {
    /// Pinned for DMA.
    pub pinned: Vec<PageRange>,
    /// Held otherwise.
    pub held: BTreeMap<u64, Hold>,
}

impl Sticky {
    /// All of them.
    #[must_use]
    pub fn pages(&self) -> Vec<PageRange> {
        let mut pages = self.pinned.clone();
        pages.extend(self.held.keys().map(|page| PageRange::at(fdmap_proto::units::PageIndex(*page), 1)));
        ranges::normalize(&mut pages);
        pages
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pinned.is_empty() && self.held.is_empty()
    }

    /// Replaces them by what was found now. A page that was held long enough is held no more, unless it comes anew.
    pub fn renew(&mut self, pinned: Vec<PageRange>, held: &[PageRange], now: Instant) {
        let before = std::mem::take(&mut self.held);
        for page in held.iter().flat_map(|range| range.start().0..range.end().0) {
            let first = Hold { checkpoints: 0, since: now };
            let hold = before
                .get(&page)
                .map_or(first, |hold| Hold { checkpoints: hold.checkpoints.saturating_add(1), ..*hold });
            if hold.checkpoints < HELD_CHECKPOINTS || now.duration_since(hold.since) < HELD_FOR {
                self.held.insert(page, hold);
            }
        }
        self.pinned = pinned;
        // So many are not held for a moment: they are remembered as what takes less.
        if self.held.len() > MOST_HELD {
            self.held.clear();
            self.pinned.extend(held);
            ranges::normalize(&mut self.pinned);
        }
    }
}

impl State {
    /// Stamps pages: in the journal first.
    ///
    /// # Errors
    /// The journal's; nothing is stamped then but what is in the journal.
    pub fn stamp(&mut self, pages: &[PageRange], stamp: PageStamp) -> Result<(), JournalError> {
        if pages.is_empty() {
            return Ok(());
        }
        self.journal.stamp_all(pages, stamp)?;
        self.stamps.stamp_all(pages, stamp);
        self.stamped = true;
        Ok(())
    }

    /// Writes what changes with each checkpoint into the journal.
    pub fn save(&mut self) {
        self.hot.open = self.open;
        self.hot.pages = self.marks.pages;
        self.hot.ctime = self.marks.ctime;
        let flag = |is: bool, flag: u64| if is { flag } else { 0 };
        self.hot.flags = flag(self.marks.closed, WAS_CLOSED)
            | self.untracked.flag()
            | flag(self.gaps.any(), HAD_GAPS)
            | flag(self.gaps.any_ignored(), HAD_IGNORED);
        self.journal.write_header(&self.hot);
    }

    /// Lets go of address spaces of which nothing is tracked any more.
    pub fn drop_ended(&mut self) {
        let ended = self.observed.extract_if(.., |observed| observed.mappings.is_empty());
        // Of a child: the userfaultfd may be that of a brother who lives.
        let inherited = ended.filter(|observed| observed.inherited);
        self.spare.extend(inherited.filter_map(|ended| Some((ended.userfaultfd, ended.forks?))));
    }

    /// Pages that all tracked mappings show.
    #[must_use]
    pub fn observed_pages(&self, page_size: fdmap_proto::units::PageSize) -> Vec<PageRange> {
        let mut pages: Vec<_> = self.observed.iter().flat_map(|observed| observed.pages(page_size)).collect();
        ranges::normalize(&mut pages);
        pages
    }

    /// VMAs that are to stand.
    #[must_use]
    pub fn pieces(&self) -> u64 {
        self.observed.iter().map(|observed| fdmap_proto::units::to_u64(observed.pieces().count())).sum()
    }

    /// How long ago the last generation was closed.
    #[must_use]
    pub fn since_last(&self) -> Option<Duration> {
        self.last_made.map(|(at, _)| at.elapsed())
    }
}
