//! The service, as its helper processes see it.

use std::os::fd::AsFd as _;

use fdmap_sys::{SyscallError, pidfd};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::getppid;

/// The service that started this process. `None` in it: the service has ended.
#[derive(Debug)]
pub(crate) struct Parent(Option<pidfd::PidFd>);

impl Parent {
    /// The parent of this process, whose pid is the argument number `argument`.
    ///
    /// # Errors
    /// `pidfd_open`.
    pub(crate) fn from_argument(argument: usize) -> Result<Self, SyscallError> {
        let parent = pidfd::open(getppid().as_raw().cast_unsigned())?;
        // Another process becomes the parent when the service ends.
        let pid = std::env::args().nth(argument).and_then(|pid| pid.parse().ok());
        let is_service = pid == Some(getppid().as_raw());
        Ok(Self(is_service.then_some(parent)))
    }

    /// Waits until the service has ended, and with it has closed its descriptors.
    pub(crate) fn wait_for_end(&self) {
        if let Some(service) = &self.0 {
            // A failed poll(2) ends the wait.
            let _ = poll(&mut [PollFd::new(service.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
        }
    }
}
