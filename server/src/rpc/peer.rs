//! The peer of a gRPC connection.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use fdmap_sys::SyscallError;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::oneshot;
use tokio::time::Sleep;
use tokio_rustls::server::TlsStream;
use tonic::Status;
use tonic::transport::server::Connected;

use super::buffers::Buffers;
use super::connection::UnixConnection;
use super::unreceived::Unreceived;
use super::unsent::Unsent;
use crate::fdpass::Connection;
use crate::files::{Caller, FileError, QuotaPermit};
use crate::service::Service;

/// The peer of a connection: by peer credentials on the unix socket, by client certificate on TCP.
#[derive(Clone, Debug)]
pub struct PeerInfo {
    caller: Caller,
    /// Charges the user for the connection while it is open.
    _permit: Arc<QuotaPermit>,
    unsent: Arc<Unsent>,
    unreceived: Unreceived,
}

impl PeerInfo {
    pub(super) fn new(caller: Caller, permit: QuotaPermit, buffers: Arc<Buffers>) -> Self {
        Self {
            caller,
            _permit: Arc::new(permit),
            unsent: Arc::new(Unsent::new(Arc::clone(&buffers))),
            unreceived: Unreceived::new(buffers),
        }
    }

    /// The answers that wait to be written to the connection.
    pub(super) fn unsent(&self) -> Arc<Unsent> {
        Arc::clone(&self.unsent)
    }

    /// The requests that the peer has not completed.
    pub(super) fn unreceived(&self) -> Unreceived {
        self.unreceived.clone()
    }
}

/// The server refuses a connection.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    #[error("reading the peer credentials of a connection")]
    Credentials(#[from] SyscallError),
    #[error("too many connections")]
    Limit(#[from] FileError),
}

/// A connection and the identity of its peer.
#[derive(Debug)]
pub struct PeerConnection<S> {
    stream: S,
    info: PeerInfo,
    /// `None` once the peer has sent the HTTP/2 preface.
    preface: Option<PrefaceDeadline>,
    revocation: Revocation,
}

/// Whether the peer may still use the connection.
#[derive(Debug)]
enum Revocation {
    Never,
    /// Resolves when the certificate of the peer is no longer accepted, or its receiver was abandoned.
    Possible(oneshot::Receiver<()>),
    Revoked,
}

/// The deadline for the HTTP/2 connection preface. The server pings a silent peer, but only after the preface.
#[derive(Debug)]
struct PrefaceDeadline {
    /// Bytes of the preface that the peer has not sent.
    missing: usize,
    timeout: Pin<Box<Sleep>>,
}

const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// Length of the connection preface, RFC 9113 section 3.4.
const PREFACE_BYTES: usize = 24;

/// A connection to the unix socket.
pub type PeerStream = PeerConnection<UnixConnection>;

/// A TCP connection whose TLS handshake is complete.
pub(super) type TlsPeerStream = PeerConnection<TlsStream<TcpStream>>;

/// A user who has connected.
pub(super) struct Peer {
    caller: Caller,
    permit: QuotaPermit,
    buffers: Buffers,
}

impl Peer {
    /// Reads the peer credentials of the unix socket, and charges the user for the connection.
    pub(super) fn new(socket: &UnixStream, service: &Service) -> Result<Self, PeerError> {
        let peer = fdmap_sys::peer::credentials(socket)?;
        let caller = Caller::new(peer.uid, peer.gid, peer.groups, service.uid);
        let permit = service.sessions.acquire(&caller, 1)?;
        Ok(Self::charged(caller, permit, service))
    }

    /// A user whom `permit` charges for the connection.
    pub(super) fn charged(caller: Caller, permit: QuotaPermit, service: &Service) -> Self {
        let buffers = Buffers::new(caller.clone(), service);
        Self { caller, permit, buffers }
    }

    /// The user who is charged. Subordinate users count for their owner.
    pub(super) fn user(&self) -> u32 {
        self.permit.uid()
    }
}

impl PeerStream {
    /// A connection whose client can pass no descriptors.
    ///
    /// # Errors
    /// [`PeerError`]
    pub(super) fn new(socket: UnixStream, service: &Service) -> Result<Self, PeerError> {
        let peer = Peer::new(&socket, service)?;
        let connection = UnixConnection::new(Connection::new(socket, None), None);
        Ok(Self::open(connection, peer, Revocation::Never))
    }

    /// A connection of which a receiver keeps a descriptor. `revoked` closes it.
    pub(super) fn guarded(connection: UnixConnection, peer: Peer, revoked: oneshot::Receiver<()>) -> Self {
        Self::open(connection, peer, Revocation::Possible(revoked))
    }
}

impl TlsPeerStream {
    /// `revoked` closes the connection.
    pub(super) fn authenticated(
        stream: TlsStream<TcpStream>,
        peer: Peer,
        revoked: oneshot::Receiver<()>,
    ) -> Self {
        Self::open(stream, peer, Revocation::Possible(revoked))
    }
}

impl<S> PeerConnection<S> {
    fn open(stream: S, peer: Peer, revocation: Revocation) -> Self {
        let Peer { caller, permit, buffers } = peer;
        let timeout = Box::pin(tokio::time::sleep(PREFACE_TIMEOUT));
        let preface = Some(PrefaceDeadline { missing: PREFACE_BYTES, timeout });
        let info = PeerInfo::new(caller, permit, Arc::new(buffers));
        Self { stream, info, preface, revocation }
    }
}

impl<S> Connected for PeerConnection<S> {
    type ConnectInfo = PeerInfo;

    fn connect_info(&self) -> PeerInfo {
        self.info.clone()
    }
}

impl Revocation {
    /// Fails once the peer is revoked. Until then, the task is woken when that happens.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if let Self::Possible(revoked) = self {
            match Pin::new(revoked).poll(cx) {
                Poll::Ready(Ok(())) => *self = Self::Revoked,
                // The service is stopping.
                Poll::Ready(Err(_)) => *self = Self::Never,
                Poll::Pending => {}
            }
        }
        match self {
            Self::Revoked => Err(io::ErrorKind::ConnectionAborted.into()),
            Self::Never | Self::Possible(_) => Ok(()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PeerConnection<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.revocation.check(cx)?;
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        if let Some(preface) = &mut this.preface {
            preface.missing = preface.missing.saturating_sub(buf.filled().len() - before);
            if preface.missing == 0 {
                this.preface = None;
            } else if polled.is_pending() && preface.timeout.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PeerConnection<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.revocation.check(cx)?;
        Pin::new(&mut this.stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.revocation.check(cx)?;
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.revocation.check(cx)?;
        Pin::new(&mut this.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// The caller of a request.
pub(super) fn caller(extensions: &tonic::Extensions) -> Result<Caller, Status> {
    let peer = extensions.get::<PeerInfo>();
    let peer = peer.ok_or_else(|| Status::unauthenticated("the connection has no peer"))?;
    Ok(peer.caller.clone())
}
