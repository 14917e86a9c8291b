//! TCP connections until tonic serves them: accept, TLS handshake, identity, limits, and reload of the TLS files.
//!
//! ```text
//!   accept -> pending handshake --certificate of a user--> authenticated, charged to the user -> tonic
//!                 |  deadline, flood, error, unmapped name        |  SIGHUP: certificate no longer accepted
//!                 v                                               v
//!               closed                                          closed
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
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::rustls::{self, pki_types::CertificateDer};
use tokio_rustls::server::TlsStream;

use super::peer::{Peer, TlsPeerStream};
use super::tls::{Identities, IdentityError, TlsContext, TlsError, TlsOptions};
use crate::files::FileError;
use crate::log_limit::LogLimit;
use crate::service::{Service, Shutdown};

/// TLS handshakes in progress, of all peers together. The peer is unknown, so no user can be charged.
const MAX_PENDING_HANDSHAKES: usize = 256;
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after a failed accept(2), most likely `EMFILE`: it succeeds again once descriptors are free.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Connections that the kernel holds until they are accepted, at most `net.core.somaxconn`. While the queue is full, the kernel drops
/// the first packet of other connections, which is repeated after 1 s.
const BACKLOG: u32 = 4096;
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
    #[error("handling SIGHUP")]
    Hangup(#[source] io::Error),
}

/// The settings of TCP, checked.
pub struct TcpConfig {
    address: SocketAddr,
    options: TlsOptions,
    tls: TlsContext,
    identities: Identities,
}

/// The TCP listener.
pub struct TcpServer {
    listener: TcpListener,
    hangup: Signal,
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
    #[error("verifying the client certificate with the reloaded TLS files")]
    Reloaded(#[source] rustls::Error),
    #[error("too many connections")]
    Limit(#[from] FileError),
}

/// A complete handshake, and the TLS files that it used.
struct Handshake {
    peer: SocketAddr,
    stream: TlsStream<TcpStream>,
    tls: Arc<TlsContext>,
}

type HandshakeResult = Result<Handshake, (SocketAddr, RefusedPeer)>;

/// An authenticated connection that tonic serves.
struct Authenticated {
    chain: Vec<CertificateDer<'static>>,
    /// Closes the connection. Is closed itself when the connection has ended.
    revoke: oneshot::Sender<()>,
}

/// The state of the task that accepts connections.
struct Acceptor {
    service: Arc<Service>,
    identities: Identities,
    tls: Arc<TlsContext>,
    handshakes: JoinSet<HandshakeResult>,
    /// The unfinished handshakes, oldest first.
    pending: VecDeque<AbortHandle>,
    authenticated: Vec<Authenticated>,
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
        Ok(Self { address, options: options.clone(), tls, identities })
    }

    /// From now on SIGHUP does not end the process.
    ///
    /// # Errors
    /// [`TcpError`]
    pub fn bind(self) -> Result<TcpServer, TcpError> {
        let address = self.address;
        let listener = listen(address).map_err(|error| TcpError::Listen { address, error })?;
        let hangup = signal(SignalKind::hangup()).map_err(TcpError::Hangup)?;
        Ok(TcpServer { listener, hangup, config: self })
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
        let Self { listener, hangup, config: TcpConfig { options, tls, identities, .. } } = self;
        let acceptor = Acceptor {
            service,
            identities,
            tls: Arc::new(tls),
            handshakes: JoinSet::new(),
            pending: VecDeque::new(),
            authenticated: Vec::new(),
        };
        let (reloaded, reloads) = mpsc::channel(1);
        let accepting = async move {
            tokio::select! {
                () = acceptor.run(listener, reloads, sender) => {}
                () = reload_on(hangup, options, reloaded) => {}
                () = shutdown.wait() => {}
            }
        };
        (streams, accepting)
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restarted service need not wait for the connections of the previous one.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Reads the TLS files again at each signal. Files that cannot be used change nothing.
async fn reload_on(mut hangup: Signal, options: TlsOptions, reloaded: mpsc::Sender<TlsContext>) {
    while hangup.recv().await.is_some() {
        let options = options.clone();
        let loaded = tokio::task::spawn_blocking(move || TlsContext::load(&options)).await;
        let error = match loaded {
            Ok(Ok(tls)) => match reloaded.send(tls).await {
                Ok(()) => continue,
                Err(_) => return,
            },
            Ok(Err(error)) => error_chain(&error),
            Err(error) => error_chain(&error),
        };
        tracing::error!(error, "cannot reload the TLS files; the previous ones stay in use");
    }
}

impl Acceptor {
    async fn run(
        mut self,
        listener: TcpListener,
        mut reloads: mpsc::Receiver<TlsContext>,
        streams: mpsc::Sender<TlsPeerStream>,
    ) {
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
                Some(tls) = reloads.recv() => self.reload(tls),
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
                Ok(Ok(stream)) => Ok(Handshake { peer, stream, tls }),
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

    fn admit(&mut self, Handshake { stream, tls, .. }: Handshake) -> Result<TlsPeerStream, RefusedPeer> {
        let chain: Vec<_> = stream.get_ref().1.peer_certificates().unwrap_or_default().to_vec();
        if !Arc::ptr_eq(&tls, &self.tls) {
            self.tls.verify(&chain).map_err(RefusedPeer::Reloaded)?;
        }
        let caller = self.identities.caller(chain.first().map_or(&[][..], |certificate| certificate))?;
        let permit = self.service.tcp_sessions.acquire(&caller, 1)?;
        let (revoke, revoked) = oneshot::channel();
        self.authenticated.retain(|connection| !connection.revoke.is_closed());
        self.authenticated.push(Authenticated { chain, revoke });
        let peer = Peer::charged(caller, permit, &self.service);
        Ok(TlsPeerStream::authenticated(stream, peer, revoked))
    }

    /// Uses other TLS files from now on, and ends the connections whose certificates they do not accept.
    fn reload(&mut self, tls: TlsContext) {
        self.tls = Arc::new(tls);
        let (accepted, refused): (Vec<_>, Vec<_>) = std::mem::take(&mut self.authenticated)
            .into_iter()
            .filter(|connection| !connection.revoke.is_closed())
            .partition(|connection| self.tls.verify(&connection.chain).is_ok());
        self.authenticated = accepted;
        let (open, closed) = (self.authenticated.len(), refused.len());
        for connection in refused {
            // Fails if the connection has just ended.
            let _ = connection.revoke.send(());
        }
        tracing::info!(open, closed, "reloaded the TLS files");
    }
}
