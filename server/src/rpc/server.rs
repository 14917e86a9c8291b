//! The listening sockets of gRPC.

use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::v1::files_server::FilesServer;
use fdmap_proto::v1::host_server::HostServer;
use fdmap_proto::v1::pages_server::PagesServer;
use fdmap_proto::v1::tracking_server::TrackingServer;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Server, ServerTlsConfig};

use super::peer::TcpPeerStream;
use super::{Identities, PeerStream, Rpc};
use crate::service::{Service, Stop};

/// The longest request, bytes: as many page indexes as a Lookup may ever have, and some more.
pub(crate) const MAX_REQUEST: usize = 256 << 10;
/// A peer that does not answer a ping in this time is gone.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a silent peer is pinged.
const PING_EVERY: Duration = Duration::from_secs(30);
/// Calls under way at once on one connection.
const CALLS: u32 = 64;
/// TCP connections at once, of all peers together: who it is is known only after the handshake.
const TCP_CONNECTIONS: usize = 256;
/// A TLS handshake takes no longer.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Where to listen.
#[derive(Debug)]
pub struct Listeners {
    /// The unix socket.
    pub unix: UnixListener,
    /// TCP with mutual TLS.
    pub tcp: Option<(TcpListener, ServerTlsConfig)>,
}

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Reflection's own descriptors cannot be read.
    #[error("setting up server reflection")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// A socket.
    #[error("serving gRPC")]
    Transport(#[from] tonic::transport::Error),
}

/// Serves until it is to stop, and then until the calls under way are.
///
/// # Errors
/// [`ServeError`]
pub async fn serve(
    service: Arc<Service>,
    identities: Identities,
    listeners: Listeners,
    stop: Stop,
) -> Result<(), ServeError> {
    let (health, health_service) = tonic_health::server::health_reporter();
    let rpc = Rpc { service: Arc::clone(&service), identities: Arc::new(identities) };
    health.set_serving::<FilesServer<Rpc>>().await;
    health.set_serving::<PagesServer<Rpc>>().await;
    health.set_serving::<TrackingServer<Rpc>>().await;
    health.set_serving::<HostServer<Rpc>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(fdmap_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let routes = Routes::new(FilesServer::new(rpc.clone()).max_decoding_message_size(MAX_REQUEST))
        .add_service(PagesServer::new(rpc.clone()).max_decoding_message_size(MAX_REQUEST))
        .add_service(TrackingServer::new(rpc.clone()).max_decoding_message_size(MAX_REQUEST))
        .add_service(HostServer::new(rpc).max_decoding_message_size(MAX_REQUEST))
        .add_service(health_service)
        .add_service(reflection().build_v1().map_err(ServeError::Reflection)?)
        .add_service(reflection().build_v1alpha().map_err(ServeError::Reflection)?);

    let incoming = UnixListenerStream::new(listeners.unix).filter_map(move |stream| {
        let stream = match stream {
            Ok(stream) => stream,
            // Out of descriptors, most likely: the listener goes on when there are some again.
            Err(error) => {
                tracing::warn!(%error, "accepting a connection");
                return None;
            }
        };
        match PeerStream::new(stream, &service) {
            Ok(stream) => Some(Ok::<_, std::io::Error>(stream)),
            Err(error) => {
                tracing::warn!(error = fdmap_proto::error_chain(&error), "turning a connection away");
                None
            }
        }
    });
    let unix =
        builder().add_routes(routes.clone()).serve_with_incoming_shutdown(incoming, stop.clone().wait());
    let Some((listener, tls)) = listeners.tcp else { return Ok(unix.await?) };
    let places = Arc::new(Semaphore::new(TCP_CONNECTIONS));
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true)).filter_map(move |stream| {
        let stream = stream.inspect_err(|error| tracing::warn!(%error, "accepting a TCP connection")).ok()?;
        let Ok(permit) = Arc::clone(&places).try_acquire_owned() else {
            tracing::warn!("turning a TCP connection away: there are {TCP_CONNECTIONS} already");
            return None;
        };
        Some(Ok::<_, std::io::Error>(TcpPeerStream::counted(stream, permit)))
    });
    let tcp = builder()
        .tls_config(tls.timeout(HANDSHAKE))?
        .add_routes(routes)
        .serve_with_incoming_shutdown(incoming, stop.wait());
    tokio::try_join!(unix, tcp)?;
    Ok(())
}

fn builder() -> Server {
    Server::builder()
        .max_concurrent_streams(CALLS)
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
}
