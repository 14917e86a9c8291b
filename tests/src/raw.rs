//! Requests that the client library never sends: raw gRPC and raw packets.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use fdmap_client::Endpoint;
use fdmap_proto::v1;
use fdmap_proto::v1::fdpass_reply::Result as Reply;
use fdmap_proto::v1::fdpass_request::Op;
use fdmap_sys::scm::{self, ReceivedPacket};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, sockopt};
use prost::Message as _;
use tonic::transport::{self, Channel, Uri};

use crate::{HarnessError, HarnessResult};

/// A raw channel to a service; `window` is the HTTP/2 flow-control window in bytes.
///
/// # Errors
/// [`HarnessError::Missing`] if no service listens.
pub async fn channel(endpoint: &Endpoint, window: u32) -> HarnessResult<Channel> {
    let path = endpoint.socket.clone();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { tokio::net::UnixStream::connect(path).await.map(hyper_util::rt::TokioIo::new) }
    });
    transport::Endpoint::from_static("http://fdmapd.invalid")
        .initial_stream_window_size(window)
        .initial_connection_window_size(window)
        .connect_with_connector(connector)
        .await
        .map_err(|error| HarnessError::Missing(format!("a service: {error}")))
}

/// Reads a connection to its end. If the peer closes its end with data in its queue, the kernel reports ECONNRESET.
///
/// # Errors
/// Those of read(2), also EAGAIN at the read timeout of `stream`.
pub fn read_to_close(mut stream: &UnixStream) -> io::Result<()> {
    match stream.read_to_end(&mut Vec::new()) {
        Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(()),
        other => other.map(drop),
    }
}

/// A TCP connection whose close waits for an hour, until its peer has read what was sent, or this process has ended.
///
/// # Panics
/// Without a loopback interface.
#[must_use]
pub fn lingering_socket() -> OwnedFd {
    socket_lingering_for(Duration::from_hours(1))
}

/// The same for another time, in whole seconds.
///
/// # Panics
/// Without a loopback interface.
#[must_use]
pub fn socket_lingering_for(time: Duration) -> OwnedFd {
    let l_linger = i32::try_from(time.as_secs()).expect("a time");
    let connected = || {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut sender = TcpStream::connect(listener.local_addr()?)?;
        let (peer, _) = listener.accept()?;
        // The peer stays open and unread.
        std::mem::forget(peer);
        socket::setsockopt(&sender, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger })?;
        sender.set_nonblocking(true)?;
        while sender.write(&[0; 1 << 16]).is_ok() {}
        Ok::<_, io::Error>(sender.into())
    };
    connected().expect("a connection on loopback")
}

/// A raw session on the fdpass socket.
#[derive(Debug)]
pub struct RawSession {
    socket: OwnedFd,
}

impl RawSession {
    /// A session on a connected socket, without a Hello.
    #[must_use]
    pub const fn of(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Connects without a Hello.
    ///
    /// # Errors
    /// [`HarnessError::Syscall`]
    pub fn connect(endpoint: &Endpoint) -> HarnessResult<Self> {
        Self::connect_with(endpoint, Duration::from_secs(20))
    }

    /// Connects without a Hello. Each operation fails after `timeout`.
    ///
    /// # Errors
    /// [`HarnessError::Syscall`]
    pub fn connect_with(endpoint: &Endpoint, timeout: Duration) -> HarnessResult<Self> {
        Ok(Self { socket: scm::connect_to(&endpoint.fdpass, timeout)? })
    }

    /// Connects and sends Hello.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn greeted(endpoint: &Endpoint) -> HarnessResult<Self> {
        Self::connect(endpoint)?.greet()
    }

    /// Connects in another process, which exits, and sends Hello.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn greeted_by_exited_process(endpoint: &Endpoint) -> HarnessResult<Self> {
        const CONNECT: &str = "import socket, sys; socket.socket(fileno=0).connect(sys.argv[1])";
        let failed = |error: std::io::Error| HarnessError::Agent(format!("python3: {error}"));
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None);
        let socket = socket.map_err(|errno| failed(errno.into()))?;
        let mut python = Command::new("python3");
        python.args(["-c", CONNECT]).arg(&endpoint.fdpass).stdin(socket.try_clone().map_err(failed)?);
        let status = python.status().map_err(failed)?;
        if !status.success() {
            return Err(HarnessError::Agent(format!("python3: {status}")));
        }
        Self { socket }.greet()
    }

    /// Sends Hello.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn greet(self) -> HarnessResult<Self> {
        self.send(&packet(Op::Hello(v1::Hello { version: 1, client: "raw".to_owned() })), &[])?;
        match self.reply()? {
            Some((Reply::Welcome(_), _)) => Ok(self),
            other => Err(HarnessError::Agent(format!("{other:?}"))),
        }
    }

    /// Sends a packet.
    ///
    /// # Errors
    /// [`HarnessError::Syscall`]
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> HarnessResult<()> {
        Ok(scm::send(self.socket.as_fd(), bytes, descriptors)?)
    }

    /// Receives the next reply; `None` if the service has closed the session.
    ///
    /// # Errors
    /// [`HarnessError`]
    pub fn reply(&self) -> HarnessResult<Option<(Reply, ReceivedPacket)>> {
        let mut buffer = vec![0; 1 << 17];
        let packet = match scm::receive(self.socket.as_fd(), &mut buffer) {
            // The service closed the session without reading the packet.
            Err(error) if error.errno == fdmap_sys::Errno::ECONNRESET => return Ok(None),
            other => other?,
        };
        let Some(packet) = packet else { return Ok(None) };
        let reply = v1::FdpassReply::decode(&buffer[..packet.len]).ok().and_then(|reply| reply.result);
        let reply = reply.ok_or_else(|| HarnessError::Agent("an empty reply".to_owned()))?;
        Ok(Some((reply, packet)))
    }

    /// The error that the service replies with: code, text, and whether it ended the session.
    ///
    /// # Errors
    /// [`HarnessError::Agent`] if it replies with anything else.
    pub fn error(&self) -> HarnessResult<v1::Error> {
        match self.reply()? {
            Some((Reply::Error(error), _)) => Ok(error),
            other => Err(HarnessError::Agent(format!("{other:?}"))),
        }
    }
}

/// A request as a packet.
#[must_use]
pub fn packet(op: Op) -> Vec<u8> {
    v1::FdpassRequest { op: Some(op) }.encode_to_vec()
}
