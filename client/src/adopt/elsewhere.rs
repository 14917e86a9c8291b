//! Architectures whose registers nobody has looked at yet.

use fdmap_sys::SyscallError;

use super::{AdoptError, Inside};

/// There is none.
#[derive(Debug)]
pub(super) struct Staying(std::convert::Infallible);

impl Staying {
    pub(super) fn join(self) -> Result<(), SyscallError> {
        match self.0 {}
    }
}

pub(super) fn check(_: u32) -> Result<(), AdoptError> {
    Err(AdoptError::Architecture)
}

pub(super) fn userfaultfds(_: u32, _: usize, _: bool) -> Result<Inside, AdoptError> {
    Err(AdoptError::Architecture)
}
