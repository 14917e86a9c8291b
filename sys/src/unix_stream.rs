//! Reads of a `SOCK_STREAM` unix socket that close no descriptors.
//!
//! A peer can send descriptors with its bytes (`SCM_RIGHTS`), where the socket has no `SO_PASSRIGHTS` (before Linux 6.16). read(2)
//! discards them, and so does the close of a socket with unread bytes. The last close of a descriptor may never return.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, recv, recvmsg, setsockopt, shutdown, sockopt};

use crate::SyscallError;
use crate::error::CallContext as _;

/// What is at the head of the queue of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// That many bytes were read. 0: the peer sends no more.
    Bytes(usize),
    /// Descriptors, which stay in the queue.
    Descriptors,
}

/// Lets [`read`] find bytes that are sent with `MSG_OOB`, and their descriptors: `SO_OOBINLINE`.
///
/// # Errors
/// `setsockopt`.
pub fn receive_all_inline(socket: impl AsFd) -> Result<(), SyscallError> {
    setsockopt(&socket, sockopt::OobInline, &true).call(|| "setsockopt(SO_OOBINLINE)".to_owned())
}

/// Reads bytes without waiting. No other reader of the socket may exist.
///
/// # Errors
/// `recvmsg` or `recv`: `EAGAIN` if nothing is queued.
pub fn read(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Received, SyscallError> {
    let call = || format!("recvmsg on descriptor {}", socket.as_raw_fd());
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    // Without a control buffer the kernel installs no descriptors, and reports that there are some.
    let mut parts = [IoSliceMut::new(buffer)];
    let peeked = recvmsg::<()>(socket.as_raw_fd(), &mut parts, None, flags).call(call)?;
    let (len, has_descriptors) = (peeked.bytes, peeked.flags.contains(MsgFlags::MSG_CTRUNC));
    if has_descriptors {
        return Ok(Received::Descriptors);
    }
    if len == 0 {
        return Ok(Received::Bytes(0));
    }
    // The same bytes: what has arrived since is behind them.
    recv(socket.as_raw_fd(), &mut buffer[..len], MsgFlags::MSG_DONTWAIT).call(call).map(Received::Bytes)
}

/// Ends the receiving half of a connection, and reads what is queued. Returns true if there are no descriptors: none can arrive any
/// more, so the close of the socket closes none.
#[must_use]
pub fn drain(socket: BorrowedFd<'_>) -> bool {
    const BUFFER_BYTES: usize = 1 << 16;

    if shutdown(socket.as_raw_fd(), Shutdown::Read).is_err() {
        return false;
    }
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match read(socket, &mut buffer) {
            Ok(Received::Bytes(0)) => return true,
            Ok(Received::Bytes(_)) => {}
            Ok(Received::Descriptors) => return false,
            // The kernel reports that the peer has closed its end when the queue is empty.
            Err(error) => return matches!(error.errno, Errno::EAGAIN | Errno::ECONNRESET),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use nix::sys::socket::{ControlMessage, sendmsg};

    use super::*;
    use crate::testing::hangup::wait_for_hangup;
    use crate::{memfd, scm};

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    fn next(socket: &UnixStream) -> Result<Vec<u8>, Received> {
        let mut buffer = [0; 8];
        match read(socket.as_fd(), &mut buffer).unwrap() {
            Received::Bytes(len) => Ok(buffer[..len].to_vec()),
            Received::Descriptors => Err(Received::Descriptors),
        }
    }

    fn memfd() -> OwnedFd {
        memfd::create("sent", None).unwrap()
    }

    #[test]
    fn bytes_are_read_until_the_peer_closes_its_end() {
        let (mut peer, socket) = pair();
        assert_eq!(read(socket.as_fd(), &mut [0; 8]).unwrap_err().errno, Errno::EAGAIN);
        peer.write_all(b"more than a buffer").unwrap();
        peer.write_all(b" and more").unwrap();
        let mut all = Vec::new();
        for _ in 0..4 {
            all.extend(next(&socket).unwrap());
        }
        assert_eq!(all, b"more than a buffer and more");
        drop(peer);
        wait_for_hangup(socket.as_fd());
        assert_eq!(next(&socket), Ok(Vec::new()));
    }

    #[test]
    fn descriptors_stay_in_the_queue() {
        let (mut peer, socket) = pair();
        peer.write_all(b"before").unwrap();
        assert_eq!(next(&socket).unwrap(), b"before");
        peer.write_all(b"A").unwrap();
        let sent = memfd();
        scm::send(peer.as_fd(), b"B", &[sent.as_fd()]).unwrap();
        peer.write_all(b"C").unwrap();
        for _ in 0..3 {
            assert_eq!(next(&socket), Err(Received::Descriptors));
        }
        // Another process receives what this one left.
        let received: usize = std::iter::from_fn(|| {
            scm::receive(socket.as_fd(), &mut [0; 8]).ok().flatten().map(|one| one.descriptors.len())
        })
        .take(2)
        .sum();
        assert_eq!(received, 1);
    }

    #[test]
    fn descriptors_of_urgent_bytes_are_found() {
        let (peer, socket) = pair();
        receive_all_inline(&socket).unwrap();
        let sent = memfd();
        let rights = [sent.as_raw_fd()];
        let control = [ControlMessage::ScmRights(&rights)];
        let bytes = [std::io::IoSlice::new(b"x")];
        match sendmsg::<()>(peer.as_raw_fd(), &bytes, &control, MsgFlags::MSG_OOB, None) {
            Ok(_) => assert_eq!(next(&socket), Err(Received::Descriptors)),
            // A kernel without urgent bytes on unix sockets, or without descriptors in them.
            Err(error) => assert_eq!(error, Errno::EOPNOTSUPP),
        }
    }

    #[test]
    fn drained_connection_carries_nothing_more() {
        let (mut peer, socket) = pair();
        peer.write_all(&[7; 100_000]).unwrap();
        assert!(drain(socket.as_fd()));
        let sent = memfd();
        assert_eq!(scm::send(peer.as_fd(), b"x", &[sent.as_fd()]).unwrap_err().errno, Errno::EPIPE);
        drop(peer);
        wait_for_hangup(socket.as_fd());
        assert!(drain(socket.as_fd()), "also when the peer has closed its end");
    }

    #[test]
    fn drained_connection_with_descriptors_keeps_them() {
        let (mut peer, socket) = pair();
        peer.write_all(b"bytes").unwrap();
        scm::send(peer.as_fd(), b"x", &[memfd().as_fd()]).unwrap();
        drop(peer);
        assert!(!drain(socket.as_fd()));
        assert!(!drain(socket.as_fd()));
        let last = std::iter::from_fn(|| scm::receive(socket.as_fd(), &mut [0; 8]).ok().flatten()).last();
        assert_eq!(last.unwrap().descriptors.len(), 1);
    }

    #[test]
    fn reset_connection_is_drained() {
        let (peer, mut socket) = pair();
        // The peer ends with unread bytes.
        socket.write_all(b"unread").unwrap();
        drop(peer);
        wait_for_hangup(socket.as_fd());
        assert!(drain(socket.as_fd()));
    }
}
