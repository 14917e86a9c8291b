//! The gRPC server on the unix socket and on TCP.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::v1::files_server::{self, FilesServer};
use fdmap_proto::v1::host_server::{self, HostServer};
use fdmap_proto::v1::pages_server::{self, PagesServer};
use fdmap_proto::v1::tracking_server::{self, TrackingServer};
use tokio::net::UnixListener;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::http;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::{Code, Status};
use tower::layer::util::{Identity, Stack};
use tower::util::MapResponseLayer;

use super::body_layer::BoundBodies;
use super::unix::{Closers, accept};
use super::unreceived::{CONNECTION_WINDOW_BYTES, MAX_CONCURRENT_CALLS, STREAM_WINDOW_BYTES};
use super::{Rpc, TcpServer};
use crate::service::{Service, Shutdown};

/// Size of one request. The largest Lookup that the service can be configured for fits.
pub(crate) const MAX_REQUEST_BYTES: usize = 256 << 10;
/// The server closes a connection whose peer does not answer a ping in this time.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// The server pings a peer that has been silent for this time.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Size of one request for reflection: a client may leave it incomplete for as long as it wants.
const MAX_REFLECTION_REQUEST_BYTES: usize = 4 << 10;

type Responses = http::Response<tonic::body::Body>;
type Layers = Stack<BoundBodies, Stack<MapResponseLayer<fn(Responses) -> Responses>, Identity>>;

/// The sockets to serve.
pub struct Listeners {
    pub unix: UnixListener,
    /// Clients of `unix` can pass descriptors, which these processes close.
    pub(crate) closers: Option<Closers>,
    pub tcp: Option<TcpServer>,
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
    listeners: Listeners,
    shutdown: Shutdown,
) -> Result<(), ServeError> {
    let (health, health_service) = tonic_health::server::health_reporter();
    let rpc = Rpc { service: Arc::clone(&service) };
    health.set_serving::<FilesServer<Rpc>>().await;
    health.set_serving::<PagesServer<Rpc>>().await;
    health.set_serving::<TrackingServer<Rpc>>().await;
    health.set_serving::<HostServer<Rpc>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(fdmap_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // Not those of other programs.
            .with_service_name(files_server::SERVICE_NAME)
            .with_service_name(pages_server::SERVICE_NAME)
            .with_service_name(tracking_server::SERVICE_NAME)
            .with_service_name(host_server::SERVICE_NAME)
            .with_service_name(tonic_health::pb::health_server::SERVICE_NAME)
    };
    let routes = Routes::new(FilesServer::new(rpc.clone()).max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(PagesServer::new(rpc.clone()).max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(TrackingServer::new(rpc.clone()).max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(HostServer::new(rpc).max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(health_service.max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(
            (reflection().build_v1().map_err(ServeError::Reflection)?)
                .max_decoding_message_size(MAX_REFLECTION_REQUEST_BYTES),
        )
        .add_service(
            (reflection().build_v1alpha().map_err(ServeError::Reflection)?)
                .max_decoding_message_size(MAX_REFLECTION_REQUEST_BYTES),
        );

    let Listeners { unix, closers, tcp } = listeners;
    let tcp = tcp.map(|tcp| tcp.start(Arc::clone(&service), shutdown.clone()));
    let incoming = accept(unix, closers, service, shutdown.clone()).map(Ok::<_, io::Error>);
    let unix =
        builder().add_routes(routes.clone()).serve_with_incoming_shutdown(incoming, shutdown.clone().wait());
    let Some((streams, accepting)) = tcp else { return Ok(unix.await?) };
    let incoming = ReceiverStream::new(streams).map(Ok::<_, io::Error>);
    let tcp = builder().add_routes(routes).serve_with_incoming_shutdown(incoming, shutdown.wait());
    let accepting = async {
        accepting.await;
        Ok(())
    };
    tokio::try_join!(unix, tcp, accepting)?;
    Ok(())
}

/// Replaces the status INTERNAL of a request that is no valid protobuf message by INVALID_ARGUMENT.
fn refuse_malformed<B>(mut response: http::Response<B>) -> http::Response<B> {
    // The message is percent-encoded.
    const UNDECODABLE: &str = "failed%20to%20decode%20Protobuf%20message";
    let starts = |name, value: &str| {
        let found = response.headers().get(name).and_then(|found| found.to_str().ok());
        found.is_some_and(|found| found.starts_with(value))
    };
    if starts(Status::GRPC_STATUS, "13") && starts(Status::GRPC_MESSAGE, UNDECODABLE) {
        let code = http::HeaderValue::from(Code::InvalidArgument as i32);
        response.headers_mut().insert(Status::GRPC_STATUS, code);
    }
    response
}

fn builder() -> Server<Layers> {
    Server::builder()
        .layer(MapResponseLayer::new(refuse_malformed as fn(_) -> _))
        .layer(BoundBodies)
        .max_concurrent_streams(MAX_CONCURRENT_CALLS)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
}
