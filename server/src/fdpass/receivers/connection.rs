//! An accepted connection of a unix socket.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;

use fdmap_sys::{scm, unix_stream};
use nix::sys::socket::{Shutdown, shutdown};
use tokio::net::UnixStream;

use super::Refuser;

/// An accepted connection. Where the kernel passes descriptors on any unix socket (before Linux 6.16), its drop closes none of those in
/// its queue: it passes such a connection to the refuser.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: UnixStream,
    /// `None`: no descriptor can be in the queue.
    refuser: Option<Arc<Refuser>>,
}

impl Connection {
    pub(crate) const fn new(socket: UnixStream, refuser: Option<Arc<Refuser>>) -> Self {
        Self { socket, refuser }
    }

    /// True if descriptors can be in the queue.
    pub(crate) const fn passes_descriptors(&self) -> bool {
        self.refuser.is_some()
    }

    /// Closes the connection, of which a receiver has a descriptor.
    pub(super) fn close_copy(mut self) {
        self.refuser = None;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(refuser) = &self.refuser else { return };
        let socket = self.socket.as_fd();
        // A packet may be empty, which looks like the end of the queue.
        if scm::is_seqpacket(socket) || !unix_stream::drain(socket) {
            // The client sees the end at once. Fails only for a connection that has none.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
            refuser.close(socket);
        }
    }
}
