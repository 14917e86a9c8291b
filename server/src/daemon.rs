//! Starting and stopping the service: sockets, signals, housekeeping.

use fdmap_proto::error_chain;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fdmap_proto::units::FileId;
use fdmap_sys::{SyscallError, scm};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Gid, Group};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};

use crate::config::Config;
use crate::probe::capabilities::{Availability, Capability, HostCapabilities};
use crate::probe::select::{SelectError, select};
use crate::rpc::{Identities, Listeners, ServeError};
use crate::service::{Service, Stop};
use crate::store::{Kept, Store};
use crate::tracking::{EventSources, RecoveredFile};
use crate::{fdpass, rpc, store};

/// How often to let go of what nobody needs any more.
const SWEEP: Duration = Duration::from_secs(10);
/// How long calls under way may go on after the service was told to stop.
const GRACE: Duration = Duration::from_secs(2);

/// Why the service does not run.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    #[error("detecting the capabilities of this host")]
    Capabilities(#[from] SyscallError),
    #[error(transparent)]
    Select(#[from] SelectError),
    /// A file or folder.
    #[error("{what} {path}")]
    Path {
        /// What was being done.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        #[source]
        error: io::Error,
    },
    /// Somebody is there already.
    #[error("another fdmapd has {0} locked")]
    Running(PathBuf),
    /// The group.
    #[error("there is no group {0:?}")]
    Group(String),
    /// TLS.
    #[error(transparent)]
    Tls(#[from] rpc::TlsError),
    /// TCP.
    #[error("listening on {address}")]
    Tcp {
        /// Where.
        address: std::net::SocketAddr,
        /// Why not.
        #[source]
        error: io::Error,
    },
    /// The runtime.
    #[error("starting the runtime")]
    Runtime(#[source] io::Error),
    /// Serving gRPC.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A task ended that should not have.
    #[error("a task of the service ended by itself")]
    Ended,
}

/// Runs the service until it is told to stop by SIGTERM or SIGINT.
///
/// # Errors
/// [`DaemonError`]
pub fn run(config: &Config) -> Result<(), DaemonError> {
    // Sockets and all else are for the owner and the group alone from the moment they are there.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o117));
    raise_descriptor_limit();
    // Before anything else is opened.
    let inherited = store::inherited();
    let host = HostCapabilities::detect()?;
    let is_missing = |capability: &&Capability| {
        capability.availability != Availability::Available && !capability.impact.is_empty()
    };
    for Capability { name, detail, impact, .. } in host.capabilities.iter().filter(is_missing) {
        tracing::info!(capability = name, detail, impact, "unavailable on this host");
    }
    let probe = select(config.probe, &host.probes)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(DaemonError::Runtime)?;
    let fdpass_path = config.fdpass_path();
    let hub = Arc::new(EventSources::new(Store::of_parent(), !config.no_call_trace, true)?);
    let service = Service::new(host, probe, hub, config.limits.limits(), fdpass_path);
    restore(&service, inherited);
    let result = runtime.block_on(serve(config, service));
    // A scan under way has nobody to tell its result to.
    runtime.shutdown_timeout(Duration::from_millis(500));
    result
}

/// Goes on with the files of the process before, as far as their descriptors were kept.
fn restore(service: &Service, inherited: Vec<(FileId, Kept, OwnedFd)>) {
    let mut files: BTreeMap<FileId, BTreeMap<Kept, OwnedFd>> = BTreeMap::new();
    for (file, kept, fd) in inherited {
        files.entry(file).or_default().insert(kept, fd);
    }
    for (file, kept) in files {
        let restored = RecoveredFile::new(file, kept, service.page_size)
            .map_err(|error| error_chain(&error))
            .and_then(|remains| service.registry.restore(remains).map_err(|error| error_chain(&error)));
        match restored {
            Ok(file) => tracing::info!(%file, "goes on"),
            Err(error) => tracing::error!(%file, error, "a file that was kept cannot go on"),
        }
    }
}

/// Files, connections and shared snapshots all cost descriptors, and the soft limit is mostly 1024, for the sake of
/// programs that use select(2).
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "raising the limit on descriptors");
    }
}

async fn serve(config: &Config, service: Arc<Service>) -> Result<(), DaemonError> {
    let tls = config.tcp.map(|address| Ok::<_, DaemonError>((address, config.tls.config()?))).transpose()?;
    let sockets = Sockets::bind(config)?;
    let tcp = match tls {
        Some((address, tls)) => {
            let listener = TcpListener::bind(address).await;
            Some((listener.map_err(|error| DaemonError::Tcp { address, error })?, tls))
        }
        None => None,
    };
    let tcp_address = tcp.as_ref().and_then(|(listener, _)| listener.local_addr().ok());
    let Sockets { grpc, fdpass, held: _held } = sockets;
    let (stopping, stop) = Stop::new();
    let identities = Identities::new(config.tls.tls_peer.clone());
    let listeners = Listeners { unix: grpc, tcp };
    let mut grpc = tokio::spawn(rpc::serve(Arc::clone(&service), identities, listeners, stop.clone()));
    let mut fdpass = tokio::spawn(fdpass::serve(Arc::clone(&service), fdpass, stop.clone()));
    let housekeeping = tokio::spawn(sweep(Arc::clone(&service), stop));

    tracing::info!(
        probe = %service.probe.kind(),
        socket = %config.socket_path().display(),
        fdpass = %config.fdpass_path().display(),
        tcp = ?tcp_address,
        "fdmapd {} serves",
        env!("CARGO_PKG_VERSION")
    );
    // Outside of systemd there is nobody to tell.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);

    let result = tokio::select! {
        () = told_to_stop() => Ok(()),
        ended = &mut grpc => match ended {
            Ok(Err(error)) => Err(error.into()),
            Ok(Ok(())) | Err(_) => Err(DaemonError::Ended),
        },
        _ = &mut fdpass => Err(DaemonError::Ended),
    };
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    tracing::info!("fdmapd stops");
    let _ = stopping.send(true);
    housekeeping.abort();
    // Watches never end by themselves.
    if !grpc.is_finished() && tokio::time::timeout(GRACE, &mut grpc).await.is_err() {
        grpc.abort();
    }
    fdpass.abort();
    result
}

async fn told_to_stop() {
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        // Without handlers the signals end the process by themselves.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

async fn sweep(service: Arc<Service>, stop: Stop) {
    let stopped = stop.wait();
    tokio::pin!(stopped);
    loop {
        tokio::select! {
            () = tokio::time::sleep(SWEEP) => {
                let service = Arc::clone(&service);
                // It never fails, and there is a next time.
                let _ = tokio::task::spawn_blocking(move || service.sweep()).await;
            }
            () = &mut stopped => return,
        }
    }
}

/// The listening sockets, and what keeps others from taking their places.
struct Sockets {
    grpc: UnixListener,
    fdpass: UnixListener,
    held: Vec<Held>,
}

impl Sockets {
    fn bind(config: &Config) -> Result<Self, DaemonError> {
        let (grpc_path, fdpass_path) = (config.socket_path(), config.fdpass_path());
        let group = config.group.as_deref().map(group_of).transpose()?;
        let held = vec![Held::take(grpc_path.clone())?, Held::take(fdpass_path.clone())?];
        let failed =
            |path: &Path, error| DaemonError::Path { what: "listening on", path: path.to_owned(), error };
        let grpc = UnixListener::bind(&grpc_path).map_err(|error| failed(&grpc_path, error))?;
        let fdpass = scm::listen_at(&fdpass_path)
            .map_err(io::Error::from)
            .and_then(|socket| UnixListener::from_std(socket.into()))
            .map_err(|error| failed(&fdpass_path, error))?;
        for path in [&grpc_path, &fdpass_path] {
            let failed = |error| DaemonError::Path {
                what: "setting the mode and group of",
                path: path.clone(),
                error,
            };
            std::os::unix::fs::chown(path, None, group.map(Gid::as_raw)).map_err(failed)?;
            fs::set_permissions(path, fs::Permissions::from_mode(0o660)).map_err(failed)?;
        }
        Ok(Self { grpc, fdpass, held })
    }
}

fn group_of(name: &str) -> Result<Gid, DaemonError> {
    if let Ok(number) = name.parse() {
        return Ok(Gid::from_raw(number));
    }
    let found = Group::from_name(name).ok().flatten();
    Ok(found.ok_or_else(|| DaemonError::Group(name.to_owned()))?.gid)
}

/// A socket's path, ours alone while this lives: a lock beside it, held by one service at a time, says whether what is
/// there is in use or was left behind by a service that was killed.
struct Held {
    path: PathBuf,
    _lock: Flock<fs::File>,
}

impl Held {
    fn take(path: PathBuf) -> Result<Self, DaemonError> {
        let failed = |what, path: &Path| {
            let path = path.to_owned();
            move |error| DaemonError::Path { what, path, error }
        };
        if let Some(folder) = path.parent().filter(|folder| !folder.exists()) {
            // From the top, each with a mode by which it can be passed: the umask would leave none. Who may connect is up
            // to the sockets' own mode.
            let mut missing: Vec<_> = folder.ancestors().take_while(|folder| !folder.exists()).collect();
            missing.retain(|folder| !folder.as_os_str().is_empty());
            for folder in missing.into_iter().rev() {
                fs::create_dir(folder).map_err(failed("making the folder", folder))?;
                let open = fs::Permissions::from_mode(0o755);
                fs::set_permissions(folder, open).map_err(failed("setting the mode of", folder))?;
            }
        }
        let lock_path = path.with_added_extension("lock");
        let mut options = fs::OpenOptions::new();
        let file = options.create(true).write(true).truncate(false).open(&lock_path);
        let file = file.map_err(failed("opening the lock", &lock_path))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|_| DaemonError::Running(path.clone()))?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("removing the old socket", &path)(error));
            }
            _ => {}
        }
        Ok(Self { path, _lock: lock })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The lock's file stays: whoever locks it next must find the same one.
        let _ = fs::remove_file(&self.path);
    }
}
