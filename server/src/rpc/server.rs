//! The gRPC server on the unix socket and on TCP.

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
use crate::service::{Service, Shutdown};

/// Size of one request. The largest Lookup that the service can be configured for fits.
pub(crate) const MAX_REQUEST_BYTES: usize = 256 << 10;
/// The server closes a connection whose peer does not answer a ping in this time.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// The server pings a peer that has been silent for this time.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Concurrent calls on one connection.
const MAX_CONCURRENT_CALLS: u32 = 64;
/// Concurrent TCP connections of all peers together. The peer is unknown before the handshake, so no user can be charged.
const MAX_TCP_CONNECTIONS: usize = 256;
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The sockets to serve.
#[derive(Debug)]
pub struct Listeners {
    pub unix: UnixListener,
    /// TCP requires mutual TLS.
    pub tcp: Option<(TcpListener, ServerTlsConfig)>,
}

/// The gRPC server failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("loading the file descriptor sets for server reflection")]
    Reflection(#[source] tonic_reflection::server::Error),
    #[error("serving gRPC")]
    Transport(#[from] tonic::transport::Error),
}

/// Serves until `shutdown`, then completes the calls in progress.
///
/// # Errors
/// [`ServeError`]
pub async fn serve(
    service: Arc<Service>,
    identities: Identities,
    listeners: Listeners,
    shutdown: Shutdown,
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
    let routes = Routes::new(FilesServer::new(rpc.clone()).max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(PagesServer::new(rpc.clone()).max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(TrackingServer::new(rpc.clone()).max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(HostServer::new(rpc).max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(health_service)
        .add_service(reflection().build_v1().map_err(ServeError::Reflection)?)
        .add_service(reflection().build_v1alpha().map_err(ServeError::Reflection)?);

    let incoming = UnixListenerStream::new(listeners.unix).filter_map(move |stream| {
        let stream = match stream {
            Ok(stream) => stream,
            // Most likely EMFILE: accept succeeds again once descriptors are free.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a gRPC connection");
                return None;
            }
        };
        match PeerStream::new(stream, &service) {
            Ok(stream) => Some(Ok::<_, std::io::Error>(stream)),
            Err(error) => {
                tracing::warn!(error = fdmap_proto::error_chain(&error), "refusing a gRPC connection");
                None
            }
        }
    });
    let unix =
        builder().add_routes(routes.clone()).serve_with_incoming_shutdown(incoming, shutdown.clone().wait());
    let Some((listener, tls)) = listeners.tcp else { return Ok(unix.await?) };
    let connections = Arc::new(Semaphore::new(MAX_TCP_CONNECTIONS));
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true)).filter_map(move |stream| {
        let stream =
            stream.inspect_err(|error| tracing::warn!(%error, "cannot accept a TCP connection")).ok()?;
        let Ok(permit) = Arc::clone(&connections).try_acquire_owned() else {
            tracing::warn!(limit = MAX_TCP_CONNECTIONS, "refusing a TCP connection: too many are open");
            return None;
        };
        Some(Ok::<_, std::io::Error>(TcpPeerStream::with_permit(stream, permit)))
    });
    let tcp = builder()
        .tls_config(tls.timeout(TLS_HANDSHAKE_TIMEOUT))?
        .add_routes(routes)
        .serve_with_incoming_shutdown(incoming, shutdown.wait());
    tokio::try_join!(unix, tcp)?;
    Ok(())
}

fn builder() -> Server {
    Server::builder()
        .max_concurrent_streams(MAX_CONCURRENT_CALLS)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
}
