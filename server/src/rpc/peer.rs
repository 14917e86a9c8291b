//! Who is at the other end of a connection.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use fdmap_sys::SyscallError;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::OwnedSemaphorePermit;
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
}

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
        Ok(Self { stream, info: PeerInfo { caller, _share: share } })
    }
}

impl TcpPeerStream {
    pub(super) const fn counted(stream: TcpStream, permit: OwnedSemaphorePermit) -> Self {
        Self { stream, info: permit }
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
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
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
