//! Coverage, tracked mappings and cursors.

use std::time::SystemTime;

use serde::Serialize;

use crate::file::is_invisible;
use crate::units::{Generation, MappingId, PageIndex, PageRange};

/// How completely the writers of a file were observed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Coverage {
    /// All writers were observed exactly; `gaps` is empty.
    pub exact: bool,
    /// Writers that were not observed.
    pub gaps: Vec<CoverageGap>,
    /// Number of tracked mappings.
    pub tracked_mappings: u64,
    /// Smallest unit of tracking in base pages: 1, or the pages of one huge page for hugetlb files.
    pub granularity_pages: u64,
}

/// A writer that was not observed, and the effect on the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CoverageGap {
    /// Kind of writer.
    pub kind: GapKind,
    /// Effect on the answer.
    pub effect: Effect,
    /// Process id in the service's pid namespace; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Affected pages of the file; `None`: all pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<PageRange>,
    /// The writer and how it was found. For display only.
    pub detail: String,
    /// How to close the gap. For display only.
    pub remedy: String,
    /// First affected generation.
    #[serde(rename = "first_generation")]
    pub first: Generation,
    /// Last affected generation; `None` while the gap persists.
    #[serde(rename = "last_generation", skip_serializing_if = "Option::is_none")]
    pub last: Option<Generation>,
}

/// Kind of writer that was not observed.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum GapKind {
    /// A writable mapping is not tracked.
    UntrackedMapping,
    /// A tracked mapping was unmapped before it was harvested.
    EndedMapping,
    /// write(2) or a similar call with unknown range.
    DescriptorWrite,
    /// A descriptor whose writes raise no event, or a block server in the kernel that may have the file open.
    UnnotifiedDescriptor,
    /// Direct I/O or DMA into pages of the file that cannot be detected: the probe reads no pins, or udmabuf, iommufd or FUSE
    /// passthrough has the file or may have it.
    DirectIo,
    /// Pages were pinned for DMA when they were harvested.
    Pinned,
    /// The service was not running, or lost events.
    LostEvents,
    /// Not all processes that map the file can be found or inspected.
    UnknownMappers,
    /// A call that the service did not make may have cleared, set or moved written bits of a tracked mapping (PAGEMAP_SCAN,
    /// userfaultfd, mremap with MREMAP_DONTUNMAP), or such calls are not traced.
    BitsTaken,
    /// A process holds the lock of its address space (mmap_lock), so that its mappings were not harvested in time.
    BlockedMapping,
    /// The stamps of the owner's files take all the memory that one user may have, so whole blocks of 4096 pages are reported.
    CoarseStamps,
}

/// Effect of a coverage gap on an answer.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Effect {
    /// The pages are reported conservatively.
    Conservative,
    /// The pages are not reported; writes may be missing.
    Ignored,
}

/// How checkpoints treat unobserved writers.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(
    serialize_all = "kebab-case",
    parse_err_ty = CoveragePolicyError,
    parse_err_fn = CoveragePolicyError::new
)]
pub enum CoveragePolicy {
    /// Report the pages that they may have written, marked conservative.
    #[default]
    Conservative,
    /// Fail the checkpoint.
    Refuse,
    /// Omit the pages that they may have written.
    Ignore,
}

/// A string that is not the name of a coverage policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown coverage policy {0:?}: expected conservative, refuse or ignore")]
pub struct CoveragePolicyError(String);

impl CoveragePolicyError {
    fn new(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// Tracked mappings of a file, and the coverage that a checkpoint taken now would have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileCoverage {
    /// Coverage of the open generation.
    pub coverage: Coverage,
    /// Mappings whose writes are tracked.
    pub mappings: Vec<TrackedMapping>,
    /// How checkpoints treat unobserved writers.
    pub policy: CoveragePolicy,
    /// Last closed generation; [`Generation::NONE`] if there is none.
    pub generation: Generation,
    /// The file is sealed against new writers.
    pub writers_sealed: bool,
}

/// A mapping whose writes are tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TrackedMapping {
    /// Id assigned by the service.
    pub id: MappingId,
    /// Process id in the service's pid namespace.
    pub pid: u32,
    /// Start address in the process.
    pub address: u64,
    /// Length in bytes.
    pub length_bytes: u64,
    /// Page of the file that is mapped at `address`.
    pub first_page: PageIndex,
    /// The process inherited the mapping by fork(2) while it was tracked.
    pub inherited: bool,
}

/// A `MAP_SHARED` mapping of a file that a client asks the service to track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientMapping {
    /// Start address; a multiple of the page size.
    pub address: u64,
    /// Length in bytes; a multiple of the page size, and of the huge page size for hugetlb.
    pub length_bytes: u64,
    /// Page of the file that is mapped at `address`.
    pub first_page: PageIndex,
}

/// A generation that the service stores for a consumer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cursor {
    /// Unique for the file.
    pub name: String,
    /// Last generation that the consumer has committed.
    pub generation: Generation,
    /// Last generation of the frozen set; `None` if the cursor has not begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until_generation: Option<Generation>,
    /// User that created the cursor.
    pub uid: u32,
    /// Time of creation.
    #[serde(serialize_with = "crate::json::rfc3339")]
    pub created: SystemTime,
}

/// Checks a cursor name: 1 to 64 bytes without control characters.
///
/// # Errors
/// [`CursorNameError`] with the violated rule.
pub fn check_cursor_name(name: &str) -> Result<(), CursorNameError> {
    if name.is_empty() {
        return Err(CursorNameError::Empty);
    }
    if name.len() > crate::MAX_CURSOR_NAME_BYTES {
        return Err(CursorNameError::TooLong(name.len()));
    }
    match name.chars().find(|c| is_invisible(*c)) {
        Some(c) => Err(CursorNameError::Character(c)),
        None => Ok(()),
    }
}

/// Reason why a string is not a valid cursor name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CursorNameError {
    /// The name has no characters.
    #[error("cursor name is empty")]
    Empty,
    /// The name exceeds the maximum length.
    #[error("cursor name has {0} bytes; the maximum is {max}", max = crate::MAX_CURSOR_NAME_BYTES)]
    TooLong(usize),
    /// The name contains a control or format character, or a line separator.
    #[error("cursor name contains the character {0:?}")]
    Character(char),
}

#[cfg(test)]
mod tests {
    use strum::VariantArray as _;

    use super::*;

    #[test]
    fn invalid_cursor_names_are_rejected() {
        assert_eq!(check_cursor_name("backup of node/0, ünder"), Ok(()));
        assert_eq!(check_cursor_name(&"x".repeat(64)), Ok(()));
        assert_eq!(check_cursor_name(""), Err(CursorNameError::Empty));
        assert_eq!(check_cursor_name(&"x".repeat(65)), Err(CursorNameError::TooLong(65)));
        assert_eq!(check_cursor_name("a\u{7f}"), Err(CursorNameError::Character('\u{7f}')));
    }

    #[test]
    fn policy_parses_from_its_name() {
        for policy in CoveragePolicy::VARIANTS {
            assert_eq!(policy.to_string().parse(), Ok(*policy));
        }
        let error = "Refuse".parse::<CoveragePolicy>().unwrap_err().to_string();
        assert!(error.contains("unknown coverage policy \"Refuse\""), "{error}");
    }

    #[test]
    fn persisting_gap_serializes_without_a_last_generation() {
        let gap = CoverageGap {
            kind: GapKind::UntrackedMapping,
            effect: Effect::Conservative,
            pid: Some(7),
            range: None,
            detail: String::new(),
            remedy: String::new(),
            first: Generation::FIRST,
            last: None,
        };
        let json = serde_json::to_value(gap).unwrap();
        assert_eq!((&json["kind"], &json["pid"]), (&"untracked-mapping".into(), &7.into()));
        assert_eq!(json["first_generation"], 1);
        assert!(json.get("last_generation").is_none() && json.get("range").is_none());
    }
}
