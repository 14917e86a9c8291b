//! A connection that the service reads, and of which the receiver keeps a descriptor.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{Shutdown, shutdown};

use super::closer::Closer;

/// A kept connection. While it is open here, the close of it in the service is not the last one, which closes descriptors in its queue.
#[derive(Debug)]
pub(super) struct Kept {
    socket: OwnedFd,
    /// The service closes the other end when it has closed the connection, or when it ends.
    leash: OwnedFd,
}

impl Kept {
    pub(super) const fn new(socket: OwnedFd, leash: OwnedFd) -> Self {
        Self { socket, leash }
    }

    /// The event for which the receiver waits: poll(2) always reports that the other end was closed.
    pub(super) fn awaited(&self) -> PollFd<'_> {
        PollFd::new(self.leash.as_fd(), PollFlags::empty())
    }

    /// Ends the connection for the client, or refuses further ones. Closes nothing, since that may wait.
    pub(super) fn shut_down(&self) {
        // Fails only if that has happened.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }

    pub(super) fn end(self, closer: &Closer) {
        self.shut_down();
        closer.close([self.socket]);
    }
}
