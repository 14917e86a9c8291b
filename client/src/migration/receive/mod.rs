//! The destination of a migration: a file of the service on this host, which another host fills. See `service` for its states.
//!
//! It runs in the caller's process: the memory of the file is charged to the caller's cgroup, and the service waits for no network.

mod file;
mod incoming;
mod service;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::v1::migration_server::MigrationServer;
use fdmap_proto::{Access, FileInfo, Lifetime};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use super::error::MigrationError;
use super::monitor::{MigrationMonitor, MigrationState};
use crate::image::Control;
use crate::{Client, FdpassClient};
use incoming::NewFile;
use service::{MigrationService, Outcome};

/// Interval and timeout of pings: a source that has vanished is noticed.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// A connection completes its TLS handshake in this time.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the last messages, and for the deletion of a file that is not complete.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of looks whether it was cancelled, or the source is late.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// HTTP/2 windows of a connection and of its stream, bytes.
const WINDOW_BYTES: u32 = 16 << 20;
/// Maximum HTTP/2 frame, bytes.
const MAX_FRAME_BYTES: u32 = 256 << 10;

/// How a file is received.
#[derive(Clone, Debug)]
pub struct ReceiveOptions {
    /// Name of the file; `None`: that at the source.
    pub name: Option<String>,
    /// Owner, group and rights; `None`: those at the source with `takes_access`, else the caller's.
    pub access: Option<Access>,
    /// The caller is an administrator.
    pub takes_access: bool,
    /// As in [`crate::grpc::CreateFile`].
    pub lifetime: Option<Lifetime>,
    /// How long a broken connection may stay broken.
    pub reconnect_within: Duration,
    pub monitor: Arc<MigrationMonitor>,
}

/// A file that was received.
#[derive(Debug)]
pub struct ReceivedFile {
    pub info: FileInfo,
    /// Open for reading and writing: a file that is not kept ends when no process uses it.
    pub descriptor: OwnedFd,
}

/// Certificate files in PEM format.
#[derive(Clone, Copy, Debug)]
pub struct ReceiverTls<'a> {
    /// Certificate of the authority that signed the certificates of the sources that may connect.
    pub ca: &'a Path,
    pub cert: &'a Path,
    pub key: &'a Path,
}

/// A listening socket for one migration.
#[derive(Debug)]
pub struct MigrationListener {
    listener: TcpListener,
    tls: ServerTlsConfig,
}

impl MigrationListener {
    /// Listens at an address, such as `0.0.0.0:7000`.
    ///
    /// # Errors
    /// [`MigrationError::Serve`]
    pub async fn bind(address: &str, tls: ReceiverTls<'_>) -> Result<Self, MigrationError> {
        let read = |path: &Path| std::fs::read(path).map_err(failed(format!("reading {}", path.display())));
        let tls = ServerTlsConfig::new()
            .timeout(HANDSHAKE_TIMEOUT)
            .identity(Identity::from_pem(read(tls.cert)?, read(tls.key)?))
            .client_ca_root(Certificate::from_pem(read(tls.ca)?));
        let listener = TcpListener::bind(address).await.map_err(failed(format!("listening at {address}")))?;
        Ok(Self { listener, tls })
    }

    /// The address at which it listens.
    ///
    /// # Errors
    /// [`MigrationError::Serve`]
    pub fn address(&self) -> Result<SocketAddr, MigrationError> {
        self.listener.local_addr().map_err(failed("getsockname of the listening socket".to_owned()))
    }

    /// Receives one file into the service on this host. `control` counts the pages.
    ///
    /// # Errors
    /// [`MigrationError`]; the service has no file.
    pub async fn receive(
        self,
        client: Client,
        fdpass: FdpassClient,
        options: ReceiveOptions,
        control: Arc<Control>,
    ) -> Result<ReceivedFile, MigrationError> {
        let monitor = Arc::clone(&options.monitor);
        let received = self.receive_watched(client, fdpass, options, control).await;
        match &received {
            Ok(received) => monitor.complete(&received.info, Duration::ZERO, true),
            Err(error) => monitor.fail(error),
        }
        received
    }

    async fn receive_watched(
        self,
        client: Client,
        fdpass: FdpassClient,
        options: ReceiveOptions,
        control: Arc<Control>,
    ) -> Result<ReceivedFile, MigrationError> {
        let monitor = Arc::clone(&options.monitor);
        let within = options.reconnect_within;
        let (deletion, mut deleted) = mpsc::channel(1);
        let file = NewFile { options, client, runtime: Handle::current(), deletion, control };
        let control = Arc::clone(&file.control);
        let service = MigrationService::new(file, fdpass);
        let mut server = Server::builder()
            .tls_config(self.tls)
            .map_err(|error| failed("using the certificates".to_owned())(io::Error::other(error)))?
            .http2_keepalive_interval(Some(PING_INTERVAL))
            .http2_keepalive_timeout(Some(PING_INTERVAL))
            .initial_connection_window_size(WINDOW_BYTES)
            .initial_stream_window_size(WINDOW_BYTES)
            .max_frame_size(MAX_FRAME_BYTES)
            .max_concurrent_streams(4);
        let incoming = TcpIncoming::from(self.listener).with_nodelay(Some(true));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let serving = server
            .add_service(MigrationServer::new(service.clone()))
            .serve_with_incoming_shutdown(incoming, async { drop(stopped.await) });
        let mut serving = tokio::spawn(serving);
        let result = tokio::select! {
            result = wait(&service, within, &control, &monitor) => result,
            ended = &mut serving => Err(ended_early(ended)),
        };
        if let Err(error) = &result {
            // A connection may have it until its source has received that the file exists.
            let _ = timeout(END_TIMEOUT, service.end(&error.to_string())).await;
        }
        drop(stop);
        if timeout(END_TIMEOUT, &mut serving).await.is_err() {
            serving.abort();
        }
        let received = service.take_received();
        drop(service);
        let _ = timeout(END_TIMEOUT, deleted.recv()).await;
        // Also if it was cancelled when the file was complete.
        match (received, result) {
            (Some(received), _) => Ok(received),
            (None, Err(error)) => Err(error),
            (None, Ok(())) => Err(MigrationError::Ended("the file was not received".to_owned())),
        }
    }
}

/// Waits until the migration has ended.
async fn wait(
    service: &MigrationService,
    within: Duration,
    control: &Control,
    monitor: &MigrationMonitor,
) -> Result<(), MigrationError> {
    let mut outcomes = service.outcome();
    loop {
        let outcome = outcomes.borrow_and_update().clone();
        monitor.connect(matches!(outcome, Outcome::Connected), 0);
        if !matches!(outcome, Outcome::Idle) {
            monitor.enter(&MigrationState::Copying);
        }
        let is_over = |since: Instant| since.elapsed() >= within;
        match outcome {
            Outcome::Done(true, _) => return Ok(()),
            // The source has not received that. The file exists all the same.
            Outcome::Done(false, since) if is_over(since) => return Ok(()),
            Outcome::Waiting(since) if is_over(since) => {
                return Err(MigrationError::Ended(format!("the source did not connect for {within:?}")));
            }
            Outcome::Failed(reason) => return Err(MigrationError::Ended(reason)),
            Outcome::Idle | Outcome::Connected | Outcome::Waiting(_) | Outcome::Done(false, _) => {}
        }
        match (control.check(), matches!(*outcomes.borrow(), Outcome::Done(..))) {
            (Err(error), false) => return Err(error.into()),
            (Err(_), true) => return Ok(()),
            (Ok(()), _) => {}
        }
        let _ = timeout(LOOK_INTERVAL, outcomes.changed()).await;
    }
}

fn ended_early(ended: Result<Result<(), tonic::transport::Error>, tokio::task::JoinError>) -> MigrationError {
    let error = match ended {
        Ok(Ok(())) => io::Error::other("it ended"),
        Ok(Err(error)) => io::Error::other(error),
        Err(error) => io::Error::other(error),
    };
    failed("serving connections".to_owned())(error)
}

fn failed(what: String) -> impl FnOnce(io::Error) -> MigrationError {
    move |error| MigrationError::Serve { what, error }
}
