//! Accepts connections to the unix socket of gRPC.
//!
//! Where the kernel passes descriptors on any unix socket (before Linux 6.16), the service receives and closes none of them: a close
//! may never return.
//!
//! ```text
//!   accept --over the limit--> closed, by the refuser if descriptors are queued
//!      |
//!      +--> a receiver of the user keeps a descriptor --> served until descriptors arrive, or the receiver is abandoned
//! ```

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::error_chain;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt as _};

use super::PeerStream;
use super::connection::UnixConnection;
use super::peer::Peer;
use crate::fdpass::{Connection, Receivers, Refuser};
use crate::log_limit::LogLimit;
use crate::service::{Service, Shutdown};

/// Delay after a failed accept(2).
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Connections that wait for the server. It takes them at once.
const QUEUED_CONNECTIONS: usize = 16;

static NOT_ACCEPTED: LogLimit = LogLimit::new();
static REFUSED: LogLimit = LogLimit::new();

/// The processes that make the last closes of connections whose clients can pass descriptors.
pub(crate) struct Closers {
    pub(crate) receivers: Arc<Receivers>,
    pub(crate) refuser: Arc<Refuser>,
}

/// Accepts connections until `shutdown`. `closers`: clients can pass descriptors.
pub(super) fn accept(
    listener: UnixListener,
    closers: Option<Closers>,
    service: Arc<Service>,
    shutdown: Shutdown,
) -> Pin<Box<dyn Stream<Item = PeerStream> + Send>> {
    if let Some(closers) = closers {
        return Box::pin(ReceiverStream::new(Acceptor { service, closers }.start(listener, shutdown)));
    }
    let sockets = UnixListenerStream::new(listener).then(accepted);
    Box::pin(sockets.filter_map(move |socket| {
        PeerStream::new(socket?, &service).inspect_err(|error| log_refused(error)).ok()
    }))
}

/// Accepts connections whose clients can pass descriptors.
struct Acceptor {
    service: Arc<Service>,
    closers: Closers,
}

impl Acceptor {
    /// Accepts connections in a task of its own, until `shutdown`.
    fn start(self, listener: UnixListener, shutdown: Shutdown) -> mpsc::Receiver<PeerStream> {
        let (sender, streams) = mpsc::channel(QUEUED_CONNECTIONS);
        tokio::spawn(async move {
            tokio::select! {
                () = self.run(listener, sender) => {}
                () = shutdown.wait() => {}
            }
        });
        streams
    }

    async fn run(self, listener: UnixListener, streams: mpsc::Sender<PeerStream>) {
        loop {
            let socket = listener.accept().await.map(|(socket, _)| socket);
            let Some(socket) = accepted(socket).await else { continue };
            // Fails for no socket of this kind. Then descriptors of such bytes would be missed.
            let inline = fdmap_sys::unix_stream::receive_all_inline(&socket);
            let connection = Connection::new(socket, Some(Arc::clone(&self.closers.refuser)));
            let peer =
                inline.map_err(Into::into).and_then(|()| Peer::new(connection.socket(), &self.service));
            match peer {
                Ok(peer) => {
                    tokio::spawn(serve(
                        Arc::clone(&self.closers.receivers),
                        connection,
                        peer,
                        streams.clone(),
                    ));
                }
                Err(error) => log_refused(&error),
            }
        }
    }
}

/// Passes a connection to a receiver and to the server.
async fn serve(
    receivers: Arc<Receivers>,
    connection: Connection,
    peer: Peer,
    streams: mpsc::Sender<PeerStream>,
) {
    let kept = match receivers.keep(peer.user(), &connection).await {
        Ok(kept) => kept,
        Err(error) => return log_refused(&error),
    };
    let abandoned = kept.abandoned();
    let (mut revoke, revoked) = oneshot::channel();
    let stream = PeerStream::guarded(UnixConnection::new(connection, Some(kept)), peer, revoked);
    // Fails after the end of the server.
    if streams.send(stream).await.is_err() {
        return;
    }
    let is_abandoned = tokio::select! {
        () = abandoned => true,
        () = revoke.closed() => false,
    };
    if is_abandoned {
        // Fails if the connection has ended.
        let _ = revoke.send(());
    }
}

fn log_refused(error: &dyn Error) {
    if let Some(omitted) = REFUSED.permit() {
        tracing::warn!(error = error_chain(error), omitted, "refusing a gRPC connection");
    }
}

/// Waits after a failed accept(2), most likely `EMFILE`: it succeeds again once descriptors are free.
async fn accepted<T>(result: io::Result<T>) -> Option<T> {
    match result {
        Ok(stream) => Some(stream),
        Err(error) => {
            if let Some(omitted) = NOT_ACCEPTED.permit() {
                tracing::warn!(%error, omitted, "cannot accept a gRPC connection");
            }
            tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            None
        }
    }
}
