//! Transport channels: unix socket and TCP with mutual TLS.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fdmap_sys::scm;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tonic::transport::{self, Certificate, Channel, ClientTlsConfig, Identity, Uri};
use tower::service_fn;

use crate::{ClientError, Endpoint, Timeouts, trust};

/// Flow control window of one stream, bytes. A scan does not wait for window updates.
const STREAM_WINDOW_BYTES: u32 = 8 << 20;
/// Flow control window of the connection, bytes.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// Maximum HTTP/2 frame, bytes: one message of page states fits into one frame. With the default of 16 KiB a scan takes
/// 50 % longer (docs/performance.md).
const MAX_FRAME_BYTES: u32 = 256 << 10;
/// Interval of HTTP/2 pings during a call.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// The connection is closed if a ping is not answered in this time.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Address of a service over TCP.
#[derive(Clone, Debug)]
pub struct TlsAddress {
    /// URI such as `https://host:port`.
    pub uri: String,
    /// Certificates for mutual TLS.
    pub tls: Tls,
}

/// Certificate files in PEM format.
#[derive(Clone, Debug)]
pub struct Tls {
    /// Certificate of the authority that signed the service's certificate.
    pub ca: PathBuf,
    /// Client certificate.
    pub cert: PathBuf,
    /// Private key of the client certificate.
    pub key: PathBuf,
    /// Name in the service's certificate; `None`: the host name of the URI.
    pub server_name: Option<String>,
}

pub(super) async fn unix(endpoint: &Endpoint, timeouts: Timeouts) -> Result<Channel, ClientError> {
    let path = endpoint.socket.clone();
    let shown = path.display().to_string();
    // The URI fills the request headers only; the connector connects to the socket.
    let target = configured(transport::Endpoint::from_static("http://fdmapd.invalid"));
    let connector = service_fn(move |_: Uri| {
        let path = path.clone();
        async move {
            let stream = connect(path.clone(), timeouts.connect).await?;
            trust::check_service(&stream, &path).map_err(io::Error::other)?;
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    connected(shown, timeouts, target.connect_with_connector(connector)).await
}

/// Connects in a thread that waits. While other clients fill the queue of the listening socket, connect(2) of a non-blocking socket
/// fails at once, and each attempt may find the queue full again; waiting threads get their turn.
async fn connect(path: PathBuf, within: Duration) -> io::Result<UnixStream> {
    // The caller reports the timeout. This longer one ends the thread.
    let within = within.saturating_add(Duration::from_secs(1));
    let connecting = spawn_blocking(move || scm::connect_stream_to(&path, within));
    let socket = connecting.await?.map_err(|error| io::Error::from(error.errno))?;
    let stream = std::os::unix::net::UnixStream::from(socket);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

pub(crate) async fn tls(address: &TlsAddress, timeouts: Timeouts) -> Result<Channel, ClientError> {
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
        address: address.uri.clone(),
        reason: cause(&error),
    };
    let endpoint = transport::Endpoint::from_shared(address.uri.clone()).map_err(unreachable)?;
    let endpoint = endpoint.tls_config(config).map_err(unreachable)?;
    connected(address.uri.clone(), timeouts, configured(endpoint).connect()).await
}

fn configured(endpoint: transport::Endpoint) -> transport::Endpoint {
    endpoint
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(MAX_FRAME_BYTES)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .tcp_nodelay(true)
}

async fn connected(
    address: String,
    timeouts: Timeouts,
    connecting: impl Future<Output = Result<Channel, tonic::transport::Error>>,
) -> Result<Channel, ClientError> {
    let after = timeouts.connect;
    match timeout(after, connecting).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(error)) => Err(ClientError::Unreachable { address, reason: cause(&error) }),
        Err(_) => Err(ClientError::TimedOut { call: "connect", after }),
    }
}

/// Text of the innermost source: the outer error of tonic is only "transport error".
pub(crate) fn cause(error: &dyn Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
