//! The listening end of the fdpass socket. It accepts connections and reads who connected, and passes them to a receiver of that
//! user. It never receives from them.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::error_chain;
use fdmap_sys::scm;
use prost::Message as _;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use super::protocol::Packet;
use super::receivers::{Connection, ReceiverError, ReceiverSession, Receivers, Refuser};
use super::session::{Peer, Session, SessionReply};
use super::wire::{BUFFER_BYTES, PacketHeader, SEND_TIMEOUT};
use crate::files::Caller;
use crate::log_limit::LogLimit;
use crate::service::{Service, Shutdown};

/// The service disconnects a client that does not send Hello in this time.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after a failed accept(2), most likely `EMFILE`.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
static NOT_ACCEPTED: LogLimit = LogLimit::new();
static REFUSED: LogLimit = LogLimit::new();
static UNKNOWN: LogLimit = LogLimit::new();
static NOT_RECEIVED: LogLimit = LogLimit::new();
/// Interval of the check whether a client has disconnected while the service computes its reply.
const DISCONNECT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Serves the fdpass socket until `shutdown`.
///
/// `listener` is a `SOCK_SEQPACKET` socket from [`scm::listen_at`] that passes no descriptors. tokio's stream types only poll it: no
/// code reads or writes it as a stream.
///
/// `refuser`: clients can pass descriptors before a receiver allows that.
pub(crate) async fn serve(
    service: Arc<Service>,
    listener: UnixListener,
    receivers: Arc<Receivers>,
    refuser: Option<Arc<Refuser>>,
    shutdown: Shutdown,
) {
    // Dropped before the refuser, which makes the last close of the socket.
    let listener = listener;
    let stopping = shutdown.clone().wait();
    tokio::pin!(stopping);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stopping => return,
        };
        match accepted {
            Ok((socket, _)) => {
                let connection = Connection::new(socket, refuser.clone());
                start_session(&service, &receivers, connection, shutdown.clone());
            }
            Err(error) => {
                if let Some(omitted) = NOT_ACCEPTED.permit() {
                    tracing::warn!(%error, omitted, "cannot accept an fdpass connection");
                }
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Starts a task for a new connection, if the quota of its user allows it.
fn start_session(
    service: &Arc<Service>,
    receivers: &Arc<Receivers>,
    connection: Connection,
    shutdown: Shutdown,
) {
    let peer = match fdmap_sys::peer::credentials(connection.socket()) {
        Ok(peer) => peer,
        Err(error) => {
            if let Some(omitted) = UNKNOWN.permit() {
                tracing::warn!(
                    error = error_chain(&error),
                    omitted,
                    "cannot read the peer credentials of an fdpass connection"
                );
            }
            return;
        }
    };
    let caller = Caller::new(peer.uid, peer.gid, peer.groups, service.uid);
    let permit = match service.sessions.acquire(&caller, 1) {
        Ok(permit) => permit,
        Err(error) => return log_refused(&error),
    };
    let process = fdmap_sys::peer::process(connection.socket()).unwrap_or_else(|error| {
        if let Some(omitted) = UNKNOWN.permit() {
            tracing::warn!(
                error = error_chain(&error),
                omitted,
                "the process of an fdpass connection is unknown"
            );
        }
        None
    });
    let from = Peer::new(u32::try_from(peer.pid).unwrap_or(0), process);
    let mut session = Session::new(Arc::clone(service), caller, from);
    // The first packet of each connection can bring userfaultfds.
    if let Err(error) = session.check_closing() {
        return log_refused(&error);
    }
    let receivers = Arc::clone(receivers);
    tokio::spawn(async move {
        let pid = peer.pid;
        // Subordinate users have the receiver of their owner.
        let link = match receivers.session(permit.uid(), connection).await {
            Ok(link) => link,
            Err(error) => return log_unreceived(&error),
        };
        let ended = tokio::select! {
            ended = run_session(&mut session, &link) => ended,
            () = link.abandoned() => Err(SessionError::Abandoned),
            () = shutdown.wait() => Ok(()),
        };
        session.wait_until_released().await;
        session.wait_until_closed().await;
        // The receiver closes its copies.
        drop(link);
        if let Err(error) = ended {
            tracing::debug!(pid, error = error_chain(&error), "fdpass session aborted");
        }
    });
}

fn log_refused(error: &dyn std::error::Error) {
    if let Some(omitted) = REFUSED.permit() {
        tracing::warn!(error = error_chain(error), omitted, "refusing an fdpass connection");
    }
}

fn log_unreceived(error: &ReceiverError) {
    if let Some(omitted) = NOT_RECEIVED.permit() {
        tracing::warn!(error = error_chain(error), omitted, "refusing an fdpass connection");
    }
}

/// The service disconnected the client.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("no Hello from the client for {HELLO_TIMEOUT:?}")]
    HelloTimeout,
    #[error("the client did not receive its reply for {SEND_TIMEOUT:?}")]
    SendTimeout,
    #[error("the receiver of the user's descriptors does not answer")]
    Abandoned,
    #[error("receiving from the client's receiver")]
    Receive(#[source] io::Error),
    #[error("the client's receiver sent a message without a header")]
    NoHeader,
    #[error("sending to the client's receiver")]
    Send(#[source] io::Error),
}

/// Replies to packets until the client disconnects or a fatal error ends the session.
async fn run_session(session: &mut Session, link: &ReceiverSession) -> Result<(), SessionError> {
    let socket = &link.socket;
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let received = if session.is_open() {
            receive(socket, &mut buffer).await
        } else {
            let received = timeout(HELLO_TIMEOUT, receive(socket, &mut buffer)).await;
            received.map_err(|_| SessionError::HelloTimeout)?
        };
        let Some(received) = received.map_err(SessionError::Receive)? else { return Ok(()) };
        let message = &buffer[..received.len];
        let (header, bytes) = PacketHeader::decode(message).ok_or(SessionError::NoHeader)?;
        let packet = Packet {
            bytes,
            truncated: header.truncated,
            descriptors: usize::try_from(header.descriptors).unwrap_or(usize::MAX),
            descriptors_lost: header.descriptors_lost || received.descriptors_lost,
            foreign_descriptors: header.foreign,
        };
        // Cancels the operation if the client disconnects.
        let handled = session.handle(packet, received.descriptors);
        let reply = tokio::select! {
            reply = handled => reply,
            () = disconnected(socket) => return Ok(()),
        };
        let sent = timeout(SEND_TIMEOUT, send(socket, &reply)).await;
        sent.map_err(|_| SessionError::SendTimeout)?.map_err(SessionError::Send)?;
        if reply.last {
            return Ok(());
        }
        session.wait_until_closed().await;
    }
}

async fn receive(socket: &UnixStream, buffer: &mut [u8]) -> io::Result<Option<scm::ReceivedPacket>> {
    socket
        .async_io(Interest::READABLE, || scm::receive(socket.as_fd(), buffer).map_err(io::Error::from))
        .await
}

async fn send(socket: &UnixStream, reply: &SessionReply) -> io::Result<()> {
    let bytes = reply.message.encode_to_vec();
    let descriptors: Vec<_> = reply.descriptors.iter().map(AsFd::as_fd).collect();
    socket
        .async_io(Interest::WRITABLE, || {
            scm::send(socket.as_fd(), &bytes, &descriptors).map_err(io::Error::from)
        })
        .await
}

/// Completes when the client has closed the connection. A client that has shut down only its sending half still waits for its
/// reply.
async fn disconnected(socket: &UnixStream) {
    loop {
        match socket.ready(Interest::READABLE | Interest::WRITABLE).await {
            // The socket is almost always writable, so this is a poll.
            Ok(ready) if !ready.is_write_closed() => tokio::time::sleep(DISCONNECT_POLL_INTERVAL).await,
            _ => return,
        }
    }
}
