//! What is told of the writes to a file: coverage, policies, mappings that are observed, cursors.

use std::fmt;
use std::str::FromStr;
use std::time::SystemTime;

use crate::units::{Generation, MappingId, PageIndex, PageRange};

/// What an answer about writes rests on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// Every writer was observed exactly: there are no gaps.
    pub exact: bool,
    /// Writers that were not.
    pub gaps: Vec<CoverageGap>,
    /// Mappings that are tracked.
    pub tracked_mappings: u64,
    /// Base pages that writes are told apart by: 1, or those of a huge page for hugetlb files.
    pub granularity_pages: u64,
}

/// Writers that were not observed exactly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoverageGap {
    /// What kind of writer.
    pub kind: GapKind,
    /// What it does to the answer.
    pub effect: Effect,
    /// The process, where one is known, in the service's pid namespace.
    pub pid: Option<u32>,
    /// The pages of the file; `None`: all.
    pub range: Option<PageRange>,
    /// For people: who it is and how it is known.
    pub detail: String,
    /// For people: what would close the gap.
    pub remedy: String,
    /// The first generation that it concerns.
    pub first: Generation,
    /// The last one; `None`: it goes on.
    pub last: Option<Generation>,
}

/// What kind of writer was not observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GapKind {
    /// A writable mapping that is not tracked.
    UntrackedMapping,
    /// A tracked mapping that ended before it was harvested.
    EndedMapping,
    /// `write(2)` and its kin, whose ranges are not known.
    DescriptorWrite,
    /// Descriptors whose writes give no signal.
    UnnotifiedDescriptor,
    /// Direct I/O and DMA cannot be seen by this probe.
    DirectIo,
    /// Pages that were pinned for DMA when they were harvested.
    Pinned,
    /// The service was away, or lost events.
    LostEvents,
    /// The mapping processes cannot all be found or looked into.
    UnknownMappers,
}

impl GapKind {
    /// Every kind.
    pub const ALL: [Self; 8] = [
        Self::UntrackedMapping,
        Self::EndedMapping,
        Self::DescriptorWrite,
        Self::UnnotifiedDescriptor,
        Self::DirectIo,
        Self::Pinned,
        Self::LostEvents,
        Self::UnknownMappers,
    ];

    /// Lower case, stable.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::UntrackedMapping => "untracked-mapping",
            Self::EndedMapping => "ended-mapping",
            Self::DescriptorWrite => "descriptor-write",
            Self::UnnotifiedDescriptor => "unnotified-descriptor",
            Self::DirectIo => "direct-io",
            Self::Pinned => "pinned",
            Self::LostEvents => "lost-events",
            Self::UnknownMappers => "unknown-mappers",
        }
    }
}

impl fmt::Display for GapKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a gap does to an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Its pages are told as written, conservatively.
    Conservative,
    /// Its pages are not told: writes may be missing.
    Ignored,
}

impl Effect {
    /// Lower case, stable.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Conservative => "conservative",
            Self::Ignored => "ignored",
        }
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a checkpoint does about writers that are not observed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CoveragePolicy {
    /// What is not observed is told as written.
    #[default]
    Conservative,
    /// A checkpoint fails while there are such writers.
    Refuse,
    /// What is not observed is left out, and the coverage says so.
    Ignore,
}

impl CoveragePolicy {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::Conservative, Self::Refuse, Self::Ignore];

    /// Lower case, one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Conservative => "conservative",
            Self::Refuse => "refuse",
            Self::Ignore => "ignore",
        }
    }
}

impl fmt::Display for CoveragePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for CoveragePolicy {
    type Err = CoveragePolicyError;

    fn from_str(text: &str) -> Result<Self, CoveragePolicyError> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == text);
        found.ok_or_else(|| CoveragePolicyError(text.to_owned()))
    }
}

/// A word that names no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no policy: there are conservative, refuse and ignore")]
pub struct CoveragePolicyError(String);

/// A mapping whose writes are observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackedMapping {
    /// The service's id for it.
    pub id: MappingId,
    /// Its process, in the service's pid namespace.
    pub pid: u32,
    /// Where it begins there.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// The page of the file that is at `address`.
    pub first_page: PageIndex,
    /// Its process is a child that was forked while tracked.
    pub inherited: bool,
}

/// A `MAP_SHARED` mapping of a file that the calling process has and wants to have observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientMapping {
    /// Where it begins; a multiple of the page size.
    pub address: u64,
    /// Bytes, a multiple of the page size (for hugetlb of that of a huge page).
    pub length: u64,
    /// The page of the file that is at `address`.
    pub first_page: PageIndex,
}

/// A generation that the service remembers for a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Unique for the file.
    pub name: String,
    /// Dealt with so far.
    pub generation: Generation,
    /// What its frozen set reaches; `None`: it has not begun.
    pub until_generation: Option<Generation>,
    /// Whose it is.
    pub uid: u32,
    /// When it was made.
    pub created: SystemTime,
}

/// Checks a cursor's name.
///
/// # Errors
/// Says what is wrong with it: empty, over 64 bytes, or a control character.
pub fn check_cursor_name(name: &str) -> Result<(), CursorNameError> {
    if name.is_empty() {
        return Err(CursorNameError::Empty);
    }
    if name.len() > crate::MAX_CURSOR_NAME_BYTES {
        return Err(CursorNameError::TooLong(name.len()));
    }
    match name.chars().find(|c| c.is_control()) {
        Some(c) => Err(CursorNameError::Character(c)),
        None => Ok(()),
    }
}

/// Why a name is no name for a cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CursorNameError {
    /// No name.
    #[error("the name is empty")]
    Empty,
    /// Too long.
    #[error("the name has {0} bytes, more than {max}", max = crate::MAX_CURSOR_NAME_BYTES)]
    TooLong(usize),
    /// A control character.
    #[error("the name has the character {0:?}")]
    Character(char),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_names_are_checked() {
        assert_eq!(check_cursor_name("backup of node/0, ünder"), Ok(()));
        assert_eq!(check_cursor_name(&"x".repeat(64)), Ok(()));
        assert_eq!(check_cursor_name(""), Err(CursorNameError::Empty));
        assert_eq!(check_cursor_name(&"x".repeat(65)), Err(CursorNameError::TooLong(65)));
        assert_eq!(check_cursor_name("a\u{7f}"), Err(CursorNameError::Character('\u{7f}')));
    }

    #[test]
    fn policies_are_read_as_they_are_written() {
        for policy in CoveragePolicy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert!(
            "Refuse".parse::<CoveragePolicy>().unwrap_err().to_string().contains("\"Refuse\" is no policy")
        );
    }
}
