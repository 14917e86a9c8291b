//! The listening end of the fdpass socket.

use fdmap_proto::error_chain;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::MAX_FDPASS_MESSAGE_BYTES;
use fdmap_sys::scm;
use prost::Message as _;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use super::protocol::Arrived;
use super::session::{Answer, Session};
use crate::files::Caller;
use crate::service::{Service, Stop};

/// A client that has not said Hello in this time is sent away.
const GREETING: Duration = Duration::from_secs(10);
/// A client that does not take its answer in this time is sent away.
const TAKING: Duration = Duration::from_secs(10);
/// How long to wait before accepting again when there are no descriptors left.
const BREATH: Duration = Duration::from_millis(100);

/// Serves the fdpass socket until it is to stop.
///
/// `listener` is of `SOCK_SEQPACKET`, from [`scm::listen_at`]: tokio's types are here for their polling only, and nothing
/// is read or written as a stream.
pub async fn serve(service: Arc<Service>, listener: UnixListener, stop: Stop) {
    let stopping = stop.clone().wait();
    tokio::pin!(stopping);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stopping => return,
        };
        match accepted {
            Ok((socket, _)) => begin(&service, socket, stop.clone()),
            Err(error) => {
                tracing::warn!(%error, "accepting a fdpass connection");
                tokio::time::sleep(BREATH).await;
            }
        }
    }
}

/// Starts a session of its own for a new connection, if its user may have one more.
fn begin(service: &Arc<Service>, socket: UnixStream, stop: Stop) {
    let peer = match fdmap_sys::peer::credentials(&socket) {
        Ok(peer) => peer,
        Err(error) => {
            tracing::warn!(error = error_chain(&error), "telling the peer of a fdpass connection");
            return;
        }
    };
    let caller = Caller::new(peer.uid, peer.gid, peer.groups, service.uid);
    let share = match service.sessions.take(&caller, 1) {
        Ok(share) => share,
        Err(error) => {
            tracing::warn!(error = error_chain(&error), "turning a fdpass connection away");
            return;
        }
    };
    let session = Session::new(Arc::clone(service), caller, u32::try_from(peer.pid).unwrap_or(0));
    tokio::spawn(async move {
        let _share = share;
        let pid = peer.pid;
        let ended = tokio::select! {
            ended = converse(session, socket) => ended,
            () = stop.wait() => return,
        };
        if let Err(error) = ended {
            tracing::debug!(pid, error = error_chain(&error), "a fdpass session was broken off");
        }
    });
}

/// Why a session was broken off.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("the client was silent for {GREETING:?}")]
    Silent,
    #[error("the client did not take its answer for {TAKING:?}")]
    Stuck,
    #[error("receiving from the client")]
    Receive(#[source] io::Error),
    #[error("sending to the client")]
    Send(#[source] io::Error),
}

/// Answers packet after packet.
async fn converse(mut session: Session, socket: UnixStream) -> Result<(), Broken> {
    // One byte more than a message may have, so that a longer one is seen to be longer.
    let mut buffer = vec![0; MAX_FDPASS_MESSAGE_BYTES + 1];
    loop {
        let packet = if session.greeted() {
            receive(&socket, &mut buffer).await
        } else {
            timeout(GREETING, receive(&socket, &mut buffer)).await.map_err(|_| Broken::Silent)?
        };
        let Some(packet) = packet.map_err(Broken::Receive)? else { return Ok(()) };
        let arrived = Arrived {
            bytes: &buffer[..packet.len],
            truncated: packet.truncated,
            descriptors: packet.descriptors.len(),
            descriptors_lost: packet.descriptors_lost,
        };
        // Whatever is being worked out for a client that goes meanwhile is given up.
        let answer = tokio::select! {
            answer = session.answer(arrived, packet.descriptors) => answer,
            () = hung_up(&socket) => return Ok(()),
        };
        let sent = timeout(TAKING, send(&socket, &answer)).await.map_err(|_| Broken::Stuck)?;
        sent.map_err(Broken::Send)?;
        if answer.last {
            return Ok(());
        }
    }
}

async fn receive(socket: &UnixStream, buffer: &mut [u8]) -> io::Result<Option<scm::ReceivedPacket>> {
    socket
        .async_io(Interest::READABLE, || scm::receive(socket.as_fd(), buffer).map_err(io::Error::from))
        .await
}

async fn send(socket: &UnixStream, answer: &Answer) -> io::Result<()> {
    let bytes = answer.reply.encode_to_vec();
    let descriptors: Vec<_> = answer.descriptors.iter().map(AsFd::as_fd).collect();
    socket
        .async_io(Interest::WRITABLE, || {
            scm::send(socket.as_fd(), &bytes, &descriptors).map_err(io::Error::from)
        })
        .await
}

/// Done when the client has gone. One that has closed its sending half alone still waits for its answer.
async fn hung_up(socket: &UnixStream) {
    loop {
        match socket.ready(Interest::READABLE | Interest::WRITABLE).await {
            // It can be written to nearly always: look again later.
            Ok(ready) if !ready.is_write_closed() => tokio::time::sleep(Duration::from_millis(20)).await,
            _ => return,
        }
    }
}
