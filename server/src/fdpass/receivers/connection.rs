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
    /// `None` only in the drop.
    socket: Option<UnixStream>,
    /// `None`: no descriptor can be in the queue.
    refuser: Option<Arc<Refuser>>,
}

impl Connection {
    pub(crate) const fn new(socket: UnixStream, refuser: Option<Arc<Refuser>>) -> Self {
        Self { socket: Some(socket), refuser }
    }

    #[expect(clippy::expect_used, reason = "only the drop takes the socket")]
    pub(crate) fn socket(&self) -> &UnixStream {
        self.socket.as_ref().expect("only the drop takes the socket")
    }

    #[expect(clippy::expect_used, reason = "only the drop takes the socket")]
    pub(crate) fn socket_mut(&mut self) -> &mut UnixStream {
        self.socket.as_mut().expect("only the drop takes the socket")
    }

    /// True if descriptors can be in the queue.
    pub(crate) const fn passes_descriptors(&self) -> bool {
        self.refuser.is_some()
    }

    /// Closes the connection, of which a descriptor was passed to a receiver. The receiver may have had no room for it: then this close
    /// is the last one.
    pub(super) fn close_copy(mut self) {
        if let (Some(refuser), Some(socket)) = (self.refuser.take(), self.socket.take()) {
            refuser.close(socket);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let (Some(refuser), Some(socket)) = (&self.refuser, self.socket.take()) else { return };
        // A packet may be empty, which looks like the end of the queue.
        if scm::is_seqpacket(socket.as_fd()) || !unix_stream::drain(socket.as_fd()) {
            // The client sees the end at once. Fails only for a connection that has none.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
            refuser.close(socket);
        }
    }
}
