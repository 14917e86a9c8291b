//! Descriptors that a client passed, and the receiver has checked.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use fdmap_sys::maps::Maps;
use fdmap_sys::pagemap::Pagemap;
use fdmap_sys::uffd::{Userfaultfd, is_userfaultfd};

use super::error::{OperationError, ProtocolError};
use crate::tracking::HeldSpace;
use crate::tracking::holder::Holder;

/// A descriptor of a client.
#[derive(Debug)]
pub(super) enum Passed {
    /// The last close may block, and is not made here, whatever becomes of the request.
    Userfaultfd(HeldSpace),
    Other(OwnedFd),
}

/// The descriptors of one packet, in order.
#[derive(Debug)]
pub(super) struct PassedDescriptors(std::vec::IntoIter<Passed>);

impl PassedDescriptors {
    /// `holder`: that of the client's user.
    pub(super) fn new(descriptors: Vec<OwnedFd>, holder: &Arc<Holder>) -> Self {
        let passed = |fd: OwnedFd| {
            if is_userfaultfd(fd.as_fd()).unwrap_or(false) {
                Passed::Userfaultfd(HeldSpace::new(Userfaultfd::of_checked(fd), Arc::clone(holder)))
            } else {
                Passed::Other(fd)
            }
        };
        Self(descriptors.into_iter().map(passed).collect::<Vec<_>>().into_iter())
    }

    fn next(&mut self) -> Result<Passed, OperationError> {
        // decode_packet() has checked the number of descriptors.
        self.0.next().ok_or_else(|| ProtocolError::DescriptorsLost.into())
    }

    /// The next descriptor, which is no userfaultfd.
    pub(super) fn other(&mut self) -> Result<OwnedFd, OperationError> {
        match self.next()? {
            Passed::Other(fd) => Ok(fd),
            Passed::Userfaultfd(_) => Err(OperationError::ForeignDescriptor),
        }
    }

    pub(super) fn userfaultfd(&mut self) -> Result<HeldSpace, OperationError> {
        match self.next()? {
            Passed::Userfaultfd(held) => Ok(held),
            // Names the check that failed.
            Passed::Other(fd) => Err(Userfaultfd::from_fd(fd)
                .map_or_else(OperationError::Descriptor, |_| OperationError::ForeignDescriptor)),
        }
    }

    pub(super) fn pagemap(&mut self) -> Result<Pagemap, OperationError> {
        Pagemap::from_fd(self.other()?).map_err(OperationError::Descriptor)
    }

    pub(super) fn maps(&mut self) -> Result<Maps, OperationError> {
        Maps::from_fd(self.other()?).map_err(OperationError::Descriptor)
    }
}
