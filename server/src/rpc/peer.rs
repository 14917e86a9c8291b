//! The peer of a gRPC connection.

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
use crate::files::{Caller, FileError, QuotaPermit};
use crate::service::Service;

/// The peer of a connection to the unix socket.
#[derive(Clone, Debug)]
pub struct PeerInfo {
    caller: Caller,
    /// Charges the user for the connection while it is open.
    _permit: Arc<QuotaPermit>,
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
pub struct PeerConnection<S, I> {
    stream: S,
    info: I,
    /// `None` once the peer has sent the HTTP/2 preface.
    preface: Option<PrefaceDeadline>,
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
pub type PeerStream = PeerConnection<UnixStream, PeerInfo>;

/// A TCP connection. The permit limits their number.
pub(super) type TcpPeerStream = PeerConnection<TcpStream, OwnedSemaphorePermit>;

impl PeerStream {
    /// Reads the peer credentials and charges the user for the connection.
    ///
    /// # Errors
    /// [`PeerError`]
    pub fn new(stream: UnixStream, service: &Service) -> Result<Self, PeerError> {
        let peer = fdmap_sys::peer::credentials(&stream)?;
        let caller = Caller::new(peer.uid, peer.gid, peer.groups, service.uid);
        let permit = Arc::new(service.sessions.acquire(&caller, 1)?);
        let timeout = Box::pin(tokio::time::sleep(PREFACE_TIMEOUT));
        let preface = PrefaceDeadline { missing: PREFACE_BYTES, timeout };
        Ok(Self { stream, info: PeerInfo { caller, _permit: permit }, preface: Some(preface) })
    }
}

impl TcpPeerStream {
    pub(super) const fn with_permit(stream: TcpStream, permit: OwnedSemaphorePermit) -> Self {
        // The TLS handshake has a timeout.
        Self { stream, info: permit, preface: None }
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

impl<S: AsyncRead + Unpin, I: Unpin> AsyncRead for PeerConnection<S, I> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
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

impl<S: AsyncWrite + Unpin, I: Unpin> AsyncWrite for PeerConnection<S, I> {
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

/// The caller of a request: by peer credentials on the unix socket, by client certificate on TCP.
pub(super) fn caller(extensions: &tonic::Extensions, identities: &Identities) -> Result<Caller, Status> {
    if let Some(peer) = extensions.get::<PeerInfo>() {
        return Ok(peer.caller.clone());
    }
    let certificates =
        extensions.get::<TlsConnectInfo<TcpConnectInfo>>().and_then(TlsConnectInfo::peer_certs);
    let Some(certificates) = certificates else {
        return Err(Status::unauthenticated(
            "the connection has neither peer credentials nor a client certificate",
        ));
    };
    identities.caller(certificates.first().map(AsRef::as_ref)).map_err(Status::unauthenticated)
}
