//! Start and stop of the service: descriptors, probe, sockets, signals and the periodic sweep.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::error_chain;
use fdmap_proto::units::FileId;
use fdmap_sys::SyscallError;
use nix::sys::stat::{Mode, umask};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::Config;
use crate::descriptor_limit;
use crate::fdpass::{Receivers, Refuser};
use crate::files::KeepPolicy;
use crate::probe::capabilities::{Availability, Capability, HostCapabilities};
use crate::probe::select::{SelectError, select};
use crate::rpc::{Closers, Listeners, ServeError, TcpConfig};
use crate::service::{Service, Shutdown};
use crate::sockets::{SocketError, Sockets};
use crate::store::{FdStore, StoredFd};
use crate::tracking::{EventSources, RecoveredFile};
use crate::{fdpass, own_program, privileges, rpc, store, watchdog};

/// Bounds of the interval between sweeps, which is `--unused-file-timeout` within them.
const MIN_SWEEP_INTERVAL: Duration = Duration::from_secs(1);
const MAX_SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Time for the calls in progress to complete after SIGTERM or SIGINT.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for scans in progress to end. No client waits for their results.
const RUNTIME_SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);
/// Time for holders to get the userfaultfds that they close.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// The service cannot start or cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    #[error("detecting the capabilities of this host")]
    Capabilities(#[from] SyscallError),
    #[error("giving up capabilities")]
    Privileges(#[source] SyscallError),
    #[error(transparent)]
    Select(#[from] SelectError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Tls(#[from] rpc::TlsError),
    #[error(transparent)]
    Tcp(#[from] rpc::TcpError),
    #[error("creating the threads that start processes")]
    Starter(#[source] io::Error),
    #[error("starting the async runtime")]
    Runtime(#[source] io::Error),
    #[error("duplicating the listening sockets")]
    Listeners(#[source] io::Error),
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A server task panicked or returned before the shutdown.
    #[error("the {0} server ended unexpectedly")]
    Ended(&'static str),
}

/// Runs the service until SIGTERM or SIGINT.
///
/// # Errors
/// [`DaemonError`]
pub fn run(config: &Config) -> Result<(), DaemonError> {
    // New files and sockets are accessible to owner and group only.
    umask(Mode::from_bits_truncate(0o117));
    descriptor_limit::raise(&config.limits.limits());
    // Before the process opens any other descriptor.
    let inherited = store::inherited();
    let event_sources =
        Arc::new(EventSources::new(FdStore::from_env(&inherited), !config.no_call_trace, true)?);
    let host = HostCapabilities::detect(&event_sources)?;
    let is_missing = |capability: &&Capability| {
        capability.availability != Availability::Available && !capability.impact.is_empty()
    };
    for Capability { name, detail, impact, .. } in host.capabilities.iter().filter(is_missing) {
        tracing::info!(capability = %name, detail, %impact, "unavailable on this host");
    }
    let probe = select(config.probe, &host.probes)?;
    // Loads the last programs.
    event_sources.load_space_programs();
    privileges::drop_unneeded(&host, config.tcp.is_some()).map_err(DaemonError::Privileges)?;
    own_program::prepare().map_err(DaemonError::Starter)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(DaemonError::Runtime)?;
    let keep = KeepPolicy::new(config.allow_keep.clone());
    let service =
        Service::new(host, probe, event_sources, config.limits.limits(), keep, config.fdpass_path());
    // Ends with the runtime.
    runtime.spawn(watchdog::run());
    restore(&service, inherited);
    let event_sources = Arc::clone(service.event_sources());
    let result = runtime.block_on(serve(config, service));
    runtime.shutdown_timeout(RUNTIME_SHUTDOWN_TIMEOUT);
    event_sources.holders().wait_until_sent(RELEASE_TIMEOUT);
    result
}

/// Recovers the files of the previous process whose descriptors were stored, the newest first: of files with one name and owner, it
/// keeps the name.
fn restore(service: &Service, inherited: Vec<(FileId, StoredFd, OwnedFd)>) {
    let mut files: BTreeMap<FileId, BTreeMap<StoredFd, OwnedFd>> = BTreeMap::new();
    for (file, role, fd) in inherited {
        files.entry(file).or_default().insert(role, fd);
    }
    let failed = |id: FileId, error: &dyn std::error::Error| {
        tracing::error!(%id, error = error_chain(error), "cannot recover a stored file");
    };
    let read = files.into_iter().filter_map(|(id, descriptors)| {
        let recovered = RecoveredFile::new(id, descriptors, service.page_size, service.event_sources());
        recovered.inspect_err(|error| failed(id, error)).ok()
    });
    let mut recovered: Vec<_> = read.collect();
    recovered.sort_by_key(|file| Reverse(file.info.created));
    for file in recovered {
        let id = file.info.id;
        match service.registry.restore(file, &service.tracked) {
            Ok(file) => tracing::info!(%id, %file, "recovered a stored file"),
            Err(error) => failed(id, &error),
        }
    }
}

async fn serve(config: &Config, service: Arc<Service>) -> Result<(), DaemonError> {
    let tcp = config.tcp.map(|address| TcpConfig::load(address, &config.tls)).transpose()?;
    let sockets = Sockets::bind(config)?;
    let tcp = tcp.map(TcpConfig::bind).transpose()?;
    let tcp_address = tcp.as_ref().and_then(rpc::TcpServer::address);
    let Sockets { grpc, fdpass, pass_descriptors, locks: _locks } = sockets;
    let (shutdown_sender, shutdown) = Shutdown::new();
    let receivers = Receivers::new(service.limits.helper_idle_timeout, shutdown.clone());
    let refuser = if pass_descriptors { Some(start_refuser([&grpc, &fdpass])?) } else { None };
    let closers = refuser.clone().map(|refuser| Closers { receivers: Arc::clone(&receivers), refuser });
    let listeners = Listeners { unix: grpc, closers, tcp };
    let mut grpc = tokio::spawn(rpc::serve(Arc::clone(&service), listeners, shutdown.clone()));
    let serving = fdpass::serve(Arc::clone(&service), fdpass, receivers, refuser, shutdown.clone());
    let mut fdpass = tokio::spawn(serving);
    let sweeper = tokio::spawn(sweep_periodically(Arc::clone(&service), shutdown));

    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        probe = %service.probe.kind(),
        socket = %config.socket_path().display(),
        fdpass_socket = %config.fdpass_path().display(),
        tcp = ?tcp_address,
        "ready"
    );
    // Fails outside systemd.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);

    let result = tokio::select! {
        () = stop_signal() => Ok(()),
        ended = &mut grpc => match ended {
            Ok(Err(error)) => Err(error.into()),
            Ok(Ok(())) | Err(_) => Err(DaemonError::Ended("gRPC")),
        },
        _ = &mut fdpass => Err(DaemonError::Ended("fdpass")),
    };
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    tracing::info!("stopping");
    let _ = shutdown_sender.send(true);
    sweeper.abort();
    // Watch streams have no end.
    if !grpc.is_finished() && tokio::time::timeout(SHUTDOWN_TIMEOUT, &mut grpc).await.is_err() {
        grpc.abort();
    }
    fdpass.abort();
    result
}

/// Starts the process that makes the last close of the listening sockets.
fn start_refuser(listeners: [&UnixListener; 2]) -> Result<Arc<Refuser>, DaemonError> {
    let copies = listeners.into_iter().map(|listener| listener.as_fd().try_clone_to_owned());
    let copies = copies.collect::<io::Result<_>>().map_err(DaemonError::Listeners)?;
    Ok(Refuser::start(copies))
}

/// Waits for SIGTERM or SIGINT.
async fn stop_signal() {
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        // Without handlers, the default action of the signals ends the process.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

async fn sweep_periodically(service: Arc<Service>, shutdown: Shutdown) {
    let stopping = shutdown.wait();
    tokio::pin!(stopping);
    let interval = service.limits.unused_file_timeout.clamp(MIN_SWEEP_INTERVAL, MAX_SWEEP_INTERVAL);
    loop {
        tokio::select! {
            () = tokio::time::sleep(interval) => {
                let service = Arc::clone(&service);
                // A failed sweep is repeated at the next interval.
                let sweep = move || {
                    own_program::reaper::reap();
                    service.sweep();
                };
                let _ = tokio::task::spawn_blocking(sweep).await;
            }
            () = &mut stopping => return,
        }
    }
}
