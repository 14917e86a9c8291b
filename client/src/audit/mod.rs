//! Would a tracker see everything that a process writes? Found out on the spot, without a service.
//!
//! [`facts`] gathers, [`parse`] understands what the kernel says, [`judge`] draws the conclusions; the latter two are pure.
//! Nothing is changed, unless descriptors are tried.

pub mod checks;
pub mod parse;
pub mod procfs;

pub use self::procfs::{Facts, gather};
pub use checks::{Finding, judge};

/// Whether all is seen in one respect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It is.
    Yes,
    /// Something is not.
    No,
    /// It cannot be told.
    Unknown,
}

impl Seen {
    /// Lower case, one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Unknown => "unknown",
        }
    }
}
