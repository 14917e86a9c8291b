//! The service: everything that both of its planes share.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use fdmap_proto::provenance::Provenance;
use fdmap_proto::units::{PageRange, PageSize};
use tokio::sync::watch;

use crate::files::{EphemeralFiles, Limits, Quota, Registry, SharedSnapshots};
use crate::pages::Snapshot;
use crate::probe::capabilities::{Capability, HostCapabilities};
use crate::probe::{Probe, ScanError};
use crate::random::random_id;
use crate::scan::PageStateReader;
use crate::tracking::EventSources;

/// Tells everybody when the service is to stop.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// Set the sender to `true`, or drop it, to stop.
    #[must_use]
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    /// Waits until it is time.
    pub async fn wait(mut self) {
        // An error means that the sender is gone: then it is time as well.
        let _ = self.0.wait_for(|stop| *stop).await;
    }
}

/// The running service.
pub struct Service {
    /// The files.
    pub registry: Registry,
    /// How page states are read.
    pub probe: Arc<dyn Probe>,
    /// Bounds on users.
    pub limits: Limits,
    pub capabilities: Vec<Capability>,
    /// The base page size.
    pub page_size: PageSize,
    /// hugetlb page sizes of this host, bytes.
    pub hugetlb_page_sizes: Vec<u64>,
    /// Names this process.
    pub instance: u64,
    /// When it started.
    pub started: SystemTime,
    /// The user it runs as.
    pub uid: u32,
    /// Where the fdpass socket is.
    pub fdpass_path: PathBuf,
    /// Connections.
    pub sessions: Arc<Quota>,
    /// Watches.
    pub watches: Arc<Quota>,
    /// Kept snapshots.
    pub kept: Arc<Quota>,
    /// Files that were given until nobody uses them.
    pub lent: EphemeralFiles,
    /// Shared snapshots that clients hold.
    pub shared: SharedSnapshots,
}

impl Service {
    /// A service without files.
    #[must_use]
    pub fn new(
        host: HostCapabilities,
        probe: Arc<dyn Probe>,
        hub: Arc<EventSources>,
        limits: Limits,
        fdpass_path: PathBuf,
    ) -> Arc<Self> {
        let HostCapabilities { capabilities, page_size, hugetlb_page_sizes, .. } = host;
        let reader = PageStateReader::new(Arc::clone(&probe));
        Arc::new(Self {
            registry: Registry::new(reader, hub, page_size, hugetlb_page_sizes.clone(), limits),
            probe,
            capabilities,
            page_size,
            hugetlb_page_sizes,
            instance: random_id(|id| (id != 0).then_some(id)),
            started: SystemTime::now(),
            uid: nix::unistd::geteuid().as_raw(),
            fdpass_path,
            sessions: Quota::new("sessions", u64::from(limits.sessions_per_user)),
            watches: Quota::new("watches", u64::from(limits.watches_per_user)),
            kept: Quota::new("kept snapshots", u64::from(limits.kept_per_user)),
            lent: EphemeralFiles::default(),
            shared: SharedSnapshots::new(limits.shared_bytes_per_user, limits.shared_per_user),
            limits,
        })
    }

    /// What an answer about `ranges` of a snapshot rests on.
    ///
    /// # Errors
    /// [`ScanError::Panicked`] if they were not read, which would be a fault of the service.
    pub fn provenance(
        &self,
        snapshot: &Snapshot,
        ranges: &[PageRange],
    ) -> Result<Provenance, Arc<ScanError>> {
        let found = snapshot.provenance(ranges, self.probe.kind(), self.instance);
        found.ok_or_else(|| Arc::new(ScanError::Panicked))
    }

    /// Lets go of what nobody needs any more: kept snapshots whose time is over, shared ones that are held no more, files that
    /// were given until nobody uses them. For the last it looks at all processes.
    pub fn sweep(&self) {
        for file in self.lent.sweep(|file| self.registry.let_go(file)) {
            tracing::info!(%file, "nobody uses it any more");
        }
        self.shared.sweep();
        for file in self.registry.all() {
            file.kept().sweep();
        }
    }
}
