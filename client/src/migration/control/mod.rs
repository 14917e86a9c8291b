//! The gRPC service `fdmap.v1.MigrationControl`, by which other programs watch and steer a migration, on a unix socket.
//!
//! It serves root and the user of this process only. It decides nothing: the migration reads the requests in [`MigrationMonitor`] and
//! [`Control`].

mod progress;
mod service;

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::v1::migration_control_server::MigrationControlServer;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;

use super::monitor::MigrationMonitor;
use crate::image::Control;
use service::ControlService;

/// Time for the last answers after the end of the migration.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay after a failed accept(2), most likely `EMFILE`.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Interval and timeout of pings.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const MAX_CONCURRENT_STREAMS: u32 = 16;
/// Requests have a few bytes.
const MAX_REQUEST_BYTES: usize = 4096;

/// The service, while it serves.
#[derive(Debug)]
pub struct ControlServer {
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
}

impl ControlServer {
    /// Serves at a listening socket, on the runtime of the caller.
    ///
    /// # Errors
    /// [`io::Error`] of the socket.
    pub fn start(
        listener: UnixListener,
        monitor: Arc<MigrationMonitor>,
        control: Arc<Control>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let service = MigrationControlServer::new(ControlService::new(monitor, control))
            .max_decoding_message_size(MAX_REQUEST_BYTES);
        let (connections, incoming) = mpsc::channel(1);
        let accepting = tokio::spawn(accept(listener, connections));
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = Server::builder()
            .http2_keepalive_interval(Some(PING_INTERVAL))
            .http2_keepalive_timeout(Some(PING_INTERVAL))
            .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
            .add_service(service)
            .serve_with_incoming_shutdown(ReceiverStream::new(incoming), async { drop(stopped.await) });
        let serving = tokio::spawn(async move {
            // Connections that fail end alone.
            let _ = serving.await;
            accepting.abort();
        });
        Ok(Self { stop, serving })
    }

    /// Ends it when the calls in progress have their answers. The migration has ended.
    pub async fn end(self) {
        let Self { stop, mut serving } = self;
        drop(stop);
        if timeout(END_TIMEOUT, &mut serving).await.is_err() {
            serving.abort();
        }
    }
}

/// Passes on the connections of users that are served. The others are closed.
async fn accept(listener: tokio::net::UnixListener, connections: mpsc::Sender<io::Result<UnixStream>>) {
    loop {
        match listener.accept().await {
            Ok((connection, _)) if is_served(&connection) => {
                if connections.send(Ok(connection)).await.is_err() {
                    return;
                }
            }
            Ok(_) => {}
            Err(_) => sleep(ACCEPT_RETRY_DELAY).await,
        }
    }
}

fn is_served(connection: &UnixStream) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    fdmap_sys::peer::credentials(connection).is_ok_and(|peer| is_permitted(peer.uid, own))
}

/// Pure.
const fn is_permitted(peer: u32, own: u32) -> bool {
    peer == 0 || peer == own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_the_own_user_are_served() {
        for (peer, own, permitted) in [(0, 0, true), (0, 5, true), (5, 5, true), (6, 5, false), (5, 0, false)]
        {
            assert_eq!(is_permitted(peer, own), permitted, "{peer} {own}");
        }
    }
}
