//! Connections.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::transport::{self, Certificate, Channel, ClientTlsConfig, Identity, Uri};
use tower::service_fn;

use crate::{ClientError, Endpoint, Timeouts};

/// What the service may send ahead of our reading on one stream, bytes: a scan is not held up by round trips.
const STREAM_WINDOW: u32 = 8 << 20;
/// The same for all streams of a connection together.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// The service may send a whole message of page states in one frame: in frames of the default 16 KiB it takes half as long
/// again (docs/performance.md).
const MAX_FRAME: u32 = 256 << 10;
/// A service that is silent in mid-call is pinged after so long.
const PING_EVERY: Duration = Duration::from_secs(10);
/// A service that does not answer a ping in this time is gone.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// A service by TCP.
#[derive(Clone, Debug)]
pub struct TlsAddress {
    /// Such as `https://host:port`.
    pub uri: String,
    /// The certificates.
    pub tls: Tls,
}

/// Certificates in PEM.
#[derive(Clone, Debug)]
pub struct Tls {
    /// The authority that signs the service's certificate.
    pub ca: PathBuf,
    /// Our own certificate.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The name in the service's certificate, if it is not the host's in the URI.
    pub server_name: Option<String>,
}

pub(super) async fn unix(endpoint: &Endpoint, timeouts: Timeouts) -> Result<Channel, ClientError> {
    let path = endpoint.socket.clone();
    let shown = path.display().to_string();
    // The URI only fills the request's headers; the connector goes to the socket.
    let target = configured(transport::Endpoint::from_static("http://fdmapd.invalid"));
    let connector = service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    connected(shown, timeouts, target.connect_with_connector(connector)).await
}

pub(super) async fn tls(address: &TlsAddress, timeouts: Timeouts) -> Result<Channel, ClientError> {
    let read = |path: &PathBuf| {
        std::fs::read(path).map_err(|error| ClientError::Path { what: "reading", path: path.clone(), error })
    };
    let Tls { ca, cert, key, server_name } = &address.tls;
    let mut config = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(read(ca)?))
        .identity(Identity::from_pem(read(cert)?, read(key)?));
    if let Some(name) = server_name {
        config = config.domain_name(name);
    }
    let unreachable = |error: tonic::transport::Error| ClientError::Unreachable {
        place: address.uri.clone(),
        reason: cause(&error),
    };
    let endpoint = transport::Endpoint::from_shared(address.uri.clone()).map_err(unreachable)?;
    let endpoint = endpoint.tls_config(config).map_err(unreachable)?;
    connected(address.uri.clone(), timeouts, configured(endpoint).connect()).await
}

fn configured(endpoint: transport::Endpoint) -> transport::Endpoint {
    endpoint
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .tcp_nodelay(true)
}

async fn connected(
    place: String,
    timeouts: Timeouts,
    connecting: impl Future<Output = Result<Channel, tonic::transport::Error>>,
) -> Result<Channel, ClientError> {
    let after = timeouts.connect;
    match timeout(after, connecting).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(error)) => Err(ClientError::Unreachable { place, reason: cause(&error) }),
        Err(_) => Err(ClientError::TimedOut { what: "a connection", after }),
    }
}

/// The innermost cause: tonic's own words say no more than "transport error".
fn cause(error: &dyn Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
