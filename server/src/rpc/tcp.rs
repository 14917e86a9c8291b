//! TCP connections until tonic serves them: accept, TLS handshake, identity, limits.
//!
//! ```text
//!   accept -> pending handshake --certificate of a user--> authenticated, charged to the user -> tonic
//!                 |  deadline, flood, error, unmapped name
//!                 v
//!               closed
//! ```
//!
//! One task owns all of this. A peer without a certificate costs a pending handshake and nothing else. Their number is
//! bounded by closing the oldest: a peer that completes its handshake faster than a flood opens that many connections
//! is served.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::error_chain;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::server::TlsStream;

use super::peer::TlsPeerStream;
use super::tls::{Identities, IdentityError, TlsContext, TlsError, TlsOptions};
use crate::files::FileError;
use crate::log_limit::LogLimit;
use crate::service::{Service, Shutdown};

/// TLS handshakes in progress, of all peers together. The peer is unknown, so no user can be charged.
const MAX_PENDING_HANDSHAKES: usize = 256;
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after a failed accept(2), most likely `EMFILE`: it succeeds again once descriptors are free.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Connections that tonic has not taken yet.
const MAX_QUEUED: usize = 16;

static NOT_ACCEPTED: LogLimit = LogLimit::new();
static REFUSED: LogLimit = LogLimit::new();
static FLOODED: LogLimit = LogLimit::new();

/// TCP cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum TcpError {
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("listening on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        error: io::Error,
    },
}

/// The settings of TCP, checked.
pub struct TcpConfig {
    address: SocketAddr,
    tls: TlsContext,
    identities: Identities,
}

/// The TCP listener.
pub struct TcpServer {
    listener: TcpListener,
    config: TcpConfig,
}

/// A connection ends before its first request.
#[derive(Debug, thiserror::Error)]
enum RefusedPeer {
    #[error("TLS handshake")]
    Handshake(#[source] io::Error),
    #[error("no TLS handshake within {} s", TLS_HANDSHAKE_TIMEOUT.as_secs())]
    TimedOut,
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("too many connections")]
    Limit(#[from] FileError),
}

/// A complete handshake.
struct Handshake {
    peer: SocketAddr,
    stream: TlsStream<TcpStream>,
}

type HandshakeResult = Result<Handshake, (SocketAddr, RefusedPeer)>;

/// The state of the task that accepts connections.
struct Acceptor {
    service: Arc<Service>,
    identities: Identities,
    tls: Arc<TlsContext>,
    handshakes: JoinSet<HandshakeResult>,
    /// The unfinished handshakes, oldest first.
    pending: VecDeque<AbortHandle>,
}

impl TcpConfig {
    /// Reads the TLS files.
    ///
    /// # Errors
    /// [`TlsError`]
    pub fn load(address: SocketAddr, options: &TlsOptions) -> Result<Self, TlsError> {
        let tls = TlsContext::load(options)?;
        if options.tls_peer.is_empty() {
            return Err(TlsError::Missing("--tls-peer"));
        }
        let identities = Identities::new(options.tls_peer.clone()).map_err(TlsError::Conflict)?;
        Ok(Self { address, tls, identities })
    }

    /// # Errors
    /// [`TcpError`]
    pub async fn bind(self) -> Result<TcpServer, TcpError> {
        let address = self.address;
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(|error| TcpError::Listen { address, error })?;
        Ok(TcpServer { listener, config: self })
    }
}

impl TcpServer {
    /// The address that it listens on.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Returns the authenticated connections, and the work that accepts connections until `shutdown`.
    pub(super) fn start(
        self,
        service: Arc<Service>,
        shutdown: Shutdown,
    ) -> (mpsc::Receiver<TlsPeerStream>, impl Future<Output = ()>) {
        let (sender, streams) = mpsc::channel(MAX_QUEUED);
        let Self { listener, config: TcpConfig { tls, identities, .. } } = self;
        let acceptor = Acceptor {
            service,
            identities,
            tls: Arc::new(tls),
            handshakes: JoinSet::new(),
            pending: VecDeque::new(),
        };
        let accepting = async move {
            tokio::select! {
                () = acceptor.run(listener, sender) => {}
                () = shutdown.wait() => {}
            }
        };
        (streams, accepting)
    }
}

impl Acceptor {
    async fn run(mut self, listener: TcpListener, streams: mpsc::Sender<TlsPeerStream>) {
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => self.begin(stream, peer),
                    Err(error) => {
                        if let Some(omitted) = NOT_ACCEPTED.permit() {
                            tracing::warn!(%error, omitted, "cannot accept a TCP connection");
                        }
                        tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                    }
                },
                // `None` disables this branch. An aborted handshake is an error of the join, and was logged.
                Some(joined) = self.handshakes.join_next() => {
                    let Ok(result) = joined else { continue };
                    if let Some(stream) = self.finish(result) && streams.send(stream).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Starts a handshake. If too many are pending, the oldest ends.
    fn begin(&mut self, stream: TcpStream, peer: SocketAddr) {
        self.pending.retain(|handshake| !handshake.is_finished());
        if self.pending.len() >= MAX_PENDING_HANDSHAKES
            && let Some(oldest) = self.pending.pop_front()
        {
            oldest.abort();
            if let Some(omitted) = FLOODED.permit() {
                let limit = MAX_PENDING_HANDSHAKES;
                tracing::warn!(limit, omitted, "closing the oldest TCP connection without a TLS handshake");
            }
        }
        // Without it, small messages are late.
        let _ = stream.set_nodelay(true);
        let tls = Arc::clone(&self.tls);
        self.pending.push_back(self.handshakes.spawn(async move {
            match tokio::time::timeout(TLS_HANDSHAKE_TIMEOUT, tls.acceptor().accept(stream)).await {
                Ok(Ok(stream)) => Ok(Handshake { peer, stream }),
                Ok(Err(error)) => Err((peer, RefusedPeer::Handshake(error))),
                Err(_) => Err((peer, RefusedPeer::TimedOut)),
            }
        }));
    }

    /// The connection for tonic, if the peer may use the service.
    fn finish(&mut self, result: HandshakeResult) -> Option<TlsPeerStream> {
        let admitted = result.and_then(|handshake| {
            let peer = handshake.peer;
            self.admit(handshake).map_err(|error| (peer, error))
        });
        match admitted {
            Ok(stream) => Some(stream),
            Err((peer, error)) => {
                if let Some(omitted) = REFUSED.permit() {
                    let error = error_chain(&error);
                    tracing::warn!(%peer, error, omitted, "refusing a TCP connection");
                }
                None
            }
        }
    }

    fn admit(&mut self, Handshake { stream, .. }: Handshake) -> Result<TlsPeerStream, RefusedPeer> {
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let caller = self.identities.caller(chain.first().map_or(&[][..], |certificate| certificate))?;
        let permit = self.service.tcp_sessions.acquire(&caller, 1)?;
        Ok(TlsPeerStream::authenticated(stream, caller, permit))
    }
}
