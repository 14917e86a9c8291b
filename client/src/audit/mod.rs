//! Audits a process: can all of its writes to shared memory be tracked? Needs no service.
//!
//! [`procfs`] reads what the kernel shows about the process, [`parse`] decodes it, [`checks`] draws the conclusions; the latter
//! two are pure. The process is not changed, unless its descriptors are probed.

pub mod checks;
pub mod parse;
pub mod procfs;

pub use self::procfs::{ProcessInfo, read_process};
pub use checks::{Check, check_process};

/// Whether all writes are observed, as far as one check is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observed {
    /// All writes are.
    Yes,
    /// Some writes are not.
    No,
    /// The kernel does not show it.
    Unknown,
}

impl Observed {
    /// `yes`, `no` or `unknown`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Unknown => "unknown",
        }
    }
}
