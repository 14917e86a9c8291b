//! Who is at the other end of a connection.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use fdmap_sys::SyscallError;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;
use tonic::Status;
use tonic::transport::server::{Connected, TcpConnectInfo, TlsConnectInfo};

use super::tls::Identities;
use crate::files::{Caller, FileError, Share};
use crate::service::Service;

/// The peer of a connection to the unix socket.
#[derive(Clone, Debug)]
pub struct PeerInfo {
    caller: Caller,
    /// Counts for its user while the connection lives.
    _share: Arc<Share>,
}

/// Why a connection is turned away.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The kernel does not say who it is.
    #[error("telling the peer of a connection")]
    Credentials(#[from] SyscallError),
    /// That user has as many as may be.
    #[error("turning a connection away")]
    Limit(#[from] FileError),
}

/// A connection and what is known of it.
#[derive(Debug)]
pub struct Known<S, I> {
    stream: S,
    info: I,
    /// Until the peer has begun to speak HTTP/2.
    greeting: Option<Greeting>,
}

/// HTTP/2 pings a silent peer, but not before it has sent its preface.
#[derive(Debug)]
struct Greeting {
    /// Bytes of the preface that are still to come.
    missing: usize,
    over: Pin<Box<Sleep>>,
}

/// A peer that has not sent its preface in this time is sent away.
const GREETING: Duration = Duration::from_secs(10);
/// `PRI * HTTP/2.0 ... SM ...` of RFC 9113.
const PREFACE: usize = 24;

/// A connection to the unix socket.
pub type PeerStream = Known<UnixStream, PeerInfo>;

/// A TCP connection, counted while it lives.
pub(super) type TcpPeerStream = Known<TcpStream, OwnedSemaphorePermit>;

impl PeerStream {
    /// Asks the kernel who is there, and counts the connection for that user.
    ///
    /// # Errors
    /// [`PeerError`]
    pub fn new(stream: UnixStream, service: &Service) -> Result<Self, PeerError> {
        let peer = fdmap_sys::peer::credentials(&stream)?;
        let caller = Caller::new(peer.uid, peer.gid, peer.groups, service.uid);
        let share = Arc::new(service.sessions.take(&caller, 1)?);
        let greeting = Greeting { missing: PREFACE, over: Box::pin(tokio::time::sleep(GREETING)) };
        Ok(Self { stream, info: PeerInfo { caller, _share: share }, greeting: Some(greeting) })
    }
}

impl TcpPeerStream {
    pub(super) const fn counted(stream: TcpStream, permit: OwnedSemaphorePermit) -> Self {
        // TLS has a handshake of its own, with a time of its own.
        Self { stream, info: permit, greeting: None }
    }
}

impl Connected for PeerStream {
    type ConnectInfo = PeerInfo;

    fn connect_info(&self) -> PeerInfo {
        self.info.clone()
    }
}

impl Connected for TcpPeerStream {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl<S: AsyncRead + Unpin, I: Unpin> AsyncRead for Known<S, I> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        if let Some(greeting) = &mut this.greeting {
            greeting.missing = greeting.missing.saturating_sub(buf.filled().len() - before);
            if greeting.missing == 0 {
                this.greeting = None;
            } else if polled.is_pending() && greeting.over.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin, I: Unpin> AsyncWrite for Known<S, I> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Who makes a request: by the kernel's word on the unix socket, by certificate on TCP.
pub(super) fn caller(extensions: &tonic::Extensions, identities: &Identities) -> Result<Caller, Status> {
    if let Some(peer) = extensions.get::<PeerInfo>() {
        return Ok(peer.caller.clone());
    }
    let certificates =
        extensions.get::<TlsConnectInfo<TcpConnectInfo>>().and_then(TlsConnectInfo::peer_certs);
    let Some(certificates) = certificates else {
        return Err(Status::unauthenticated("nobody vouches for the caller"));
    };
    identities.caller(certificates.first().map(AsRef::as_ref)).map_err(Status::unauthenticated)
}
