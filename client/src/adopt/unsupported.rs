//! Replaces `uffd` on architectures other than x86-64, for which call injection is not implemented.

use std::os::fd::OwnedFd;

use super::tracee::Tracee;
use super::{AdoptError, ThreadStop};

pub(super) fn create_userfaultfds(
    _: &Tracee,
    _: usize,
    _: bool,
) -> Result<(Vec<OwnedFd>, ThreadStop), AdoptError> {
    Err(AdoptError::Unsupported("mappings of other processes can be tracked on x86-64 only"))
}
