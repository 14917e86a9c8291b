//! Unix `SOCK_SEQPACKET` sockets that pass descriptors (`SCM_RIGHTS`).

use std::ffi::OsStr;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, bind, connect,
    getsockopt, listen, sendmsg, setsockopt, socket, socketpair, sockopt,
};
use nix::sys::time::TimeVal;

use crate::error::{CallContext, SyscallError};

/// Maximum number of descriptors in one message (`SCM_MAX_FD`).
pub const MAX_DESCRIPTORS: usize = 253;

/// `asm-generic/socket.h`, since Linux 6.16.
pub const SO_PASSRIGHTS: libc::c_int = 83;

/// Connections that a listening socket queues. Connect waits while the queue is full, and each process has its turn: one that connects
/// all the time delays the others by no more than the queue. In a long one that is half a second.
const MAX_WAITING_CONNECTIONS: i32 = 128;

/// A message received by one `recvmsg`.
#[derive(Debug)]
pub struct ReceivedPacket {
    /// Number of bytes stored in the buffer.
    pub len: usize,
    /// The message was longer than the buffer (`MSG_TRUNC`).
    pub truncated: bool,
    /// Received descriptors, close-on-exec.
    pub descriptors: Vec<OwnedFd>,
    /// The kernel dropped descriptors (`MSG_CTRUNC`): the process has too many open.
    pub descriptors_lost: bool,
}

/// Creates a non-blocking listening socket at `path`.
///
/// # Errors
/// `socket`, `bind` (`EADDRINUSE` if the path exists) or `listen`.
pub fn listen_at(path: &Path) -> Result<OwnedFd, SyscallError> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = new_socket(flags)?;
    let address = address_of(path)?;
    bind(listener.as_raw_fd(), &address).call(|| format!("bind to {}", path.display()))?;
    let backlog = Backlog::new(MAX_WAITING_CONNECTIONS).call(|| "listen".to_owned())?;
    listen(&listener, backlog).call(|| format!("listen on {}", path.display()))?;
    Ok(listener)
}

/// Connects to `path`. The socket is blocking; connect, send and receive each fail with `EAGAIN` after `timeout`.
///
/// # Errors
/// `socket`, `setsockopt` or `connect`.
pub fn connect_to(path: &Path, timeout: Duration) -> Result<OwnedFd, SyscallError> {
    connected(new_socket(SockFlag::SOCK_CLOEXEC)?, path, timeout)
}

/// The same for a `SOCK_STREAM` socket. While the queue of the listening socket is full, connect(2) waits; that of a non-blocking
/// socket would fail.
///
/// # Errors
/// `socket`, `setsockopt` or `connect`.
pub fn connect_stream_to(path: &Path, timeout: Duration) -> Result<OwnedFd, SyscallError> {
    let stream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
        .call(|| "socket(AF_UNIX, SOCK_STREAM)".to_owned())?;
    connected(stream, path, timeout)
}

fn connected(socket: OwnedFd, path: &Path, timeout: Duration) -> Result<OwnedFd, SyscallError> {
    set_timeout(&socket, timeout)?;
    connect(socket.as_raw_fd(), &address_of(path)?).call(|| format!("connect to {}", path.display()))?;
    Ok(socket)
}

/// Sets the send and the receive timeout: each operation fails with `EAGAIN` after `timeout`.
///
/// # Errors
/// `setsockopt`.
pub fn set_timeout(socket: &OwnedFd, timeout: Duration) -> Result<(), SyscallError> {
    // 0 means no timeout.
    let timeout = timeout.max(Duration::from_micros(1));
    let seconds = i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX);
    let limit = TimeVal::new(seconds, i64::from(timeout.subsec_micros()));
    let call = || format!("setsockopt(SO_SNDTIMEO, SO_RCVTIMEO) to {timeout:?}");
    setsockopt(socket, sockopt::SendTimeout, &limit).call(call)?;
    setsockopt(socket, sockopt::ReceiveTimeout, &limit).call(call)
}

/// Creates a pair of connected sockets, non-blocking and close-on-exec.
///
/// # Errors
/// `socketpair`.
pub fn socket_pair() -> Result<(OwnedFd, OwnedFd), SyscallError> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
        .call(|| "socketpair(AF_UNIX, SOCK_SEQPACKET)".to_owned())
}

/// Decides whether `socket` receives descriptors (`SO_PASSRIGHTS`): if not, the sender of one gets `EPERM`. Connections to a
/// listening socket begin with its setting.
///
/// # Errors
/// `setsockopt`: `ENOPROTOOPT` before Linux 6.16.
pub fn pass_descriptors(socket: impl AsFd, allowed: bool) -> Result<(), SyscallError> {
    let raw = socket.as_fd().as_raw_fd();
    let value = libc::c_int::from(allowed);
    // SAFETY: the kernel reads 4 bytes, the size of `value`.
    let result =
        unsafe { libc::setsockopt(raw, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const value).cast(), 4) };
    Errno::result(result)
        .call(|| format!("setsockopt(SO_PASSRIGHTS) of descriptor {raw} to {value}"))
        .map(drop)
}

/// Checks whether `fd` is a `SOCK_SEQPACKET` socket.
#[must_use]
pub fn is_seqpacket(fd: BorrowedFd<'_>) -> bool {
    getsockopt(&fd, sockopt::SockType) == Ok(SockType::SeqPacket)
}

fn new_socket(flags: SockFlag) -> Result<OwnedFd, SyscallError> {
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
        .call(|| "socket(AF_UNIX, SOCK_SEQPACKET)".to_owned())
}

fn address_of(path: &Path) -> Result<UnixAddr, SyscallError> {
    UnixAddr::new(path).call(|| format!("unix address of {}", path.display()))
}

/// Sends one datagram with descriptors to the socket at `address`: a path, or `@` followed by an abstract name, as in
/// `$NOTIFY_SOCKET`.
///
/// # Errors
/// `socket` or `sendmsg`. Blocks while the receive queue is full.
pub fn send_to(address: &OsStr, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), SyscallError> {
    let call = || format!("sendmsg of {} bytes to {}", bytes.len(), address.display());
    let target = match address.as_bytes() {
        [b'@', name @ ..] => UnixAddr::new_abstract(name),
        path => UnixAddr::new(path),
    };
    let target = target.call(call)?;
    let socket = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).call(call)?;
    let raw: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[] } else { &rights[..] };
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, Some(&target)).call(call)?;
    Ok(())
}

/// Sends one message with descriptors. Never raises `SIGPIPE`.
///
/// # Errors
/// `sendmsg`: `EAGAIN` if it would block or timed out, `EPIPE` if the peer has closed the connection.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), SyscallError> {
    let raw: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[] } else { &rights[..] };
    loop {
        let sent =
            sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL, None);
        match sent {
            Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => {
                let call = || format!("sendmsg of {} bytes and {} descriptors", bytes.len(), raw.len());
                return Err(errno).call(call);
            }
        }
    }
}

/// Receives one message; `None` if the peer has closed the connection.
///
/// # Errors
/// `recvmsg`: `EAGAIN` if no message is queued or the call timed out.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Option<ReceivedPacket>, SyscallError> {
    let mut control = ControlBuffer::new();
    let mut parts = [IoSliceMut::new(buffer)];
    // SAFETY: msghdr is a C struct for which all zeroes is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr().cast();
    message.msg_iovlen = parts.len();
    message.msg_control = control.words.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control.words);

    let len = loop {
        // SAFETY: `message` points to one buffer (IoSliceMut has the layout of iovec) and one control buffer, each with its
        // length, and both outlive the call.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        match Errno::result(received) {
            Err(Errno::EINTR) => {}
            other => break other.call(|| "recvmsg on the fdpass socket".to_owned())?,
        }
    };
    let descriptors = take_descriptors(&message);
    let packet = ReceivedPacket {
        len: usize::try_from(len).unwrap_or(0),
        truncated: message.msg_flags & libc::MSG_TRUNC != 0,
        descriptors,
        descriptors_lost: message.msg_flags & libc::MSG_CTRUNC != 0,
    };
    // An empty packet and the end of the connection are indistinguishable; the protocol has no empty messages.
    let ended = packet.len == 0 && packet.descriptors.is_empty() && !packet.descriptors_lost;
    Ok(if ended { None } else { Some(packet) })
}

/// Takes ownership of every descriptor of a received message, including one with truncated control data.
fn take_descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut descriptors = Vec::new();
    // SAFETY: the kernel initialized msg_control up to msg_controllen; CMSG_FIRSTHDR checks the length.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return null or a header inside the control buffer.
    while let Some(cmsg) = unsafe { header.as_ref() } {
        if cmsg.cmsg_level == libc::SOL_SOCKET && cmsg.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: the header lies in the control buffer; CMSG_DATA only computes an address.
            let data = unsafe { libc::CMSG_DATA(header) };
            let bytes = cmsg.cmsg_len.saturating_sub(data.addr() - header.addr());
            for i in 0..bytes / size_of::<libc::c_int>() {
                let element = data.cast::<libc::c_int>().wrapping_add(i);
                // SAFETY: `i` is below the number of descriptors given by cmsg_len.
                let fd = unsafe { element.read_unaligned() };
                // SAFETY: recvmsg installed this descriptor for the caller, so nothing else owns it.
                descriptors.push(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
        // SAFETY: `header` lies in the control buffer of `message`.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    descriptors
}

/// Space for [`MAX_DESCRIPTORS`] descriptors, aligned for `cmsghdr`, so that a message with more descriptors than the protocol
/// allows is received and reported as such.
struct ControlBuffer {
    words: [u64; 160],
}

// cmsghdr and padding take 16 bytes, descriptors 4 each.
const _: () = assert!(size_of::<ControlBuffer>() >= 16 + MAX_DESCRIPTORS * 4);

impl ControlBuffer {
    const fn new() -> Self {
        Self { words: [0; 160] }
    }
}

/// True if the other end has not received all that was sent: `SIOCOUTQ`.
///
/// # Errors
/// `ioctl`.
pub fn has_unread(socket: BorrowedFd<'_>) -> Result<bool, SyscallError> {
    nix::ioctl_read_bad!(siocoutq, nix::libc::TIOCOUTQ, nix::libc::c_int);
    let mut bytes = 0;
    // SAFETY: the kernel writes one int.
    let result = unsafe { siocoutq(socket.as_raw_fd(), &raw mut bytes) };
    result.call(|| format!("ioctl(SIOCOUTQ) of descriptor {}", socket.as_raw_fd()))?;
    Ok(bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap()
    }

    #[test]
    fn connect_waits_while_the_queue_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(listener.as_raw_fd(), &address_of(&path).unwrap()).unwrap();
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        let try_connect = || connect_stream_to(&path, Duration::from_millis(10));
        let queued: Vec<_> = std::iter::from_fn(|| try_connect().ok()).collect();
        assert_eq!(queued.len(), 2);
        assert_eq!(try_connect().unwrap_err().errno, Errno::EAGAIN);
        let waiting = std::thread::spawn(move || connect_stream_to(&path, Duration::from_secs(60)));
        let accepted = nix::sys::socket::accept(listener.as_raw_fd()).unwrap();
        waiting.join().unwrap().unwrap();
        nix::unistd::close(accepted).unwrap();
    }

    #[test]
    fn received_descriptors_are_close_on_exec() {
        let (one, other) = pair();
        let memfd = crate::memfd::create("passed", None).unwrap();
        send(one.as_fd(), b"hello", &[memfd.as_fd(), memfd.as_fd()]).unwrap();
        let mut buffer = [0; 16];
        let packet = receive(other.as_fd(), &mut buffer).unwrap().unwrap();
        assert_eq!((&buffer[..packet.len], packet.truncated), (&b"hello"[..], false));
        assert_eq!(packet.descriptors.len(), 2);
        let ino = crate::fd::stat(&memfd).unwrap().st_ino;
        for fd in &packet.descriptors {
            assert_eq!(crate::fd::stat(fd).unwrap().st_ino, ino);
            let flags = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_GETFD).unwrap();
            assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
        }
    }

    #[test]
    fn maximum_number_of_descriptors_is_received() {
        let (one, other) = pair();
        let memfd = crate::memfd::create("many", None).unwrap();
        send(one.as_fd(), b"x", &[memfd.as_fd(); MAX_DESCRIPTORS]).unwrap();
        let packet = receive(other.as_fd(), &mut [0; 4]).unwrap().unwrap();
        assert_eq!((packet.descriptors.len(), packet.descriptors_lost), (MAX_DESCRIPTORS, false));
    }

    #[test]
    fn socket_pair_is_connected_and_nonblocking() {
        let (one, other) = socket_pair().unwrap();
        assert!(is_seqpacket(one.as_fd()) && is_seqpacket(other.as_fd()));
        assert_eq!(receive(other.as_fd(), &mut [0; 4]).unwrap_err().errno, Errno::EAGAIN);
        send(one.as_fd(), b"x", &[]).unwrap();
        assert_eq!(receive(other.as_fd(), &mut [0; 4]).unwrap().unwrap().len, 1);
        let memfd = crate::memfd::create("no-socket", None).unwrap();
        assert!(!is_seqpacket(memfd.as_fd()));
    }

    #[test]
    fn descriptors_are_refused_until_they_are_allowed() {
        let (one, other) = pair();
        let memfd = crate::memfd::create("refused", None).unwrap();
        if let Err(error) = pass_descriptors(&other, false) {
            assert_eq!(error.errno, Errno::ENOPROTOOPT);
            eprintln!("not run: this kernel lacks SO_PASSRIGHTS");
            return;
        }
        assert_eq!(send(one.as_fd(), b"x", &[memfd.as_fd()]).unwrap_err().errno, Errno::EPERM);
        send(one.as_fd(), b"x", &[]).unwrap();
        pass_descriptors(&other, true).unwrap();
        send(one.as_fd(), b"y", &[memfd.as_fd()]).unwrap();
        let counts = [0; 2].map(|_| receive(other.as_fd(), &mut [0; 4]).unwrap().unwrap().descriptors.len());
        assert_eq!(counts, [0, 1]);
    }

    #[test]
    fn long_message_is_reported_as_truncated() {
        let (one, other) = pair();
        send(one.as_fd(), &[7; 100], &[]).unwrap();
        let packet = receive(other.as_fd(), &mut [0; 10]).unwrap().unwrap();
        assert_eq!((packet.len, packet.truncated), (10, true));
    }

    #[test]
    fn closed_connection_ends_receive_and_send() {
        let (one, other) = pair();
        drop(one);
        crate::testing::hangup::wait_for_hangup(other.as_fd());
        assert!(receive(other.as_fd(), &mut [0; 4]).unwrap().is_none());
        assert_eq!(send(other.as_fd(), b"x", &[]).unwrap_err().errno, Errno::EPIPE);
    }

    #[test]
    fn receive_from_an_unresponsive_peer_times_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("unresponsive");
        let _listener = listen_at(&path).unwrap();
        let stream = connect_to(&path, Duration::from_millis(50)).unwrap();
        assert_eq!(receive(stream.as_fd(), &mut [0; 4]).unwrap_err().errno, Errno::EAGAIN);
    }
}
