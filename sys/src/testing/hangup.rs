//! The end of a connection, where processes are started at the same time.

use std::os::fd::BorrowedFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Waits until no process has the other end of a connected unix socket open, for 10 s at most.
///
/// A process that another thread starts has copies of all descriptors of this one until its execve. So a test that closes an end
/// cannot expect at once what the last close causes.
///
/// # Panics
/// If the other end is still open, or the socket cannot be polled.
pub fn wait_for_hangup(socket: BorrowedFd<'_>) {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    let ready = poll(&mut polled, PollTimeout::from(10_000_u16));
    assert_eq!(ready, Ok(1), "the other end of the socket is open");
}
